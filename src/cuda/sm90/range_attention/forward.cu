// Attention over a range of keys per query: the compressed branch (window == 0) and the sliding window, the latter also
// with the gated sum of all branches.
//
// Three warpgroups compute, each on 64 rows (HeadPacking), and share every tile of 64 keys and values; the thread
// blocks are persistent. Data flow of a tile of queries:
//
//   loader warp     keys and values -> ring of stages, two barriers each: `full` (bytes have come) and `empty` (every
//                   computing warp has arrived). It runs ahead over the ends of tiles.
//   query warp      queries of each warpgroup -> shared memory, as soon as its last scores of the tile before are done
//   warpgroups      S(i) = Q K(i)^T is issued, then O += P(i-1) V(i-1); both run while the softmax of S(i) waits only
//                   for the former. P stays in registers, rounded to T.
//
// Keys of a tile of queries begin at the first one that its first query sees. A warpgroup that sees nothing of a key
// tile releases it at once.
#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/fallback.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/common/epilogue.cuh"
#include "cuda/sm90/common/forward_pipeline.cuh"
#include "cuda/sm90/common/tensor_map.h"
#include "cuda/sm90/common/wgmma.cuh"
#include "cuda/sm90/range_attention/range_attention.h"

namespace nsa::cuda::sm90::range_attention {
namespace {

constexpr int kGroups = 3;  // computing warpgroups: with two the softmax is not quite hidden
constexpr int kThreads = (kGroups + 1) * 128;
constexpr int kKeys = 64;               // with the outputs of 64 rows all that 152 registers hold
constexpr int kComputeRegisters = 152;  // 3 * 152 + 56 = 4 * 128
constexpr int kLoadRegisters = 56;

template <int Dk, int Dv>
struct Layout {
  static constexpr int kQueryBytes = 64 * Dk * 2;  // of a warpgroup
  static constexpr int kKeyBytes = kKeys * Dk * 2, kValueBytes = kKeys * Dv * 2;
  static constexpr int kReserved = 2048;  // barriers, and to align the tiles
  static constexpr int kStages =
      std::min(8, (kSharedMemory - kReserved - kGroups * kQueryBytes) / (kKeyBytes + kValueBytes));
  static constexpr int kMemory = 1024 + kGroups * kQueryBytes + kStages * (kKeyBytes + kValueBytes);
  static_assert(kStages >= 3);
};

template <int kStages>
using Barriers = ForwardBarriers<kStages, kGroups>;

struct Maps {
  CUtensorMap q, k, v, o_cmp, o_slc;
};

/// Whether the tiles of queries see equally many keys, but for those at the start of a sequence.
__device__ __forceinline__ bool alike(const RangeArgs& args) {
  return args.window > 0 && args.window <= args.geometry.q_len / 2;
}

/// Warp 0 of the loading warpgroup.
template <int Dk, int Dv, int kStages>
__device__ __forceinline__ void load_keys(const RangeArgs& args, const Maps& maps, Barriers<kStages>& barriers,
                                          std::uint32_t keys, std::uint32_t values) {
  using L = Layout<Dk, Dv>;
  const HeadPacking packing(args.geometry.group);
  PipelineState<kStages> state;
  TileScheduler scheduler(args.geometry, packing, kGroups * packing.queries, alike(args));
  while (scheduler.next()) {
    const KeyTiles tiles =
        key_tiles<kKeys>(args.geometry, args.window, scheduler.seq, scheduler.first_query, kGroups * packing.queries);
    const int begin = (args.window ? scheduler.seq.k_begin : scheduler.compressed_begin) + tiles.first;
    for (int i = 0; i < tiles.count; ++i) {
      const int row = begin + i * kKeys;
      const std::uint32_t key_full = barriers.keys().full(state.stage());
      const std::uint32_t value_full = barriers.values().full(state.stage());
      barriers.keys().acquire(state);
      mbarrier_arrive_expect_tx(key_full, L::kKeyBytes);
#pragma unroll
      for (int column = 0; column < Dk; column += 64)
        tma_load(keys + state.stage() * L::kKeyBytes + column * kKeys * 2, maps.k, column, scheduler.kv_head, row,
                 scheduler.seq.batch, key_full);
      barriers.values().acquire(state);
      mbarrier_arrive_expect_tx(value_full, L::kValueBytes);
#pragma unroll
      for (int column = 0; column < Dv; column += 64)
        tma_load(values + state.stage() * L::kValueBytes + column * kKeys * 2, maps.v, column, scheduler.kv_head, row,
                 scheduler.seq.batch, value_full);
      state.advance();
    }
  }
}

/// Warp 1 of the loading warpgroup.
template <class T, int Dk, int Dv, bool kSum, int kStages>
__device__ __forceinline__ void load_queries(const WindowCombineArgs& call, const Maps& maps,
                                             Barriers<kStages>& barriers, std::uint32_t queries) {
  const RangeArgs& args = call.range;
  const HeadPacking packing(args.geometry.group);
  std::uint32_t phase = 0;
  TileScheduler scheduler(args.geometry, packing, kGroups * packing.queries, alike(args));
  for (bool more = true; more; phase ^= 1) {
    more = scheduler.next();
    KeyTiles tiles;
    if (more)
      tiles =
          key_tiles<kKeys>(args.geometry, args.window, scheduler.seq, scheduler.first_query, kGroups * packing.queries);
    for (int group = 0; more && group < kGroups; ++group) {
      const int head = scheduler.kv_head * args.geometry.group + scheduler.slice * packing.heads;
      const int row = scheduler.seq.q_begin + scheduler.first_query + group * packing.queries;
#pragma unroll
      for (int column = 0; column < Dk; column += 64) tma_prefetch(maps.q, column, head, row, scheduler.seq.batch);
#pragma unroll
      for (int column = 0; kSum && column < Dv; column += 64) {
        tma_prefetch(maps.o_cmp, column, head, row, scheduler.seq.batch);
        tma_prefetch(maps.o_slc, column, head, row, scheduler.seq.batch);
      }
      if constexpr (kSum) {
        const int queries = min(packing.queries, scheduler.seq.q_len - scheduler.first_query - group * packing.queries);
        for (int i = 0; i < queries; ++i) {
          const T* const gates = call.gates.at<T>(scheduler.seq.batch, row + i, head);
          prefetch_line(gates);
          prefetch_line(gates + (packing.heads - 1) * call.gates.head + kBranches - 1);
        }
      }
    }
    for (int group = 0; group < kGroups; ++group) {
      const std::uint32_t full = barriers.queries().full(group);
      GroupTile& tile = barriers.tiles[group][phase];
      mbarrier_wait(barriers.queries().empty(group), phase ^ 1);
      if (!more) {
        tile.queries = -1;
        mbarrier_arrive(full);
        continue;
      }
      tile = GroupTile::of<kKeys>(args.geometry, args.window, packing, scheduler, tiles, group);
      mbarrier_arrive_expect_tx(full, packing.heads * packing.queries * Dk * 2);
#pragma unroll
      for (int column = 0; column < Dk; column += 64)
        tma_load(queries + group * 64 * Dk * 2 + column * 64 * 2, maps.q, column, tile.head, tile.row, tile.batch,
                 full);
    }
  }
}

/// What the gated sum of a row takes besides the window's branch: a lane's vectors (vector_of_row), and the gates.
template <class T, int kVectors>
struct OtherBranches {
  uint4 cmp[kVectors], slc[kVectors];
  T gates[kBranches];

