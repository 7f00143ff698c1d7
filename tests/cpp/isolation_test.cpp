// What a NaN or an infinity may reach: nothing that does not see it, and all that does.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "under_test.h"

namespace nsa::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

class Isolation : public testing::TestWithParam<DType> {
 protected:
  Case packed() const {
    return {.dtype = GetParam(),
            .packed = true,
            .q_lens = {50, 0, 90, 33},
            .slack = 6,
            .kv_heads = 3,
            .group = 4,
            .cfg = small_config(),
            .kind = CompressionKind::kLinear};
  }
  Case batched() const {
    return {.dtype = GetParam(), .q_lens = {130, 130}, .kv_heads = 2, .group = 3, .cfg = small_config()};
  }
};

/// All inputs with rows of queries or keys, and the heads of each that belong to one KV head.
std::vector<std::pair<const Tensor*, Rows>> inputs_of(const Problem& p) {
  return {{&p.q, Rows::kQueries},       {&p.gates, Rows::kQueries},  {&p.o_cmp, Rows::kQueries},
          {&p.o_slc, Rows::kQueries},   {&p.o_swa, Rows::kQueries},  {&p.d_o, Rows::kQueries},
          {&p.k_cmp, Rows::kKeys},      {&p.v_cmp, Rows::kKeys},     {&p.k_slc, Rows::kKeys},
          {&p.v_slc, Rows::kKeys},      {&p.k_swa, Rows::kKeys},     {&p.v_swa, Rows::kKeys},
          {&p.k_c, Rows::kCompressed},  {&p.v_c, Rows::kCompressed}, {&p.d_k_c, Rows::kCompressed},
          {&p.d_v_c, Rows::kCompressed}};
}

TEST_P(Isolation, SequenceOfNaN) {
  const Problem p(packed());
  Problem poisoned(packed());
  const std::vector<Sequence> sequences = sequences_of(p.c);
  for (const auto& [input, rows] : inputs_of(poisoned)) fill_value(part_of(*input, rows, sequences[2]), kNan);
  const auto clean = run_all(p), results = run_all(poisoned);
  for (std::size_t i = 0; i < clean.size(); ++i)
    for (const Sequence& s : sequences) {
      if (s.index == 2 || clean[i].rows == Rows::kNone) continue;
      EXPECT_TRUE(agree(part_of(clean[i].value, clean[i].rows, s), part_of(results[i].value, clean[i].rows, s), true))
          << clean[i].name << " of sequence " << s.index;
    }
}

/// The heads of `view` that belong to KV heads [begin, end).
TensorView heads_of(const TensorView& view, Rows rows, std::int64_t kv_heads, std::int64_t begin, std::int64_t end) {
  const int dim = view.rank - 2;  // of heads, in lse too
  const std::int64_t per_head = view.size(dim) / kv_heads;
  return slice(view, rows == Rows::kNone ? 0 : dim, begin * per_head, end * per_head);
}

TEST_P(Isolation, KvHeadOfNaN) {
  const Problem p(packed());
  Problem poisoned(packed());
  const std::int64_t heads = p.c.kv_heads;
  for (const auto& [input, rows] : inputs_of(poisoned)) fill_value(heads_of(*input, rows, heads, 1, 2), kNan);
  const auto clean = run_all(p), results = run_all(poisoned);
  for (std::size_t i = 0; i < clean.size(); ++i) {
    const Rows rows = clean[i].rows;
    if (rows == Rows::kNone) continue;
    for (const std::int64_t head : {0, 2})
      EXPECT_TRUE(agree(heads_of(clean[i].value, rows, heads, head, head + 1),
                        heads_of(results[i].value, rows, heads, head, head + 1), true))
          << clean[i].name << " of KV head " << head;
  }
}

TEST_P(Isolation, UnselectedBlocks) {
  Problem p(batched()), poisoned(batched());
  for (Problem* problem : {&p, &poisoned})  // queries select even blocks only
    for_each_index(problem->indices.view(), [&](const Index& index) {
      problem->indices.set(index, 2.0 * std::floor(problem->indices.get(index) / 2));
    });
  const std::int64_t block = p.c.cfg.block_size;
  for (std::int64_t begin = block; begin < 130; begin += 2 * block)
    for (const Tensor* t : {&poisoned.k_slc, &poisoned.v_slc})
      fill_value(slice(*t, 1, begin, std::min<std::int64_t>(begin + block, 130)), kNan);
  for (const bool given : {false, true}) {
    std::vector<std::vector<Tensor>> results;
    for (const Problem* problem : {&p, &poisoned}) {
      if (given) {
        NsaAttentionParams f = problem->whole();
        f.block_indices = problem->indices;
        results.push_back(outputs_of(f, whole_outputs(*problem), false, [](const NsaAttentionParams& params) {
          return under_test.nsa_attention(params, kCpu);
        }));
        results.push_back(outputs_of(
            backward_of(f, views_of(results.back()), problem->d_o), whole_backward_outputs(*problem), false,
            [](const NsaAttentionBackwardParams& params) { return under_test.nsa_attention_backward(params, kCpu); }));
      } else {
        const SelectedAttentionParams f = problem->selected();
        results.push_back(outputs_of(f, selected_outputs(*problem), false, [](const SelectedAttentionParams& params) {
          return under_test.selected_attention(params, kCpu);
        }));
        results.push_back(outputs_of(backward_of(f, views_of(results.back()), problem->d_o),
                                     selected_backward_outputs(*problem), false,
                                     [](const SelectedAttentionBackwardParams& params) {
                                       return under_test.selected_attention_backward(params, kCpu);
                                     }));
      }
    }
    for (const std::size_t pass : {0, 1})
      for (std::size_t i = 0; i < results[pass].size(); ++i)
        EXPECT_TRUE(agree(results[pass][i], results[pass + 2][i], true))
            << (given ? "nsa_attention" : "selected_attention") << (pass ? " backward" : "") << ", output " << i;
  }
}

