// dQ for a range of keys per query: the sliding window and the compressed branch. The same walk as range_forward.cuh,
// but a warp has two times sixteen rows where their sums fit into registers: what limits the kernel is the traffic of
// shared memory, and a fragment of keys or values serves all rows of the warp. Where d_kv has stored dS of the
// compressed branch, only dS K is left to do.
#pragma once

#include "cuda/common/attention_backward.cuh"
#include "cuda/common/fallback.cuh"
#include "cuda/common/params.h"
#include "cuda/portable/range_forward.cuh"

namespace nsa::cuda::portable {

/// kWide: Q and dO of 16-bit types in shared memory, of which only Hopper and later have enough for two thread blocks;
/// that leaves registers for two times sixteen rows.
template <class T, int Dk, int Dv, bool kWide = kHopper>
struct RangeDq {
  static constexpr int kTiles = kWide && sizeof(T) == 2 && Dk <= 128 ? 2 : 1;  // times sixteen rows of a warp
  static constexpr int kRows = 64 * kTiles;
  static constexpr int kKeys = sizeof(T) == 2 ? (kWide && Dk > 128 ? 16 : 32) : Dk > 128 ? 8 : 16;
  static constexpr int kValues = Tile<T, Dk>::bytes(kKeys);
  static constexpr int kStage = kValues + Tile<T, Dv>::bytes(kKeys);
  static constexpr bool kShared = kWide && sizeof(T) == 2;                    // Q and dO in shared memory
  static constexpr bool kKept = kShared || (sizeof(T) == 2 && Dk <= 128);     // Q there or in registers
  static constexpr int kGradients = kTiles * SharedFragments<T, Dk>::kBytes;  // where dO of a warp begins
  static constexpr int kWarp = kShared ? kGradients + kTiles * SharedFragments<T, Dv>::kBytes : 0;
  static constexpr int kMemory = 2 * kStage + 4 * kWarp;
  static constexpr int kStoredKeys = Dk == Dv ? 2 * kKeys : 16;  // of a stage where dS is stored, without values
};

/// dS of M times sixteen rows and kKeys keys as d_kv stored it, always a tile of keys ahead of its use.
template <int M, int kKeys>
struct StoredTiles {
  const char* from;  // this lane's share of the first row tile
  int pitch;         // bytes from one row tile to the next
  uint4 ahead[kKeys / 16][M];

  __device__ __forceinline__ uint4 at(int k, int m, int key) const {
    return __ldcs(reinterpret_cast<const uint4*>(from + m * pitch + (key / 16 + k) * DsBuffer::kTile));
  }
  __device__ __forceinline__ void fetch(int k, int m, int key) { ahead[k][m] = at(k, m, key); }
  /// Into L2.
  __device__ __forceinline__ void prefetch(int k, int m, int key) const {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + m * pitch + (key / 16 + k) * DsBuffer::kTile));
  }
};

/// One range or two of the same queries, whose dQ is summed: sum_from counts of the first, where it goes of the last.
struct RangeDqArgs {
  BackwardArgs branch[2];
  int branches;
};

