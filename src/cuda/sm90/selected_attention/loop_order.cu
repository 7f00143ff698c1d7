#include "cuda/sm90/selected_attention/loop_order.h"

#include "cuda/sm90/selected_attention/gather_plan.cuh"

namespace nsa::cuda::sm90::selected_attention {
namespace {

// Time of an SM in units of 10 ns, for blocks of 64; for others these times grow and shrink together.
//
// Query-major against block-major, for head dims of 128 (others likewise): the warps' visits to blocks hide the filling
// of the ring or the other way round; block by block each row (a head of a query) and block costs the same.
constexpr int kVisit = 22, kFill = 60, kRow = 3;
/// Query-major against unions, by keys of 64, 128 and 192: fitted to times of groups of 8 and 16 at 8k and 64k.
struct UnionCost {
  int visit, fill;             // query-major: of a warp to a block; of the ring with a block
  int step, pair, union_fill;  // of a warpgroup: to a block, to one of two blocks of 32 together; of the ring
};
constexpr UnionCost kUnionCosts[] = {{10, 8, 39, 40, 0}, {18, 25, 48, 52, 0}, {23, 24, 42, 45, 41}};

constexpr int kWarps = 12;     // of a tile, as in selected_forward for head dims of 128
constexpr int kTiles = 32;     // tiles of a sequence that are sampled
constexpr int kBlocks = 2048;  // blocks this far apart are taken for one

/// Marks a block in a set of blocks. Returns 1 if it was not in it.
__device__ inline int mark(unsigned (&set)[kBlocks / 32], int block) {
  const unsigned bit = 1u << block % 32;
  return (atomicOr(&set[block % kBlocks / 32], bit) & bit) == 0;
}

/// What both orders take for a tile of queries, `together` for each warp. cost.step 0: the alternative is block-major.
/// Grid: sampled tiles, KV heads, sequences. Sums of integers: the order does not matter.
__global__ void __launch_bounds__(256)
    sample_loop_order(const __grid_constant__ SelectedArgs args, const LoopOrder loop_order, int together,
                      const UnionCost cost) {
  __shared__ unsigned by_warp[kWarps][kBlocks / 32], by_warpgroup[kUnionWarpgroups][kBlocks / 32], by_any[kBlocks / 32];
  __shared__ int visits, steps, fills, entries;
  const Geometry& g = args.geometry;
  const int kv_head = blockIdx.y, sample = blockIdx.x;
  const DeviceSequence seq = sequence_of(g, blockIdx.z);
  const int queries = kWarps * together, tiles = (seq.q_len + queries - 1) / queries, samples = min(tiles, kTiles);
  if (sample >= samples) return;
  const int first = static_cast<int>((2 * sample + 1) * std::int64_t{tiles} / (2 * samples)) * queries;
  for (int i = threadIdx.x; i < kBlocks / 32; i += blockDim.x) {
    by_any[i] = 0;
    for (auto& set : by_warp) set[i] = 0;
    for (auto& set : by_warpgroup) set[i] = 0;
  }
  if (threadIdx.x == 0) visits = steps = fills = entries = 0;
  __syncthreads();
  int own_visits = 0, own_steps = 0, own_fills = 0, own_entries = 0;
  for (int e = threadIdx.x; e < min(queries, seq.q_len - first) * args.topk; e += blockDim.x) {
    const int number = e / args.topk, query = first + number;
    const int block = args.indices.at<int>(seq.batch, seq.q_begin + query, kv_head)[e - number * args.topk];
    if (block < 0 || std::int64_t{block} * args.block_size > seq.position(query)) continue;
    own_visits += mark(by_warp[number / together], block);
    own_steps += mark(by_warpgroup[number / (kWarps / kUnionWarpgroups * together)], block);
    own_fills += mark(by_any, block);
    ++own_entries;
  }
  atomicAdd(&visits, own_visits);
  atomicAdd(&steps, own_steps);
  atomicAdd(&fills, own_fills);
  atomicAdd(&entries, own_entries);
  __syncthreads();
  if (threadIdx.x != 0) return;
  LoopOrderCost& times = loop_order.times[seq.index * g.kv_heads + kv_head];
  if (cost.step > 0) {
    atomicAdd(&times.query_major, cost.visit * visits + cost.fill * fills);
    atomicAdd(&times.alternative, cost.step * steps + cost.union_fill * fills);
  } else {
    atomicAdd(&times.query_major, max(kVisit * visits, kFill * fills));
    atomicAdd(&times.alternative, kRow * g.group * entries);
  }
}

}  // namespace

bool has_union(int group, int topk) {
  if (group != 8 && group % 16 != 0) return false;
  return kUnionWarpgroups * HeadPacking(group).queries * topk <= kMaxEntries;
}

cudaError_t estimate_loop_order(const SelectedArgs& args, const LoopOrder& loop_order, int union_key_dim,
                                cudaStream_t stream) {
  const Geometry& g = args.geometry;
  UnionCost cost{};
  if (union_key_dim > 0) cost = kUnionCosts[union_key_dim / 64 - 1];
  if (args.block_size == 32) cost.step = cost.pair;
  const int together = queries_of_warp(g, args.topk, kWarps);
  const std::int64_t tiles = ceil_div(g.q_len, kWarps * together);
  const std::size_t bytes = sizeof(LoopOrderCost) * g.batches * g.kv_heads;
  if (const cudaError_t error = cudaMemsetAsync(loop_order.times, 0, bytes, stream); error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(tiles, kTiles)), g.kv_heads, g.batches);
  return launch(sample_loop_order, grid, 256, 0, stream, args, loop_order, together, cost);
}

}  // namespace nsa::cuda::sm90::selected_attention
