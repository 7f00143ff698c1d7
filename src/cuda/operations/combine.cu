#include "cuda/operations/operations.h"

#include "cuda/portable/instances.h"

namespace nsa::cuda {

CombineArgs combine_args(const CombineParams& p) {
  const Rows r = rows_of(p.o, 2);
  return {.branch = {strided(p.o_cmp), strided(p.o_slc), strided(p.o_swa)},
          .gates = strided(p.gates),
          .o = strided(p.o),
          .rows = r.rows,
          .heads = to_int(p.o.size(-2)),
          .dim = to_int(p.o.size(-1))};
}

CombineBackwardArgs combine_backward_args(const TensorView& d_o, const TensorView& o_cmp, const TensorView& o_slc,
                                          const TensorView& o_swa, const TensorView& gates, const TensorView& d_gates) {
  CombineBackwardArgs args{};
  args.d_o = strided(d_o);
  args.branches = kBranches;
  args.o[kCompressed] = strided(o_cmp);
  args.o[kSelected] = strided(o_slc);
  args.o[kWindow] = strided(o_swa);
  args.gates = strided(gates);
  args.d_gates = strided(d_gates);
  args.rows = rows_of(d_o, 2).rows;
  args.heads = to_int(d_o.size(-2));
  args.dim = to_int(d_o.size(-1));
  return args;
}

Status run(const CombineParams& p, Execution& e) {
  if (e.arena.measuring()) return {};
  return status_of(portable::element_kernels(p.o.dtype)->combine(combine_args(p), rows_of(p.o, 2).batches, e.stream),
                   "combine");
}

Status run(const CombineBackwardParams& p, Execution& e) {
  if (e.arena.measuring()) return {};
  CombineBackwardArgs args =
      combine_backward_args(p.d_o, p.forward.o_cmp, p.forward.o_slc, p.forward.o_swa, p.forward.gates, p.d_gates);
  args.d_branch[kCompressed] = strided(p.d_o_cmp);
  args.d_branch[kSelected] = strided(p.d_o_slc);
  args.d_branch[kWindow] = strided(p.d_o_swa);
  return status_of(portable::element_kernels(p.d_o.dtype)->combine_backward(args, rows_of(p.d_o, 2).batches, e.stream),
                   "combine_backward");
}

}  // namespace nsa::cuda
