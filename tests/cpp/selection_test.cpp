// Block selection where it is not trivial: many candidates, ties, noise.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "under_test.h"

namespace nsa::test {
namespace {

Tensor select(const Problem& p) {
  auto outputs = outputs_of(p.selection(), selection_outputs(p), false,
                            [](const SelectBlocksParams& params) { return under_test.select_blocks(params, kCpu); });
  return std::move(outputs[0]);
}

class Selection : public testing::TestWithParam<Case> {};

TEST_P(Selection, ManyCandidates) {
  const Problem p(GetParam());
  const Tensor indices = select(p);
  const SelectionResult result = expect_valid_selection(p.selection(), indices, 1e-5);
  EXPECT_GE(result.share(), 0.999) << result.identical << " of " << result.rows << " rows identical";
  // Not trivial: somewhere a block between the forced ones was left out, and a later one taken.
  bool gap = false;
  const auto last = static_cast<std::size_t>(indices.view().rank - 1);
  for_each_index(indices.view(), [&](const Index& index) {
    if (index[last] == 0 || indices.get(index) < 0) return;
    Index before = index;
    --before[last];
    gap |= indices.get(index) > indices.get(before) + 1;
  });
  EXPECT_TRUE(gap);
}

TEST_P(Selection, ManyCandidatesOfTheWhole) {
  const Problem p(GetParam());
  if (p.c.packed) {  // without NaN, where some kernels would stand back
    const Sequence last = sequences_of(p.c).back();
    for (const Tensor* t : {&p.k_c, &p.v_c}) fill_value(slice(*t, 0, last.c_begin + last.c_len, t->view().size(0)), 0);
  }
  const auto outputs = outputs_of(p.whole(), whole_outputs(p), false, [](const NsaAttentionParams& params) {
    return under_test.nsa_attention(params, kCpu);
  });
  const double rho = rho_of_whole(p.c.dtype);
  const SelectionResult result = expect_valid_selection(p.selection(), outputs[1], rho);
  EXPECT_GE(result.share(), rho > 1e-5 ? 0.97 : 0.999) << result.identical << " of " << result.rows << " identical";
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const std::string suffix = dtype == DType::kFloat32 ? "_f32" : "_bf16";
    Case paper{.dtype = dtype, .q_lens = {40}, .k_lens = {2600}, .kv_heads = 2, .group = 4};
    paper.name = "paper" + suffix;
    all.push_back(paper);
    paper.name = "noise" + suffix, paper.noise = 0.7, paper.seed = 0x123456789abcdef;
    all.push_back(paper);
    Case small{.dtype = dtype, .q_lens = {500}, .kv_heads = 1, .group = 16, .cfg = small_config()};
    small.name = "small" + suffix;
    all.push_back(small);
    small.name = "small_noise" + suffix, small.noise = 2, small.seed = 3;
    all.push_back(small);
    Case dense{.dtype = dtype, .q_lens = {300}, .kv_heads = 2, .group = 3, .softmax_scale = 0.02};
    dense.cfg = {
        .kernel_size = 48, .kernel_stride = 4, .block_size = 16, .topk = 6, .init_blocks = 0, .local_blocks = 1};
    dense.name = "flat" + suffix;
    all.push_back(dense);
  }
  for (const std::int64_t dk : {64, 192}) {
    for (const std::int64_t group : {1, 2, 5, 8, 12, 16, 32, 48}) {
      Case c{.dtype = DType::kBFloat16, .q_lens = {70, 70}, .k_lens = {1500, 1500}, .kv_heads = 1, .group = group};
      c.name = "group" + std::to_string(group) + (dk == 192 ? "_192" : "");
      c.dk = dk == 64 && group % 3 == 0 ? 128 : dk;
      c.dv = std::min<std::int64_t>(c.dk, 128);
      if (group % 4 == 0) c.noise = 0.3, c.seed = 5;
      all.push_back(c);
      c.name += "_packed", c.packed = true;
      c.q_lens = {0, 130, 1, 0, 37}, c.k_lens = {9, 130, 200, 0, 500};
      c.cfg = small_config();
      all.push_back(c);
    }
  }
  // Blocks of one to sixteen strides, compression blocks that overlap or do not. Among the queries are some that see 64
  // keys and may take the block behind their strides, others with as many and a half-finished stride.
  for (const int of_key : {1, 2, 5}) {
    for (const int strides : {1, 2, 3, 4, 8, 16}) {
      Case c{.dtype = DType::kBFloat16, .q_lens = {70, 70}, .k_lens = {1080, 1080}, .kv_heads = 1};
      c.cfg = {.kernel_size = 16 * of_key,
               .kernel_stride = 16,
               .block_size = 16 * strides,
               .topk = std::max(2, std::min(16, 32 / strides)),
               .local_blocks = 1};
      std::string name("l");
      name.append(std::to_string(c.cfg.kernel_size)).append("_block").append(std::to_string(c.cfg.block_size));
      for (const std::int64_t group : {4, 16}) {
        c.name = name + "_group" + std::to_string(group), c.group = group;
        c.dk = group == 16 ? 128 : strides < 4 ? 192 : 64;
        c.dv = std::min<std::int64_t>(c.dk, 128);
        all.push_back(c);
      }
      c.name = name + "_packed", c.packed = true, c.group = of_key == 1 ? 32 : of_key == 2 ? 8 : 3;
      c.q_lens = {0, 130, 1, 0, 37}, c.k_lens = {9, 130, 1200, 0, 1060};
      c.noise = 0.3, c.seed = 7;
      all.push_back(c);
    }
  }
  // Many free slots, as with 32 short blocks.
  for (const std::int64_t group : {2, 8, 16, 32}) {
    for (const int topk : {19, 20, 32, 35, 36}) {
      Case c{.dtype = DType::kBFloat16, .q_lens = {40}, .k_lens = {topk == 32 ? 6000 : 2600}, .kv_heads = 1};
      c.name = "slots" + std::to_string(topk - 3) + "_group" + std::to_string(group), c.group = group;
      c.dk = group == 8 ? 192 : group == 32 ? 64 : 128, c.dv = std::min<std::int64_t>(c.dk, 128);
      c.cfg = {.kernel_size = topk == 20 ? 16 : 8, .kernel_stride = 8, .block_size = 32, .topk = topk};
      all.push_back(c);
      if (topk != 32) continue;
      c.name += "_noise", c.noise = 0.3, c.seed = 5;
      all.push_back(c);
    }
  }
  // More blocks than a thread block of a GPU keeps the scores of.
  Case far{.dtype = DType::kBFloat16, .q_lens = {5}, .k_lens = {27000}, .kv_heads = 1, .group = 16};
  far.name = "far", far.dk = 192, far.dv = 128;
  far.cfg = {.kernel_size = 32, .kernel_stride = 8, .block_size = 16};
  all.push_back(far);
  // The same with the blocks of the defaults, of which it keeps a half; heads whose keys it takes one after the other.
  Case filtered{.dtype = DType::kBFloat16, .q_lens = {2}, .k_lens = {54000}, .kv_heads = 3, .group = 16};
  filtered.name = "filtered", filtered.dk = filtered.dv = 128;
  filtered.cfg = {.kernel_size = 8, .kernel_stride = 4, .block_size = 16};
  all.push_back(filtered);
  filtered.name = "filtered_noise", filtered.kv_heads = 1, filtered.noise = 0.3, filtered.seed = 5;
  all.push_back(filtered);
  filtered.name = "filtered_apart", filtered.noise = 0;
  filtered.cfg = {.kernel_size = 4, .kernel_stride = 4, .block_size = 16, .topk = 32};
  all.push_back(filtered);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cases, Selection, testing::ValuesIn(supported(cases())),
                         [](const auto& info) { return info.param.name; });

TEST(SelectionTies, GoToTheLowerIndex) {
  // All compressed keys alike: every block is as important as the next, save those at the ends.
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t group : {5, 16}) {
      for (const int topk : {4, 22}) {
        for (const std::int64_t keys : {400, 1300}) {
          const std::int64_t queries = 40;  // the last ones
          Case c{.dtype = dtype, .q_lens = {queries}, .k_lens = {keys}, .kv_heads = 1, .group = group};
          c.cfg = small_config();
          c.cfg.topk = topk;
          Problem p(c);
          fill_value(p.k_c, 0.5);
          fill_exact(p.q, 3);
          CompressedAttentionParams f = p.compressed();
          f.lse = p.lse;
          Tensor o = p.query_rows(group, 64, dtype);
          f.o = o;
          ASSERT_TRUE(under_test.compressed_attention(f, kCpu).ok());
          const Tensor indices = select(p);
          // With l = 8, d = 4, l' = 16 block 0 weighs 1 less than the others: init block 0, then 1, 2, ..., then the
          // local ones.
          for (const std::int64_t row : {std::int64_t{0}, queries - 1}) {
            const std::int64_t t = keys - queries + row;
            for (std::int64_t n = 0; n < topk; ++n) {
              const std::int64_t expected = n < topk - 2 ? n : t / 16 - (topk - 1 - n);
              EXPECT_EQ(indices.get({0, row, 0, n}), static_cast<double>(expected)) << "query " << t << ", rank " << n;
            }
          }
          expect_valid_selection(p.selection(), indices, 0);
        }
      }
    }
  }
}

TEST(SelectionNoise, SeedDecides) {
  Case c{.q_lens = {300}, .kv_heads = 2, .group = 2, .cfg = small_config(), .noise = 1.5, .seed = 11};
  const Tensor first = select(Problem(c)), again = select(Problem(c));
  c.seed = 12;
  const Tensor other = select(Problem(c));
  c.noise = 0;
  const Tensor none = select(Problem(c));
  EXPECT_TRUE(same_bits(first, again));
  EXPECT_FALSE(same_bits(first, other));
  EXPECT_FALSE(same_bits(first, none));
}

}  // namespace
}  // namespace nsa::test