  __device__ __forceinline__ void load(const WindowCombineArgs& args, int batch, int row, int head, int lane) {
    const T* const from = args.gates.at<T>(batch, row, head);
#pragma unroll
    for (int b = 0; b < kBranches; ++b) gates[b] = from[b];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = 32 * j + 8 * (lane & 3);
      cmp[j] = *reinterpret_cast<const uint4*>(args.o_cmp.at<T>(batch, row, head) + column);
      slc[j] = *reinterpret_cast<const uint4*>(args.o_slc.at<T>(batch, row, head) + column);
    }
  }
};

/// `swa`: the same vectors of the window's branch. Stores them, and the sum of the branches.
template <class T, int kVectors>
__device__ __forceinline__ void combine_row(const WindowCombineArgs& args, const OtherBranches<T, kVectors>& others,
                                            const uint4 (&swa)[kVectors], int batch, int row, int head, int lane) {
  float gate[kBranches];
#pragma unroll
  for (int b = 0; b < kBranches; ++b) gate[b] = to_float(others.gates[b]);
  const auto sum = [&](std::uint32_t x, std::uint32_t y, std::uint32_t z) {
    const float2 a = unpack(T{}, x), b = unpack(T{}, y), c = unpack(T{}, z);
    return pack(T{}, fmaf(gate[kWindow], c.x, fmaf(gate[kSelected], b.x, gate[kCompressed] * a.x)),
                fmaf(gate[kWindow], c.y, fmaf(gate[kSelected], b.y, gate[kCompressed] * a.y)));
  };
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int column = 32 * j + 8 * (lane & 3);
    const uint4 &cmp = others.cmp[j], &slc = others.slc[j];
    if (args.range.o.data) store_uint4(args.range.o.at<T>(batch, row, head) + column, swa[j]);
    store_uint4(args.o.at<T>(batch, row, head) + column,
                make_uint4(sum(cmp.x, slc.x, swa[j].x), sum(cmp.y, slc.y, swa[j].y), sum(cmp.z, slc.z, swa[j].z),
                           sum(cmp.w, slc.w, swa[j].w)));
  }
}

