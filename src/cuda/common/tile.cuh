// Tiles of rows in shared memory, and the products that kernels build on them.
//
// The eight 16-byte rows of an ldmatrix have to lie in different banks. In 16-bit rows of whole 128-byte lines the
// 16-byte chunks of each line are swizzled: chunk c of row r is at c ^ (r % 8). Other rows are padded by 16 bytes,
// their pitch is an odd multiple of that. (This costs an asynchronous copy more: every other row lies across its
// 32-byte sectors, which are then fetched twice. But it leaves constant distances between the many addresses of
// float32.)
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/common/element.cuh"

namespace nsa::cuda {

template <class T, int D>
struct Tile {
  static constexpr int kRow = D * static_cast<int>(sizeof(T));  // bytes
  static constexpr bool kSwizzled = sizeof(T) == 2 && kRow % 128 == 0;
  static constexpr int kPitch = kSwizzled ? kRow : kRow + 16;
  static constexpr int kChunks = kRow / 16;
  static_assert(kSwizzled || kPitch / 16 % 2 == 1);

  static constexpr int bytes(int rows) { return rows * kPitch; }

  /// Where byte `first` + `mine` of a row lies, for numbers with no bit in common: what all lanes have and what they
  /// don't, so that one XOR with a constant leads from one chunk to the next.
  __device__ __forceinline__ static int at(int row, int first, int mine) {
    if constexpr (kSwizzled) {
      return row * kPitch + (first & ~127) + ((first & 127) ^ (mine ^ (row & 7) * 16));
    } else {
      return row * kPitch + first + mine;
    }
  }

  /// This lane's eighth of a row (lane % 8), a null pointer gives zeros.
  __device__ static void load_row(std::uint32_t tile, int row, auto lane, const T* from) {
    static_assert(kChunks % 8 == 0);
    const char* bytes = reinterpret_cast<const char*>(from) + lane % 8 * 16;
    const std::uint32_t to = tile + at(row, 0, lane % 8 * 16);
#pragma unroll
    for (int c = 0; c < kChunks / 8; ++c) copy16(to + c * 128, bytes + c * 128, from != nullptr);
  }
  /// The B operand of two neighbouring column tiles (rows `row` .. `row` + 15 of the tile are its columns) at reduction
  /// step k: {b0, b1} of the first and {b0, b1} of the second.
  __device__ static void load_b(std::uint32_t (&b)[4], std::uint32_t tile, int row, int k, int lane) {
    ldmatrix4(b, tile + at(row + (lane & 16) / 2 + (lane & 7), k * 32, (lane & 8) * 2));
  }
  /// The B operand of one column tile (rows `row` .. `row` + 7) at reduction steps k and k + 1, k even.
  __device__ static void load_b_narrow(std::uint32_t (&b)[4], std::uint32_t tile, int row, int k, int lane) {
    ldmatrix4(b, tile + at(row + (lane & 7), k * 32, (lane / 8) * 16));
  }
  /// The A operand: rows `row` .. `row` + 15 at reduction step k.
  __device__ static void load_a(std::uint32_t (&a)[4], std::uint32_t tile, int row, int k, int lane) {
    ldmatrix4(a, tile + at(row + (lane & 15), k * 32, lane & 16));
  }
  /// The B operand when the tile's rows are the reduction: rows `row` .. `row` + kStep - 1, columns `column` .. + 15.
  /// For float32 row 2t and 2t + 1 of the tile take the places t and t + 4 of the reduction: see operand_a.
  __device__ static void load_b_rows(std::uint32_t (&b)[4], std::uint32_t tile, int row, int column, int lane) {
    if constexpr (sizeof(T) == 2) {
      ldmatrix4_transposed(b, tile + at(row + (lane & 15), column * 2, lane & 16));
    } else {
      static_assert(!kSwizzled);
      const std::uint32_t from = tile + at(row + 2 * (lane & 3), column * 4, lane / 4 * 4);
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(b[0]) : "r"(from));
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(b[1]) : "r"(from + kPitch));
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(b[2]) : "r"(from + 32));
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(b[3]) : "r"(from + 32 + kPitch));
    }
  }
};

/// Rows of one head of a tensor on their way into tiles of kRows: kThreads threads, eight to a row.
template <class T, int D, int kRows, int kThreads>
class RowStream {
 public:
  /// row0: of this head; stride: from row to row, in elements; thread < kThreads.
  __device__ RowStream(const T* row0, std::int64_t stride, int thread)
      : mine_(reinterpret_cast<const char*>(row0 + thread / 8 * stride) + thread % 8 * 16),
        stride_(stride * static_cast<int>(sizeof(T))),
        row_(thread / 8),
        column_(thread % 8 * 16) {}

