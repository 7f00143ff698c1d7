// Selected attention where the indices decide, for each sequence and KV head, in which order it goes
// (sm90/selected_attention/loop_order.h).
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "cuda/portable/instances.h"
#include "cuda/sm90/selected_attention/loop_order.h"
#include "device.h"
#include "under_test.h"

namespace nsa::test {
namespace {

constexpr int kQueries = 200, kBlocks = 62, kTopk = 8, kSequences = 2, kHeads = 2;

/// Neighbours choose the same blocks in one half of the sequences and heads; in the other half four of them have no
/// block in common.
bool alike(std::int64_t sequence, std::int64_t head) { return (sequence + head) % 2 == 0; }
/// The last entry of a row is none, in the future, or one that the row has twice.
int chosen(std::int64_t sequence, std::int64_t query, std::int64_t head, std::int64_t entry) {
  if (entry == kTopk - 1 && query % 4 == 1) return -1;
  if (entry == kTopk - 1 && query % 4 == 2) return kBlocks;
  if (entry == kTopk - 1 && query % 4 == 3) entry = 0;
  return static_cast<int>(alike(sequence, head) ? 6 * entry + 1 : (13 * query + 7 * entry) % 56);
}

/// Where neighbours choose alike, query-major is faster than block-major, and unions are faster than query-major.
TEST(LoopOrder, IndicesDecideForEachSequenceAndHead) {
  std::vector<int> indices;
  for (int sequence = 0; sequence < kSequences; ++sequence)
    for (int query = 0; query < kQueries; ++query)
      for (int head = 0; head < kHeads; ++head)
        for (int entry = 0; entry < kTopk; ++entry) indices.push_back(chosen(sequence, query, head, entry));
  const DeviceMemory copy(indices.size() * sizeof(int));
  std::vector<cuda::LoopOrderCost> times(kSequences * kHeads);
  const DeviceMemory found(times.size() * sizeof(times[0]));
  ASSERT_EQ(cudaMemcpy(copy.data, indices.data(), copy.bytes, cudaMemcpyHostToDevice), cudaSuccess);

  for (const auto& [group, block_size, union_key_dim] :
       {std::tuple{4, 32, 0}, {8, 64, 128}, {16, 32, 128}, {16, 64, 128}, {16, 128, 192}, {32, 128, 192}}) {
    cuda::SelectedArgs args{};
    args.geometry.batches = kSequences;
    args.geometry.heads = kHeads * group, args.geometry.kv_heads = kHeads, args.geometry.group = group;
    args.geometry.q_len = kQueries, args.geometry.k_len = kBlocks * block_size;
    args.indices = {copy.data, kQueries * kHeads * kTopk, kHeads * kTopk, kTopk};
    args.topk = kTopk;
    args.block_size = block_size;
    const cuda::LoopOrder loop_order{static_cast<cuda::LoopOrderCost*>(found.data)};
    using cuda::sm90::selected_attention::estimate_loop_order;
    ASSERT_EQ(estimate_loop_order(args, loop_order, union_key_dim, nullptr), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(times.data(), found.data, found.bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    for (int sequence = 0; sequence < kSequences; ++sequence)
      for (int head = 0; head < kHeads; ++head) {
        const auto [query_major, alternative] = times[sequence * kHeads + head];
        EXPECT_EQ(query_major < alternative, alike(sequence, head) == (union_key_dim == 0))
            << group << ", " << block_size << ", " << union_key_dim << ": " << query_major << " and " << alternative;
      }
  }
}

using Shape = std::tuple<bool, int, int, int>;  // packed, G, l', Dk

class BothOrders : public testing::TestWithParam<Shape> {};

TEST_P(BothOrders, WithinTheBoundAndWithTheBitsOfEachSequenceAlone) {
  const auto [packed, group, block_size, key_dim] = GetParam();
  const int keys = kBlocks * block_size, value_dim = key_dim == 64 ? 64 : 128;
  const DType dtype = group == 8 ? DType::kFloat16 : DType::kBFloat16;
  if (!cuda::portable::attention_kernels(dtype, key_dim, value_dim))
    GTEST_SKIP() << "a build without kernels for these head dims";
  Problem p(Case{.dtype = dtype,
                 .packed = packed,
                 .q_lens = {kQueries, packed ? kQueries - 69 : kQueries},
                 .k_lens = {keys, keys},
                 .kv_heads = kHeads,
                 .group = group,
                 .dk = key_dim,
                 .dv = value_dim,
                 .cfg = {.block_size = block_size, .topk = kTopk}});
  const auto attention = [](const Problem& problem) {
    return outputs_of(problem.selected(), selected_outputs(problem), false, [](const SelectedAttentionParams& params) {
      return under_test.selected_attention(params, kCpu);
    });
  };
  for (const Sequence& s : sequences_of(p.c)) {
    const TensorView own = part_of(p.indices, Rows::kQueries, s);
    const int rows = own.rank - 3;  // the dimension of rows
    for_each_index(own, [&](const Index& at) {
      set_element(own, offset_of(own, at), chosen(s.index, at[rows], at[rows + 1], at[rows + 2]));
    });
  }
  expect_within_bound<SelectedAttentionParams>(p.selected(), selected_outputs(p), p.c.dtype,
                                               under_test.selected_attention, reference::run, under_test.floor);
  const std::vector<Tensor> together = attention(p);
  for (const Sequence& s : sequences_of(p.c)) {
    const std::vector<Tensor> alone = attention(p.alone(static_cast<std::size_t>(s.index)));
    for (std::size_t i = 0; i < alone.size(); ++i)
      EXPECT_TRUE(same_bits(part_of(together[i], selected_outputs(p)[i].rows, s), alone[i])) << s.index << ", " << i;
  }
}

/// The queries of a warpgroup over unions have a first and a last block far from each other in the ring, and the
/// softmax changes its reference at the last one, whose scores are large.
TEST(Union, ALateBlockWithLargeScores) {
  constexpr int kBlockSize = 64, kLate = 40;
  Problem p(Case{.dtype = DType::kBFloat16,
                 .packed = false,
                 .q_lens = {kQueries},
                 .k_lens = {kBlocks * kBlockSize},
                 .kv_heads = 1,
                 .group = 16,
                 .dk = 128,
                 .dv = 128,
                 .cfg = {.block_size = kBlockSize, .topk = kTopk}});
  // Of twelve queries four choose the first and the late block; the others eight blocks for each four.
  for_each_index(p.indices, [&](const Index& at) {
    const auto four = at[1] % 12 / 4, entry = at[3];
    const auto block = four > 0 ? 4 * entry + four : entry == 0 ? 0 : entry == kTopk - 1 ? kLate : -1;
    p.indices.set(at, static_cast<double>(block));
  });
  for_each_index(p.k_slc, [&](const Index& at) {
    if (at[1] / kBlockSize == kLate) p.k_slc.set(at, 8 * p.k_slc.get(at));
  });
  expect_within_bound<SelectedAttentionParams>(p.selected(), selected_outputs(p), p.c.dtype,
                                               under_test.selected_attention, reference::run, under_test.floor);
}

INSTANTIATE_TEST_SUITE_P(BlockMajor, BothOrders,
                         testing::Combine(testing::Bool(), testing::Values(4), testing::Values(32),
                                          testing::Values(128)));
INSTANTIATE_TEST_SUITE_P(Union, BothOrders,
                         testing::Combine(testing::Values(true), testing::Values(8, 16), testing::Values(32, 64, 128),
                                          testing::Values(64, 128, 192)));
INSTANTIATE_TEST_SUITE_P(UnionOfSlices, BothOrders,
                         testing::Combine(testing::Bool(), testing::Values(32), testing::Values(64),
                                          testing::Values(128)));

}  // namespace
}  // namespace nsa::test
