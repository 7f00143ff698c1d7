#include "cuda/operations/branch_backward.h"
#include "cuda/operations/branch_forward.h"

namespace nsa::cuda {

Status run(const SelectedAttentionParams& p, Execution& e) { return forward(p, p.v, e); }

Status run(const SelectedAttentionBackwardParams& p, Execution& e) {
  return single_backward(p, p.d_k, p.d_v, nullptr, e);
}

}  // namespace nsa::cuda
