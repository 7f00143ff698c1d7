// The backend against the oracle, every operation on every case of the grid, forward and backward.
#include "grid.h"

#include <gtest/gtest.h>

#include "core/rotate.h"
#include "under_test.h"

namespace nsa::test {
namespace {

class GridTest : public testing::TestWithParam<Case> {
 protected:
  /// The backend against the oracle; returns what the backend computed.
  template <class Params>
  std::vector<Tensor> check(const Params& params, const std::vector<Output<Params>>& outputs,
                            Operation<Params> operation, PlainOperation<Params> reference) {
    return expect_within_bound(params, outputs, p.c.dtype, operation, reference, under_test.floor);
  }

  Problem p{GetParam()};
};

class Compression : public GridTest {};
class Layer : public GridTest {};
class Grid : public GridTest {};

TEST_P(Compression, ForwardAndBackward) {
  for (const CompressParams& f : {p.compress_keys(), p.compress_values()}) {
    check<CompressParams>(f, compress_outputs(p, f), under_test.compress, reference::run);
    const Tensor d_out = p.random_compressed_rows(f.k.size(-1), 77);
    const CompressBackwardParams b{f, d_out, {}, {}};
    check<CompressBackwardParams>(b, compress_backward_outputs(p, f), under_test.compress_backward, reference::run);
  }
}

TEST_P(Grid, CompressedAttention) {
  const auto outputs = check<CompressedAttentionParams>(p.compressed(), compressed_outputs(p),
                                                        under_test.compressed_attention, reference::run);
  check<CompressedAttentionBackwardParams>(backward_of(p.compressed(), views_of(outputs), p.d_o),
                                           compressed_backward_outputs(p), under_test.compressed_attention_backward,
                                           reference::run);
}

TEST_P(Grid, SelectBlocks) {
  const auto outputs = outputs_of(p.selection(), selection_outputs(p), false, [](const SelectBlocksParams& params) {
    return under_test.select_blocks(params, kCpu);
  });
  const SelectionResult result = expect_valid_selection(p.selection(), outputs[0], 1e-5);
  EXPECT_GE(result.share(), 0.999) << result.identical << " of " << result.rows << " rows identical";
}

TEST_P(Grid, SelectedAttention) {
  const auto outputs =
      check<SelectedAttentionParams>(p.selected(), selected_outputs(p), under_test.selected_attention, reference::run);
  check<SelectedAttentionBackwardParams>(backward_of(p.selected(), views_of(outputs), p.d_o),
                                         selected_backward_outputs(p), under_test.selected_attention_backward,
                                         reference::run);
}

TEST_P(Grid, SlidingWindowAttention) {
  const auto outputs = check<SlidingWindowAttentionParams>(p.window(), window_outputs(p),
                                                           under_test.sliding_window_attention, reference::run);
  check<SlidingWindowAttentionBackwardParams>(backward_of(p.window(), views_of(outputs), p.d_o),
                                              window_backward_outputs(p), under_test.sliding_window_attention_backward,
                                              reference::run);
}

TEST_P(Grid, Combine) {
  check<CombineParams>(p.combination(), combine_outputs(p), under_test.combine, reference::run);
  CombineBackwardParams b;
  b.forward = p.combination();
  b.d_o = p.d_o;
  check<CombineBackwardParams>(b, combine_backward_outputs(p), under_test.combine_backward, reference::run);
}

TEST_P(Grid, NsaAttention) {
  NsaAttentionParams f = p.whole();
  f.block_indices = p.indices;
  auto compared = whole_outputs(p);
  compared.erase(compared.begin() + 1);  // the indices have their own rule
  check<NsaAttentionParams>(f, compared, under_test.nsa_attention, reference::run);

  // Now with its own block selection, which the backward then takes as given.
  f.block_indices = {};
  const auto outputs = outputs_of(f, whole_outputs(p), false, [](const NsaAttentionParams& params) {
    return under_test.nsa_attention(params, kCpu);
  });
  expect_valid_selection(p.selection(), outputs[1], rho_of_whole(p.c.dtype));
  check<NsaAttentionBackwardParams>(backward_of(f, views_of(outputs), p.d_o), whole_backward_outputs(p),
                                    under_test.nsa_attention_backward, reference::run);
}

TEST_P(Layer, ForwardAndBackward) {
  NativeSparseAttentionParams f = p.layer();
  f.attention.block_indices = p.indices;
  auto compared = layer_outputs(p);
  compared.erase(compared.begin() + 1);  // the indices have their own rule
  check<NativeSparseAttentionParams>(f, compared, under_test.native_sparse_attention, reference::run);
  const auto outputs = outputs_of(f, layer_outputs(p), false, [](const NativeSparseAttentionParams& params) {
    return under_test.native_sparse_attention(params, kCpu);
  });
  check<NativeSparseAttentionBackwardParams>(backward_of(f, views_of(outputs), p.d_o), layer_backward_outputs(p),
                                             under_test.native_sparse_attention_backward, reference::run);
}

/// Runs an operation of the backend into fresh outputs.
template <class Params>
std::vector<Tensor> run(const Params& params, const std::vector<Output<Params>>& outputs, Operation<Params> operation) {
  return outputs_of(params, outputs, false, [&](const Params& bound) { return operation(bound, kCpu); });
}

TEST_P(Layer, HasTheBitsOfItsOperations) {
  const NativeSparseAttentionParams f = p.layer();
  const auto whole = run(f, layer_outputs(p), under_test.native_sparse_attention);
  const auto gradients = run(backward_of(f, views_of(whole), p.d_o), layer_backward_outputs(p),
                             under_test.native_sparse_attention_backward);

  const auto sequences = nsa::sequences_of(p.q, p.k_slc.view().size(1), p.packed, p.c.cfg);
  const auto rotate = [&](const TensorView& k_c, bool back) {
    rotate_compressed(k_c, sequences, p.c.cfg, {p.rope_cos, p.rope_sin}, back);
  };
  const CompressParams keys = p.compress_keys(), values = p.compress_values();
  const auto k_c = run(keys, compress_outputs(p, keys), under_test.compress);
  const auto v_c = run(values, compress_outputs(p, values), under_test.compress);
  rotate(k_c[0], false);
  NsaAttentionParams attention = p.whole();
  attention.k_c = k_c[0], attention.v_c = v_c[0];
  const auto parts = run(attention, whole_outputs(p), under_test.nsa_attention);
  for (std::size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(same_bits(whole[i], parts[i])) << layer_outputs(p)[i].name;
  EXPECT_TRUE(same_bits(whole[8], k_c[0])) << "k_c";
  EXPECT_TRUE(same_bits(whole[9], v_c[0])) << "v_c";

  const auto d =
      run(backward_of(attention, views_of(parts), p.d_o), whole_backward_outputs(p), under_test.nsa_attention_backward);
  rotate(d[1], true);
  const auto d_keys =
      run(CompressBackwardParams{keys, d[1], {}, {}}, compress_backward_outputs(p, keys), under_test.compress_backward);
  const auto d_values = run(CompressBackwardParams{values, d[2], {}, {}}, compress_backward_outputs(p, values),
                            under_test.compress_backward);
  std::vector<TensorView> expected{d[0], d_keys[0], d_values[0], d[3], d[4], d[5], d[6], d[7]};
  for (const auto* weights : {&d_keys, &d_values})
    expected.insert(expected.end(), weights->begin() + 1, weights->end());
  ASSERT_EQ(expected.size(), gradients.size());
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(same_bits(gradients[i], expected[i])) << layer_backward_outputs(p)[i].name;

  auto again = backward_of(f, views_of(whole), p.d_o);
  again.forward.attention.k_c = again.forward.attention.v_c = {};
  const auto recomputed = run(again, layer_backward_outputs(p), under_test.native_sparse_attention_backward);
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(same_bits(gradients[i], recomputed[i])) << layer_backward_outputs(p)[i].name << ", computed again";
}

const auto name_of_case = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Pairwise, Compression, testing::ValuesIn(supported_by_compress(compression_cases())),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Pairwise, Layer, testing::ValuesIn(supported(layer_cases())), name_of_case);
INSTANTIATE_TEST_SUITE_P(Pairwise, Grid, testing::ValuesIn(supported(attention_cases())), name_of_case);

}  // namespace
}  // namespace nsa::test
