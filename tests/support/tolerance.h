// How far a backend may be from the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/backend.h"
#include "reference/reference.h"
#include "support/problem.h"
#include "support/tensor.h"

namespace nsa::test {

/// max|x - oracle| <= 2 * max|plain - oracle| + 1e-5 * max|oracle|, over the finite elements of the oracle; NaN and
/// infinities must be where the oracle has them. `floor` is added where the oracle is zero everywhere, for a backend
/// whose sums do not cancel exactly.
testing::AssertionResult within_bound(const TensorView& x, const TensorView& plain, const TensorView& oracle,
                                      double floor = 0);

/// One output of an operation: its view within the parameters, and how to make a fresh poisoned tensor for it.
template <class Params>
struct Output {
  std::string name;
  Rows rows;
  std::function<TensorView&(Params&)> slot;
  std::function<Tensor(DType)> make;
  DType dtype;
};

/// The CPU backend, asked for through the public functions.
inline const Context kCpu{.backend = Backend::kCPU};

template <class Params>
using Operation = Status (*)(const Params&, const Context&);
template <class Params>
using PlainOperation = Status (*)(const Params&, DType);

inline void expect_ok(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

/// Runs an operation into fresh outputs and returns them; float64 ones if `exact`, otherwise of their own dtype.
template <class Params, class Run>
std::vector<Tensor> outputs_of(Params params, const std::vector<Output<Params>>& outputs, bool exact, Run&& run) {
  std::vector<Tensor> results;
  for (const auto& output : outputs) {
    results.push_back(output.make(exact && output.dtype != DType::kInt32 ? DType::kFloat64 : output.dtype));
    output.slot(params) = results.back();
  }
  const Status status = run(params);
  EXPECT_TRUE(status.ok()) << status.message();
  for (std::size_t i = 0; i < outputs.size(); ++i)
    EXPECT_TRUE(results[i].gaps_intact()) << outputs[i].name << ": wrote outside the view";
  return results;
}

/// Every output of the backend within the bound; returns the backend's outputs.
template <class Params>
std::vector<Tensor> expect_within_bound(const Params& params, const std::vector<Output<Params>>& outputs, DType dtype,
                                        Operation<Params> backend, PlainOperation<Params> reference, double floor = 0) {
  auto x = outputs_of(params, outputs, false, [&](const Params& p) { return backend(p, kCpu); });
  const auto oracle = outputs_of(params, outputs, true, [&](const Params& p) { return reference(p, DType::kFloat64); });
  const auto plain = outputs_of(params, outputs, true, [&](const Params& p) { return reference(p, dtype); });
  for (std::size_t i = 0; i < outputs.size(); ++i)
    EXPECT_TRUE(within_bound(x[i], plain[i], oracle[i], floor)) << outputs[i].name;
  return x;
}

struct SelectionResult {
  std::int64_t rows = 0, identical = 0;  // rows in all, and rows equal to the oracle's

  double share() const { return rows ? static_cast<double>(identical) / static_cast<double>(rows) : 1; }
};

/// Checks indices by the rule of the specification: exactly min(topk, candidates) distinct blocks in ascending order,
/// then -1; all forced ones; every pick at least I_n - tol, no candidate left out above I_n + tol, where I_n is the
/// n-th largest importance among the unforced and tol = rho * I_n + 1e-7 * G. With noise the same for the ranks, whose
/// error is that of a logarithm. The importances are computed with an lse of their own, in float64.
SelectionResult expect_valid_selection(const SelectBlocksParams& params, const TensorView& indices, double rho);

}  // namespace nsa::test
