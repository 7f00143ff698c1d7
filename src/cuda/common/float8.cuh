// e4m3, as caches may store keys and values: every number of it is one of float16's and of bfloat16's.
#pragma once

#include <cuda_fp8.h>

#include "cuda/common/tile.cuh"

namespace nsa::cuda {

using Float8 = __nv_fp8_e4m3;

/// One scale for each KV head: what is stored times it is meant. Null data: 1.
struct HeadScales {
  const float* data = nullptr;
  std::int64_t step = 0;  // floats

  __device__ float operator[](int head) const { return data ? data[head * step] : 1.0f; }
};

/// Two neighbours, of the lower or the upper half of a word, as float16.
__device__ __forceinline__ std::uint32_t to_half2(std::uint32_t word, bool upper) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint32_t x;
  if (upper) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(x) : "r"(word));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(x) : "r"(word));
  }
  return x;
#else
  const auto pair = static_cast<__nv_fp8x2_storage_t>(upper ? word >> 16 : word & 0xffffu);
  const __half2_raw x = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
  return x.x | static_cast<std::uint32_t>(x.y) << 16;
#endif
}

/// x / scale rounded to nearest even, at most 448 in magnitude; NaN stays NaN.
__device__ __forceinline__ std::uint32_t to_float8(float x, float y, float scale) {
  return __nv_cvt_float2_to_fp8x2(make_float2(__fdiv_rn(x, scale), __fdiv_rn(y, scale)), __NV_SATFINITE, __NV_E4M3);
}
/// The same of sixteen bytes of 16-bit elements.
template <class T>
__device__ __forceinline__ uint2 to_float8(uint4 x, float scale) {
  const auto pair = [&](std::uint32_t w) {
    const float2 y = unpack(T{}, w);
    return to_float8(y.x, y.y, scale);
  };
  return {pair(x.x) | pair(x.y) << 16, pair(x.z) | pair(x.w) << 16};
}

/// Tile<T, D>::load_row of elements in e4m3, without their scale. The tile is written before it returns.
template <class T, int D>
__device__ __forceinline__ void load_float8_row(std::uint32_t tile, int row, int lane, const Float8* from) {
#pragma unroll
  for (int c = 0; c < D / 64; ++c) {  // eight elements of a lane at a time
    const int chunk = lane % 8 + c * 8;
    const uint2 x = from ? reinterpret_cast<const uint2*>(from)[chunk] : uint2{0, 0};
    const std::uint32_t halves[4] = {to_half2(x.x, false), to_half2(x.x, true), to_half2(x.y, false),
                                     to_half2(x.y, true)};
    const auto store = [&](std::uint32_t to, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    };
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 low = unpack(Half{}, halves[2 * i]), high = unpack(Half{}, halves[2 * i + 1]);
        store(tile + Tile<T, D>::at(row, chunk * 32, i * 16), __float_as_uint(low.x), __float_as_uint(low.y),
              __float_as_uint(high.x), __float_as_uint(high.y));
      }
    } else {
      const auto as_type = [&](std::uint32_t w) {
        if constexpr (std::is_same_v<T, Half>) return w;
        const float2 y = unpack(Half{}, w);
        return pack(T{}, y.x, y.y);
      };
      store(tile + Tile<T, D>::at(row, c * 128, lane % 8 * 16), as_type(halves[0]), as_type(halves[1]),
            as_type(halves[2]), as_type(halves[3]));
    }
  }
}

}  // namespace nsa::cuda
