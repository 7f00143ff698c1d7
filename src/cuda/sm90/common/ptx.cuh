// Instructions of sm_90a that CUDA C++ has no names for: barriers in shared memory that count bytes,
// TMA, register budgets, named barriers. Addresses of shared memory are 32 bits.
#pragma once

#include <cuda.h>

#include "cuda/common/element.cuh"

namespace nsa::cuda::sm90 {

/// Bytes of shared memory that a thread block can have.
inline constexpr int kSharedMemory = 227 * 1024;

// Barriers (mbarrier): eight bytes of shared memory each. A phase ends after `count` arrivals and all expected bytes;
// mbarrier_wait(phase) returns once the phase of that phase has ended, so a fresh barrier lets mbarrier_wait(1) pass.

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
/// After the last mbarrier_init, before the __syncthreads that lets others use the barriers.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
/// One arrival, and `bytes` more to come by copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// One arrival once this thread's cp.async copies so far have landed; the barrier's count includes it.
__device__ __forceinline__ void cp_async_mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(std::uint32_t barrier, std::uint32_t phase) {
  std::uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(barrier), "r"(phase)
               : "memory");
  return done != 0;
}
/// One thread waits, or a warp whose loop over tiles has wgmma next: all lanes poll one address, which the machine does
/// once for the warp, so they leave together. mbarrier_wait_warp() in these loops costs range_forward 2 % (BRA.DIV
/// behind each).
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, std::uint32_t phase) {
  while (!mbarrier_try_wait(barrier, phase)) {
  }
}
/// A whole warp waits. Its lanes poll each for itself and then come together again, as wgmma, named barriers and
/// setmaxnreg need them.
__device__ __forceinline__ void mbarrier_wait_warp(std::uint32_t barrier, std::uint32_t phase) {
  mbarrier_wait(barrier, phase);
  __syncwarp();
}

/// A box of a tensor into shared memory (tensor_map.h); its bytes count at `barrier`. Coordinates: column, head, row,
/// batch.
__device__ __forceinline__ void tma_load(std::uint32_t to, const CUtensorMap& map, int column, int head, int row,
                                         int batch, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(&map), "r"(column), "r"(head), "r"(row), "r"(batch), "r"(barrier)
      : "memory");
}
/// The same of five dimensions; coordinates as the map has them.
__device__ __forceinline__ void tma_load(std::uint32_t to, const CUtensorMap& map, int x0, int x1, int x2, int x3,
                                         int x4, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(to),
      "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(barrier)
      : "memory");
}
/// Through a map of make_spread_tensor_map. Coordinates: column, first row, head, batch.
__device__ __forceinline__ void tma_load_spread(std::uint32_t to, const CUtensorMap& map, int column, int row, int head,
                                                int batch, std::uint32_t barrier) {
  tma_load(to, map, column, row / 8, row % 8, head, batch, barrier);
}
/// The same box into L2 only.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, int column, int head, int row, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(column), "r"(head),
               "r"(row), "r"(batch)
               : "memory");
}
/// The line with this address into L2.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
/// `bytes` (a multiple of 16) from global to shared memory, both 16-byte aligned; they count at `barrier`.
__device__ __forceinline__ void bulk_copy(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
/// Orders writes of global memory that this thread knows of before its copies by TMA.
__device__ __forceinline__ void fence_global_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// Orders this thread's accesses of shared memory before or after those of TMA and of wgmma. After reads
/// by ldmatrix it must come before the slot is released: ptxas lets the arrival overtake the last of them.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// The registers of each thread of this warpgroup from here on, a multiple of 8. All its warps call it.
template <int kCount>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

/// A named barrier (1 .. 15; 0 is __syncthreads) of `threads` threads: one of an enum class of the kernel family, or
/// the one `of` slots behind it. The warps may come from different instructions: bar.sync would promise that all of
/// them execute the same one.
template <class Barrier>
__device__ __forceinline__ void named_barrier_sync(Barrier barrier, int threads, int of = 0) {
  asm volatile("barrier.sync %0, %1;" ::"r"(static_cast<int>(barrier) + of), "r"(threads) : "memory");
}
template <class Barrier>
__device__ __forceinline__ void named_barrier_arrive(Barrier barrier, int threads, int of = 0) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(static_cast<int>(barrier) + of), "r"(threads) : "memory");
}

__device__ __forceinline__ float load_float(std::uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from));
  return x;
}
__device__ __forceinline__ float2 load_float2(std::uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from));
  return x;
}

__device__ __forceinline__ uint4 load_uint4(std::uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
  return x;
}
/// To global memory. Of a row of such stores nvcc may cut the first one into four.
__device__ __forceinline__ void store_uint4(void* to, const uint4& x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
/// Four 8 x 8 matrices; a lane names a row of sixteen bytes, lanes 0 to 7 those of the first matrix and so on.
__device__ __forceinline__ void stmatrix4(std::uint32_t to, const std::uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
/// The same, each of them transposed.
__device__ __forceinline__ void stmatrix4_transposed(std::uint32_t to, const std::uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

/// The lane, read again instead of kept in a register.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// True, which the compiler does not know: what this guards stays where it is. Else ptxas moves arithmetic behind the
/// next wait for products, or in between products.
__device__ __forceinline__ bool always() { return lane_id() < 32; }

/// For values that cost less to compute again than registers to keep.
template <class T>
__device__ __forceinline__ T again(T x) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
  return x;
}

/// The same value in all lanes, and known to the compiler as such.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

}  // namespace nsa::cuda::sm90