/// A computing warpgroup.
template <class T, int Dk, int Dv, bool kSum, int kStages>
__device__ __forceinline__ void attend(const WindowCombineArgs& call, const FastDivmod& by_stride,
                                       Barriers<kStages>& barriers, std::uint32_t queries, std::uint32_t keys,
                                       std::uint32_t values) {
  using L = Layout<Dk, Dv>;
  const RangeArgs& args = call.range;
  const Geometry& p = args.geometry;
  const HeadPacking packing(p.group);
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32,
            row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // and row + 8
  const float scale = positive_scale(args.scale);
  const std::uint32_t q = descriptor(queries + warp_uniform(group) * L::kQueryBytes, 16);
  const auto keys_before = [&](int position) {  // the first one that a query there does not see
    return kSum || args.window > 0 ? position + 1 : num_compressed(p, by_stride, position + 1);
  };
  stagger_warpgroups(group, 2500);
  KeyValueRings<Dk, Dv, kKeys, kStages> rings(barriers, keys, values);

  for (std::uint32_t phase = 0;; phase ^= 1) {
    const volatile GroupTile& tile = barriers.tiles[group][phase];
    mbarrier_wait_warp(barriers.queries().full(group), phase);
    if (tile.queries < 0) break;
    // A row sees the keys before this one, with a window: that many. Keys count from this lane's first one of the next
    // tile. Rows without use take those of the last query.
    int last[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = min(HeadPacking::query_of(p, row + 8 * i), tile.queries - 1);
      last[i] = keys_before(tile.position + query) - tile.first_key - tile.begin * kKeys - 2 * (lane & 3);
    }
    const auto mask = [&](float(&s)[kKeys / 2]) {
      if (args.scale < 0) {
#pragma unroll
        for (float& x : s) x = -x;
      }
      bool partial = false;
#pragma unroll
      for (int i = 0; i < 2; ++i) partial |= last[i] < kKeys - 6 || (args.window > 0 && last[i] > args.window);
      if (__any_sync(0xffffffffu, partial)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int low = args.window > 0 ? last[i] - args.window : 0;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int b = 0; b < 2; ++b)
              if (n * 8 + b < low || n * 8 + b >= last[i]) s[4 * n + 2 * i + b] = -INFINITY;
        }
      }
      last[0] -= kKeys, last[1] -= kKeys;
    };
    RowSoftmax<kKeys> softmax;
    float o[Dv / 2];
#pragma unroll
    for (float& x : o) x = 0;
    const auto update = [&](float(&s)[kKeys / 2]) {
      mask(s);
      return softmax.update(s, scale);
    };
    // Of the two rows; those of the first one come under the last product. Rows without use take the last query's.
    OtherBranches<T, kSum ? Dv / 32 : 1> others[2];
    const auto load_others = [&](int i) {
      if constexpr (kSum) {
        const int query = HeadPacking::query_of(p, row + 8 * i);
        others[i].load(call, tile.batch, tile.row + min(query, tile.queries - 1),
                       tile.head + row + 8 * i - query * packing.heads, lane);
      }
    };
    const int left = tile.end - tile.begin;
    rings.skip(tile.begin);
    if (left > 0) {
      float s[kKeys / 2];
      std::uint32_t probabilities[kKeys / 4];
      attention_mainloop<T>(rings, q, left, o, softmax.factor, s, probabilities, update, [&] {
        barriers.queries().release(group);
        load_others(0);
      });
    } else {
      barriers.queries().release(group);
      others[0] = {};
    }
    rings.skip(tile.key_tiles - max(tile.begin, tile.end));
    if (tile.queries == 0) continue;

    uint4 vectors[2][Dv / 32];
    float lse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = row_sum(softmax.sum[i]);
      const bool any = keys_before(tile.position + HeadPacking::query_of(p, row + 8 * i)) > 0;
      const float inverse = any ? __fdividef(1, sum) : 0;
      lse[i] = any ? (softmax.max[i] + log2f(sum)) * kLn2 : -INFINITY;
#pragma unroll
      for (int j = 0; j < Dv / 32; ++j) vectors[i][j] = vector_of_row<T>(o, i, j, inverse, lane);
    }
    load_others(1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = HeadPacking::query_of(p, row + 8 * i), head = tile.head + row + 8 * i - query * packing.heads;
      if (query >= tile.queries) continue;
      if (lane % 4 == 0) args.lse.at(tile.batch, tile.row + query, head) = lse[i];
      if constexpr (kSum) {
        combine_row<T>(call, others[i], vectors[i], tile.batch, tile.row + query, head, lane);
      } else {
        T* to = args.o.template at<T>(tile.batch, tile.row + query, head) + 8 * (lane & 3);
#pragma unroll
        for (int j = 0; j < Dv / 32; ++j) store_uint4(to + 32 * j, vectors[i][j]);
      }
    }
  }
}

