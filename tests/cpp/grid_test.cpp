// The backend against the oracle, every operation on every case of the grid, forward and backward.
#include "grid.h"

#include <gtest/gtest.h>

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
class Grid : public GridTest {};

TEST_P(Compression, ForwardAndBackward) {
  for (const CompressParams& f : {p.compress_keys(), p.compress_values()}) {
    check<CompressParams>(f, compress_outputs(p, f), under_test.compress, reference::compress);
    const Tensor d_out = p.random_compressed_rows(f.k.size(-1), 77);
    const CompressBackwardParams b{f, d_out, {}, {}};
    check<CompressBackwardParams>(b, compress_backward_outputs(p, f), under_test.compress_backward,
                                  reference::compress_backward);
  }
}

TEST_P(Grid, CompressedAttention) {
  const auto outputs = check<CompressedAttentionParams>(
      p.compressed(), compressed_outputs(p), under_test.compressed_attention, reference::compressed_attention);
  check<CompressedAttentionBackwardParams>(backward_of(p.compressed(), views_of(outputs), p.d_o),
                                           compressed_backward_outputs(p), under_test.compressed_attention_backward,
                                           reference::compressed_attention_backward);
}

TEST_P(Grid, SelectBlocks) {
  const auto outputs = outputs_of(p.selection(), selection_outputs(p), false, [](const SelectBlocksParams& params) {
    return under_test.select_blocks(params, kCpu);
  });
  const SelectionResult result = expect_valid_selection(p.selection(), outputs[0], 1e-5);
  EXPECT_GE(result.share(), 0.999) << result.identical << " of " << result.rows << " rows identical";
}

TEST_P(Grid, SelectedAttention) {
  const auto outputs = check<SelectedAttentionParams>(p.selected(), selected_outputs(p), under_test.selected_attention,
                                                      reference::selected_attention);
  check<SelectedAttentionBackwardParams>(backward_of(p.selected(), views_of(outputs), p.d_o),
                                         selected_backward_outputs(p), under_test.selected_attention_backward,
                                         reference::selected_attention_backward);
}

TEST_P(Grid, SlidingWindowAttention) {
  const auto outputs = check<SlidingWindowAttentionParams>(
      p.window(), window_outputs(p), under_test.sliding_window_attention, reference::sliding_window_attention);
  check<SlidingWindowAttentionBackwardParams>(backward_of(p.window(), views_of(outputs), p.d_o),
                                              window_backward_outputs(p), under_test.sliding_window_attention_backward,
                                              reference::sliding_window_attention_backward);
}

TEST_P(Grid, Combine) {
  check<CombineParams>(p.combination(), combine_outputs(p), under_test.combine, reference::combine);
  CombineBackwardParams b;
  b.forward = p.combination();
  b.d_o = p.d_o;
  check<CombineBackwardParams>(b, combine_backward_outputs(p), under_test.combine_backward,
                               reference::combine_backward);
}

TEST_P(Grid, NsaAttention) {
  NsaAttentionParams f = p.whole();
  f.imposed_indices = p.indices;
  auto compared = whole_outputs(p);
  compared.erase(compared.begin() + 1);  // the indices have their own rule
  check<NsaAttentionParams>(f, compared, under_test.nsa_attention, reference::nsa_attention);

  // Now with its own choice of blocks, which the backward then takes as given.
  f.imposed_indices = {};
  const auto outputs = outputs_of(f, whole_outputs(p), false, [](const NsaAttentionParams& params) {
    return under_test.nsa_attention(params, kCpu);
  });
  expect_valid_selection(p.selection(), outputs[1], rho_of_whole(p.c.dtype));
  check<NsaAttentionBackwardParams>(backward_of(f, views_of(outputs), p.d_o), whole_backward_outputs(p),
                                    under_test.nsa_attention_backward, reference::nsa_attention_backward);
}

const auto name_of_case = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Pairwise, Compression, testing::ValuesIn(supported_by_compress(compression_cases())),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Pairwise, Grid, testing::ValuesIn(supported(attention_cases())), name_of_case);

}  // namespace
}  // namespace nsa::test
