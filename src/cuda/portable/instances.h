// The kernels as functions of the host, one table per element type and head dims. Each table is compiled in a
// translation unit of its own (attention_kernels.cu, element_kernels.cu).
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/params.h"
#include "nsa/tensor.h"

namespace nsa::cuda::portable {

struct AttentionKernels {
  cudaError_t (*range_forward)(const RangeArgs&, cudaStream_t);
  cudaError_t (*selected_forward)(const SelectedArgs&, cudaStream_t);
  cudaError_t (*range_d_q)(const BackwardArgs&, const BackwardArgs* more, cudaStream_t);  // more: RangeDqArgs
  cudaError_t (*selected_d_q)(const BackwardArgs&, cudaStream_t);
  cudaError_t (*d_kv)(const BackwardArgs&, cudaStream_t);
  cudaError_t (*sum_partials)(const BackwardArgs&, cudaStream_t);  // of d_kv
  int selected_forward_memory, selected_d_q_memory;                // dynamic shared memory without the list of blocks
};

struct ElementKernels {
  cudaError_t (*combine)(const CombineArgs&, int batches, cudaStream_t);
  cudaError_t (*combine_backward)(const CombineBackwardArgs&, int batches, cudaStream_t);
  cudaError_t (*compress)(const CompressPair&, cudaStream_t);
  cudaError_t (*compress_backward)(const CompressArgs&, cudaStream_t);
  cudaError_t (*rotate)(const RotateArgs&, cudaStream_t);
  cudaError_t (*select_blocks)(const SelectArgs&, int key_dim, int blocks_of_threads, cudaStream_t);
};

/// Null where there is no such instance: head dims (Dk, Dv) are 64/64, 128/128 and 192/128, of which a build may leave
/// some out.
const AttentionKernels* attention_kernels(DType dtype, std::int64_t key_dim, std::int64_t value_dim);
const ElementKernels* element_kernels(DType dtype);

/// Weak: a build may leave instances out, their address is null then.
template <class T, int Dk, int Dv>
[[gnu::weak]] const AttentionKernels& attention_instance();
template <class T>
[[gnu::weak]] const ElementKernels& element_instance();

}  // namespace nsa::cuda::portable
