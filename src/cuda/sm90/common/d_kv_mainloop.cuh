// What the two kernels for dK and dV share. They own keys and stream query rows:
//
//   S^T = K Q^T, dP^T = V dO^T, P = exp(scale * S - lse), dS = P * (g * dP - delta)
//   dV += (g P)^T dO, dK += dS^T Q
//
// With the keys as the rows of the products P^T and dS^T leave the accumulators as A operands of the next ones. A stage
// of the ring is a tile of 64 query rows: Q, dO, and per row lse, delta and gate.
//
// The warps 8 to 11 have K, V, Q, dO and what there is per row copied and note who sees whom; two warpgroups compute.
// Left alone these would compute exponentials at the same time and leave the tensor cores idle, so they take turns: one
// may issue its products only after the other has seen its scores arrive.
//
// Tiles of 32 keys would leave half of the rows of these products idle. There the queries are the rows of S and dP, the
// keys their columns, and P^T and dS^T reach the other products through shared memory (NarrowKeyGradients):
//
//   S = Q K^T, dP = dO V^T, dV^T += dO^T (g P), dK^T += Q^T dS
#pragma once

#include "cuda/common/attention_backward.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/common/d_kv_item.h"
#include "cuda/sm90/common/head_packing.cuh"
#include "cuda/sm90/common/pipeline.cuh"
#include "cuda/sm90/common/row_terms.h"
#include "cuda/sm90/common/wgmma.cuh"

namespace nsa::cuda::sm90 {

enum class DKvBarrier {
  kTurn = 1,     // and 2, one for each of the two computing warpgroups: it may issue its products
  kOperand = 3,  // and 4: its warps have written, or no longer read, an operand in shared memory
};

struct KeyMaps {
  CUtensorMap q, d_o, k, v;
};

/// Shared memory: kTiles tiles of kKeys keys, a ring of stages, barriers.
template <int Dk, int Dv, int kTiles, int kStageCount, int kKeys = 64>
struct KeyMemory {
  static constexpr int kStages = kStageCount, kKeyPanelBytes = kKeys * 128;
  static constexpr int kKeyBytes = kKeys * Dk * 2, kValueBytes = kKeys * Dv * 2;  // of a tile
  static constexpr int kK = kTileBytes<Dk>, kV = kTileBytes<Dv>, kTerms = 4 * 64 * 4;
  static constexpr int kRing = kTiles * (kKeyBytes + kValueBytes), kRows = kRing + kStages * (kK + kV);
  static constexpr int kBarriers = kRows + kStages * kTerms;
  static constexpr int kBytes = kBarriers + (2 * kStages + 2) * 8;

  std::uint32_t base;

  __device__ std::uint32_t k(int tile) const { return base + tile * kKeyBytes; }
  __device__ std::uint32_t v(int tile) const { return base + kTiles * kKeyBytes + tile * kValueBytes; }
  __device__ std::uint32_t q(int stage) const { return base + kRing + stage * (kK + kV); }
  __device__ std::uint32_t d_o(int stage) const { return q(stage) + kK; }
  /// Per row: the three of RowTerms; then what the warpgroups need to know of the stage.
  __device__ std::uint32_t terms(int stage) const { return base + kRows + stage * kTerms; }
  __device__ char* info(char* memory, int stage) const { return memory + kRows + stage * kTerms + 3 * 256; }
  __device__ Pipeline<kStages> rows() const { return {base + kBarriers}; }
  /// Of the tiles of keys, which come together.
  __device__ Pipeline<1> keys() const { return {rows().full(2 * kStages)}; }
  /// `writers`: arrivals of the producers at a stage; `readers`: threads that compute from it.
  __device__ void init(int writers, int readers) const {
    rows().init(writers, readers);
    keys().init(1, 8);
    fence_mbarrier_init();
  }
  /// Zeros for the rows of stages that no copy reaches. All threads; the caller synchronises.
  __device__ void clear_stages(char* memory) const {
    auto* words = reinterpret_cast<uint4*>(memory + kRing);
    for (int i = threadIdx.x; i < kStages * (kK + kV) / 16; i += blockDim.x) words[i] = uint4{0, 0, 0, 0};
    fence_async();
  }
};

/// Sums of D columns of kKeys keys in the registers of a warpgroup: f(key, column, x, y), columns that are neighbours,
/// for keys below `keys`. Of 64 the keys are the rows of the accumulators; of 32 the columns, and pair_columns() has
/// passed over them.
template <int kKeys, int D, class F>
__device__ __forceinline__ void for_pairs(float (&x)[D * kKeys / 128], int keys, const F& f) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if constexpr (kKeys == 64) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = warp * 16 + lane / 4 + 8 * i;
      if (key >= keys) continue;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) f(key, n * 8 + 2 * (lane & 3), x[4 * n + 2 * i], x[4 * n + 2 * i + 1]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      const int key = 8 * j + 2 * (lane & 3) + (lane / 4 & 1);
      if (key >= keys) continue;
#pragma unroll
      for (int n = 0; n < D / 32; ++n) {
        float* pair = x + n / 2 * (kKeys / 2) + 4 * j + n % 2 * 2;
        f(key, n / 2 * 64 + warp * 16 + n % 2 * 8 + (lane / 4 & 6), pair[0], pair[1]);
      }
    }
  }
}
/// Accumulators with keys as columns: a lane's two keys of a row become two rows of a key.
template <int N>
__device__ __forceinline__ void pair_columns(float (&x)[N]) {
  const bool odd = (threadIdx.x & 4) != 0;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const float other = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 4);
    x[i] = odd ? other : x[i];
    x[i + 1] = odd ? x[i + 1] : other;
  }
}