TEST_P(Isolation, KeysNobodySees) {
  // Few queries at the end: the window of none reaches back to the first keys; compression never takes the last ones.
  Case c = batched();
  c.q_lens = {10, 10}, c.k_lens = {131, 131};
  const Problem p(c);
  Problem poisoned(c);
  for (const Tensor* t : {&poisoned.k_swa, &poisoned.v_swa})
    fill_value(slice(*t, 1, 0, 131 - 10 - c.cfg.window_size + 1), kNan);
  for (const Tensor* t : {&poisoned.k_cmp, &poisoned.v_cmp}) fill_value(slice(*t, 1, 128, 131), kNan);
  const auto clean = run_all(p), results = run_all(poisoned);
  for (std::size_t i = 0; i < clean.size(); ++i)
    EXPECT_TRUE(agree(clean[i].value, results[i].value, true)) << clean[i].name;
}

TEST_P(Isolation, VisibleNaNPropagates) {
  // One NaN or infinity at a time; NaN and infinities must then be where the oracle has them.
  struct Place {
    const char* name;
    Tensor Problem::*tensor;
    Index index;
    double value;
  };
  const Place places[] = {
      {"q", &Problem::q, {1, 70, 2, 5}, kNan},         {"k_slc", &Problem::k_slc, {0, 40, 1, 3}, kNan},
      {"v_slc", &Problem::v_slc, {0, 33, 0, 7}, kNan}, {"v_slc", &Problem::v_slc, {1, 129, 0, 9}, kInfinity},
      {"k_swa", &Problem::k_swa, {0, 64, 0, 0}, kNan}, {"v_swa", &Problem::v_swa, {1, 100, 1, 63}, -kInfinity},
      {"k_c", &Problem::k_c, {0, 12, 1, 3}, kNan},     {"v_c", &Problem::v_c, {1, 20, 0, 7}, kInfinity},
      {"v_c", &Problem::v_c, {0, 20, 1, 7}, kNan},     {"gates", &Problem::gates, {0, 55, 4, 1}, kNan},
      {"k_cmp", &Problem::k_cmp, {0, 57, 1, 3}, kNan}, {"v_cmp", &Problem::v_cmp, {1, 58, 1, 3}, kInfinity}};
  for (const Place& place : places) {
    SCOPED_TRACE(std::string(place.name) + " = " + std::to_string(place.value));
    Problem p(batched());
    (p.*place.tensor).set(place.index, place.value);
    for (const CompressParams& f : {p.compress_keys(), p.compress_values()})
      expect_within_bound<CompressParams>(f, compress_outputs(p, f), p.c.dtype, under_test.compress, reference::run,
                                          under_test.floor);
    NsaAttentionParams f = p.whole();
    f.block_indices = p.indices;
    auto outputs = whole_outputs(p);
    outputs.erase(outputs.begin() + 1);
    expect_within_bound<NsaAttentionParams>(f, outputs, p.c.dtype, under_test.nsa_attention, reference::run,
                                            under_test.floor);
    const auto results = outputs_of(p.selection(), selection_outputs(p), false, [](const SelectBlocksParams& params) {
      return under_test.select_blocks(params, kCpu);
    });
    for_each_index(p.indices.view(), [&](const Index& index) {  // valid blocks even where importances are NaN
      const double t = static_cast<double>(index[1]), block = results[0].get(index);
      EXPECT_LE(block * p.c.cfg.block_size, t);
      if (index[3] > 0 && block >= 0) {
        EXPECT_GT(block, results[0].get({index[0], index[1], index[2], index[3] - 1}));
      }
      EXPECT_EQ(block < 0, p.indices.get(index) < 0);
    });
  }
}

TEST_P(Isolation, NaNGradient) {
  Problem p(batched());
  p.d_o.set({1, 77, 4, 3}, kNan);
  NsaAttentionParams f = p.whole();
  f.block_indices = p.indices;
  const auto outputs = outputs_of(f, whole_outputs(p), false, [](const NsaAttentionParams& params) {
    return under_test.nsa_attention(params, kCpu);
  });
  expect_within_bound<NsaAttentionBackwardParams>(backward_of(f, views_of(outputs), p.d_o), whole_backward_outputs(p),
                                                  p.c.dtype, under_test.nsa_attention_backward, reference::run,
                                                  under_test.floor);
}

INSTANTIATE_TEST_SUITE_P(Types, Isolation, testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace nsa::test
