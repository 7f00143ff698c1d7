#include "cpu/kernels/for_dtype.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/nsa_forward.h"

namespace nsa::cpu::NSA_ISA {

Status run(const NsaAttentionParams& p, const Context& context) {
  for_dtype(p.q.dtype, [&]<class In>() {
    const BranchTokens<TensorView> tokens{
        .k_c = p.k_c, .v_c = p.v_c, .k_slc = p.k_slc, .v_slc = p.v_slc, .k_swa = p.k_swa, .v_swa = p.v_swa};
    NsaForward<In, SelectedBranch<In>>(p, sequences_of(p.q, p.k_slc.size(1), p.packed, p.cfg), tokens, context)
        .run(context);
  });
  return {};
}

}  // namespace nsa::cpu::NSA_ISA
