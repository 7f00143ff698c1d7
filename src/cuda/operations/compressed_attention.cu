#include "cuda/operations/branch_backward.h"
#include "cuda/operations/branch_forward.h"

namespace nsa::cuda {

Status run(const CompressedAttentionParams& p, Execution& e) { return forward(p, p.v_c, e); }

Status run(const CompressedAttentionBackwardParams& p, Execution& e) {
  return single_backward(p, p.d_k_c, p.d_v_c, &p.forward.cfg, e);
}

}  // namespace nsa::cuda