/// The gradients of kKeys keys in the registers of a warpgroup.
template <class T, int Dk, int Dv, int kKeys = 64>
struct KeySums {
  float dk[Dk * kKeys / 128], dv[Dv * kKeys / 128];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;
    // As constants ptxas would write them behind the fence of the first product, and add a fence of its own.
    if constexpr (kKeys == 32) {
#pragma unroll
      for (float& x : dv) asm volatile("" : "+f"(x));
    }
  }
  /// To float32 rows of Dk + Dv, `to` the row of key 0.
  __device__ __forceinline__ void store_partial_dk(float* to, int keys) {
    store_rows<Dk>(dk, 1, keys, [&](int key) { return to + key * (Dk + Dv); });
  }
  __device__ __forceinline__ void store_partial_dv(float* to, int keys) {
    store_rows<Dv>(dv, 1, keys, [&](int key) { return to + key * (Dk + Dv) + Dk; });
  }
  /// To dK and dV, key 0 at row `first` of the tensors.
  __device__ __forceinline__ void store_dk(const BackwardArgs& args, int batch, std::int64_t first, int kv_head,
                                           int keys) {
    if (!args.d_k.data) return;
    store_rows<Dk>(dk, args.scale, keys, [&](int key) { return args.d_k.at<T>(batch, first + key, kv_head); });
  }
  __device__ __forceinline__ void store_dv(const BackwardArgs& args, int batch, std::int64_t first, int kv_head,
                                           int keys) {
    if (!args.d_v.data) return;
    store_rows<Dv>(dv, 1, keys, [&](int key) { return args.d_v.at<T>(batch, first + key, kv_head); });
  }

 private:
  /// row(key): where the row of a key begins.
  template <int D, class Row>
  __device__ __forceinline__ static void store_rows(float (&x)[D * kKeys / 128], float scale, int keys,
                                                    const Row& row) {
    for_pairs<kKeys, D>(x, keys, [&](int key, int column, float left, float right) {
      store_pair(row(key) + column, left * scale, right * scale);
    });
  }
};

/// s: scores to probabilities. mask(s): -inf where the query does not see the key.
template <class Mask>
__device__ __forceinline__ void probabilities(float (&s)[32], std::uint32_t terms, float scale, const Mask& mask) {
  mask(s);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 lse = load_float2(terms + j * 32 + (lane & 3) * 8);
    s[4 * j] = exp2_fast(fmaf(s[4 * j], scale, lse.x));
    s[4 * j + 1] = exp2_fast(fmaf(s[4 * j + 1], scale, lse.y));
    s[4 * j + 2] = exp2_fast(fmaf(s[4 * j + 2], scale, lse.x));
    s[4 * j + 3] = exp2_fast(fmaf(s[4 * j + 3], scale, lse.y));
  }
}

/// Whether the registers hold S and dP of a stage beside the sums.
template <int Dk, int Dv>
inline constexpr bool kSideBySide = Dk + Dv <= 256;

/// What becomes of a stage's dS^T beside dK: leave(ds, stage), ds the operand of dK.
struct LeavesNothing {
  __device__ void operator()(const std::uint32_t (&)[16], int) const {}
};

/// The sums, and a stage on its way through.
template <class T, int Dk, int Dv, bool = kSideBySide<Dk, Dv>>
struct KeyGradients : KeySums<T, Dk, Dv> {
  using KeySums<T, Dk, Dv>::dk, KeySums<T, Dk, Dv>::dv;
  float s[32], dp[32];
  std::uint32_t p[16], ds[16];  // P^T and dS^T of the stage before, as operands

