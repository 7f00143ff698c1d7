// The gated sum of the branches (eq. 5).
#include "core/backend.h"
#include "core/branch_index.h"
#include "reference/reference.h"

namespace nsa::reference {
namespace {

/// Calls f(rows_of) for every batch and head of a tensor's tokens; rows_of(tensor) is this head's rows of any tensor.
template <class F>
void for_each_head(const TensorView& shape, F&& f) {
  const bool batched = shape.rank == 4;
  for (std::int64_t b = 0; b < (batched ? shape.size(0) : 1); ++b)
    for (std::int64_t head = 0; head < shape.size(-2); ++head)
      f([=](const TensorView& tensor) { return head_of(tensor, b, 0, shape.size(-3), head); });
}

}  // namespace

Status run(const CombineParams& p, DType precision) {
  for_each_head(p.o_cmp, [&](const auto& rows_of) {
    const Matrix gates = load(rows_of(p.gates));
    const Matrix branches[kBranches] = {load(rows_of(p.o_cmp)), load(rows_of(p.o_slc)), load(rows_of(p.o_swa))};
    Matrix o(gates.rows(), branches[0].cols());
    for (std::int64_t i = 0; i < o.rows(); ++i)
      for (int n = 0; n < kBranches; ++n) axpy(gates[i][n], branches[n][i], o[i], o.cols());
    store(o, rows_of(p.o), precision);
  });
  return {};
}

Status run(const CombineBackwardParams& p, DType precision) {
  const CombineParams& f = p.forward;
  for_each_head(p.d_o, [&](const auto& rows_of) {
    const Matrix gates = load(rows_of(f.gates)), d_o = load(rows_of(p.d_o));
    const TensorView* branches[kBranches] = {&f.o_cmp, &f.o_slc, &f.o_swa};
    const TensorView* d_branches[kBranches] = {&p.d_o_cmp, &p.d_o_slc, &p.d_o_swa};
    Matrix d_gates(gates.rows(), kBranches);
    for (int n = 0; n < kBranches; ++n) {
      const Matrix branch = load(rows_of(*branches[n]));
      Matrix d_branch(d_o.rows(), d_o.cols());
      for (std::int64_t i = 0; i < d_o.rows(); ++i) {
        d_gates[i][n] = dot(branch[i], d_o[i], d_o.cols());
        axpy(gates[i][n], d_o[i], d_branch[i], d_o.cols());
      }
      store(d_branch, rows_of(*d_branches[n]), precision);
    }
    store(d_gates, rows_of(p.d_gates), precision);
  });
  return {};
}

Status run(const CombineParams& p, const Context&) { return run(p, DType::kFloat64); }

Status run(const CombineBackwardParams& p, const Context&) { return run(p, DType::kFloat64); }

}  // namespace nsa::reference
