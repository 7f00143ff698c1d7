// Sixteen rows of one warp: their fragments as the first factor, and their softmax as keys stream past.
#pragma once

#include "cuda/common/params.h"
#include "cuda/common/tile.cuh"

namespace nsa::cuda {

/// The A fragments of sixteen rows, given by pointers to this lane's two (lane/4 and lane/4 + 8; null: zeros), negated
/// on demand. Rows are kept in registers, or (float32 rows would not fit) read again each time, from L1.
template <class T, int D, bool kKept = sizeof(T) == 2>
class RowFragments {
 public:
  __device__ RowFragments(const T* low, const T* high, int lane, bool negate = false)
      : low_(low),
        high_(high),
        lane_(lane),
        sign_(!negate          ? 0
              : sizeof(T) == 2 ? 0x80008000u
                               : 0x80000000u) {
    if constexpr (kKept) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) read(kept_[k], k);
    }
  }

  __device__ __forceinline__ void operator()(std::uint32_t (&a)[4], int k) const {
    if constexpr (kKept) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = kept_[k][i];
    } else {
      read(a, k);
    }
  }

 private:
  static constexpr int kSteps = D / kStep<T>;

  __device__ __forceinline__ void read(std::uint32_t (&a)[4], int k) const {
    const int column = k * kStep<T> + (lane_ & 3) * (kStep<T> / 8);
    const auto at = [&](const T* row, int offset) {
      return row ? *reinterpret_cast<const std::uint32_t*>(row + column + offset) ^ sign_ : 0u;
    };
    a[0] = at(low_, 0);
    a[1] = at(high_, 0);
    a[2] = at(low_, kStep<T> / 2);
    a[3] = at(high_, kStep<T> / 2);
  }

  const T *low_, *high_;
  int lane_;
  std::uint32_t sign_;
  std::uint32_t kept_[kKept ? kSteps : 1][4];
};

/// The same of 16-bit types in shared memory, each lane its own: where registers are scarce.
template <class T, int D>
class SharedFragments {
 public:
  static constexpr int kBytes = 16 * D * static_cast<int>(sizeof(T));

  /// Writes the steps first, first + every, ... of kBytes at `memory`: warps that have the same rows share this work.
  __device__ SharedFragments(std::uint32_t memory, int lane, const RowFragments<T, D>& rows, int first = 0,
                             int every = 1)
      : mine_(memory + lane * 16) {
#pragma unroll
    for (int k = 0; k < D / kStep<T>; ++k) {
      if (k % every != first) continue;
      std::uint32_t a[4];
      rows(a, k);
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(mine_ + k * 512), "r"(a[0]), "r"(a[1]), "r"(a[2]),
                   "r"(a[3]));
    }
  }
  __device__ __forceinline__ void operator()(std::uint32_t (&a)[4], int k) const {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(mine_ + k * 512));
  }

 private:
  std::uint32_t mine_;
};

template <bool kShared, class T, int D, bool kKept>
__device__ __forceinline__ auto keep_fragments(const RowFragments<T, D, kKept>& rows, std::uint32_t memory, int lane,
                                               int first = 0, int every = 1) {
  if constexpr (kShared) {
    return SharedFragments<T, D>(memory, lane, rows, first, every);
  } else {
    return rows;
  }
}

/// load_a(a, k), load_a(a, k, m) of M times sixteen rows for Scores. row(m, i): this lane's two of the m-th sixteen.
template <class T, int D, int M, bool kShared, bool kKept, class Row>
__device__ __forceinline__ auto fragments_of(const Row& row, std::uint32_t memory, int lane) {
  const auto of = [&](int m) {
    return keep_fragments<kShared>(RowFragments<T, D, kKept>(row(m, 0), row(m, 1), lane),
                                   memory + m * SharedFragments<T, D>::kBytes, lane);
  };
  if constexpr (M == 1) {
    return of(0);
  } else {
    return [first = of(0), second = of(1)](std::uint32_t(&a)[4], int k, int m) { m == 0 ? first(a, k) : second(a, k); };
  }
}

/// What the softmax of two rows is relative to: near their running maxima, in base-2 units. A reference follows the
/// maximum only when that has grown by 2^8: until then the probabilities are at most 256 instead of 1, which costs no
/// accuracy and saves reductions and the scaling of sums.
struct SoftmaxReference {
  float max[2] = {-INFINITY, -INFINITY};
  float factor[2];

  /// maxima: this lane's of the new scores, scaled. Returns whether what was summed before is to be scaled by `factor`;
  /// rescale(i) does so for what belongs to the softmax itself.
  template <class Rescale>
  __device__ __forceinline__ bool follow(const float (&maxima)[2], const Rescale& rescale) {
    const bool grown = __any_sync(0xffffffffu, maxima[0] > max[0] + 8 || maxima[1] > max[1] + 8);
    if (grown) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float m = row_max(maxima[i]), before = max[i];
        if (m > before + 8) max[i] = m;
        factor[i] = max[i] == before ? 1 : exp2_fast(before - max[i]);
        rescale(i);
      }
    }
    return grown;
  }
  /// To be added to the scaled scores of row i.
  __device__ __forceinline__ float shift(int i) const { return max[i] == -INFINITY ? 0 : -max[i]; }  // nothing seen yet
};

/// The softmax of two rows, their sums and outputs. Scores come raw and are scaled here by positive_scale().
template <int D>
struct OnlineSoftmax : SoftmaxReference {
  float sum[2] = {0, 0};  // this lane's shares
  float acc[D / 8][4] = {};

  /// s: raw scores, -inf where masked. Turns them into probabilities relative to the new reference.
  template <int N>
  __device__ void update(float (&s)[N][4], float scale) {
    float maxima[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      maxima[i] = s[0][2 * i];
#pragma unroll
      for (int n = 0; n < N; ++n) maxima[i] = fmaxf(maxima[i], fmaxf(s[n][2 * i], s[n][2 * i + 1]));
      maxima[i] *= scale;
    }
    if (follow(maxima, [&](int i) { sum[i] *= factor[i]; })) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        acc[n][0] *= factor[0], acc[n][1] *= factor[0];
        acc[n][2] *= factor[1], acc[n][3] *= factor[1];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        s[n][2 * i] = exp2_fast(fmaf(s[n][2 * i], scale, shift(i)));
        s[n][2 * i + 1] = exp2_fast(fmaf(s[n][2 * i + 1], scale, shift(i)));
        sum[i] += s[n][2 * i] + s[n][2 * i + 1];
      }
    }
  }
};

}  // namespace nsa::cuda
