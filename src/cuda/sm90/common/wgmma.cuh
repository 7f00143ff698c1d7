// Warpgroup matmuls (wgmma): 64 rows of A against N columns of B, 16 steps of the reduction at a time.
//
// A tile of R rows x D elements lies in shared memory as D / 64 panels of R rows x 128 bytes, each row's 16-byte
// vectors permuted by the 128-byte swizzle of TMA: what tma_load makes of boxes of 64 columns. Panels begin
// at multiples of 1024 bytes. As an operand a tile is either read along its rows (the reduction runs over D) or along
// its columns (the reduction runs over the rows: "transposed").
#pragma once

#include "cuda/sm90/common/ptx.cuh"

namespace nsa::cuda::sm90 {

/// The low word of a matrix descriptor; the high word is the same for all tiles here. Descriptors advance by addition,
/// in units of 16 bytes.
__device__ __forceinline__ std::uint32_t descriptor(std::uint32_t address, int panel_bytes) {
  return (address >> 4) | (static_cast<std::uint32_t>(panel_bytes) >> 4 << 16);
}
__device__ __forceinline__ std::uint64_t full_descriptor(std::uint32_t low) {
  return (1ull << 62) | (64ull << 32) | low;  // 128-byte swizzle, 1024 bytes from eight rows to the next
}

/// Before the first product of a batch, and between writing registers and products that read them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until at most kPending committed batches are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// clang-format off
#define NSA_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NSA_OPERANDS_32 \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
  "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
#define NSA_NAMES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NSA_OPERANDS_64 \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
  "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), \
  "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
  "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
#define NSA_NAMES_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NSA_OPERANDS_128 \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
  "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), \
  "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
  "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), \
  "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), \
  "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), \
  "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), \
  "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
#define NSA_NAMES_192 \
  NSA_NAMES_128 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NSA_OPERANDS_192 \
  NSA_OPERANDS_128, \
  "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71]), \
  "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]), "+f"(c[78]), "+f"(c[79]), \
  "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), \
  "+f"(c[88]), "+f"(c[89]), "+f"(c[90]), "+f"(c[91]), "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95])
#define NSA_NAMES_256 \
  NSA_NAMES_192 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define NSA_OPERANDS_256 \
  NSA_OPERANDS_192, \
  "+f"(c[96]), "+f"(c[97]), "+f"(c[98]), "+f"(c[99]), "+f"(c[100]), "+f"(c[101]), "+f"(c[102]), "+f"(c[103]), \
  "+f"(c[104]), "+f"(c[105]), "+f"(c[106]), "+f"(c[107]), "+f"(c[108]), "+f"(c[109]), "+f"(c[110]), "+f"(c[111]), \
  "+f"(c[112]), "+f"(c[113]), "+f"(c[114]), "+f"(c[115]), "+f"(c[116]), "+f"(c[117]), "+f"(c[118]), "+f"(c[119]), \
  "+f"(c[120]), "+f"(c[121]), "+f"(c[122]), "+f"(c[123]), "+f"(c[124]), "+f"(c[125]), "+f"(c[126]), "+f"(c[127])
// clang-format on

// c += or = (accumulate = 0) a * b. Type "bf16" or "f16"; trans_a, trans_b: 1 where that operand is read transposed.
#define NSA_SHARED_32(type)                                                                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type \
               " {" NSA_NAMES_32 "}, %16, %17, p, 1, 1, %19, %20;\n}\n"                                              \
               : NSA_OPERANDS_32                                                                                     \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposedA), "n"(kTransposedB))
#define NSA_SHARED_64(type)                                                                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type \
               " {" NSA_NAMES_64 "}, %32, %33, p, 1, 1, %35, %36;\n}\n"                                              \
               : NSA_OPERANDS_64                                                                                     \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposedA), "n"(kTransposedB))
#define NSA_REGISTERS_64(type)                                                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type \
               " {" NSA_NAMES_64 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                  \
               : NSA_OPERANDS_64                                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposedB))
#define NSA_SHARED_128(type)                                                                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type \
               " {" NSA_NAMES_128 "}, %64, %65, p, 1, 1, %67, %68;\n}\n"                                              \
               : NSA_OPERANDS_128                                                                                     \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposedA), "n"(kTransposedB))
#define NSA_REGISTERS_128(type)                                                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type \
               " {" NSA_NAMES_128 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"                                  \
               : NSA_OPERANDS_128                                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposedB))
#define NSA_REGISTERS_192(type)                                                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type \
               " {" NSA_NAMES_192 "}, {%96, %97, %98, %99}, %100, p, 1, 1, %102;\n}\n"                                 \
               : NSA_OPERANDS_192                                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposedB))
