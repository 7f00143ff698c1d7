#include "cpu/kernels/branches.h"
#include "cpu/kernels/for_dtype.h"
#include "cpu/kernels/kernels.h"

namespace nsa::cpu::NSA_ISA {

Status run(const SlidingWindowAttentionParams& p, const Context& context) {
  for_dtype(p.q.dtype, [&]<class In>() {
    const Queries<In> queries(p.q, p.k.size(-2), sequences_of(p.q, p.k.size(1), p.packed, {}), p.softmax_scale);
    attend_to_branch(queries, WindowBranch<In>(queries, p.k, p.v, p.window_size, context), p.o, p.lse, context);
  });
  return {};
}

}  // namespace nsa::cpu::NSA_ISA
