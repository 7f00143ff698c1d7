// dQ for ranges of keys per query: the compressed branch, the sliding window, or both one after the other into the same
// sum (a second branch saves a round trip of dQ as float32).
//
// A thread block takes two tiles of query rows, one per consumer warpgroup, with Q and dO in shared memory, and walks
// the key tiles that any of its queries sees. One thread of the third warpgroup brings K and V tiles of 64 keys
// through a ring of four stages. Per key tile a warpgroup forms
//
//   S = Q K^T, dP = dO V^T, dS = P * (g * dP - delta), dQ += dS K
//
// and S and dP of a tile and dQ of the tile before are in flight while it computes exponentials. A V tile is released
// after dP, a K tile after dQ, one step later. The grid is persistent; long and short tiles alternate.
#include "cuda/common/attention_backward.cuh"
#include "cuda/common/device.h"
#include "cuda/common/fallback.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/common/head_packing.cuh"
#include "cuda/sm90/common/pipeline.cuh"
#include "cuda/sm90/common/wgmma.cuh"
#include "cuda/sm90/range_attention/range_attention.h"

namespace nsa::cuda::sm90::range_attention {
namespace {

constexpr int kKeys = 64, kWarpgroups = 2;
/// As many as fit into shared memory, at most four.
template <int Dk, int Dv>
inline constexpr int kStages = Dk + Dv <= 256 ? 4 : 3;

struct RangeDqArgs {
  BackwardArgs branch[2];  // dQ of the last one goes where it says; sum_from counts of the first
  int branches;
  HeadPacking packing;
  int row_tiles;  // pairs of query tiles per sequence, an upper bound
  int work;
};

struct RangeMaps {
  CUtensorMap q, d_o, k[2], v[2];
};

/// Two query tiles of one KV head, or of a slice of its group.
struct WorkTile {
  int batch, kv_head, first_head, first_query;
};
__device__ inline WorkTile work_tile_at(const RangeDqArgs& args, int x) {
  const int lines = args.branch[0].geometry.kv_heads * args.packing.slices;
  const int line = x % lines, tile = x / lines % args.row_tiles;
  const int kv_head = line / args.packing.slices;
  const int long_and_short = tile & 1 ? tile >> 1 : args.row_tiles - 1 - (tile >> 1);
  return {.batch = x / lines / args.row_tiles,
          .kv_head = kv_head,
          .first_head = kv_head * args.branch[0].geometry.group + line % args.packing.slices * args.packing.heads,
          .first_query = long_and_short * kWarpgroups * args.packing.queries};
}

/// Key tiles [first, last) of the queries from `first_query` to `last_query`, of which some do not see all keys unless
/// whole() says so.
struct KeyTiles {
  int first, last, all_from, all_until;

  __device__ KeyTiles(const BackwardArgs& args, const DeviceSequence& seq, int first_query, int last_query) {
    const KeyRange head = visible_keys(args.geometry, args.window, seq.position(first_query));
    const KeyRange tail = visible_keys(args.geometry, args.window, seq.position(last_query));
    first = head.first / kKeys;
    last = (tail.last + kKeys - 1) / kKeys;
    all_from = tail.first;
    all_until = head.last;
  }
  __device__ bool whole(int tile) const { return tile * kKeys >= all_from && (tile + 1) * kKeys <= all_until; }
};

template <int Dk, int Dv>
struct Memory {
  static constexpr int kStages = range_attention::kStages<Dk, Dv>;
  static constexpr int kQ = kTileBytes<Dk>, kO = kTileBytes<Dv>, kStage = kQ + kO;
  static constexpr int kBarriers = kWarpgroups * (kQ + kO) + kStages * kStage;
  static constexpr int kBytes = kBarriers + (4 * kStages + 2 * kWarpgroups) * 8;

  std::uint32_t base;

