// Vectors of float32 for the instruction set this file is compiled for, and the two element types of packed operands.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif NSA_NEON
#include <arm_neon.h>
#endif

#if defined(__AVX512BF16__) || (NSA_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define NSA_PAIRS 1  // the instruction set multiplies pairs of bf16
#endif

namespace nsa::cpu::NSA_ISA {

#if defined(__AVX512F__)
inline constexpr int kWidth = 16;
inline constexpr int kTileVectors = 4;  // columns of a tile, in vectors: 6 x 4 accumulators + 4 + 1 of 32 registers
#elif defined(__AVX2__)
inline constexpr int kWidth = 8;
inline constexpr int kTileVectors = 2;  // 6 x 2 accumulators + 2 + 1 of 16 registers
#else
inline constexpr int kWidth = 4;
#if NSA_NEON
inline constexpr int kTileVectors = 4;  // 6 x 4 accumulators + 4 + 1 of 32 registers
#else
inline constexpr int kTileVectors = 2;
#endif
#endif
inline constexpr int kTileRows = 6;

using Vec = float __attribute__((vector_size(kWidth * 4), aligned(kWidth * 4)));
using IVec = std::int32_t __attribute__((vector_size(kWidth * 4), aligned(kWidth * 4)));
using UVec = std::uint32_t __attribute__((vector_size(kWidth * 4), aligned(kWidth * 4)));

inline constexpr float kInf = std::numeric_limits<float>::infinity();

inline Vec splat_bits(std::uint32_t bits) { return (Vec)(UVec{} + bits); }
inline Vec splat(float x) {  // an integer sum with zero is folded into the broadcast, one of floats is not: -0 + 0 = 0
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return splat_bits(bits);
}
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
/// Of type float for the compiler: unlike memcpy it lets everything that is not a float stay in registers.
inline void store(float* p, Vec v) {
  using Unaligned = float __attribute__((vector_size(kWidth * 4), aligned(4)));
  *reinterpret_cast<Unaligned*>(p) = v;
}

/// a * b + c, fused where the instruction set can.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif NSA_NEON
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

/// b where either is NaN, like the instruction.
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float reduce_add(Vec v) {  // a fixed tree
  float x[kWidth];
  std::memcpy(x, &v, sizeof v);
  for (int n = kWidth / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) x[i] += x[i + n];
  return x[0];
}
inline float reduce_max(Vec v) {
  float x[kWidth];
  std::memcpy(x, &v, sizeof v);
  float m = x[0];
  for (int i = 1; i < kWidth; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

/// All bits set in the lanes [first, last), clamped.
inline IVec lanes(std::int64_t first, std::int64_t last) {
  IVec lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  const auto clamp = [](std::int64_t x) { return static_cast<std::int32_t>(x < 0 ? 0 : x > kWidth ? kWidth : x); };
  return (lane >= clamp(first)) & (lane < clamp(last));
}
inline Vec select(IVec mask, Vec yes, Vec no) { return mask ? yes : no; }

/// 2^x to 2e-7 relative. -inf gives 0, NaN stays NaN, results below the smallest normal number may be 0.
/// A polynomial on the fraction x - floor(x), scaled by 2^floor(x).
inline Vec exp2(Vec x) {
  const auto polynomial = [](Vec f) {
    Vec p = splat(0.0018775752f);
    p = fma(p, f, splat(0.0089893453f));
    p = fma(p, f, splat(0.055826314f));
    p = fma(p, f, splat(0.24015363f));
    p = fma(p, f, splat(0.69315308f));
    return fma(p, f, splat(0.99999994f));
  };
#if defined(__AVX512DQ__)
  // vreduceps gives the fraction (0 for -inf), vscalefps takes the floor itself.
  return (Vec)_mm512_scalef_ps((__m512)polynomial((Vec)_mm512_reduce_ps((__m512)x, 0x01)), (__m512)x);
#else
  const Vec low = splat(-126.0f), high = splat(128.0f);
  Vec y = x < low ? low : x;  // NaN passes both comparisons unchanged
  y = y > high ? high : y;
  const IVec nan = ~(x == x);
  const Vec finite = nan ? Vec{} : y;
  IVec n = __builtin_convertvector(finite, IVec);   // toward zero
  n += (__builtin_convertvector(n, Vec) > finite);  // floor: comparisons are -1 where true
  const Vec p = polynomial(finite - __builtin_convertvector(n, Vec));
  // 2^n in two factors, so that n = 128 gives inf and not a wrapped exponent
  const IVec half = n >> 1;
  const Vec result = p * (Vec)((half + 127) << 23) * (Vec)((n - half + 127) << 23);
  return nan ? x : (x < low ? Vec{} : result);
#endif
}

// ---- elements

struct bf16 {
  std::uint16_t bits;
};

inline float to_float(bf16 x) {
  const std::uint32_t u = std::uint32_t{x.bits} << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline float to_float(float x) { return x; }

/// Round to nearest even; a NaN stays a NaN.
inline bf16 to_bf16(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  if (x != x) return {static_cast<std::uint16_t>((u >> 16) | 0x40)};
  return {static_cast<std::uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

inline void from_float(float x, bf16& y) { y = to_bf16(x); }
inline void from_float(float x, float& y) { y = x; }

/// kWidth consecutive elements as float32.
inline Vec load_floats(const float* p) { return load(p); }
inline Vec load_floats(const bf16* p) {
  using Half = std::uint16_t __attribute__((vector_size(kWidth * 2)));
  Half h;
  std::memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, UVec) << 16);
}
inline void store_floats(float* p, Vec v) { store(p, v); }
inline void store_floats(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
  const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &h, sizeof h);
#elif NSA_PAIRS
  const bfloat16x4_t h = vcvt_bf16_f32((float32x4_t)v);
  std::memcpy(p, &h, sizeof h);
#else
  const UVec u = (UVec)v;
  const UVec rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const UVec quiet = (u >> 16) | 0x40;
  using Half = std::uint16_t __attribute__((vector_size(kWidth * 2)));
  const Half h = __builtin_convertvector((v != v) ? quiet : rounded, Half);
  std::memcpy(p, &h, sizeof h);
#endif
}

// ---- slots: what a tile multiplies. An operand is an array of 4-byte slots, one per row (or column) and step of the
// reduction: one float32, or two consecutive bf16 where the instruction set multiplies pairs.

using Slot = std::uint32_t;
using SlotVec = UVec;

/// Slots may have been written as floats or as bf16, so they are read as bytes.
inline Slot load_slot(const Slot* p) {
  Slot s;
  std::memcpy(&s, p, sizeof s);
  return s;
}
inline SlotVec load_slots(const Slot* p) {
  SlotVec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store_slots(Slot* p, SlotVec v) { std::memcpy(p, &v, sizeof v); }

/// Swaps the blocks of `size` x `size` slots off the diagonal of each block of twice that size.
template <int size, int... lane>
inline __attribute__((always_inline)) void swap_blocks(SlotVec (&rows)[kWidth], std::integer_sequence<int, lane...>) {
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if ((i & size) != 0) continue;
    const SlotVec a = rows[i], b = rows[i + size];
    rows[i] = __builtin_shufflevector(a, b, ((lane & size) != 0 ? kWidth + lane - size : lane)...);
    rows[i + size] = __builtin_shufflevector(a, b, ((lane & size) != 0 ? kWidth + lane : lane + size)...);
  }
}

/// rows[i][j] becomes rows[j][i].
template <int size = kWidth / 2>
inline __attribute__((always_inline)) void transpose(SlotVec (&rows)[kWidth]) {
  swap_blocks<size>(rows, std::make_integer_sequence<int, kWidth>{});
  if constexpr (size > 1) transpose<size / 2>(rows);
}

/// A slot is one float32.
struct Floats {
  static constexpr int kElements = 1;
  static Vec dot(Vec acc, Slot a, SlotVec b) {
#if NSA_NEON  // as a lane: the compiler broadcasts with an instruction of its own
    return (Vec)vfmaq_lane_f32((float32x4_t)acc, (float32x4_t)b, vcreate_f32(a), 0);
#else
    return fma(splat_bits(a), (Vec)b, acc);
#endif
  }
};

#if NSA_PAIRS
/// A slot is two bf16, multiplied and added as a pair. Both instructions flush denormals. vdpbf16ps rounds to nearest.
/// BFDOT rounds each sum to odd, unless FPCR.EBF is set, which Linux leaves clear: the last bit of a sum is a bound.
/// (BFMMLA needs four elements of a column side by side, another packing.)
struct Pairs {
  static constexpr int kElements = 2;
  static Vec dot(Vec acc, Slot a, SlotVec b) {
#if NSA_NEON
    return (Vec)vbfdotq_lane_f32((float32x4_t)acc, (bfloat16x8_t)b, vcreate_bf16(a), 0);
#else
    const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int>(a));
    return (Vec)_mm512_dpbf16_ps((__m512)acc, x, (__m512bh)b);
#endif
  }
};
#endif

/// The slot type for inputs of type In: pairs of bf16 where the hardware has them, otherwise widened to float32.
template <class In>
struct SlotsOf {
  using type = Floats;
};
#if NSA_PAIRS
template <>
struct SlotsOf<bf16> {
  using type = Pairs;
};
#endif

}  // namespace nsa::cpu::NSA_ISA