#define NSA_SHARED_256(type)                                                                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type \
               " {" NSA_NAMES_256 "}, %128, %129, p, 1, 1, %131, %132;\n}\n"                                           \
               : NSA_OPERANDS_256                                                                                      \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposedA), "n"(kTransposedB))

/// Both operands in shared memory.
template <class T, int N, bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void wgmma(float (&c)[N / 2], std::uint64_t a, std::uint64_t b, int accumulate) {
  static_assert(N == 32 || N == 64 || N == 128 || N == 256);
  if constexpr (std::is_same_v<T, Bf16>) {
    if constexpr (N == 32) NSA_SHARED_32("bf16");
    if constexpr (N == 64) NSA_SHARED_64("bf16");
    if constexpr (N == 128) NSA_SHARED_128("bf16");
    if constexpr (N == 256) NSA_SHARED_256("bf16");
  } else {
    if constexpr (N == 32) NSA_SHARED_32("f16");
    if constexpr (N == 64) NSA_SHARED_64("f16");
    if constexpr (N == 128) NSA_SHARED_128("f16");
    if constexpr (N == 256) NSA_SHARED_256("f16");
  }
}
/// A in registers: fragments as of mma.sync m16n8k16, 16 rows per warp.
template <class T, int N, bool kTransposedB>
__device__ __forceinline__ void wgmma(float (&c)[N / 2], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  static_assert(N == 64 || N == 128 || N == 192);
  if constexpr (std::is_same_v<T, Bf16>) {
    if constexpr (N == 64) NSA_REGISTERS_64("bf16");
    if constexpr (N == 128) NSA_REGISTERS_128("bf16");
    if constexpr (N == 192) NSA_REGISTERS_192("bf16");
  } else {
    if constexpr (N == 64) NSA_REGISTERS_64("f16");
    if constexpr (N == 128) NSA_REGISTERS_128("f16");
    if constexpr (N == 192) NSA_REGISTERS_192("f16");
  }
}

#undef NSA_NAMES_32
#undef NSA_NAMES_64
#undef NSA_NAMES_128
#undef NSA_NAMES_192
#undef NSA_NAMES_256
#undef NSA_OPERANDS_32
#undef NSA_OPERANDS_64
#undef NSA_OPERANDS_128
#undef NSA_OPERANDS_192
#undef NSA_OPERANDS_256
#undef NSA_SHARED_32
#undef NSA_SHARED_64
#undef NSA_SHARED_128
#undef NSA_SHARED_256
#undef NSA_REGISTERS_64
#undef NSA_REGISTERS_128
#undef NSA_REGISTERS_192

/// c = a * b^T over D: 64 rows of tile a (a_rows in all) against N rows of tile b (b_rows in all). One batch.
template <class T, int D, int N>
__device__ __forceinline__ void gemm_ss(float (&c)[N / 2], std::uint32_t a, int a_rows, std::uint32_t b, int b_rows) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
    wgmma<T, N, false, false>(c, full_descriptor(a + k / 4 * (a_rows * 8) + k % 4 * 2),
                              full_descriptor(b + k / 4 * (b_rows * 8) + k % 4 * 2), k != 0);
  wgmma_commit();
}
/// c += a^T * b^T over 64 rows of tile a: M of its columns, 64 at a time, against N rows of tile b. One batch.
template <class T, int M, int N>
__device__ __forceinline__ void gemm_ts(float (&c)[M * N / 128], std::uint32_t a, std::uint32_t b) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int m = 0; m < M / 64; ++m)
      wgmma<T, N, true, false>(reinterpret_cast<float(&)[N / 2]>(c[m * (N / 2)]),
                               full_descriptor(a + m * (64 * 8) + k * 128), full_descriptor(b + k * 2), 1);
  }
  wgmma_commit();
}
/// c += p * b, or c = p * b: p 64 x kRows as packed fragments (pack_rows), b a tile of kRows rows x N columns whose
/// descriptor names its panel bytes. One batch.
template <class T, int N, int kRows>
__device__ __forceinline__ void gemm_rs(float (&c)[N / 2], const std::uint32_t (&p)[kRows / 4], std::uint32_t b,
                                        bool add = true) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) wgmma<T, N, true>(c, p + 4 * k, full_descriptor(b + k * 128), add || k != 0);
  wgmma_commit();
}
/// Accumulators (64 x N) as the A operand of the next product.
template <class T, int N>
__device__ __forceinline__ void pack_rows(std::uint32_t (&p)[N / 4], const float (&c)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) p[i] = pack(T{}, c[2 * i], c[2 * i + 1]);
}

}  // namespace nsa::cuda::sm90
