// Inputs of every legal kind: adversarial indices, stride 0, tensors given twice.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "under_test.h"

namespace nsa::test {
namespace {

class Inputs : public testing::TestWithParam<DType> {
 protected:
  Case base() const {
    return {.dtype = GetParam(), .q_lens = {110, 110}, .kv_heads = 2, .group = 4, .cfg = small_config()};
  }

  /// An operation and its backward against the oracle; returns all outputs.
  template <class Forward, class Backward>
  std::vector<Tensor> run_both(const Problem& p, const Forward& f, const std::vector<Output<Forward>>& outputs,
                               Operation<Forward> forward, PlainOperation<Forward> oracle,
                               const std::vector<Output<Backward>>& gradients, Operation<Backward> backward,
                               PlainOperation<Backward> backward_oracle) const {
    auto all = expect_within_bound<Forward>(f, outputs, GetParam(), forward, oracle, under_test.floor);
    auto more = expect_within_bound<Backward>(backward_of(f, views_of(all), p.d_o), gradients, GetParam(), backward,
                                              backward_oracle, under_test.floor);
    std::move(more.begin(), more.end(), std::back_inserter(all));
    return all;
  }

  /// Selected attention with other indices.
  std::vector<Tensor> run_selected(const Problem& p, const TensorView& indices) const {
    SelectedAttentionParams f = p.selected();
    f.indices = indices;
    return run_both<SelectedAttentionParams, SelectedAttentionBackwardParams>(
        p, f, selected_outputs(p), under_test.selected_attention, reference::run, selected_backward_outputs(p),
        under_test.selected_attention_backward, reference::run);
  }
};

TEST_P(Inputs, HostileIndices) {
  const Problem p(base());
  const auto expected = run_selected(p, p.indices);
  // The same sets, shuffled, with duplicates and numbers that name no candidate block.
  constexpr std::int64_t kWidth = 13;
  Tensor adversarial(DType::kInt32, {2, 110, 2, kWidth}, Layout::kPadded);
  std::mt19937 random(5);
  for (std::int64_t b = 0; b < 2; ++b)
    for (std::int64_t t = 0; t < 110; ++t)
      for (std::int64_t head = 0; head < 2; ++head) {
        const double future = static_cast<double>(t / p.c.cfg.block_size + 1);
        std::vector<double> row = {-1,
                                   -7,
                                   future,
                                   future + 1,
                                   1e9,
                                   std::numeric_limits<std::int32_t>::max(),
                                   std::numeric_limits<std::int32_t>::min(),
                                   p.indices.get({b, t, head, 0}),
                                   p.indices.get({b, t, head, 0})};
        for (std::int64_t n = 0; n < p.c.cfg.topk; ++n) row.push_back(p.indices.get({b, t, head, n}));
        std::shuffle(row.begin(), row.end(), random);
        for (std::int64_t n = 0; n < kWidth; ++n) adversarial.set({b, t, head, n}, row[static_cast<std::size_t>(n)]);
      }
  const auto results = run_selected(p, adversarial);
  for (std::size_t i = 0; i < results.size(); ++i) EXPECT_TRUE(same_bits(expected[i], results[i])) << "output " << i;
}

/// The scores do not matter: every branch gives the mean of what is visible, and no gradient to queries and keys.
/// No case of the grid: where a query sees one key alone lse is 0, and no error at all would be allowed.
TEST_P(Inputs, ScaleOfZero) {
  for (const double scale : {0.0, -0.0, 1e-50, -1e-50}) {
    Case c = base();
    c.softmax_scale = scale;
    const Problem p(c);
    const auto all = run_selected(p, p.indices);
    for (std::int64_t t = 0; t < 110; ++t) {
      std::int64_t visible = 0;
      for (std::int64_t n = 0; n < c.cfg.topk; ++n) {
        const auto block = static_cast<std::int64_t>(p.indices.get({0, t, 0, n}));
        if (block >= 0) visible += std::min<std::int64_t>(c.cfg.block_size, t + 1 - block * c.cfg.block_size);
      }
      EXPECT_NEAR(all[1].get({0, 0, t}), std::log(static_cast<double>(visible)), 1e-6) << scale << ", query " << t;
    }
  }
}

/// The other branches, and all of them, with a scale of zero and one that turns the order of keys round.
TEST_P(Inputs, ScaleOfZeroOrLessInEveryBranch) {
  for (const double scale : {0.0, -0.3}) {
    Case c = base();
    c.softmax_scale = scale;
    const Problem p(c);
    run_selected(p, p.indices);
    NsaAttentionParams whole = p.whole();
    whole.block_indices = p.indices;
    run_both<SlidingWindowAttentionParams, SlidingWindowAttentionBackwardParams>(
        p, p.window(), window_outputs(p), under_test.sliding_window_attention, reference::run,
        window_backward_outputs(p), under_test.sliding_window_attention_backward, reference::run);
    run_both<CompressedAttentionParams, CompressedAttentionBackwardParams>(
        p, p.compressed(), compressed_outputs(p), under_test.compressed_attention, reference::run,
        compressed_backward_outputs(p), under_test.compressed_attention_backward, reference::run);
    run_both<NsaAttentionParams, NsaAttentionBackwardParams>(p, whole, whole_outputs(p), under_test.nsa_attention,
                                                             reference::run, whole_backward_outputs(p),
                                                             under_test.nsa_attention_backward, reference::run);
  }
}

TEST_P(Inputs, NoIndices) {
  const Problem p(base());
  run_selected(p, Tensor(DType::kInt32, {2, 110, 2, 0}));
  run_selected(p, Tensor(DType::kInt32, {2, 110, 2, 3}));  // all -1
}

TEST_P(Inputs, RandomIndicesOfOtherBlockSizes) {
  for (const int block_size : {16, 32, 48, 64, 128}) {
    Case c = base();
    c.q_lens = {30, 30}, c.k_lens = {300, 300};
    const Problem p(c);
    Tensor indices(DType::kInt32, {2, 30, 2, 5});
    std::mt19937 random(7);
    for_each_index(indices.view(), [&](const Index& index) {
      indices.set(index, static_cast<double>(random() % static_cast<unsigned>(300 / block_size + 2)) - 1);
    });
    SelectedAttentionParams f = p.selected();
    f.indices = indices, f.block_size = block_size;
    const auto outputs = expect_within_bound<SelectedAttentionParams>(
        f, selected_outputs(p), GetParam(), under_test.selected_attention, reference::run, under_test.floor);
    expect_within_bound<SelectedAttentionBackwardParams>(
        backward_of(f, views_of(outputs), p.d_o), selected_backward_outputs(p), GetParam(),
        under_test.selected_attention_backward, reference::run, under_test.floor);
  }
}

/// Forward and backward of nsa_attention on these parameters, which may be views of anything.
std::vector<Tensor> run_whole(const Problem& p, const NsaAttentionParams& f, const TensorView& d_o) {
  auto all = outputs_of(f, whole_outputs(p), false,
                        [](const NsaAttentionParams& params) { return under_test.nsa_attention(params, kCpu); });
  auto gradients = outputs_of(
      backward_of(f, views_of(all), d_o), whole_backward_outputs(p), false,
      [](const NsaAttentionBackwardParams& params) { return under_test.nsa_attention_backward(params, kCpu); });
  std::move(gradients.begin(), gradients.end(), std::back_inserter(all));
  return all;
}

TEST_P(Inputs, StrideZero) {
  const Problem p(base());
  // Each input broadcast along a dimension of its own, beside the same values written out.
  NsaAttentionParams f = p.whole();
  std::vector<Tensor> copies;
  const auto broadcast_and_copy = [&](TensorView& view, std::initializer_list<int> dims) {
    for (const int dim : dims) view = broadcast(view, dim);
    copies.emplace_back(view.dtype, shape_of(view));
    assign(view, copies.back());
    return copies.back().view();
  };
  NsaAttentionParams written = f;
  written.q = broadcast_and_copy(f.q, {0});
  written.k_c = broadcast_and_copy(f.k_c, {2});
  written.v_c = broadcast_and_copy(f.v_c, {0, 2});
  written.k_slc = broadcast_and_copy(f.k_slc, {2});
  written.v_slc = broadcast_and_copy(f.v_slc, {0});
  written.k_swa = broadcast_and_copy(f.k_swa, {0});
  written.v_swa = broadcast_and_copy(f.v_swa, {1});
  written.gates = broadcast_and_copy(f.gates, {1, 2});
  TensorView d_o = p.d_o;
  const TensorView written_d_o = broadcast_and_copy(d_o, {0, 1, 2, 3});  // what sum().backward() gives
  const auto expected = run_whole(p, written, written_d_o), results = run_whole(p, f, d_o);
  for (std::size_t i = 0; i < results.size(); ++i) EXPECT_TRUE(same_bits(expected[i], results[i])) << "output " << i;

  CompressParams c = p.compress_keys();
  Tensor k(c.k.dtype, shape_of(c.k));
  c.k = broadcast(c.k, 1);
  assign(c.k, k);
  std::vector<std::vector<Tensor>> both;
  for (const TensorView& view : {c.k, k.view()}) {
    c.k = view;
    both.push_back(outputs_of(c, compress_outputs(p, c), false,
                              [](const CompressParams& params) { return under_test.compress(params, kCpu); }));
  }
  EXPECT_TRUE(same_bits(both[0][0], both[1][0])) << "compress";
}

TEST_P(Inputs, SharedKeysAndValues) {
  // One tensor as keys and values of two branches gives what equal tensors give.
  const Problem p(base());
  NsaAttentionParams shared = p.whole();
  shared.k_swa = shared.v_swa = shared.v_slc = shared.k_slc;
  shared.v_c = shared.k_c;
  NsaAttentionParams separate = p.whole();
  for (const Tensor* t : {&p.k_swa, &p.v_swa, &p.v_slc}) assign(p.k_slc, *t);
  assign(p.k_c, p.v_c);
  const auto expected = run_whole(p, separate, p.d_o), results = run_whole(p, shared, p.d_o);
  for (std::size_t i = 0; i < results.size(); ++i) EXPECT_TRUE(same_bits(expected[i], results[i])) << "output " << i;
}

INSTANTIATE_TEST_SUITE_P(Types, Inputs, testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace nsa::test
