// What the backend says of itself.
#include <limits>

#include "core/backend.h"
#include "cuda/common/block_list.cuh"
#include "cuda/portable/instances.h"
#include "cuda/sm90/heuristics.h"

namespace nsa::cuda {

const char* variant() { return sm90::device_supported(0) ? "sm90 and portable" : "portable"; }

bool built(const Problem& problem) {
  if (!portable::element_kernels(problem.dtype)) return false;
  return problem.key_dim == 0 || problem.value_dim == 0 ||
         portable::attention_kernels(problem.dtype, problem.key_dim, problem.value_dim);
}

std::int64_t max_topk(const Problem& problem, bool backward) {
  int limit = 0;
  if (cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, problem.device.index) != cudaSuccess) {
    cudaGetLastError();
    return std::numeric_limits<int>::max();  // the launch reports it
  }
  const auto& kernels = *portable::attention_kernels(problem.dtype, problem.key_dim, problem.value_dim);
  return max_topk(limit, backward ? kernels.selected_d_q_memory : kernels.selected_forward_memory);
}

std::string describe_kernels(const KernelQuery& query) { return sm90::describe(query); }

}  // namespace nsa::cuda
