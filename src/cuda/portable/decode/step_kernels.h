// The kernels of a step with a cache as functions of the host; tables as in instances.h, compiled in step_kernels.cu
// and step_element_kernels.cu.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/portable/decode/step_params.h"
#include "nsa/tensor.h"

namespace nsa::cuda::portable {

template <class Tokens>
struct StepAttentionKernels {
  cudaError_t (*range_forward)(const StepRangeArgs<Tokens>&, cudaStream_t);  // of a chunk
  cudaError_t (*ranges)(const StepRangesArgs<Tokens>&, cudaStream_t);        // of a decode step
  cudaError_t (*selected_forward)(const StepSelectedArgs<Tokens>&, cudaStream_t);
};

template <class Tokens>
struct StepSelectKernels {
  cudaError_t (*select_blocks)(const StepSelectArgs<Tokens>&, int key_dim, int blocks_of_threads, cudaStream_t);
  cudaError_t (*select_with_splits)(const StepSelectArgs<Tokens>&, int key_dim, cudaStream_t);
};

struct StepElementKernels {
  cudaError_t (*quantise)(const QuantiseArgs&, cudaStream_t);
  cudaError_t (*store_compressed)(const StoreArgs&, int blocks, cudaStream_t);
  StepSelectKernels<CachedTokens> select;
  StepSelectKernels<Float8Tokens> select_float8;
  cudaError_t (*clear)(const StepCombineArgs&, cudaStream_t);  // packed rows
  cudaError_t (*combine)(const StepCombineArgs&, cudaStream_t);

  template <class Tokens>
  const StepSelectKernels<Tokens>& of() const {
    if constexpr (std::is_same_v<Tokens, Float8Tokens>) {
      return select_float8;
    } else {
      return select;
    }
  }
};

/// There is one for every instance that attention_kernels and element_kernels have.
template <class Tokens>
const StepAttentionKernels<Tokens>* step_attention_kernels(DType dtype, std::int64_t key_dim, std::int64_t value_dim);
const StepElementKernels* step_element_kernels(DType dtype);

template <class T, int Dk, int Dv, class Tokens>
[[gnu::weak]] const StepAttentionKernels<Tokens>& step_attention_instance();
template <class T>
[[gnu::weak]] const StepElementKernels& step_element_instance();

}  // namespace nsa::cuda::portable
