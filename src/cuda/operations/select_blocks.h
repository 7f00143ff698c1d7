// What the operations that choose blocks share: select_blocks, nsa_attention, decode.
#pragma once

#include "cuda/operations/branch.h"

namespace nsa::cuda {

/// Floats of a row of sums over compressed keys.
inline std::int64_t scratch_keys_of(const NSAConfig& cfg, const Geometry& g) {
  return ceil_div(cfg.num_compressed(g.k_len), 64) * 64;
}

/// What the selection of blocks takes from the configuration and from the shapes in args.geometry; no noise.
template <class Args>
void set_selection(Args& args, const NSAConfig& cfg, double scale) {
  const Geometry& g = args.geometry;
  args.topk = cfg.topk;
  args.block_size = cfg.block_size;
  args.init_blocks = cfg.init_blocks;
  args.local_blocks = cfg.local_blocks;
  args.scale = static_cast<float>(scale);
  args.inverse_stride = 1.0f / static_cast<float>(cfg.kernel_stride);
  args.share =
      static_cast<float>(cfg.kernel_stride) / (static_cast<float>(g.group) * static_cast<float>(cfg.kernel_size));
  args.queries = std::clamp(64 / std::max(g.group, 1), 1, 16);
  args.tiles = to_int(ceil_div(g.q_len, args.queries));
  args.scratch_keys = scratch_keys_of(cfg, g);
  args.scratch_blocks = ceil_div(g.k_len, cfg.block_size);
}

/// Thread blocks that select: as many as keep the device busy, fewer where their scratch would pass 256 MiB.
template <class Args>
int selecting_blocks(const Args& args) {
  const Geometry& g = args.geometry;
  const std::int64_t bytes = args.queries * (args.scratch_keys + args.scratch_blocks) * 4;
  const std::int64_t work = static_cast<std::int64_t>(args.tiles) * g.kv_heads * g.batches;
  const std::int64_t blocks =
      std::clamp<std::int64_t>((std::int64_t{256} << 20) / std::max<std::int64_t>(bytes, 1), 16, 512);
  return to_int(std::min(blocks, work));
}

/// Everything except args.scratch.
SelectArgs select_args(const SelectBlocksParams& p);
/// The size of args.scratch.
std::int64_t scratch_floats(const SelectArgs& args, int thread_blocks);

}  // namespace nsa::cuda