  __device__ std::uint32_t q(int warpgroup) const { return base + warpgroup * (kQ + kO); }
  __device__ std::uint32_t d_o(int warpgroup) const { return q(warpgroup) + kQ; }
  __device__ std::uint32_t k(int stage) const { return base + kWarpgroups * (kQ + kO) + stage * kStage; }
  __device__ std::uint32_t v(int stage) const { return k(stage) + kQ; }
  __device__ Pipeline<kStages> keys() const { return {base + kBarriers}; }
  __device__ Pipeline<kStages> values() const { return {keys().full(2 * kStages)}; }
  /// Its stages are the slots of the warpgroups.
  __device__ Pipeline<kWarpgroups> queries() const { return {keys().full(4 * kStages)}; }
};

/// The copying warp.
template <int Dk, int Dv>
__device__ inline void produce(const RangeDqArgs& args, const RangeMaps& maps, const Memory<Dk, Dv>& memory) {
  using Shape = Memory<Dk, Dv>;
  const bool leader = threadIdx.x % 32 == 0;
  const Geometry& p = args.branch[0].geometry;
  const int tile_bytes = args.packing.rows * (Dk + Dv) * 2;
  PipelineState<kStages<Dk, Dv>> state;
  std::uint32_t q_phase = 1;
  for (int x = blockIdx.x; x < args.work; x += gridDim.x) {
    const WorkTile work = work_tile_at(args, x);
    const DeviceSequence seq = sequence_of(p, work.batch);
    if (work.first_query >= seq.q_len) continue;
    const int compressed = compressed_begin_in_warp(p, work.batch);
    if (!leader) continue;
    const int last_query = min(work.first_query + kWarpgroups * args.packing.queries, seq.q_len) - 1;
    for (int g = 0; g < kWarpgroups; ++g) {
      mbarrier_wait(memory.queries().empty(g), q_phase);
      mbarrier_arrive_expect_tx(memory.queries().full(g), tile_bytes);
      const int row = seq.q_begin + work.first_query + g * args.packing.queries;
#pragma unroll
      for (int c = 0; c < Dk / 64; ++c)
        tma_load(memory.q(g) + c * kPanelBytes, maps.q, c * 64, work.first_head, row, seq.batch,
                 memory.queries().full(g));
#pragma unroll
      for (int c = 0; c < Dv / 64; ++c)
        tma_load(memory.d_o(g) + c * kPanelBytes, maps.d_o, c * 64, work.first_head, row, seq.batch,
                 memory.queries().full(g));
    }
    q_phase ^= 1;
    for (int b = 0; b < args.branches; ++b) {
      const KeyTiles tiles(args.branch[b], seq, work.first_query, last_query);
      const int begin = args.branch[b].window ? seq.k_begin : compressed;
      for (int tile = tiles.first; tile < tiles.last; ++tile) {
        const int row = begin + tile * kKeys;
        memory.keys().acquire(state);
        mbarrier_arrive_expect_tx(memory.keys().full(state.stage()), Shape::kQ);
#pragma unroll
        for (int c = 0; c < Dk / 64; ++c)
          tma_load(memory.k(state.stage()) + c * kPanelBytes, maps.k[b], c * 64, work.kv_head, row, seq.batch,
                   memory.keys().full(state.stage()));
        memory.values().acquire(state);
        mbarrier_arrive_expect_tx(memory.values().full(state.stage()), Shape::kO);
#pragma unroll
        for (int c = 0; c < Dv / 64; ++c)
          tma_load(memory.v(state.stage()) + c * kPanelBytes, maps.v[b], c * 64, work.kv_head, row, seq.batch,
                   memory.values().full(state.stage()));
        state.advance();
      }
    }
  }
}

/// One of the warpgroups that compute.
template <class T, int Dk, int Dv>
__device__ inline void consume(const RangeDqArgs& args, const Memory<Dk, Dv>& memory) {
  const int lane = threadIdx.x % 32, warp = warp_uniform(threadIdx.x / 32), warpgroup = warp / 4;
  const Geometry& p = args.branch[0].geometry;
  const std::uint32_t q_tile = descriptor(memory.q(warpgroup), 16), d_o = descriptor(memory.d_o(warpgroup), 16);
  const auto q = [&] { return Dk > 128 ? again(q_tile) : q_tile; };  // its descriptors would take registers
  const auto consumer_release = [&](std::uint32_t barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  };
  stagger_warpgroups(warpgroup, 1500);
  PipelineState<kStages<Dk, Dv>> state;
  std::uint32_t q_phase = 0;
#pragma unroll 1
  for (int x = blockIdx.x; x < args.work; x += gridDim.x) {
    const WorkTile work = work_tile_at(args, x);
    const DeviceSequence seq = sequence_of(p, work.batch);
    if (work.first_query >= seq.q_len) continue;
    const int last_query = min(work.first_query + kWarpgroups * args.packing.queries, seq.q_len) - 1;
    QueryRows mine;
    int position[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = warp % 4 * 16 + lane / 4 + 8 * i, in_tile = args.packing.by_heads.divide(row);
      const int query = work.first_query + warpgroup * args.packing.queries + in_tile;
      mine.valid[i] = row < args.packing.rows && query < seq.q_len;
      mine.head[i] = work.first_head + row - in_tile * args.packing.heads;
      mine.row[i] = seq.q_begin + query;
      position[i] = seq.position(query);
    }

    float acc[Dk / 2], s[kKeys / 2], dp[kKeys / 2];
    std::uint32_t ds[kKeys / 4];
#pragma unroll
    for (float& a : acc) a = 0;
    mbarrier_wait_warp(memory.queries().full(warpgroup), q_phase);
    q_phase ^= 1;
#pragma unroll 1
    for (int b = 0; b < args.branches; ++b) {
      const BackwardArgs& branch = args.branch[b];
      const KeyTiles tiles(branch, seq, work.first_query, last_query);
      KeyRange range[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        range[i] = mine.valid[i] ? visible_keys(p, branch.window, position[i]) : KeyRange{0, 0};
        mine.read(branch, seq.batch, i);
        if (mine.lse[i] == -INFINITY) mine.lse[i] = 0;
      }
      const float scale = log2_scale(branch.scale);
      const auto probabilities = [&](int tile) {
        if (!tiles.whole(tile)) {
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int key = tile * kKeys + n * 8 + 2 * (lane & 3) + i % 2;
              if (key < range[i / 2].first || key >= range[i / 2].last) s[4 * n + i] = masked_score(scale);
            }
          }
        }
        if (!always()) return;
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) s[i] = exp2_fast(fmaf(s[i], scale, -mine.lse[i / 2 % 2]));
      };
      const auto score_gradients = [&] {
        if (!always()) return;
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          const int row = i / 2 % 2;
          s[i] *= fmaf(mine.gate[row], dp[i], -mine.delta[row]);
        }
      };
      if (tiles.first >= tiles.last) continue;