  /// s and dp to the operands p and ds.
  __device__ __forceinline__ void operands(std::uint32_t terms) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 delta = load_float2(terms + 256 + j * 32 + (lane & 3) * 8);
      const float2 gate = load_float2(terms + 512 + j * 32 + (lane & 3) * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = s[4 * j + 2 * i], high = s[4 * j + 2 * i + 1];
        ds[2 * j + i] = pack(T{}, low * fmaf(gate.x, dp[4 * j + 2 * i], -delta.x),
                             high * fmaf(gate.y, dp[4 * j + 2 * i + 1], -delta.y));
        p[2 * j + i] = pack(T{}, low * gate.x, high * gate.y);
      }
    }
  }

  /// The first stage of an item.
  template <class Memory, class Mask, class Pass, class Leave = LeavesNothing>
  __device__ __forceinline__ void first(const Memory& memory, std::uint32_t k, std::uint32_t v, int stage, float scale,
                                        const Mask& mask, const Pass& pass, const Leave& leave = {}) {
    gemm_ss<T, Dk, 64>(s, k, 64, descriptor(memory.q(stage), 16), 64);
    gemm_ss<T, Dv, 64>(dp, v, 64, descriptor(memory.d_o(stage), 16), 64);
    wgmma_wait<1>();
    pass();
    probabilities(s, memory.terms(stage), scale, mask);
    wgmma_wait<0>();
    operands(memory.terms(stage));
    leave(ds, stage);
  }
  /// A stage after another. The order of issue keeps the operands and accumulators within 240 registers.
  template <class Memory, class Mask, class Pass, class Release, class Leave = LeavesNothing>
  __device__ __forceinline__ void next(const Memory& memory, std::uint32_t k, std::uint32_t v, int before, int stage,
                                       float scale, const Mask& mask, const Pass& pass, const Release& consumer_release,
                                       const Leave& leave = {}) {
    gemm_rs<T, Dv, 64>(dv, p, descriptor(memory.d_o(before), kPanelBytes));
    gemm_ss<T, Dk, 64>(s, k, 64, descriptor(memory.q(stage), 16), 64);
    gemm_rs<T, Dk, 64>(dk, ds, descriptor(memory.q(before), kPanelBytes));
    wgmma_wait<2>();  // p is free
    gemm_ss<T, Dv, 64>(dp, v, 64, descriptor(memory.d_o(stage), 16), 64);
    wgmma_wait<2>();
    pass();
    probabilities(s, memory.terms(stage), scale, mask);
    wgmma_wait<1>();
    consumer_release(before);
    wgmma_wait<0>();
    operands(memory.terms(stage));
    leave(ds, stage);
  }
  /// After the last stage.
  template <class Memory, class Release>
  __device__ __forceinline__ void last(const Memory& memory, int before, const Release& consumer_release) {
    gemm_rs<T, Dv, 64>(dv, p, descriptor(memory.d_o(before), kPanelBytes));
    gemm_rs<T, Dk, 64>(dk, ds, descriptor(memory.q(before), kPanelBytes));
    wgmma_wait<0>();
    consumer_release(before);
  }
};

/// The same with S and dP one after the other in the same registers, and so their operands:
///
///   S(k), dK += dS(k-1)^T Q(k-1) | dP(k), dV += (g P(k))^T dO(k) | S(k+1), ...
///
/// dP - delta is computed beside dV. dS = (g P) * (dP - delta / g) comes from the rounded g P: the second of the rows'
/// terms is delta / g here.
template <class T, int Dk, int Dv>
struct KeyGradients<T, Dk, Dv, false> : KeySums<T, Dk, Dv> {
  using KeySums<T, Dk, Dv>::dk, KeySums<T, Dk, Dv>::dv;
  float x[32];                // S, P, dP, dP - delta / g
  std::uint32_t operand[16];  // g P, then dS