  /// The rows first ... first + kRows - 1; zeros from row `end` on.
  __device__ void load(std::uint32_t tile, int first, int end) const {
    const char* from = mine_ + first * stride_;
#pragma unroll
    for (int r = 0; r < kRows; r += kTogether) {
      if (kRows % kTogether != 0 && r + row_ >= kRows) break;
      const std::uint32_t to = tile + Tile<T, D>::at(r + row_, 0, column_);
#pragma unroll
      for (int c = 0; c < Tile<T, D>::kChunks / 8; ++c) copy16(to + c * 128, from + c * 128, first + r + row_ < end);
      from += kTogether * stride_;
    }
  }

 private:
  static constexpr int kTogether = kThreads / 8;

  const char* mine_;
  std::int64_t stride_;  // bytes
  int row_, column_;
};

/// C fragments (row x reduction) of columns step*kStep .. as the A operand of the next product.
template <class T, int N>
__device__ inline void operand_a(std::uint32_t (&a)[4], const float (&c)[N][4], int step) {
  if constexpr (sizeof(T) == 2) {
    a[0] = pack(T{}, c[2 * step][0], c[2 * step][1]);
    a[1] = pack(T{}, c[2 * step][2], c[2 * step][3]);
    a[2] = pack(T{}, c[2 * step + 1][0], c[2 * step + 1][1]);
    a[3] = pack(T{}, c[2 * step + 1][2], c[2 * step + 1][3]);
  } else {
    a[0] = __float_as_uint(c[step][0]);
    a[1] = __float_as_uint(c[step][2]);
    a[2] = __float_as_uint(c[step][1]);
    a[3] = __float_as_uint(c[step][3]);
  }
}

// Products. The B operand, a tile, comes by ldmatrix into a ring of fragments, kAhead of them on their way while
// earlier ones are multiplied. Towards its end a product fetches the first fragments of the next one, so that the
// tensor cores need not wait at its start:
//
//   start(scores, ring);  scores.run(s, ring, outputs);  ...  outputs.run(acc, s, ring);

template <class T>
inline constexpr int kAhead = sizeof(T) == 4 && !kHopper ? 1 : 3;

/// f(0), f(1), ... f(N - 1) with constants: for loops that `#pragma unroll` finds too long.
template <int N, class F>
__device__ __forceinline__ void unrolled(const F& f) {
  [&]<int... kI>(std::integer_sequence<int, kI...>) { (f(std::integral_constant<int, kI>{}), ...); }
  (std::make_integer_sequence<int, N>{});
}

template <class T>
struct Ring {
  static constexpr int kSize = kAhead<T> + 1;
  std::uint32_t a[4];  // the first fragment of A, where A is a tile too; not with M > 1, for which registers are short
  std::uint32_t b[kSize][4];
};

/// After the last product.
struct Nothing {
  template <class T>
  __device__ void fetch(Ring<T>&, int) const {}
};

/// Fetches what must be on its way before run().
template <class Product, class T>
__device__ inline void start(const Product& product, Ring<T>& ring) {
#pragma unroll
  for (int i = 0; i < kAhead<T>; ++i) product.fetch(ring, i);
}

/// Of the C fragments of M times sixteen rows, c[M][..][4] or, if M = 1, c[..][4], those of the m-th sixteen.
template <int M, class C>
__device__ __forceinline__ auto& sixteen(C& c, int m) {
  if constexpr (M == 1) {
    return c;
  } else {
    return c[m];
  }
}

/// c = a * tile^T: M times sixteen rows of a against 8 * N rows of a tile, over D. The fragments of a come from
/// load_a(a, k), with M > 1 from load_a(a, k, m).
template <class T, int D, int N, class LoadA, int M = 1>
struct Scores {
  const LoadA& load_a;
  std::uint32_t tile;
  int lane;

  static constexpr int kSteps = D / kStep<T>, kPairs = N > 1 ? N / 2 : 1;
  // Steps of the unrolled loop (float32 has too many of them to unroll all), its fragments of B; N = 1: two steps each.
  static constexpr int kBlock = sizeof(T) == 4 ? 8 : kSteps, kFragments = N > 1 ? kBlock *kPairs : kBlock / 2;
  static_assert(kFragments % Ring<T>::kSize == 0 && kSteps % kBlock == 0 && (N == 1 || N % 2 == 0));