/// kSum: with the gated sum, else only call.range counts.
template <class T, int Dk, int Dv, bool kSum>
__global__ void __launch_bounds__(kThreads, 1)
    range_forward(const __grid_constant__ Maps maps, const __grid_constant__ WindowCombineArgs call,
                  const __grid_constant__ FastDivmod by_stride) {
  using L = Layout<Dk, Dv>;
  const RangeArgs& args = call.range;
  extern __shared__ __align__(1024) char memory[];
  __shared__ Barriers<L::kStages> barriers;
  if (block_should_fall_back(args.fallback.flag)) return;
  const std::uint32_t queries = (shared_address(memory) + 1023) & ~1023u;
  const std::uint32_t keys = queries + kGroups * L::kQueryBytes, values = keys + L::kStages * L::kKeyBytes;
  if (threadIdx.x == 0) {
    barriers.init();
    fence_mbarrier_init();
  }
  // Rows without use stay zero: TMA does not touch them.
  const HeadPacking packing(args.geometry.group);
  const int used = packing.heads * packing.queries, unused = (64 - used) * 8;  // 16-byte vectors of a panel
  for (int i = threadIdx.x; i < unused * (kGroups * Dk / 64); i += kThreads) {
    char* panel = memory + (queries - shared_address(memory)) + i / unused * 64 * 128;
    *reinterpret_cast<uint4*>(panel + used * 128 + i % unused * 16) = uint4{};
  }
  fence_async();
  __syncthreads();

  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp < kGroups * 4) {
    warpgroup_reg_alloc<kComputeRegisters>();
    attend<T, Dk, Dv, kSum>(call, by_stride, barriers, queries, keys, values);
  } else {
    warpgroup_reg_dealloc<kLoadRegisters>();
    if (threadIdx.x % 32 != 0) return;
    if (warp == kGroups * 4) load_keys<Dk, Dv>(args, maps, barriers, keys, values);
    if (warp == kGroups * 4 + 1) load_queries<T, Dk, Dv, kSum>(call, maps, barriers, queries);
  }
}

/// call.o.data null: without the sum.
template <class T, int Dk, int Dv>
cudaError_t run(const WindowCombineArgs& call, cudaStream_t stream) {
  const RangeArgs& args = call.range;
  const Geometry& g = args.geometry;
  const HeadPacking packing(g.group);
  const std::int64_t rows = query_rows(g), keys = key_rows(g, args.window == 0);
  const int batches = tensor_batches(g);
  if (rows == 0 || g.batches == 0) return cudaSuccess;
  int num_sms = 0;
  cudaError_t error = sm_count(num_sms);
  Maps maps{};
  const auto map_queries = [&](CUtensorMap& map, const Strided& t, int columns) {
    if (error == cudaSuccess)
      error = make_tensor_map(map, t, columns, g.heads, rows, batches, packing.heads, packing.queries);
  };
  // Without a key nothing is read through the maps of keys and values.
  const auto map_keys = [&](CUtensorMap& map, const Strided& t, int columns) {
    if (error == cudaSuccess && keys > 0) error = make_tensor_map(map, t, columns, g.kv_heads, keys, batches, 1, kKeys);
  };
  map_queries(maps.q, args.q, Dk);
  map_keys(maps.k, args.k, Dk);
  map_keys(maps.v, args.v, Dv);
  if (call.o.data) map_queries(maps.o_cmp, call.o_cmp, Dv);
  if (call.o.data) map_queries(maps.o_slc, call.o_slc, Dv);
  if (error != cudaSuccess) return error;
  const std::int64_t tiles = (rows / (kGroups * packing.queries) + 1) * batches + (g.cu_q ? g.batches : 0);
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(tiles * g.kv_heads * packing.slices, num_sms));
  return launch(call.o.data ? range_forward<T, Dk, Dv, true> : range_forward<T, Dk, Dv, false>, blocks, kThreads,
                Layout<Dk, Dv>::kMemory, stream, maps, call, FastDivmod(g.kernel_stride));
}

}  // namespace

template <>
cudaError_t launch_range_forward<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const RangeArgs& args, cudaStream_t stream) {
  return run<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>({.range = args}, stream);
}
template <>
cudaError_t launch_window_combine<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const WindowCombineArgs& args,
                                                                           cudaStream_t stream) {
  return run<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(args, stream);
}

}  // namespace nsa::cuda::sm90::range_attention
