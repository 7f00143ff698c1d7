// What the attention of a trained model does on a text: which blocks each query selects, and how open the gates are.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "lm/model/model.h"
#include "lm/model/selection_stats.h"

namespace nsa::lm {

struct SelectionMap {
  std::vector<std::int64_t> query_positions;
  std::vector<std::vector<std::int32_t>> blocks;  // that the query at this position selected, ascending
  std::vector<std::vector<std::int32_t>> forced;  // those of them that it had to take
};

/// Selection recall: the fraction of the selected branch's attention mass that lies inside the selected blocks. The
/// mass is the softmax over all past tokens, outside of forced blocks, summed over the group's heads and over the
/// queries of the map that have more blocks than they may select. `oracle`: as many blocks with the most mass;
/// `random`: as many random ones.
struct SelectionRecall {
  double selected = 0, oracle = 0, random = 0;
};

struct KvHeadView {
  SelectionStats stats;
  std::optional<SelectionRecall> recall;  // none if every query selects all its blocks
  SelectionMap map;
};

struct LayerView {
  int layer = 0;
  std::array<double, 3> gates{};                     // mean, in the order cmp, slc, swa
  std::vector<std::array<double, 3>> gates_by_head;  // (H)
  std::vector<KvHeadView> kv_heads;                  // (Hkv)
  at::Tensor blocks;                                 // int32 (S, Hkv, topk) of all queries, in host memory
};

/// Throws Error unless the model's attention is `nsa`.
void require_selection(const Model& model);

/// Runs the model over `tokens`, without gradients; the maps hold `num_queries` evenly spaced positions, the last token
/// among them; of the layers that are sparse. Throws Error unless the model's attention is `nsa`.
std::vector<LayerView> inspect(const Model& model, const std::vector<std::int64_t>& tokens, int num_queries);

void to_json(nlohmann::json& json, const LayerView& layer);

/// How one query of a KV head's group reads one block in the selected branch; masses are means over the group's heads.
struct BlockRead {
  int layer = 0, kv_head = 0;
  bool selected = false, forced = false;
  std::int64_t rank = 0;  // by importance among the blocks that are not forced, 0: first
  double mass = 0;        // of the attention to the selected blocks
  double dense_mass = 0;  // of the attention that the branch would have to the whole past
};

void to_json(nlohmann::json& json, const BlockRead& read);

/// How the query of the last token reads the block of token `place`, in each KV head of each sparse layer. Throws as
/// inspect() does.
std::vector<BlockRead> read_block(const Model& model, const std::vector<std::int64_t>& tokens, std::int64_t place);

}  // namespace nsa::lm