/// acc += dS K, dS as d_kv stored it. terms: of the thread block's rows, the last one is where the keys end.
template <class T, int Dk, int Dv, class Acc>
__device__ __forceinline__ void add_stored(Acc& acc, const BackwardArgs& args, const DeviceSequence& seq, int kv_head,
                                           std::int64_t first_row, int key_begin, int key_count, KeyRange head,
                                           KeyRange tail, char* memory, const float4* terms) {
  using Shape = RangeDq<T, Dk, Dv>;
  constexpr int kKeys = Shape::kStoredKeys, kM = Shape::kTiles, kSteps = kKeys / 16, kPrefetch = 4;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int tiles = (min(tail.last, key_count) + kKeys - 1) / kKeys;
  const RowStream<T, Dk, kKeys, 128> k(args.k.at<T>(seq.batch, key_begin, kv_head), args.k.row, thread);
  const auto load = [&](int tile) {
    k.load(shared_address(memory) + tile % 2 * Shape::kStage, tile * kKeys, key_count);
    commit_copies();
  };
  const int pitch = DsBuffer::columns(args.geometry) * DsBuffer::kTile;
  const char* const from = args.ds_buffer.at(args.geometry, seq, kv_head, first_row, 0);
  StoredTiles<kM, kKeys> stored{from + static_cast<std::int64_t>(warp) * kM * pitch, pitch};
  if (tiles > 0) {
    load(0);
    unrolled<kSteps>([&](auto step) { unrolled<kM>([&](auto m) { stored.fetch(step, m, 0); }); });
  }
  for (int tile = 0; tile < tiles; ++tile) {
    wait_copies<0>();
    __syncthreads();  // the other stage is free
    const bool more = tile + 1 < tiles;
    if (more) load(tile + 1);
    const bool much_more = tile + kPrefetch < tiles;
    char* keys = memory + tile % 2 * Shape::kStage;
    const int key = tile * kKeys;
    const bool partial = key + kKeys > head.last;
    const auto last_key = [&](int m, int i) {  // of a row, behind it
      return __float_as_int(terms[(warp * kM + m) * 16 + lane / 4 + 8 * i].w) - key;
    };
    // What no query of a tile sees was not stored.
    const auto seen = [&](std::uint32_t x, int behind) { return behind > 1 ? x : behind > 0 ? x & 0xffffu : 0u; };
    const auto operand = [&](std::uint32_t(&a)[4], const uint4& x, int step, int m) {
      a[0] = transposed(x.x), a[1] = transposed(x.z), a[2] = transposed(x.y), a[3] = transposed(x.w);
      if (partial) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = seen(a[i], last_key(m, i % 2) - (step * 16 + i / 2 * 8 + 2 * (lane & 3)));
      }
    };
    Ring<T> ring;
    const Outputs<T, Dk, kKeys / 8, kM> outputs{shared_address(keys), lane};
    if (partial && __syncthreads_or(has_nonfinite<T, Dk>(keys, kKeys, thread, 128))) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float d_s[kKeys / 8][4];
        unrolled<kSteps>([&](auto step) {
          std::uint32_t a[4];
          operand(a, stored.at(step, m, key), step, m);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const T* two = reinterpret_cast<const T*>(&a[i]);
            d_s[2 * step + i / 2][i % 2 * 2] = to_float(two[0]);
            d_s[2 * step + i / 2][i % 2 * 2 + 1] = to_float(two[1]);
          }
        });
        add_nonfinite<T, Dk>(sixteen<kM>(acc, m), d_s, keys, 0, lane, [&](int i, int j) { return last_key(m, i) > j; });
      }
      __syncthreads();
      clear_nonfinite<T, Dk>(keys, kKeys, thread, 128);
      __syncthreads();
    }
    start(outputs, ring);
    outputs.run(
        acc,
        [&](std::uint32_t(&a)[4], int step, int m) {
          operand(a, stored.ahead[step][m], step, m);
          if (more) stored.fetch(step, m, key + kKeys);
          if (much_more) stored.prefetch(step, m, key + kPrefetch * kKeys);
        },
        ring);
  }
}

