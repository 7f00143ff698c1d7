// What a warp computes of its tile of rows and of key tiles in shared memory: scores, probabilities, sums of values.
#pragma once

#include "cuda/common/float8.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/sm90/decode/attend/config.cuh"

namespace nsa::cuda::sm90::decode {

template <class S>
using Scores = float[2 * S::kAtOnce][4];

/// Adds the products of the queries and of the key tiles whose keys lie at `keys`. queries: of e4m3 in place of q, the
/// lane's fragments in shared memory.
template <class S>
__device__ __forceinline__ void multiply_keys(Scores<S>& s, const QueryFragments<S>& q, const char* queries,
                                              std::uint32_t keys, int lane) {
  if constexpr (S::kFloat8) {
#pragma unroll
    for (int k = 0; k < S::kKeyDim / 16; k += 2) {
      std::uint32_t fragment[S::kAtOnce][4];  // of eight keys each: (keys, sixteen channels)
#pragma unroll
      for (int u = 0; u < S::kAtOnce; ++u) S::Keys::load_a(fragment[u], keys, u * kTileKeys, k / 2, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 x = *reinterpret_cast<const uint4*>(queries + (k + i) * 512);
        const std::uint32_t a[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int n = 0; n < 2 * S::kAtOnce; ++n) {
          const std::uint32_t word = fragment[n / 2][2 * i + n % 2];
          mma(typename S::Element{}, s[n], a, to_half2(word, false), to_half2(word, true));
        }
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < S::kKeyDim / 16; ++k)
#pragma unroll
      for (int u = 0; u < S::kAtOnce; ++u) {
        std::uint32_t fragment[4];
        Tile<typename S::Input, S::kKeyDim>::load_b(fragment, keys, u * kTileKeys, k, lane);
        mma(typename S::Input{}, s[2 * u], q[k], fragment[0], fragment[1]);
        mma(typename S::Input{}, s[2 * u + 1], q[k], fragment[2], fragment[3]);
      }
  }
}

/// Scores to probabilities, relative to state.max; of the key tiles' keys the query sees begin ... end - 1.
template <class S>
__device__ __forceinline__ void update_softmax(OnlineSoftmax<S::kValueDim>& state, Scores<S>& s, float scale, int begin,
                                               int end, int lane) {
  if (begin > 0 || end < S::kLoadKeys) {
#pragma unroll
    for (int e = 0; e < 4 * S::kAtOnce; ++e) {
      const int k = e / 2 * 8 + 2 * (lane & 3) + e % 2;
      if (k < begin || k >= end) s[e / 2][e % 2] = s[e / 2][2 + e % 2] = -INFINITY;
    }
  }
  state.update(s, scale);
}

/// Adds p V of the key tiles whose values lie at `values`.
template <class S>
__device__ __forceinline__ void add_values(OnlineSoftmax<S::kValueDim>& state, const Scores<S>& p, std::uint32_t values,
                                           int lane) {
#pragma unroll
  for (int u = 0; u < S::kAtOnce; ++u) {
    std::uint32_t a[4];
    operand_a<typename S::Element>(a, p, u);
    if constexpr (S::kFloat8) {
      // Neighbouring channels of a key come together; the even ones go to one tile of columns, the odd ones to the
      // next.
#pragma unroll
      for (int n = 0; n < S::kValueDim / 32; ++n) {
        std::uint32_t v[4];
        S::Values::load_b_rows(v, values, u * kTileKeys, n * 16, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = __byte_perm(v[i], 0, 0x3120);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma(typename S::Element{}, state.acc[4 * n + 2 * i], a, to_half2(v[2 * i], false),
              to_half2(v[2 * i + 1], false));
          mma(typename S::Element{}, state.acc[4 * n + 2 * i + 1], a, to_half2(v[2 * i], true),
              to_half2(v[2 * i + 1], true));
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < S::kValueDim / 16; ++n) {
        std::uint32_t v[4];
        Tile<typename S::Input, S::kValueDim>::load_b_rows(v, values, u * kTileKeys, n * 16, lane);
        mma(typename S::Input{}, state.acc[2 * n], a, v[0], v[1]);
        mma(typename S::Input{}, state.acc[2 * n + 1], a, v[2], v[3]);
      }
    }
  }
}

/// A tile of rows and one key tile, whose keys and values lie at `keys` and of whose keys the query sees begin ...
/// end - 1. keep(p): takes the probabilities, relative to state.max. What the query does not see has not been loaded,
/// so that values there are 0.
template <class S, class Keep>
__device__ __forceinline__ void attend_key_tile(OnlineSoftmax<S::kValueDim>& state, const QueryFragments<S>& q,
                                                const char* queries, int begin, int end, std::uint32_t keys,
                                                float scale, bool wants_values, int lane, const Keep& keep) {
  Scores<S> s = {};
  if constexpr (S::kFloat8) {
    multiply_keys<S>(s, q, queries, keys, lane);
  } else {
    constexpr int kChains = S::kTiles == 1 ? 2 : 1;  // of products, so that they wait less for each other
    float other[2][4] = {};
#pragma unroll
    for (int k = 0; k < S::kKeyDim / 16; ++k) {
      std::uint32_t fragment[4];
      Tile<typename S::Input, S::kKeyDim>::load_b(fragment, keys, 0, k, lane);
      mma(typename S::Input{}, k % kChains ? other[0] : s[0], q[k], fragment[0], fragment[1]);
      mma(typename S::Input{}, k % kChains ? other[1] : s[1], q[k], fragment[2], fragment[3]);
    }
    if constexpr (kChains == 2) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] += other[n][i];
    }
  }
  update_softmax<S>(state, s, scale, begin, end, lane);
  keep(s);
  if (wants_values) add_values<S>(state, s, keys + S::kValues, lane);
}

}  // namespace nsa::cuda::sm90::decode