      memory.keys().wait(state);
      gemm_ss<T, Dk, kKeys>(s, q(), 64, descriptor(memory.k(state.stage()), 16), 64);
      memory.values().wait(state);
      gemm_ss<T, Dv, kKeys>(dp, d_o, 64, descriptor(memory.v(state.stage()), 16), 64);
      wgmma_wait<1>();
      probabilities(tiles.first);
      wgmma_wait<0>();
      consumer_release(memory.values().empty(state.stage()));
      score_gradients();
      pack_rows<T, kKeys>(ds, s);
#pragma unroll 1
      for (int tile = tiles.first + 1; tile < tiles.last; ++tile) {
        const int before = state.stage();
        state.advance();
        memory.keys().wait(state);
        gemm_ss<T, Dk, kKeys>(s, q(), 64, descriptor(memory.k(state.stage()), 16), 64);
        memory.values().wait(state);
        gemm_ss<T, Dv, kKeys>(dp, d_o, 64, descriptor(memory.v(state.stage()), 16), 64);
        gemm_rs<T, Dk, kKeys>(acc, ds, descriptor(memory.k(before), kPanelBytes));
        wgmma_wait<2>();
        probabilities(tile);
        wgmma_wait<1>();
        consumer_release(memory.values().empty(state.stage()));
        score_gradients();
        wgmma_wait<0>();
        consumer_release(memory.keys().empty(before));
        pack_rows<T, kKeys>(ds, s);
      }
      gemm_rs<T, Dk, kKeys>(acc, ds, descriptor(memory.k(state.stage()), kPanelBytes));
      wgmma_wait<0>();
      consumer_release(memory.keys().empty(state.stage()));
      state.advance();
    }
    consumer_release(memory.queries().empty(warpgroup));

    const BackwardArgs& last = args.branch[args.branches - 1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!mine.valid[i]) continue;
      store_d_q<T, Dk / 8>(last, seq.batch, mine.row[i], mine.head[i], 2 * (lane & 3), [&](int n) {
        return float2{acc[4 * n + 2 * i] * last.scale, acc[4 * n + 2 * i + 1] * last.scale};
      });
    }
  }
}

