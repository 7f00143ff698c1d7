// What the programs that time the CUDA backend share: checked calls, memory of the device, random tensors.
#pragma once

#include <cuda_fp8.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "cuda/common/element.cuh"
#include "nsa/status.h"
#include "nsa/tensor.h"

namespace nsa::bench {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
inline void check(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.message().c_str());
  std::exit(1);
}

__device__ inline unsigned hash(unsigned x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}
/// About normal (sum of four uniforms), deviation as given.
template <class T>
__global__ void fill_normal(T* p, std::int64_t n, unsigned seed, float deviation, float shift) {
  for (std::int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    float sum = 0;
    for (unsigned j = 0; j < 4; ++j)
      sum += static_cast<float>(hash(static_cast<unsigned>(i) * 4 + j + seed * 0x9e3779b9u)) * 0x1p-32f;
    p[i] = T((sum - 2) * 1.732f * deviation + shift);
  }
}

/// Tensors on the device, as long as it lives.
struct Tensors {
  Tensors() = default;
  Tensors(const Tensors&) = delete;
  ~Tensors() {
    for (void* p : all) cudaFree(p);
  }

  void* take(std::size_t bytes) {
    void* p;
    check(cudaMalloc(&p, std::max<std::size_t>(bytes, 256)), "cudaMalloc");
    all.push_back(p);
    return p;
  }
  TensorView tensor(DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView t = TensorView::contiguous(nullptr, dtype, shape, {DeviceType::kCUDA, 0});
    t.data = take(static_cast<std::size_t>(t.numel()) * size_of(dtype));
    return t;
  }
  /// Bfloat16, or e4m3.
  TensorView random(std::initializer_list<std::int64_t> shape, float deviation = 1, float shift = 0,
                    DType dtype = DType::kBFloat16) {
    const TensorView t = tensor(dtype, shape);
    const auto fill = [&](auto* p) {
      fill_normal<<<1024, 256>>>(p, t.numel(), static_cast<unsigned>(all.size()), deviation, shift);
    };
    dtype == DType::kBFloat16 ? fill(t.as<cuda::Bf16>()) : fill(t.as<__nv_fp8_e4m3>());
    return t;
  }
  TensorView integers(const std::vector<int>& values, std::initializer_list<std::int64_t> shape) {
    const TensorView t = tensor(DType::kInt32, shape);
    check(cudaMemcpy(t.data, values.data(), values.size() * sizeof(int), cudaMemcpyHostToDevice), "cudaMemcpy");
    return t;
  }

  TensorView floats(const std::vector<float>& values, std::initializer_list<std::int64_t> shape) {
    const TensorView t = tensor(DType::kFloat32, shape);
    check(cudaMemcpy(t.data, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
    return t;
  }

  std::vector<void*> all;
};

}  // namespace nsa::bench
