// Scalars that show whether the selection works or has collapsed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "nsa/config.h"

namespace nsa::lm {

struct SelectionStats {
  double unforced_share = 0;     // of all picks, those that were neither first nor local blocks
  double entropy = 0;            // nats, of the unforced picks of a sequence over its blocks
  double entropy_max = 0;        // nats, if they were spread evenly over all blocks that could be picked
  double neighbour_overlap = 0;  // share of blocks that the previous query selected too, of queries that have a choice
};

/// True for a block that every query at position t takes.
inline bool is_forced(std::int64_t block, std::int64_t t, const NSAConfig& cfg) {
  return block < cfg.init_blocks || block > t / cfg.block_size - cfg.local_blocks;
}

/// The same of tensors that broadcast, `block` and `t` of integers, and the other way round: is it one to be chosen?
at::Tensor is_eligible(const at::Tensor& block, const at::Tensor& t, const NSAConfig& cfg);

/// Of each KV head. `indices` int32 (total, Hkv, topk) as select_blocks writes them, on any device, which counts them;
/// `offsets` the B + 1 starts of the sequences. Entropies are means over the sequences, weighted by their unforced
/// picks; all zero where nothing could be chosen.
std::vector<SelectionStats> selection_stats(const at::Tensor& indices, std::span<const std::int32_t> offsets,
                                            const NSAConfig& cfg);

}  // namespace nsa::lm