  /// Fragment i of the block of steps that begins at k0.
  __device__ __forceinline__ void fetch(Ring<T>& ring, int i, int k0 = 0) const {
    if constexpr (N == 1) {
      Tile<T, D>::load_b_narrow(ring.b[i % Ring<T>::kSize], tile, 0, k0 + 2 * i, lane);
    } else {
      Tile<T, D>::load_b(ring.b[i % Ring<T>::kSize], tile, i % kPairs * 16, k0 + i / kPairs, lane);
    }
    if constexpr (M == 1) {
      if (i == 0 && k0 == 0) load_a(ring.a, 0);
    }
  }
  template <class C, class Next = Nothing>
  __device__ __forceinline__ void run(C& c, Ring<T>& ring, const Next& next = {}) const {
    std::uint32_t a[2][M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sixteen<M>(c, m)[n][i] = 0;
    }
    if constexpr (M == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[0][0][i] = ring.a[i];
    } else {
      load(a[0], 0);
    }
#pragma unroll(kBlock == kSteps ? kSteps : 1)
    for (int k0 = 0; k0 < kSteps; k0 += kBlock) {
      const bool last = k0 + kBlock == kSteps;
      unrolled<kBlock * kPairs>([&](auto index) {
        constexpr int k = index / kPairs, n = index % kPairs, i = N > 1 ? index : k / 2, ahead = i + kAhead<T>;
        if (n == 0 && (!last || k + 1 < kBlock)) load(a[(k + 1) % 2], k0 + k + 1);
        const std::uint32_t(&b)[4] = ring.b[i % Ring<T>::kSize];
        if constexpr (N > 1 || k % 2 == 0) {
          if constexpr (ahead < kFragments) {
            fetch(ring, ahead, k0);
          } else if (!last) {
            fetch(ring, ahead - kFragments, k0 + kBlock);
          } else {
            next.fetch(ring, ahead - kFragments);
          }
        }
        if constexpr (N > 1) {
          unrolled<M>([&](auto m) { mma(T{}, sixteen<M>(c, m)[2 * n], a[k % 2][m], b[0], b[1]); });
          unrolled<M>([&](auto m) { mma(T{}, sixteen<M>(c, m)[2 * n + 1], a[k % 2][m], b[2], b[3]); });
        } else {
          unrolled<M>([&](auto m) { mma(T{}, sixteen<M>(c, m)[0], a[k % 2][m], b[k % 2 * 2], b[k % 2 * 2 + 1]); });
        }
      });
    }
  }

 private:
  __device__ __forceinline__ void load(std::uint32_t (&a)[M][4], int k) const {
    if constexpr (M == 1) {
      load_a(a[0], k);
    } else {
#pragma unroll
      for (int m = 0; m < M; ++m) load_a(a[m], k, m);
    }
  }
};

/// acc += p * tile: p (C fragments, M times 16 x 8*N, rounded to T, or p(a, k, m), its A operand of step k) against the
/// rows of a tile, D columns.
template <class T, int D, int N, int M = 1>
struct Outputs {
  std::uint32_t tile;
  int lane;

  static constexpr int kSteps = N * 8 / kStep<T>, kPairs = D / 16, kAll = kSteps * kPairs;
  static_assert(kAll % Ring<T>::kSize == 0);

  __device__ __forceinline__ void fetch(Ring<T>& ring, int i) const {
    Tile<T, D>::load_b_rows(ring.b[i % Ring<T>::kSize], tile, i / kPairs * kStep<T>, i % kPairs * 16, lane);
  }
  template <class Acc, class P, class Next = Nothing>
  __device__ __forceinline__ void run(Acc& acc, const P& p, Ring<T>& ring, const Next& next = {}) const {
    std::uint32_t a[M][4];
    unrolled<kAll>([&](auto index) {
      constexpr int i = index, n = i % kPairs;
      if constexpr (n == 0) {
        unrolled<M>([&](auto m) {
          if constexpr (!std::is_array_v<P>) {
            p(a[m], i / kPairs, m);
          } else {
            operand_a<T>(a[m], sixteen<M>(p, m), i / kPairs);
          }
        });
      }
      if constexpr (i + kAhead<T> < kAll) {
        fetch(ring, i + kAhead<T>);
      } else {
        next.fetch(ring, i + kAhead<T> - kAll);
      }
      const std::uint32_t(&b)[4] = ring.b[i % Ring<T>::kSize];
      unrolled<M>([&](auto m) { mma(T{}, sixteen<M>(acc, m)[2 * n], a[m], b[0], b[1]); });
      unrolled<M>([&](auto m) { mma(T{}, sixteen<M>(acc, m)[2 * n + 1], a[m], b[2], b[3]); });
    });
  }
};

