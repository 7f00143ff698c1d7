#include "cuda/sm90/selected_attention/block_major_schedule.cuh"

#include "cuda/common/launch.cuh"

namespace nsa::cuda::sm90::selected_attention {
namespace {

/// The first entry of an ascending list that is not below x.
__device__ inline int lower_bound(const int* list, int count, int x) {
  int low = 0;
  while (count > 0) {
    const int half = count / 2;
    if (list[low + half] < x) {
      low += half + 1, count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

/// Writes the items of the buffers from `first` on, in any order. Grid: blocks of all sequences, KV heads of a buffer,
/// buffers.
__global__ void __launch_bounds__(256) write_items(const __grid_constant__ BlockArgs args, int first) {
  const Geometry& g = args.selected.geometry;
  const InverseIndex& lists = args.lists;
  const QueryBuffers& buffers = args.buffers;
  const QueryBuffer buffer(buffers, first + static_cast<int>(blockIdx.z));
  const int kv_head = buffer.first_kv_head + static_cast<int>(blockIdx.y);
  const int slot = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (kv_head >= g.kv_heads || slot >= lists.slots) return;
  const DeviceSequence seq =
      sequence_of(g, sequence_at(g, slot, [&](const RowPrefix& at) { return lists.slots_before(at); }));
  const SequenceLists own = lists_of(lists, g, seq, kv_head);
  const int block = slot - static_cast<int>(own.slot), tiles = lists.tiles_per_block;
  if (block < 0 || block >= own.blocks || own.item_begin[own.blocks * tiles] == 0) return;  // 0: lists were not made
  const std::int64_t before = row_prefix(g, seq).q - buffer.first_row;                      // rows of the buffer
  if (before >= buffers.rows || before + seq.q_len <= 0) return;
  const int buffer_row = static_cast<int>(before);
  const int* list = own.list + own.begin[block];
  const int all = own.begin[block + 1] - own.begin[block];
  const int from = buffer_row < 0 ? lower_bound(list, all, -buffer_row) : 0;
  const int to = from + lower_bound(list + from, all - from, buffers.rows - buffer_row);
  const int items = (to - from + buffers.most - 1) / buffers.most;
  if (items == 0) return;
  const int end = min((block + 1) * lists.block_size, seq.k_len), first_key = block * lists.block_size;
  const int used = min((end - first_key + 63) / 64, tiles);
  BlockItem* out = args.items + blockIdx.z * buffers.items + atomicAdd(&args.queues[blockIdx.z].end, items * used);
  BlockItem item{};
  item.batch = seq.batch;
  item.kv_head = kv_head;
  item.block = block;
  item.query_row = seq.q_begin;
  item.shift = seq.position(0);
  item.buffer_row = buffer_row;
  for (int tile = 0; tile < used; ++tile) {
    item.tile = tile;
    item.first_key = first_key + tile * 64;
    item.keys = min(end - item.first_key, 64);
    item.key_row = seq.k_begin + item.first_key;
    for (int i = from; i < to; i += buffers.most) {
      item.list = list + i;
      item.count = min(to - i, buffers.most);
      *out++ = item;
    }
  }
}

}  // namespace

cudaError_t make_schedule(const BlockArgs& args, int first, int count, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(args.queues, 0, count * sizeof(BlockQueue), stream);
  const dim3 grid(static_cast<unsigned>(ceil_div(args.lists.slots, 256)), args.buffers.kv_heads, count);
  return error == cudaSuccess ? launch(write_items, grid, 256, 0, stream, args, first) : error;
}

}  // namespace nsa::cuda::sm90::selected_attention
