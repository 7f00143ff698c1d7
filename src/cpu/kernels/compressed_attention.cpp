#include "cpu/kernels/branches.h"
#include "cpu/kernels/for_dtype.h"
#include "cpu/kernels/kernels.h"

namespace nsa::cpu::NSA_ISA {

Status run(const CompressedAttentionParams& p, const Context& context) {
  for_dtype(p.q.dtype, [&]<class In>() {
    const Queries<In> queries(p.q, p.k_c.size(-2), sequences_of(p.q, raw_length(p.q, p.seqlen_k), p.packed, p.cfg),
                              p.softmax_scale);
    attend_to_branch(queries, CompressedBranch<In>(queries, p.k_c, p.v_c, p.cfg, context), p.o, p.lse, context);
  });
  return {};
}

}  // namespace nsa::cpu::NSA_ISA
