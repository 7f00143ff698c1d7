// The oracle's gradients against central differences of its forward: every operation, every kind of compression.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/backend.h"
#include "reference/reference.h"
#include "support/outputs.h"
#include "support/problem.h"

namespace nsa::test {
namespace {

double inner_product(const TensorView& a, const TensorView& b) {
  const std::vector<double> x = values_of(a), y = values_of(b);
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i)
    if (!std::isnan(y[i])) sum += x[i] * y[i];  // rows of no sequence: d_o is NaN there, o zero
  return sum;
}

/// Compares d_x with (L(x + h) - L(x - h)) / 2h at some elements of x, L a function of the forward's outputs.
void expect_gradient(const char* name, const TensorView& x, const TensorView& d_x, const std::function<double()>& L) {
  constexpr double kStep = 1e-5;
  const std::int64_t every = std::max<std::int64_t>(1, x.numel() / 60);
  std::int64_t n = 0;
  double largest = 0;
  for_each_index(x, [&](const Index& index) {
    if (n++ % every != 0) return;
    const std::int64_t at = offset_of(x, index);
    const double value = get_element(x, at), gradient = get_element(d_x, offset_of(d_x, index));
    if (std::isnan(value)) {
      EXPECT_EQ(gradient, 0) << name << ": an element of no sequence";
      return;
    }
    set_element(x, at, value + kStep);
    const double above = L();
    set_element(x, at, value - kStep);
    const double below = L();
    set_element(x, at, value);
    largest = std::max(largest, std::fabs(gradient));
    ASSERT_NEAR(gradient, (above - below) / (2 * kStep), 1e-7 * (1 + std::fabs(gradient)))
        << name << " at " << index[0] << "," << index[1] << "," << index[2] << "," << index[3];
  });
  EXPECT_GT(largest, 0) << name << ": all gradients zero, nothing was tested";
}

NSAConfig tiny_config() {
  NSAConfig cfg = small_config();
  cfg.window_size = 7;
  cfg.topk = 3;
  return cfg;
}

std::vector<Case> cases() {
  const Case base{.dtype = DType::kFloat64, .q_lens = {37, 37}, .dk = 6, .dv = 5, .cfg = tiny_config()};
  std::vector<Case> all(6, base);
  all[0].name = "mean";
  all[1].name = "mlp_longer_keys", all[1].kind = CompressionKind::kMlp, all[1].q_lens = {5, 5},
  all[1].k_lens = {41, 41}, all[1].rope = true;
  all[2].name = "linear_packed", all[2].kind = CompressionKind::kLinear, all[2].packed = true,
  all[2].q_lens = {0, 23, 7, 0, 36}, all[2].slack = 3, all[2].rope = true;
  all[3].name = "mlp_shared_heads_first", all[3].kind = CompressionKind::kMlp, all[3].shared_weights = true,
  all[3].layout = Layout::kHeadsFirst, all[3].softmax_scale = 0.7;
  all[4].name = "linear_bare_packed", all[4].kind = CompressionKind::kLinear, all[4].optional_weights = false,
  all[4].shared_weights = true, all[4].packed = true, all[4].q_lens = {3, 9}, all[4].k_lens = {30, 9}, all[4].group = 3;
  all[5].name = "mlp_bare_packed", all[5].kind = CompressionKind::kMlp, all[5].optional_weights = false,
  all[5].packed = true, all[5].q_lens = {33}, all[5].group = 1, all[5].hidden = 7;
  return all;
}

class OracleGradient : public testing::TestWithParam<Case> {
 protected:
  Problem p{GetParam()};
};

TEST_P(OracleGradient, Compress) {
  for (const bool values : {false, true}) {
    CompressParams f = values ? p.compress_values() : p.compress_keys();
    const Tensor out = p.compressed_rows(f.k.size(-1), DType::kFloat64);
    f.out = out;
    Tensor d_out = out.clone();
    fill_normal(d_out, 7);
    const auto L = [&] {
      EXPECT_TRUE(reference::run(f, Context{}).ok());
      return inner_product(out, d_out);
    };
    Tensor d_k = p.key_rows(f.k.size(-1), DType::kFloat64);
    std::vector<Tensor> d_weights;
    std::vector<TensorView> weights{f.weights.pe, f.weights.w1, f.weights.b1, f.weights.w2, f.weights.b2};
    for (const TensorView& w : weights)
      d_weights.push_back(w.defined() ? Tensor(DType::kFloat64, shape_of(w)) : Tensor());
    ASSERT_TRUE(
        reference::run(
            {f, d_out, d_k, {f.weights.kind, d_weights[0], d_weights[1], d_weights[2], d_weights[3], d_weights[4]}},
            Context{})
            .ok());
    expect_gradient("k", f.k, d_k, L);
    const char* names[] = {"pe", "w1", "b1", "w2", "b2"};
    for (std::size_t i = 0; i < weights.size(); ++i)
      if (weights[i].defined()) expect_gradient(names[i], weights[i], d_weights[i], L);
  }
}

TEST_P(OracleGradient, CompressedAttention) {
  CompressedAttentionParams f = p.compressed();
  const Tensor o = p.query_rows(p.c.heads(), p.c.dv, DType::kFloat64);
  f.o = o;
  const auto L = [&] {
    EXPECT_TRUE(reference::run(f, Context{}).ok());
    return inner_product(o, p.d_o);
  };
  const Tensor d_q = p.q.clone(), d_k = p.k_c.clone(), d_v = p.v_c.clone();
  ASSERT_TRUE(reference::run({f, p.d_o, d_q, d_k, d_v}, Context{}).ok());
  expect_gradient("q", p.q, d_q, L);
  expect_gradient("k_c", p.k_c, d_k, L);
  expect_gradient("v_c", p.v_c, d_v, L);
}

TEST_P(OracleGradient, SelectedAttention) {
  SelectedAttentionParams f = p.selected();
  const Tensor o = p.query_rows(p.c.heads(), p.c.dv, DType::kFloat64);
  f.o = o;
  const auto L = [&] {
    EXPECT_TRUE(reference::run(f, Context{}).ok());
    return inner_product(o, p.d_o);
  };
  const Tensor d_q = p.q.clone(), d_k = p.k_slc.clone(), d_v = p.v_slc.clone();
  ASSERT_TRUE(reference::run({f, p.d_o, d_q, d_k, d_v}, Context{}).ok());
  expect_gradient("q", p.q, d_q, L);
  expect_gradient("k", p.k_slc, d_k, L);
  expect_gradient("v", p.v_slc, d_v, L);
}

TEST_P(OracleGradient, SlidingWindowAttention) {
  SlidingWindowAttentionParams f = p.window();
  const Tensor o = p.query_rows(p.c.heads(), p.c.dv, DType::kFloat64);
  f.o = o;
  const auto L = [&] {
    EXPECT_TRUE(reference::run(f, Context{}).ok());
    return inner_product(o, p.d_o);
  };
  const Tensor d_q = p.q.clone(), d_k = p.k_swa.clone(), d_v = p.v_swa.clone();
  ASSERT_TRUE(reference::run({f, p.d_o, d_q, d_k, d_v}, Context{}).ok());
  expect_gradient("q", p.q, d_q, L);
  expect_gradient("k", p.k_swa, d_k, L);
  expect_gradient("v", p.v_swa, d_v, L);
}

TEST_P(OracleGradient, Combine) {
  // Combine knows no sequences: every row counts, so give those of no sequence values too.
  for (const Tensor* t : {&p.o_cmp, &p.o_slc, &p.o_swa, &p.gates, &p.d_o}) fill_normal(*t, 3);
  CombineParams f = p.combination();
  const Tensor o = p.query_rows(p.c.heads(), p.c.dv, DType::kFloat64);
  f.o = o;
  const auto L = [&] {
    EXPECT_TRUE(reference::run(f, Context{}).ok());
    return inner_product(o, p.d_o);
  };
  const Tensor d[] = {p.o_cmp.clone(), p.o_slc.clone(), p.o_swa.clone(), p.gates.clone()};
  ASSERT_TRUE(reference::run({f, p.d_o, d[0], d[1], d[2], d[3]}, Context{}).ok());
  expect_gradient("o_cmp", p.o_cmp, d[0], L);
  expect_gradient("o_slc", p.o_slc, d[1], L);
  expect_gradient("o_swa", p.o_swa, d[2], L);
  expect_gradient("gates", p.gates, d[3], L);
}

TEST_P(OracleGradient, NsaAttention) {
  NsaAttentionParams f = p.whole();
  const Tensor o = p.query_rows(p.c.heads(), p.c.dv, DType::kFloat64);
  f.o = o;
  f.block_indices = p.indices;  // block selection has no gradient, so it must not change with the step
  const auto L = [&] {
    EXPECT_TRUE(reference::run(f, Context{}).ok());
    return inner_product(o, p.d_o);
  };
  const Tensor* inputs[] = {&p.q, &p.k_c, &p.v_c, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa, &p.gates};
  std::vector<Tensor> d;
  for (const Tensor* input : inputs) d.push_back(input->clone());
  ASSERT_TRUE(reference::run({f, p.d_o, d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]}, Context{}).ok());
  const char* names[] = {"q", "k_c", "v_c", "k_slc", "v_slc", "k_swa", "v_swa", "gates"};
  for (std::size_t i = 0; i < d.size(); ++i) expect_gradient(names[i], *inputs[i], d[i], L);
}

