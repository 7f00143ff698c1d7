// The kernels of a step with a cache as functions of the host; tables as in instances.h, compiled in step_kernels.cu
// and step_element_kernels.cu.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/portable/decode/step_params.h"
#include "nsa/tensor.h"

namespace nsa::cuda::portable {

struct StepAttentionKernels {
  cudaError_t (*range_forward)(const StepRangeArgs&, cudaStream_t);  // of a chunk
  cudaError_t (*ranges)(const StepRangesArgs&, cudaStream_t);        // of a decode step
  cudaError_t (*selected_forward)(const StepSelectedArgs&, cudaStream_t);
};

struct StepElementKernels {
  cudaError_t (*store_compressed)(const StoreArgs&, int blocks, cudaStream_t);
  cudaError_t (*select_blocks)(const StepSelectArgs&, int key_dim, int blocks_of_threads, cudaStream_t);
  cudaError_t (*select_with_splits)(const StepSelectArgs&, int key_dim, cudaStream_t);
  cudaError_t (*combine)(const StepCombineArgs&, cudaStream_t);
};

/// There is one for every instance that attention_kernels and element_kernels have.
const StepAttentionKernels* step_attention_kernels(DType dtype, std::int64_t key_dim, std::int64_t value_dim);
const StepElementKernels* step_element_kernels(DType dtype);

template <class T, int Dk, int Dv>
[[gnu::weak]] const StepAttentionKernels& step_attention_instance();
template <class T>
[[gnu::weak]] const StepElementKernels& step_element_instance();

}  // namespace nsa::cuda::portable
