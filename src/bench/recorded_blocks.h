// Selected blocks in a file: `nsa inspect` records a model's, and `nsa bench` attends to them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "nsa/config.h"

namespace nsa::bench {

/// Blocks of one sequence, ascending, then -1.
struct RecordedBlocks {
  std::int64_t length = 0, kv_heads = 0, topk = 0;
  std::vector<std::int32_t> blocks;  // (length, kv_heads, topk)

  /// Those of the first `queries` for `heads` KV heads: head h has what head h modulo the recorded number has.
  std::vector<std::int32_t> of(std::int64_t queries, std::int64_t heads) const;
};

/// Replaces a safetensors file. It has "layers.N", int32 (length, kv_heads, topk), for each layer N, and as metadata
/// "block_size" and "layers.N.neighbour_overlap", which may be null.
void write_blocks(const std::string& path, const std::map<int, RecordedBlocks>& layers, const NSAConfig& cfg);

/// One layer of such a file. Throws Error for any other file, and where block size or topk differ.
RecordedBlocks read_blocks(const std::string& path, int layer, const NSAConfig& cfg);

}  // namespace nsa::bench