template <class T, int Dk, int Dv>
__global__ void __launch_bounds__(128, 2) range_d_q(const __grid_constant__ RangeDqArgs ranges) {
  FallbackGrid<T, BackwardArgs> block(ranges.branch[0]);
  if (!block.any()) return;
  do {
    using Shape = RangeDq<T, Dk, Dv>;
    constexpr int kKeys = Shape::kKeys, kM = Shape::kTiles, kN = kKeys / 8;
    extern __shared__ __align__(128) char memory[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, kv_head = block.y();
    const Geometry& p = ranges.branch[0].geometry;
    const DeviceSequence found = sequence_of(p, block.z());
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900
    constexpr bool kInMemory = sizeof(T) == 2 && Dk == 128;  // it would spill
#else
    constexpr bool kInMemory = false;
#endif
    __shared__ DeviceSequence in_memory;
    if constexpr (kInMemory) {
      if (thread == 0) in_memory = found;
      __syncthreads();
    }
    const DeviceSequence& seq = kInMemory ? in_memory : found;
    const std::int64_t first_row = static_cast<std::int64_t>(block.columns() - 1 - block.x()) * Shape::kRows;
    if (first_row >= static_cast<std::int64_t>(seq.q_len) * p.group) continue;

    // Per row, in shared memory because registers are scarce: lse, delta, gate, and the end of the keys that it sees.
    // Query and head are computed where they are used: an array of them would put code for 9.x above the limit of 12.x.
    __shared__ float4 terms[Shape::kRows];
    const int first_query = static_cast<int>(first_row / p.group);
    const int first_head = static_cast<int>(first_row - static_cast<std::int64_t>(first_query) * p.group);
    const auto row_at = [&](int row) {
      const int query = first_query + (first_head + row) / p.group;
      return Row{query, kv_head * p.group + (first_head + row) % p.group, query < seq.q_len};
    };
    const std::uint32_t kept = shared_address(memory) + 2 * Shape::kStage + warp * Shape::kWarp;
    const auto row_in_tile = [&](int m, int i) { return (warp * kM + m) * 16 + lane / 4 + 8 * i; };
    QueryRows mine[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Row r = row_at(row_in_tile(m, i));
        mine[m].valid[i] = r.valid;
        mine[m].head[i] = r.head;
        mine[m].row[i] = seq.q_begin + r.query;
      }
    const auto q = fragments_of<T, Dk, kM, Shape::kShared, Shape::kKept>(
        [&](int m, int i) { return mine[m].template at<T>(ranges.branch[0].q, seq.batch, i); }, kept, lane);
    const auto d_o = fragments_of<T, Dv, kM, Shape::kShared, Shape::kShared>(
        [&](int m, int i) { return mine[m].template at<T>(ranges.branch[0].d_o, seq.batch, i); },
        kept + Shape::kGradients, lane);
    std::conditional_t<kM == 1, float[Dk / 8][4], float[kM][Dk / 8][4]> acc;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < Dk / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sixteen<kM>(acc, m)[n][i] = 0;
#pragma unroll 1
    for (int range = 0; range < ranges.branches; ++range) {
      const BackwardArgs& args = ranges.branch[range];
      const int key_begin = args.window ? seq.k_begin : compressed_begin(p, block.z());
      const int key_count = args.window ? seq.k_len : num_compressed(p, seq.k_len);
      __syncthreads();  // the stages are free
      if (lane % 4 == 0) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const Row r = row_at(row_in_tile(m, i));
            if (!r.valid) {
              terms[row_in_tile(m, i)] = make_float4(0, 0, 0, 0);
            } else {
              const int row = seq.q_begin + r.query;
              const KeyRange keys = visible_keys(p, args.window, seq.position(r.query));
              terms[row_in_tile(m, i)] =
                  make_float4(args.lse.at(seq.batch, row, r.head) * kLog2e, args.delta.at(seq.batch, row, r.head),
                              gate_of(args, seq.batch, row, r.head), __int_as_float(keys.last));
            }
          }
      }
      __syncwarp();
      const int last = static_cast<int>(
          min(static_cast<std::int64_t>(seq.q_len) * p.group - first_row, std::int64_t{Shape::kRows}) - 1);
      const KeyRange head = visible_keys(p, args.window, seq.position(first_query)),
                     tail = visible_keys(p, args.window, seq.position(row_at(last).query));
      const int first_tile = head.first / kKeys, last_tile = (min(tail.last, key_count) + kKeys - 1) / kKeys;

      if constexpr (sizeof(T) == 2) {
        if (args.ds_buffer.tiles) {
          add_stored<T, Dk, Dv>(acc, args, seq, kv_head, first_row, key_begin, key_count, head, tail, memory, terms);
          continue;
        }
      }
      const RowStream<T, Dk, kKeys, 128> k(args.k.at<T>(seq.batch, key_begin, kv_head), args.k.row, thread);
      const RowStream<T, Dv, kKeys, 128> v(args.v.at<T>(seq.batch, key_begin, kv_head), args.v.row, thread);
      const auto load = [&](int tile) {
        const std::uint32_t stage = shared_address(memory) + tile % 2 * Shape::kStage;
        k.load(stage, tile * kKeys, key_count);
        v.load(stage + Shape::kValues, tile * kKeys, key_count);
        commit_copies();
      };

      const float scale = args.scale * kLog2e;
      if (first_tile < last_tile) load(first_tile);
      for (int tile = first_tile; tile < last_tile; ++tile) {
        wait_copies<0>();
        __syncthreads();  // the other stage is free
        if (tile + 1 < last_tile) load(tile + 1);
        char* keys = memory + tile % 2 * Shape::kStage;
        const int key = tile * kKeys;
        std::conditional_t<kM == 1, float[kN][4], float[kM][kN][4]> s, dp;
        Ring<T> ring;
        const Scores<T, Dk, kN, decltype(q), kM> scores{q, shared_address(keys), lane};
        const Scores<T, Dv, kN, decltype(d_o), kM> products{d_o, shared_address(keys + Shape::kValues), lane};
        const Outputs<T, Dk, kN, kM> outputs{shared_address(keys), lane};
        start(scores, ring);
        scores.run(s, ring, products);
        products.run(dp, ring, outputs);
        const bool partial = key < tail.first || key + kKeys > head.last;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const float4 low = terms[row_in_tile(m, 0)], high = terms[row_in_tile(m, 1)];
          row_gradients(sixteen<kM>(s, m), sixteen<kM>(dp, m), scale, {low.x, high.x}, {low.y, high.y},
                        {low.z, high.z});
        }
        if (partial) {
          const auto visible = [&](int m, int i, int j) {
            const int behind = __float_as_int(terms[row_in_tile(m, i)].w) - (key + j);  // no more than the window
            return behind > 0 && (args.window == 0 || behind <= args.window);
          };
#pragma unroll
          for (int m = 0; m < kM; ++m)
            mask_rows(sixteen<kM>(dp, m), lane, [&](int i, int j) { return visible(m, i, j); });
          if (__syncthreads_or(has_nonfinite<T, Dk>(keys, kKeys, thread, 128))) {
#pragma unroll
            for (int m = 0; m < kM; ++m)
              add_nonfinite<T, Dk>(sixteen<kM>(acc, m), sixteen<kM>(dp, m), keys, 0, lane,
                                   [&](int i, int j) { return visible(m, i, j); });
            __syncthreads();
            clear_nonfinite<T, Dk>(keys, kKeys, thread, 128);
            __syncthreads();
            start(outputs, ring);
          }
        }
        outputs.run(acc, dp, ring);
      }
    }

    constexpr int kPairs = Dk > 128 ? 1 : 2;
    const BackwardArgs& args = ranges.branch[ranges.branches - 1];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Row r = row_at(row_in_tile(m, i));
        if (!r.valid) continue;
        const auto& sum = sixteen<kM>(acc, m);
#pragma unroll
        for (int first = 0; first < Dk / 8; first += kPairs)  // more at a time would spill
          store_d_q<T, kPairs>(args, seq.batch, seq.q_begin + r.query, r.head, 8 * first + 2 * (lane & 3), [&](int n) {
            return float2{sum[first + n][2 * i] * args.scale, sum[first + n][2 * i + 1] * args.scale};
          });
      }
  } while (block.next());
}

}  // namespace nsa::cuda::portable
