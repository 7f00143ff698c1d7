#include "support/tolerance.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace nsa::test {

testing::AssertionResult within_bound(const TensorView& x, const TensorView& plain, const TensorView& oracle,
                                      double floor) {
  const std::vector<double> xs = values_of(x), ps = values_of(plain), os = values_of(oracle);
  if (xs.size() != os.size()) return testing::AssertionFailure() << x.describe() << " against " << oracle.describe();
  double error = 0, plain_error = 0, largest = 0;
  std::size_t worst = 0;
  for (std::size_t i = 0; i < os.size(); ++i) {
    if (!std::isfinite(os[i])) {
      if (std::isnan(os[i]) ? !std::isnan(xs[i]) : xs[i] != os[i])
        return testing::AssertionFailure() << "element " << i << " is " << xs[i] << ", the oracle's " << os[i];
      continue;
    }
    if (!std::isfinite(xs[i]))
      return testing::AssertionFailure() << "element " << i << " is " << xs[i] << ", the oracle's " << os[i];
    largest = std::max(largest, std::fabs(os[i]));
    plain_error = std::max(plain_error, std::fabs(ps[i] - os[i]));
    if (std::fabs(xs[i] - os[i]) > error) {
      error = std::fabs(xs[i] - os[i]);
      worst = i;
    }
  }
  const double bound = 2 * plain_error + 1e-5 * largest + (largest == 0 ? floor : 0);
  if (error <= bound) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "error " << error << " at element " << worst << " (" << xs[worst]
                                     << ", the oracle's " << os[worst] << ") above the bound " << bound << " = 2 * "
                                     << plain_error << " + 1e-5 * " << largest;
}

namespace {

/// The candidates of one row, what they rank by, and how far a backend's rank may be off.
void expect_valid_row(const NSAConfig& cfg, std::int64_t t, const std::vector<std::int32_t>& row,
                      const std::vector<double>& rank, const std::function<double(double)>& tolerance) {
  const auto candidates = static_cast<std::int64_t>(rank.size());
  const std::int64_t count = std::min<std::int64_t>(cfg.topk, candidates);
  std::set<std::int64_t> picked;
  for (std::int64_t n = 0; n < cfg.topk; ++n) {
    const std::int64_t j = row[static_cast<std::size_t>(n)];
    if (n >= count) {
      EXPECT_EQ(j, -1) << "place " << n << " of the query at " << t;
      continue;
    }
    ASSERT_TRUE(j >= 0 && j < candidates) << "block " << j << " of the query at " << t;
    EXPECT_TRUE(n == 0 || j > row[static_cast<std::size_t>(n) - 1]) << "order, the query at " << t;
    picked.insert(j);
  }
  std::vector<double> unforced;
  std::int64_t forced = 0;
  for (std::int64_t j = 0; j < candidates; ++j) {
    if (reference::is_forced(cfg, j, t)) {
      ++forced;
      EXPECT_TRUE(picked.contains(j)) << "forced block " << j << " of the query at " << t;
    } else {
      unforced.push_back(rank[static_cast<std::size_t>(j)]);
    }
  }
  const auto free = static_cast<std::size_t>(count - forced);
  if (free == 0 || unforced.size() == free) return;
  std::sort(unforced.rbegin(), unforced.rend());
  const double last = unforced[free - 1], tol = tolerance(last);
  for (std::int64_t j = 0; j < candidates; ++j) {
    if (reference::is_forced(cfg, j, t)) continue;
    const double r = rank[static_cast<std::size_t>(j)];
    if (picked.contains(j))
      EXPECT_GE(r, last - tol) << "picked block " << j << " of the query at " << t;
    else
      EXPECT_LE(r, last + tol) << "block " << j << " left out by the query at " << t;
  }
}

}  // namespace

SelectionResult expect_valid_selection(const SelectBlocksParams& params, const TensorView& indices, double rho) {
  // An lse in float64, so that the importances are exact.
  Tensor lse(DType::kFloat64, shape_of(params.lse)), o(DType::kFloat64, shape_of(params.q));
  const CompressedAttentionParams attention{
      params.q, params.k_c, params.k_c, params.cfg, params.softmax_scale, params.seqlen_k, params.packed, o, lse};
  (void)reference::run(attention, DType::kFloat64);
  SelectBlocksParams exact = params;
  exact.lse = lse;
  Tensor expected(DType::kInt32, shape_of(indices));
  exact.indices = expected;
  (void)reference::run(exact, Context{});

  const NSAConfig& cfg = params.cfg;
  const auto group = static_cast<double>(params.q.size(-2) / params.k_c.size(-2));
  const double largest = group * cfg.kernel_size / cfg.kernel_stride;
  const auto tolerance = [&](double last) {
    if (params.noise == 0) return rho * last + 1e-7 * group;
    return rho + 1e-7 * group / (1e-4 * largest) + 1e-5 * (1 + params.noise);
  };
  SelectionResult result;
  for (const Sequence& s : sequences_of(params.q, raw_length(params.q, params.seqlen_k), params.packed, cfg))
    for (std::int64_t kv_head = 0; kv_head < params.k_c.size(-2); ++kv_head)
      for (std::int64_t i = 0; i < s.q_len; ++i) {
        const auto row_of = [&](const TensorView& view) {
          const std::int32_t* row = rows_of<const std::int32_t>(view, s.batch, s.q_begin).at(i, kv_head);
          return std::vector<std::int32_t>(row, row + cfg.topk);
        };
        const std::vector<double> importance = reference::importance(exact, s, kv_head, i);
        expect_valid_row(cfg, s.position(i), row_of(indices), reference::ranking(exact, s, kv_head, i, importance),
                         tolerance);
        ++result.rows;
        result.identical += row_of(indices) == row_of(expected);
      }
  return result;
}

}  // namespace nsa::test
