#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "under_test.h"

namespace nsa::test {

bool agree(const TensorView& a, const TensorView& b, bool nonfinite) {
  if (!nonfinite || !under_test.has_fallback()) return same_bits(a, b);
  const std::vector<double> x = values_of(a), y = values_of(b);
  if (a.dtype == DType::kInt32) {  // blocks of queries: a few may choose otherwise where importances are alike
    const std::int64_t width = a.size(a.rank - 1), rows = width > 0 ? a.numel() / width : 0;
    std::int64_t same = 0;
    for (std::int64_t row = 0; row < rows; ++row)
      same += std::equal(x.begin() + row * width, x.begin() + (row + 1) * width, y.begin() + row * width);
    return static_cast<double>(same) >= 0.97 * static_cast<double>(rows);
  }
  double square = 0, count = 0;
  for (const double v : x)
    if (std::isfinite(v)) square += v * v, ++count;
  const double mean = std::sqrt(square / std::max(count, 1.0));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const bool same = x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]));
    // The floor: what is left where sums cancel is noise.
    if (!same && !(std::abs(x[i] - y[i]) <= 0.03 * (std::abs(x[i]) + mean) + under_test.floor)) return false;
  }
  return true;
}

std::vector<Result> run_all(const Problem& p, const Context& context) {
  std::vector<Result> results;
  /// Runs one operation; returns where its outputs start in `results`.
  const auto run = [&]<class Params>(const char* name, const Params& params, const std::vector<Output<Params>>& outputs,
                                     std::type_identity_t<Operation<Params>> operation) {
    std::vector<Tensor> values =
        outputs_of(params, outputs, false, [&](const Params& bound) { return operation(bound, context); });
    std::vector<TensorView> views;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      views.push_back(values[i]);
      results.push_back({std::string(name).append(".").append(outputs[i].name), outputs[i].rows, std::move(values[i])});
    }
    return views;
  };
  for (const bool keys : {true, false}) {
    const CompressParams f = keys ? p.compress_keys() : p.compress_values();
    run("compress", f, compress_outputs(p, f), under_test.compress);
    CompressBackwardParams b;
    b.forward = f;
    b.d_out = keys ? p.d_k_c : p.d_v_c;
    run("compress_backward", b, compress_backward_outputs(p, f), under_test.compress_backward);
  }
  const auto compressed =
      run("compressed_attention", p.compressed(), compressed_outputs(p), under_test.compressed_attention);
  run("compressed_attention_backward", backward_of(p.compressed(), compressed, p.d_o), compressed_backward_outputs(p),
      under_test.compressed_attention_backward);
  run("select_blocks", p.selection(), selection_outputs(p), under_test.select_blocks);
  const auto selected = run("selected_attention", p.selected(), selected_outputs(p), under_test.selected_attention);
  run("selected_attention_backward", backward_of(p.selected(), selected, p.d_o), selected_backward_outputs(p),
      under_test.selected_attention_backward);
  const auto window =
      run("sliding_window_attention", p.window(), window_outputs(p), under_test.sliding_window_attention);
  run("sliding_window_attention_backward", backward_of(p.window(), window, p.d_o), window_backward_outputs(p),
      under_test.sliding_window_attention_backward);
  run("combine", p.combination(), combine_outputs(p), under_test.combine);
  CombineBackwardParams combined;
  combined.forward = p.combination();
  combined.d_o = p.d_o;
  run("combine_backward", combined, combine_backward_outputs(p), under_test.combine_backward);
  const auto whole = run("nsa_attention", p.whole(), whole_outputs(p), under_test.nsa_attention);
  run("nsa_attention_backward", backward_of(p.whole(), whole, p.d_o), whole_backward_outputs(p),
      under_test.nsa_attention_backward);
  const auto layer = run("native_sparse_attention", p.layer(), layer_outputs(p), under_test.native_sparse_attention);
  run("native_sparse_attention_backward", backward_of(p.layer(), layer, p.d_o), layer_backward_outputs(p),
      under_test.native_sparse_attention_backward);
  return results;
}

void expect_packed_equals_alone(const Problem& p) {
  const auto together = run_all(p);
  for (const Sequence& s : sequences_of(p.c)) {
    const auto alone = run_all(p.alone(static_cast<std::size_t>(s.index)));
    for (std::size_t i = 0; i < alone.size(); ++i) {
      if (alone[i].rows == Rows::kNone) continue;  // gradients of weights sum over sequences
      // Rows past the last sequence hold NaN.
      EXPECT_TRUE(agree(part_of(together[i].value, together[i].rows, s), alone[i].value, p.c.slack > 0))
          << alone[i].name << " of sequence " << s.index;
    }
  }
}

}  // namespace nsa::test
