#include "cuda/portable/inverse_index.cuh"

#include "cuda/portable/host.h"

namespace nsa::cuda::portable {

InverseArgs take_lists(const Branch& b, Arena& arena) {
  const Geometry& g = b.geometry;
  const Before all = before_end(g);
  InverseArgs args{};
  args.geometry = g;
  args.indices = strided(*b.indices);
  args.topk = to_int(b.indices->size(-1));
  BlockLists& lists = args.lists;
  lists.block_size = b.block_size;
  lists.tiles_per_block = to_int(tiles(b.block_size, 64));
  lists.width = to_int(std::min<std::int64_t>(args.topk, tiles(g.k_len, b.block_size)));
  lists.entries = lists.entries_before(all);
  lists.slots = lists.slots_before(all);
  lists.list = arena.take<int>(g.kv_heads * lists.entries);
  lists.begin = arena.take<int>(g.kv_heads * lists.slots);
  lists.item_begin = arena.take<int>(g.kv_heads * lists.slots * lists.tiles_per_block);
  lists.chunks = to_int(std::clamp<std::int64_t>(tiles(g.q_len, BlockLists::chunk(g.q_len)), 1, 128));
  lists.offsets = arena.take<int>(g.kv_heads * lists.chunks * lists.slots);
  return args;
}

cudaError_t build_inverse_index(const InverseArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  const dim3 grid(static_cast<unsigned>(args.lists.chunks), g.kv_heads, g.batches);
  cudaError_t error = launch(mark_queries<false>, grid, 256, 0, stream, args);
  if (error == cudaSuccess) error = launch(scan_queries, dim3(1, g.kv_heads, g.batches), 1024, 0, stream, args);
  if (error == cudaSuccess) error = launch(mark_queries<true>, grid, 256, 0, stream, args);
  return error;
}

}  // namespace nsa::cuda::portable
