#include "bench/recorded_blocks.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "base/error.h"
#include "base/safetensors.h"
#include "bench/selection.h"

namespace nsa::bench {
namespace {

constexpr const char* kBlockSize = "block_size";

std::string name_of_layer(int layer) { return fmt::format("layers.{}", layer); }

}  // namespace

std::vector<std::int32_t> RecordedBlocks::of(std::int64_t queries, std::int64_t heads) const {
  std::vector<std::int32_t> all;
  all.reserve(static_cast<std::size_t>(queries * heads * topk));
  for (std::int64_t t = 0; t < queries; ++t) {
    for (std::int64_t head = 0; head < heads; ++head) {
      const auto row = blocks.begin() + (t * kv_heads + head % kv_heads) * topk;
      all.insert(all.end(), row, row + topk);
    }
  }
  return all;
}

void write_blocks(const std::string& path, const std::map<int, RecordedBlocks>& layers, const NSAConfig& cfg) {
  std::vector<base::StoredTensor> tensors;
  base::Metadata metadata = {{kBlockSize, std::to_string(cfg.block_size)}};
  for (const auto& [layer, recorded] : layers) {
    const auto overlap = neighbour_overlap(recorded.blocks, cfg, recorded.kv_heads);
    metadata[name_of_layer(layer) + ".neighbour_overlap"] = overlap ? fmt::format("{}", *overlap) : "null";
    tensors.push_back({.name = name_of_layer(layer),
                       .dtype = "I32",
                       .shape = {recorded.length, recorded.kv_heads, recorded.topk},
                       .bytes = std::as_bytes(std::span(recorded.blocks))});
  }
  base::write_safetensors(path, tensors, metadata);
}

RecordedBlocks read_blocks(const std::string& path, int layer, const NSAConfig& cfg) {
  const auto refuse = [&](const std::string& why) { throw base::Error(fmt::format("{}: {}", path, why)); };
  const auto file = base::SafetensorsFile::open(path, base::Links::kFollow);
  const auto found = std::ranges::find(file.tensors(), name_of_layer(layer), &base::StoredTensor::name);
  if (found == file.tensors().end()) refuse(fmt::format("has no tensor {}", name_of_layer(layer)));
  const auto size = file.metadata().find(kBlockSize);
  if (size == file.metadata().end() || size->second != std::to_string(cfg.block_size))
    refuse(fmt::format("block_size = {}, here it is {}",
                       size == file.metadata().end() ? "unknown" : base::printable(size->second), cfg.block_size));
  const auto& shape = found->shape;
  if (found->dtype != "I32" || shape.size() != 3 || shape[0] == 0 || shape[1] == 0)
    refuse(fmt::format("{} is not int32 (length, kv_heads, topk)", found->name));
  if (shape[2] != cfg.topk) refuse(fmt::format("topk = {}, here it is {}", shape[2], cfg.topk));
  RecordedBlocks recorded{.length = shape[0], .kv_heads = shape[1], .topk = shape[2], .blocks = {}};
  recorded.blocks.resize(found->bytes.size() / sizeof(std::int32_t));
  std::memcpy(recorded.blocks.data(), found->bytes.data(), found->bytes.size());
  for (std::size_t i = 0; i < recorded.blocks.size(); ++i) {
    const auto t = static_cast<std::int64_t>(i) / (recorded.kv_heads * recorded.topk);
    if (const auto block = recorded.blocks[i]; block < -1 || block > t / cfg.block_size)
      refuse(fmt::format("{}: query {} has block {}: must be at most {}, or -1", found->name, t, block,
                         t / cfg.block_size));
  }
  return recorded;
}

}  // namespace nsa::bench
