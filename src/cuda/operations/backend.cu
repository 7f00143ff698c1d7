// What the backend says of itself.
#include "core/backend.h"
#include "cuda/portable/instances.h"
#include "cuda/sm90/heuristics.h"

namespace nsa::cuda {

const char* variant() { return sm90::device_supported(0) ? "sm90 and portable" : "portable"; }

bool built(const Problem& problem) {
  if (!portable::element_kernels(problem.dtype)) return false;
  return problem.key_dim == 0 || problem.value_dim == 0 ||
         portable::attention_kernels(problem.dtype, problem.key_dim, problem.value_dim);
}

std::string describe_kernels(const KernelQuery& query) { return sm90::describe(query); }

}  // namespace nsa::cuda