  /// operand: g P.
  __device__ __forceinline__ void gate_probabilities(std::uint32_t terms) {
    if (!always()) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 gate = load_float2(terms + 512 + j * 32 + (lane & 3) * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        operand[2 * j + i] = pack(T{}, x[4 * j + 2 * i] * gate.x, x[4 * j + 2 * i + 1] * gate.y);
    }
  }
  /// x: dP - delta / g.
  __device__ __forceinline__ void subtract_delta(std::uint32_t terms) {
    if (!always()) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 delta = load_float2(terms + 256 + j * 32 + (lane & 3) * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * j + i] -= i % 2 ? delta.y : delta.x;
    }
  }
  /// From P in x on: dV, and dS as the next operand.
  template <class Memory>
  __device__ __forceinline__ void score_gradients(const Memory& memory, std::uint32_t v, int stage) {
    gate_probabilities(memory.terms(stage));
    gemm_ss<T, Dv, 64>(x, again(v), 64, descriptor(memory.d_o(stage), 16), 64);
    gemm_rs<T, Dv, 64>(dv, operand, descriptor(memory.d_o(stage), kPanelBytes));
    wgmma_wait<1>();
    subtract_delta(memory.terms(stage));
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 p = unpack(T{}, again(operand[i]));  // not before the wait
      operand[i] = pack(T{}, p.x * x[2 * i], p.y * x[2 * i + 1]);
    }
  }

  template <class Memory, class Mask, class Pass, class Leave = LeavesNothing>
  __device__ __forceinline__ void first(const Memory& memory, std::uint32_t k, std::uint32_t v, int stage, float scale,
                                        const Mask& mask, const Pass& pass, const Leave& leave = {}) {
    gemm_ss<T, Dk, 64>(x, again(k), 64, descriptor(memory.q(stage), 16), 64);
    wgmma_wait<0>();
    pass();
    probabilities(x, memory.terms(stage), scale, mask);
    score_gradients(memory, v, stage);
    leave(operand, stage);
  }
  template <class Memory, class Mask, class Pass, class Release, class Leave = LeavesNothing>
  __device__ __forceinline__ void next(const Memory& memory, std::uint32_t k, std::uint32_t v, int before, int stage,
                                       float scale, const Mask& mask, const Pass& pass, const Release& consumer_release,
                                       const Leave& leave = {}) {
    gemm_ss<T, Dk, 64>(x, again(k), 64, descriptor(memory.q(stage), 16), 64);
    gemm_rs<T, Dk, 64>(dk, operand, descriptor(memory.q(before), kPanelBytes));
    wgmma_wait<1>();
    pass();
    probabilities(x, memory.terms(stage), scale, mask);
    wgmma_wait<0>();
    consumer_release(before);
    score_gradients(memory, v, stage);
    leave(operand, stage);
  }
  template <class Memory, class Release>
  __device__ __forceinline__ void last(const Memory& memory, int before, const Release& consumer_release) {
    gemm_rs<T, Dk, 64>(dk, operand, descriptor(memory.q(before), kPanelBytes));
    wgmma_wait<0>();
    consumer_release(before);
  }
};

/// The same for 32 keys as the columns of the products. P^T and dS^T pass through `operand`, a tile of 32 keys x 64
/// query rows; leave(stage) is to read dS^T there.
///
///   dK += Q(k-1)^T dS(k-1), S(k), dP(k) | dV += dO(k)^T (g P(k)) | dK += Q(k)^T dS(k), S(k+1), ...
///
/// A warp has a query's rows in two halves: a lane the rows lane / 4 and eight further on.
template <class T, int Dk, int Dv>
struct NarrowKeyGradients : KeySums<T, Dk, Dv, 32> {
  using KeySums<T, Dk, Dv, 32>::dk, KeySums<T, Dk, Dv, 32>::dv;
  float s[16], dp[16];

  template <class Memory, class Mask, class Leave>
  __device__ __forceinline__ void first(const Memory& memory, std::uint32_t k, std::uint32_t v, std::uint32_t operand,
                                        int stage, float scale, const Mask& mask, const Leave& leave) {
    issue_scores(memory, k, v, stage);
    score_gradients(
        memory, operand, stage, scale, mask, [] {}, leave);
  }
  template <class Memory, class Mask, class Release, class Leave>
  __device__ __forceinline__ void next(const Memory& memory, std::uint32_t k, std::uint32_t v, std::uint32_t operand,
                                       int before, int stage, float scale, const Mask& mask,
                                       const Release& consumer_release, const Leave& leave) {
    gemm_ts<T, Dk, 32>(dk, descriptor(memory.q(before), kPanelBytes), descriptor(operand, 16));
    issue_scores(memory, k, v, stage);
    score_gradients(
        memory, operand, stage, scale, mask, [&] { consumer_release(before); }, leave);
  }
  template <class Memory, class Release>
  __device__ __forceinline__ void last(const Memory& memory, std::uint32_t operand, int before,
                                       const Release& consumer_release) {
    gemm_ts<T, Dk, 32>(dk, descriptor(memory.q(before), kPanelBytes), descriptor(operand, 16));
    wgmma_wait<0>();
    consumer_release(before);
    pair_columns(dk), pair_columns(dv);
  }

