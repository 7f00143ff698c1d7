#include "cuda/common/launch.cuh"
#include "cuda/sm90/selected_attention/d_kv_schedule.h"

namespace nsa::cuda::sm90::selected_attention {
namespace {

constexpr int kThreads = 256;
constexpr int kCounted = kQueryGroups + 2;  // items of each query group, partial sums, key tiles that have such

/// Sums over the threads before this one, from `carry` on, which then moves on behind all of them.
template <int N>
__device__ inline void scan(int (&x)[N], int (&carry)[N]) {
  __shared__ int sums[N][kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int own[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    own[i] = x[i];
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, x[i], step);
      if (lane >= step) x[i] += other;
    }
    if (lane == 31) sums[i][warp] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int of_warp = lane < kThreads / 32 ? sums[i][lane] : 0;
    const int before = __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
    const int all = __reduce_add_sync(0xffffffffu, of_warp);
    x[i] += carry[i] + before - own[i];
    carry[i] += all;
  }
  __syncthreads();
}

/// A sequence and KV head, and how its lists are cut.
struct ListLine {
  const ListSchedule& schedule;
  int kv_head, number;
  DeviceSequence seq;
  SequenceLists lists;
  ListCut cut;
  int tiles;  // 0: of lists that were not made

  __device__ ListLine(const ListSchedule& all, int sequence, int head)
      : schedule(all),
        kv_head(head),
        number(head * all.branch.geometry.batches + sequence),
        seq(sequence_of(all.branch.geometry, sequence)),
        lists(lists_of(all.branch.lists, all.branch.geometry, seq, head)),
        cut(seq.q_len, all.packing.heads, all.branch.windows.several),
        tiles(lists.blocks * all.branch.lists.tiles_per_block) {
    if (lists.item_begin[tiles] == 0) tiles = 0;
  }
};

/// A key tile and its items.
struct ListTile {
  int first_key, keys;
  int begin;                // of its list
  int end[kQueryGroups];    // of the part of a query group, behind `begin`
  int items[kQueryGroups];  // of a query group
  int all = 0;              // items