TEST_P(OracleGradient, NativeSparseAttention) {
  NativeSparseAttentionParams f = p.layer();
  const Tensor o = p.query_rows(p.c.heads(), p.c.dv, DType::kFloat64);
  f.attention.o = o;
  f.attention.block_indices = p.indices;
  const auto L = [&] {
    EXPECT_TRUE(reference::run(f, Context{}).ok());
    return inner_product(o, p.d_o);
  };
  NativeSparseAttentionBackwardParams b;
  b.forward = f;
  b.d_o = p.d_o;
  const auto outputs = layer_backward_outputs(p);
  const auto d = outputs_of(b, outputs, true, [](const NativeSparseAttentionBackwardParams& params) {
    return reference::run(params, Context{});
  });
  std::vector<TensorView> inputs{p.q, p.k_cmp, p.v_cmp, p.k_slc, p.v_slc, p.k_swa, p.v_swa, p.gates};
  for (const CompressionWeights& w : {f.weights_k, f.weights_v})
    for (const TensorView& t : {w.pe, w.w1, w.b1, w.w2, w.b2})
      if (t.defined()) inputs.push_back(t);
  ASSERT_EQ(inputs.size(), d.size());
  for (std::size_t i = 0; i < d.size(); ++i) expect_gradient(outputs[i].name.c_str(), inputs[i], d[i], L);
}

INSTANTIATE_TEST_SUITE_P(Cases, OracleGradient, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace nsa::test