template <class T, int Dk, int Dv>
__global__ void __launch_bounds__((kWarpgroups + 1) * 128, 1)
    range_d_q(const __grid_constant__ RangeDqArgs args, const __grid_constant__ RangeMaps maps) {
  if (should_fall_back(*args.branch[0].fallback.flag)) return;
  extern __shared__ __align__(1024) char dynamic[];
  const Memory<Dk, Dv> memory{shared_address(dynamic)};
  if (threadIdx.x == 0) {
    memory.keys().init(1, 4 * kWarpgroups);
    memory.values().init(1, 4 * kWarpgroups);
    memory.queries().init(1, 4);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp >= kWarpgroups * 4) {
    warpgroup_reg_dealloc<40>();
    if (warp == kWarpgroups * 4) produce<Dk, Dv>(args, maps, memory);
  } else {
    warpgroup_reg_alloc<232>();
    consume<T, Dk, Dv>(args, memory);
  }
}

}  // namespace

template <>
cudaError_t launch_range_d_q<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const BackwardArgs& first,
                                                                      const BackwardArgs* second, cudaStream_t stream) {
  constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;
  const Geometry& g = first.geometry;
  RangeDqArgs args{};
  args.branch[0] = first;
  if (second) args.branch[1] = *second;
  args.branches = second ? 2 : 1;
  args.packing = HeadPacking(g.group);
  args.row_tiles = static_cast<int>(ceil_div(g.q_len, kWarpgroups * args.packing.queries));
  args.work = args.row_tiles * args.packing.slices * g.kv_heads * g.batches;
  RangeMaps maps;
  int num_sms = 0;
  cudaError_t error = sm_count(num_sms);
  if (error == cudaSuccess) error = args.packing.make_tensor_map(maps.q, first.q, g, Dk);
  if (error == cudaSuccess) error = args.packing.make_tensor_map(maps.d_o, first.d_o, g, Dv);
  for (int b = 0; b < args.branches && error == cudaSuccess; ++b) {
    const BackwardArgs& branch = args.branch[b];
    error = make_key_tensor_map(maps.k[b], branch.k, branch.geometry, Dk, branch.window == 0, kKeys);
    if (error == cudaSuccess)
      error = make_key_tensor_map(maps.v[b], branch.v, branch.geometry, Dv, branch.window == 0, kKeys);
  }
  if (error != cudaSuccess) return error;
  return launch(range_d_q<NSA_ELEMENT, Dk, Dv>, std::min(args.work, num_sms), (kWarpgroups + 1) * 128,
                Memory<Dk, Dv>::kBytes, stream, args, maps);
}

}  // namespace nsa::cuda::sm90::range_attention