  __device__ ListTile(const ListLine& line, int tile) : items{} {
    const InverseIndex& lists = line.schedule.branch.lists;
    const int block = tile / lists.tiles_per_block;
    first_key = block * lists.block_size + tile % lists.tiles_per_block * 64;
    keys = tile < line.tiles ? min(min(first_key + 64, (block + 1) * lists.block_size), line.seq.k_len) - first_key : 0;
    if (keys <= 0) return;
    begin = line.lists.begin[block];
#pragma unroll
    for (int i = 0; i < kQueryGroups; ++i) {
      const int chunks = min((i + 1) * line.cut.query_group, line.cut.chunks);
      end[i] = chunks > 0 ? line.lists.offsets[(chunks - 1) * lists.slots + block] : 0;
      items[i] = (end[i] - from(i) + line.cut.most - 1) / line.cut.most;
      all += items[i];
    }
    if (all == 0) all = items[0] = 1;  // writes zeros
  }
  __device__ int from(int query_group) const { return query_group > 0 ? end[query_group - 1] : 0; }
  __device__ int partials() const { return all > 1 ? all : 0; }
};

/// Grid: sequences, KV heads.
__global__ void __launch_bounds__(kThreads) count_items(const __grid_constant__ ListSchedule schedule) {
  const ListLine line(schedule, blockIdx.x, blockIdx.y);
  int carry[kCounted] = {};
  for (int first = 0; first < line.tiles; first += kThreads) {
    const ListTile tile(line, first + static_cast<int>(threadIdx.x));
    int x[kCounted];
    for (int i = 0; i < kQueryGroups; ++i) x[i] = tile.items[i];
    x[kQueryGroups] = tile.partials();
    x[kQueryGroups + 1] = tile.partials() > 0;
    scan(x, carry);
  }
  if (threadIdx.x > 0) return;
  ItemCounts counts;
  for (int i = 0; i < kQueryGroups; ++i) counts.items[i] = carry[i];
  counts.partials = carry[kQueryGroups];
  counts.sums = carry[kQueryGroups + 1];
  schedule.counts[line.number] = counts;
  if (line.number == 0) schedule.queue->next = 0;
}

/// Writes the items, in the order line, query group, key tile. Grid as above.
__global__ void __launch_bounds__(kThreads) write_items(const __grid_constant__ ListSchedule schedule) {
  const BackwardArgs& branch = schedule.branch;
  const ListLine line(schedule, blockIdx.x, blockIdx.y);
  const DeviceSequence& seq = line.seq;
  int carry[kCounted];  // of the lines before, and where the items of a query group begin
  {
    int before[3] = {}, none[3] = {};
    for (int i = threadIdx.x; i < line.number; i += kThreads) {
      const ItemCounts& counts = schedule.counts[i];
      for (int w = 0; w < kQueryGroups; ++w) before[0] += counts.items[w];
      before[1] += counts.partials;
      before[2] += counts.sums;
    }
    scan(before, none);
    const ItemCounts& own = schedule.counts[line.number];
    carry[0] = none[0];
    for (int i = 1; i < kQueryGroups; ++i) carry[i] = carry[i - 1] + own.items[i - 1];
    carry[kQueryGroups] = none[1];
    carry[kQueryGroups + 1] = none[2];
    if (line.number == static_cast<int>(gridDim.x * gridDim.y) - 1 && threadIdx.x == 0) {
      schedule.queue->end = carry[kQueryGroups - 1] + own.items[kQueryGroups - 1];
      schedule.queue->sums = none[2] + own.sums;
    }
  }
  for (int first = 0; first < line.tiles; first += kThreads) {
    const ListTile tile(line, first + static_cast<int>(threadIdx.x));
    int at[kCounted];
    for (int i = 0; i < kQueryGroups; ++i) at[i] = tile.items[i];
    at[kQueryGroups] = tile.partials();
    at[kQueryGroups + 1] = tile.partials() > 0;
    scan(at, carry);
    KeyItem item{};
    item.batch = seq.batch;
    item.kv_head = line.kv_head;
    item.first_key = tile.first_key;
    item.keys = tile.keys;
    item.key_row = seq.k_begin + tile.first_key;
    item.query_row = seq.q_begin;
    item.shift = seq.position(0);
    item.terms = schedule.terms.at(seq.batch, line.kv_head * schedule.packing.slices, seq.q_begin);
    item.slot = tile.all > 1 ? at[kQueryGroups] : -1;
    item.partials = tile.partials();
    item.cut = branch.windows.of(seq.index);
    const int list = static_cast<int>(line.lists.list - branch.lists.list) + tile.begin;
#pragma unroll
    for (int query_group = 0; query_group < kQueryGroups; ++query_group) {
      const int from = tile.from(query_group), queries = tile.end[query_group] - from, items = tile.items[query_group];
      for (int i = 0; i < items; ++i) {
        // Even parts of whole stages.
        const auto share = [&](int n) {
          return n < items ? queries / schedule.packing.queries * n / items * schedule.packing.queries : queries;
        };
        item.from = list + from + share(i);
        item.to = list + from + share(i + 1);
        item.stages =
            (item.to - item.from + schedule.packing.queries - 1) / schedule.packing.queries * schedule.packing.slices;
        schedule.items[at[query_group] + i] = item;
        if (item.partials > 0) schedule.sums[at[kQueryGroups + 1]] = at[query_group] + i;
        if (item.slot >= 0) ++item.slot;
        item.partials = 0;
      }
    }
  }
}

}  // namespace

cudaError_t make_schedule(const ListSchedule& schedule, cudaStream_t stream) {
  const dim3 lines(schedule.branch.geometry.batches, schedule.branch.geometry.kv_heads);
  const cudaError_t error = launch(count_items, lines, kThreads, 0, stream, schedule);
  return error == cudaSuccess ? launch(write_items, lines, kThreads, 0, stream, schedule) : error;
}

}  // namespace nsa::cuda::sm90::selected_attention
