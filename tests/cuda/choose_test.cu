// Which calls the kernels of compute capability 9.0 serve. Needs no device.
#include <gtest/gtest.h>

#include "cuda/sm90/kernels.h"

namespace nsa::cuda::sm90 {
namespace {

Call call() {
  Call c;
  c.dtype = DType::kBFloat16;
  c.key_dim = c.value_dim = 128;
  c.group = 16;
  c.block_size = 64;
  c.topk = 16;
  c.selection = Selection{};
  c.selection->blocks = 1024;
  return c;
}

TEST(Choose, TheDefaultsHaveEveryKernel) {
  const Kernels k = choose(call());
  EXPECT_TRUE(k.range_forward && k.window_combine && k.compressed_select && k.selected_forward);
  EXPECT_TRUE(k.range_d_q && k.range_d_kv && k.selected_d_q && k.selected_d_kv);
}

TEST(Choose, NoneForFloat32OrOtherGroupsOrLayouts) {
  Call c = call();
  c.dtype = DType::kFloat32;
  EXPECT_FALSE(any(choose(c)));
  c = call(), c.group = 24;
  EXPECT_FALSE(any(choose(c)));
  c = call(), c.mappable = false;
  EXPECT_FALSE(any(choose(c)));
}

TEST(Choose, SmallGroups) {
  Call c = call();
  c.group = 5;
  const Kernels k = choose(c);
  EXPECT_TRUE(k.range_forward && k.selected_forward && k.range_d_kv && k.compressed_select);
  EXPECT_FALSE(k.selected_d_kv);
}

TEST(Choose, OtherBlocks) {
  Call c = call();
  c.block_size = 16;
  const Kernels k = choose(c);
  EXPECT_TRUE(k.range_forward && k.range_d_q);
  EXPECT_FALSE(k.selected_forward || k.selected_d_q || k.selected_d_kv);
}

TEST(Choose, VeryLongSelections) {
  // Where a unit is one query, what to rank by lies in shared memory.
  Call c = call();
  c.selection->blocks = 1 << 20;
  for (const int group : {12, 16, 32}) {
    c.group = group;
    EXPECT_FALSE(choose(c).compressed_select) << group;
  }
  c.group = 4;
  EXPECT_TRUE(choose(c).compressed_select);
}

TEST(Choose, LargeGroups) {
  Call c = call();
  for (const int group : {32, 48, 192}) {
    c.group = group;
    EXPECT_TRUE(choose(c).compressed_select) << group;
  }
  c.group = 208;
  EXPECT_FALSE(choose(c).compressed_select);
}

}  // namespace
}  // namespace nsa::cuda::sm90

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
