// Fallback kernels, and those in front of them: see Fallback in params.h.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/common/params.h"

namespace nsa::cuda {

/// Whether the kernel has anything to do. All threads of the block: it waits for the kernel in front.
__device__ __forceinline__ bool runs(const Fallback& fallback) {
  if (!fallback.flag) return true;
  launch_dependents();
  griddepcontrol_wait();
  return *fallback.flag != 0;
}
template <class Args>
__device__ __forceinline__ bool runs(const Args& args) {
  return runs(args.fallback);
}

/// The same test in a kernel that requires finite values: whether it leaves its work to the fallback behind it. A
/// backward always has a flag.
__device__ __forceinline__ bool should_fall_back(int flag) { return flag != 0; }
__device__ __forceinline__ bool should_fall_back(const Fallback& fallback) {
  return fallback.flag && should_fall_back(*fallback.flag);
}
/// The same where other thread blocks may set the flag meanwhile: one answer for all threads of a thread block.
__device__ __forceinline__ bool block_should_fall_back(const int* flag) {
  return __syncthreads_or(flag && threadIdx.x == 0 && *static_cast<const volatile int*>(flag)) != 0;
}

/// launch(), but a fallback kernel is a programmatic dependent launch: it may start before the kernel in front ends,
/// and the next fallback before it ends. Each waits for the one in front, so fallbacks without work end at once.
template <class... Params, class... Args>
cudaError_t launch(const Fallback& fallback, void (*kernel)(Params...), dim3 grid, dim3 threads, std::size_t memory,
                   cudaStream_t stream, const Args&... args) {
  return fallback.flag ? launch_dependent(kernel, grid, threads, memory, stream, args...)
                       : launch(kernel, grid, threads, memory, stream, args...);
}

/// The thread blocks whose work this one does: itself, or its share of a larger grid.
///
///   FallbackGrid<T, Args> block(args);
///   if (!block.any()) return;
///   do { ... block.x() ... } while (block.next());
///
/// Only kernels of 16-bit types, except those of a step with a cache, are fallbacks.
template <class T, class Args, bool kIsFallback = sizeof(T) == 2 && !kHasSplits<Args>>
struct FallbackGrid {
  __device__ __forceinline__ explicit FallbackGrid(const Args&) {}
  __device__ __forceinline__ bool any() const { return true; }
  __device__ __forceinline__ bool next() { return false; }
  __device__ __forceinline__ unsigned x() const { return blockIdx.x; }
  __device__ __forceinline__ unsigned y() const { return blockIdx.y; }
  __device__ __forceinline__ unsigned z() const { return blockIdx.z; }
  __device__ __forceinline__ unsigned columns() const { return gridDim.x; }
};
template <class T, class Args>
struct FallbackGrid<T, Args, true> {
  __device__ __forceinline__ explicit FallbackGrid(const Args& args) : grid_(args.fallback), index_(blockIdx.x) {}
  __device__ __forceinline__ bool any() const { return runs(grid_) && (!grid_.flag || index_ < all()); }
  __device__ __forceinline__ bool next() {
    __syncthreads();
    index_ += gridDim.x;
    return grid_.flag && index_ < all();
  }
  __device__ __forceinline__ unsigned x() const { return grid_.flag ? index_ % grid_.x : blockIdx.x; }
  __device__ __forceinline__ unsigned y() const { return grid_.flag ? index_ / grid_.x % grid_.y : blockIdx.y; }
  __device__ __forceinline__ unsigned z() const { return grid_.flag ? index_ / grid_.x / grid_.y : blockIdx.z; }
  __device__ __forceinline__ unsigned columns() const { return grid_.flag ? grid_.x : gridDim.x; }

 private:
  __device__ __forceinline__ unsigned all() const { return grid_.x * grid_.y * grid_.z; }

  const Fallback& grid_;
  unsigned index_;
};

}  // namespace nsa::cuda
