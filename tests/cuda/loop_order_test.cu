// Selected attention where the indices decide, for each sequence and KV head, which way it goes
// (sm90/selected_attention/loop_order.h).
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

#include "cuda/sm90/selected_attention/loop_order.h"
#include "device.h"
#include "under_test.h"

namespace nsa::test {
namespace {

constexpr int kQueries = 200, kKeys = 2000, kBlockSize = 32, kTopk = 8, kGroup = 4, kSequences = 2, kHeads = 2;

/// Neighbours choose the same blocks in one half of the sequences and heads; in the other half four of them, who share
/// a warp query by query, have no block in common.
bool alike(std::int64_t sequence, std::int64_t head) { return (sequence + head) % 2 == 0; }
int chosen(std::int64_t sequence, std::int64_t query, std::int64_t head, std::int64_t entry) {
  return static_cast<int>(alike(sequence, head) ? 6 * entry + 1 : (13 * query + 7 * entry) % 56);
}

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

  cuda::InverseArgs args{};
  args.geometry.batches = kSequences;
  args.geometry.heads = kHeads * kGroup, args.geometry.kv_heads = kHeads, args.geometry.group = kGroup;
  args.geometry.q_len = kQueries, args.geometry.k_len = kKeys;
  args.indices = {copy.data, kQueries * kHeads * kTopk, kHeads * kTopk, kTopk};
  args.topk = kTopk;
  args.lists.block_size = kBlockSize;
  args.loop_order.times = static_cast<cuda::LoopOrderCost*>(found.data);
  ASSERT_EQ(cuda::sm90::selected_attention::estimate_loop_order(args, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(times.data(), found.data, found.bytes, cudaMemcpyDeviceToHost), cudaSuccess);
  for (int sequence = 0; sequence < kSequences; ++sequence)
    for (int head = 0; head < kHeads; ++head) {
      const auto [query_major, block_major] = times[sequence * kHeads + head];
      EXPECT_EQ(query_major < block_major, alike(sequence, head)) << query_major << " and " << block_major;
    }
}

class BothOrders : public testing::TestWithParam<bool> {};

TEST_P(BothOrders, WithinTheBoundAndWithTheBitsOfEachSequenceAlone) {
  Problem p(Case{.dtype = DType::kBFloat16,
                 .packed = GetParam(),
                 .q_lens = {kQueries, kQueries},
                 .k_lens = {kKeys, kKeys},
                 .kv_heads = kHeads,
                 .group = kGroup,
                 .dk = 128,
                 .dv = 128,
                 .cfg = {.block_size = kBlockSize, .topk = kTopk}});
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

INSTANTIATE_TEST_SUITE_P(LoopOrder, BothOrders, testing::Bool());

}  // namespace
}  // namespace nsa::test
