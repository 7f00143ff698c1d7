// Element types of the CUDA kernels and warp-level matmuls (mma) on them.
//
// One kernel source serves bfloat16, float16 and float32, because the fragments of mma.sync are alike when counted in
// bytes: an A operand is 16 rows x 32 bytes (16 elements of 16 bits with m16n8k16, 8 floats with m16n8k8), a B operand
// 32 bytes x 8 columns, and ldmatrix delivers both. float32 products are three TF32 products of the high and low parts
// of the factors: the error is that of float32 arithmetic, not of TF32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace nsa::cuda {

// Code for compute capability 9.x. ptxas needs more registers for the same kernel elsewhere, and 8.6, 8.9 and 12.x have
// 99 KB of shared memory: kernels take smaller tiles there, so that none spills and each fits.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1000)
inline constexpr bool kHopper = false;
#else
inline constexpr bool kHopper = true;
#endif

/// A lane that the compiler takes for a new one on 10.x and 12.x: it recomputes the addresses that depend on it instead
/// of keeping them across a loop, which would spill there.
__device__ __forceinline__ int opaque_lane(int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  asm volatile("" : "+r"(lane));
#endif
  return lane;
}

using Bf16 = __nv_bfloat16;
using Half = __half;

/// Elements of the reduction in one product: 32 bytes.
template <class T>
inline constexpr int kStep = 32 / static_cast<int>(sizeof(T));

__device__ inline float to_float(Bf16 x) { return __bfloat162float(x); }
__device__ inline float to_float(Half x) { return __half2float(x); }
__device__ inline float to_float(float x) { return x; }

template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline Bf16 from_float<Bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline Half from_float<Half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}

/// Two neighbouring 16-bit elements, or one float, as the register that a fragment holds.
__device__ inline std::uint32_t pack(Bf16, float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ inline std::uint32_t pack(Half, float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ inline float2 unpack(Bf16, std::uint32_t w) {
  return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
}
__device__ inline float2 unpack(Half, std::uint32_t w) { return __half22float2(*reinterpret_cast<const __half2*>(&w)); }

/// Writes the neighbours (x, y).
template <class T>
__device__ inline void store_pair(T* p, float x, float y) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(p) = make_float2(x, y);
  } else {
    *reinterpret_cast<std::uint32_t*>(p) = pack(T{}, x, y);
  }
}

/// An 8 x 8 tile of 16-bit elements as the rows of an A operand have it, transposed.
__device__ __forceinline__ std::uint32_t transposed(std::uint32_t x) {
  std::uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

/// c += a * b for one 16 x 8 tile; c: rows lane/4 and lane/4 + 8, columns 2*(lane%4) and the next.
__device__ inline void mma(Bf16, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma(Half, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma_tf32(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// The part of a float that TF32 keeps, and what is left (0 for NaN and infinity).
__device__ inline void split(std::uint32_t x, std::uint32_t& high, std::uint32_t& low) {
  high = x & 0xffffe000u;
  const float rest = __uint_as_float(x) - __uint_as_float(high);
  low = rest == rest ? __float_as_uint(rest) : 0u;
}
__device__ inline void mma(float, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  std::uint32_t high[4], low[4], b0_high, b0_low, b1_high, b1_low;
#pragma unroll
  for (int i = 0; i < 4; ++i) split(a[i], high[i], low[i]);
  split(b0, b0_high, b0_low);
  split(b1, b1_high, b1_low);
  // The tensor cores truncate when they add to an accumulator, which over hundreds of steps is a bias of 1e-5: each
  // step starts from zero, and the sums are added with rounding to nearest.
  float sum[4] = {};
  mma_tf32(sum, low, b0_high, b1_high);
  mma_tf32(sum, high, b0_low, b1_low);
  mma_tf32(sum, high, b0_high, b1_high);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += sum[i];
}

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
__device__ inline void ldmatrix4(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ inline void ldmatrix4_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// Sixteen bytes from global to shared memory, asynchronously; zeros where `valid` is false (nothing is read then).
__device__ inline void copy16(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
/// The same for four bytes.
__device__ inline void copy4(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

/// Over the four lanes that hold one row of a C fragment.
__device__ inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// The softmax scale in base-2 units, of its sign. Zero becomes the smallest there is: a masked score stays infinite.
__host__ __device__ __forceinline__ float log2_scale(float scale) {
  return copysignf(fmaxf(fabsf(scale), 1.1754944e-38f) * kLog2e, scale);
}
/// The same without its sign, for kernels that negate queries or scores instead.
__device__ __forceinline__ float positive_scale(float scale) { return fabsf(log2_scale(scale)); }
/// What a masked score is before it is multiplied by log2_scale().
__host__ __device__ __forceinline__ float masked_score(float log2_scale) { return copysignf(INFINITY, -log2_scale); }

}  // namespace nsa::cuda