 private:
  template <class Memory>
  __device__ __forceinline__ void issue_scores(const Memory& memory, std::uint32_t k, std::uint32_t v, int stage) {
    gemm_ss<T, Dk, 32>(s, descriptor(memory.q(stage), 16), 64, k, 32);
    gemm_ss<T, Dv, 32>(dp, descriptor(memory.d_o(stage), 16), 64, v, 32);
  }
  /// From S and dP on their way on: dV, and dS^T as the operand of dK.
  template <class Memory, class Mask, class Release, class Leave>
  __device__ __forceinline__ void score_gradients(const Memory& memory, std::uint32_t operand, int stage, float scale,
                                                  const Mask& mask, const Release& release_before, const Leave& leave) {
    const std::uint32_t row = memory.terms(stage) + (threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) * 4;
    float gate[2];
    std::uint32_t packed[2][4];
    wgmma_wait<1>();
    release_before();
    mask(s);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lse = load_float(row + half * 32);
      gate[half] = load_float(row + half * 32 + 512);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float &low = s[4 * j + 2 * half], &high = s[4 * j + 2 * half + 1];
        low = exp2_fast(fmaf(low, scale, lse));
        high = exp2_fast(fmaf(high, scale, lse));
        packed[half][j] = pack(T{}, low * gate[half], high * gate[half]);
      }
    }
    sync();
    write_operand(operand, packed);
    gemm_ts<T, Dv, 32>(dv, descriptor(memory.d_o(stage), kPanelBytes), descriptor(operand, 16));
    wgmma_wait<1>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float delta = load_float(row + half * 32 + 256);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * j + 2 * half;
        packed[half][j] =
            pack(T{}, s[i] * fmaf(gate[half], dp[i], -delta), s[i + 1] * fmaf(gate[half], dp[i + 1], -delta));
      }
    }
    wgmma_wait<0>();
    sync();
    write_operand(operand, packed);
    leave(stage);
  }

  __device__ __forceinline__ static void sync() {
    named_barrier_sync(DKvBarrier::kOperand, 128, warp_uniform(threadIdx.x / 128));
  }
  /// All warps of the warpgroup call it, when none reads the operand any more.
  __device__ __forceinline__ static void write_operand(std::uint32_t operand, const std::uint32_t (&x)[2][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;  // a lane names the row of a key
#pragma unroll
    for (int half = 0; half < 2; ++half)
      stmatrix4_transposed(operand + lane * 128 + ((2 * warp + half) ^ (lane & 7)) * 16, x[half]);
    fence_async();
    sync();
  }
};

/// Thread blocks that add the partial sums of a key tile: a few have very many.
inline constexpr int kSumBlocks = 8;

/// Adds the partial sums of a key tile, `count` of `rows` rows of dk + dv float32 each from the slot `first` on, in
/// order, and writes dK and dV of its `keys` keys. The thread blocks of all z of the grid share the work. `cut`: of a
/// window of the queries (SelectedWindows).
template <class T>
__device__ inline void sum_partials(const BackwardArgs& args, std::int64_t first, int count, int rows, int batch,
                                    std::int64_t key_row, int kv_head, int keys, int dk, int dv, int cut = 0) {
  const int width = dk + dv;
  const float* from = args.partials + first * rows * width;
  const int threads = static_cast<int>(gridDim.z * blockDim.x);
  for (int e = static_cast<int>(blockIdx.z * blockDim.x + threadIdx.x) * 4; e < keys * width; e += threads * 4) {
    float4 sum{};
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(from + static_cast<std::int64_t>(i) * rows * width + e);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    const int column = e % width;
    if (cut) {
      float4& so_far =
          *reinterpret_cast<float4*>(args.windows.sums.at<float>(batch, key_row + e / width, kv_head) + column);
      if (cut & SelectedWindows::kBefore)
        sum = {sum.x + so_far.x, sum.y + so_far.y, sum.z + so_far.z, sum.w + so_far.w};
      if (cut & SelectedWindows::kAfter) {
        so_far = sum;
        continue;
      }
    }
    const bool key = column < dk;
    const Strided& to = key ? args.d_k : args.d_v;
    if (!to.data) continue;
    const float scale = key ? args.scale : 1;
    T* out = to.at<T>(batch, key_row + e / width, kv_head) + (key ? column : column - dk);
    store_pair(out, sum.x * scale, sum.y * scale);
    store_pair(out + 2, sum.z * scale, sum.w * scale);
  }
}

}  // namespace nsa::cuda::sm90