// Where a row of p sees only some rows of a tile (its p is 0 for the others) and the tile holds a NaN or an infinity,
// 0 * NaN would leak. Then: add_nonfinite, a barrier, clear_nonfinite, a barrier, the product. Rows of p that
// do not see the bad elements get the same bits as if these were finite.

__device__ inline bool is_finite(float x) { return fabsf(x) <= 3.4028234663852886e38f; }

/// acc += p * x for the elements x of the tile's rows `row` .. that are not finite, where visible(i, j); i = 0, 1 for
/// the rows lane/4, lane/4 + 8 of p, j a row of the tile counted from `row`. Slow and rare.
template <class T, int D, int N, class Visible>
__device__ inline void add_nonfinite(float (&acc)[D / 8][4], const float (&p)[N][4], const char* tile, int row,
                                     int lane, const Visible& visible) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    for (int j = 0; j < 8; ++j) {
      const int source = (lane & ~3) | (j / 2);
      const float low0 = __shfl_sync(0xffffffffu, p[n][0], source), low1 = __shfl_sync(0xffffffffu, p[n][1], source);
      const float high0 = __shfl_sync(0xffffffffu, p[n][2], source), high1 = __shfl_sync(0xffffffffu, p[n][3], source);
      const float x = j & 1 ? low1 : low0, y = j & 1 ? high1 : high0;
      const bool see_x = visible(0, n * 8 + j), see_y = visible(1, n * 8 + j);
      constexpr int kSize = static_cast<int>(sizeof(T));
#pragma unroll
      for (int m = 0; m < D / 8; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = Tile<T, D>::at(row + n * 8 + j, m * 8 * kSize, 2 * (lane & 3) * kSize);
          const float v = to_float(reinterpret_cast<const T*>(tile + at)[i]);
          if (!is_finite(v) && see_x) acc[m][i] += x * v;
          if (!is_finite(v) && see_y) acc[m][2 + i] += y * v;
        }
      }
    }
  }
}

/// f(four words) for this thread's share of the tile's rows.
template <class T, int D, class F>
__device__ inline void for_words(char* tile, int rows, int thread, int threads, const F& f) {
#pragma unroll 2  // more would take registers from the kernel around it
  for (int i = thread; i < rows * Tile<T, D>::kChunks; i += threads)
    f(*reinterpret_cast<uint4*>(tile + i / Tile<T, D>::kChunks * Tile<T, D>::kPitch + i % Tile<T, D>::kChunks * 16));
}
/// Sign bits of the elements of a word whose exponent is all ones.
__device__ inline std::uint32_t nonfinite_bits(Bf16, std::uint32_t w) {
  return ((w & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
}
__device__ inline std::uint32_t nonfinite_bits(Half, std::uint32_t w) {
  return ((w & 0x7c007c00u) + 0x04000400u) & 0x80008000u;
}
__device__ inline std::uint32_t nonfinite_bits(float, std::uint32_t w) {
  return ((w & 0x7f800000u) + 0x00800000u) & 0x80000000u;
}
template <class T, int D>
__device__ inline bool has_nonfinite(char* tile, int rows, int thread, int threads) {
  std::uint32_t found = 0;
  for_words<T, D>(tile, rows, thread, threads, [&](const uint4& w) {
    found |= nonfinite_bits(T{}, w.x) | nonfinite_bits(T{}, w.y) | nonfinite_bits(T{}, w.z) | nonfinite_bits(T{}, w.w);
  });
  return found != 0;
}
template <class T, int D>
__device__ inline void clear_nonfinite(char* tile, int rows, int thread, int threads) {
  constexpr std::uint32_t kElement = sizeof(T) == 4 ? 0xffffffffu : 0xffffu;
  for_words<T, D>(tile, rows, thread, threads, [&](uint4& words) {
    for (std::uint32_t* w : {&words.x, &words.y, &words.z, &words.w}) {
      const std::uint32_t bits = nonfinite_bits(T{}, *w);
      if (bits & 0x80000000u) *w &= ~(kElement << (32 - 8 * sizeof(T)));
      if (bits & 0x00008000u) *w &= ~kElement;
    }
  });
}

}  // namespace nsa::cuda
