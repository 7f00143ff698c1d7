// Problems as large as those of use: one forward over a sequence whose queries have 2^31 elements, checked at sampled
// rows against the oracle, and the bits of many calls at 64k tokens, where a race would show.
//   NSA_FULL_SIZE_REPEATS=1000     calls of the forward (default 5), a fifth as many of the backward
#include <gtest/gtest.h>

#include <cstdlib>
#include <future>
#include <ostream>
#include <string>

#include "bench/gpu/cuda_device.cuh"
#include "reference/reference.h"
#include "support/environment.h"
#include "support/tolerance.h"

namespace nsa::test {
namespace {

constexpr std::int64_t kDim = 128;
constexpr std::int64_t kTokens = 1 << 20, kHeads = 16;  // of the long sequence
// 2^31 elements of queries, of outputs and of what the window is added to, 2^27 of each key or value, and the scratch.
constexpr std::size_t kMemory = std::size_t{24} << 30;

/// Rows [begin, end) of a (1, rows, heads, columns) tensor on the device, in host memory.
Tensor rows_of(const TensorView& device, std::int64_t begin, std::int64_t end) {
  Tensor host(device.dtype, {1, end - begin, device.size(2), device.size(3)});
  const auto bytes = static_cast<std::size_t>(device.stride[1]) * size_of(device.dtype);
  bench::check(cudaMemcpy(host.view().data, static_cast<const char*>(device.data) + begin * bytes,
                          static_cast<std::size_t>(end - begin) * bytes, cudaMemcpyDeviceToHost),
               "cudaMemcpy");
  return host;
}

/// The tokens up to t of the selected blocks, one after the other.
Tensor selected_rows(const TensorView& tokens, const TensorView& indices, int block_size, std::int64_t t) {
  std::vector<std::int64_t> taken;
  for (const double block : values_of(indices))
    for (std::int64_t i = 0; block >= 0 && i < block_size; ++i)
      if (const auto token = static_cast<std::int64_t>(block) * block_size + i; token <= t) taken.push_back(token);
  Tensor rows(tokens.dtype, {1, static_cast<std::int64_t>(taken.size()), 1, kDim});
  for (std::size_t i = 0; i < taken.size(); ++i)
    assign(slice(tokens, 1, taken[i], taken[i] + 1),
           slice(rows, 1, static_cast<std::int64_t>(i), static_cast<std::int64_t>(i) + 1));
  return rows;
}

/// A query's whole attention in this precision, float64: the oracle, attending to given blocks.
Tensor attend(const NsaAttentionParams& host, std::int64_t t, const TensorView& q, const TensorView& gates,
              const TensorView& indices, DType precision) {
  const NSAConfig& cfg = host.cfg;
  const auto row = [](DType dtype) { return Tensor(dtype, {1, 1, kHeads, kDim}); };
  Tensor o_cmp = row(DType::kFloat64), o_slc = row(DType::kFloat64), o_swa = row(DType::kFloat64),
         o = row(DType::kFloat64), lse(DType::kFloat64, {1, kHeads, 1});
  const std::int64_t blocks = cfg.num_compressed(t + 1), window = std::min<std::int64_t>(cfg.window_size, t + 1);
  const auto ok = [](const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); };
  ok(reference::run(
      CompressedAttentionParams{
          q, slice(host.k_c, 1, 0, blocks), slice(host.v_c, 1, 0, blocks), cfg, {}, t + 1, {}, o_cmp, lse},
      precision));
  // With its keys gathered, a query sees all of them: a window as long as they are.
  const Tensor k = selected_rows(host.k_slc, indices, cfg.block_size, t);
  const Tensor v = selected_rows(host.v_slc, indices, cfg.block_size, t);
  ok(reference::run(SlidingWindowAttentionParams{q, k, v, k.view().size(1), {}, {}, o_slc, lse}, precision));
  ok(reference::run(SlidingWindowAttentionParams{q,
                                                 slice(host.k_swa, 1, t + 1 - window, t + 1),
                                                 slice(host.v_swa, 1, t + 1 - window, t + 1),
                                                 window,
                                                 {},
                                                 {},
                                                 o_swa,
                                                 lse},
                    precision));
  ok(reference::run(CombineParams{o_cmp, o_slc, o_swa, gates, o}, precision));
  return o;
}

std::size_t free_memory() {
  std::size_t free = 0, total = 0;
  bench::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

TEST(FullSize, AMillionTokens) {
  const std::size_t free = free_memory();
  if (free < kMemory)
    GTEST_SKIP() << "needs " << (kMemory >> 30) << " GiB of GPU memory, " << (free >> 30) << " are free";
  bench::Tensors device;
  NsaAttentionParams params;
  const std::int64_t blocks = params.cfg.num_compressed(kTokens);
  params.q = device.random({1, kTokens, kHeads, kDim});
  params.k_c = device.random({1, blocks, 1, kDim});
  params.v_c = device.random({1, blocks, 1, kDim});
  params.k_slc = params.k_swa = device.random({1, kTokens, 1, kDim});
  params.v_slc = params.v_swa = device.random({1, kTokens, 1, kDim});
  params.gates = device.random({1, kTokens, kHeads, 3}, 0.1f, 0.5f);
  params.o = device.tensor(DType::kBFloat16, {1, kTokens, kHeads, kDim});
  params.indices = device.tensor(DType::kInt32, {1, kTokens, 1, params.cfg.topk});
  ASSERT_GE(params.q.numel(), std::int64_t{1} << 31);
  Context context;
  ASSERT_TRUE(workspace_size(params, context.workspace_size).ok());
  context.workspace = device.take(context.workspace_size);
  cudaEvent_t begin, end;
  bench::check(cudaEventCreate(&begin), "event");
  bench::check(cudaEventCreate(&end), "event");
  for (int i = 0; i < 2; ++i) {  // the first call loads the kernels
    bench::check(cudaEventRecord(begin), "event");
    bench::check(nsa_attention(params, context), "nsa_attention");
    bench::check(cudaEventRecord(end), "event");
  }
  bench::check(cudaEventSynchronize(end), "nsa_attention");
  float ms = 0;
  bench::check(cudaEventElapsedTime(&ms, begin, end), "event");
  std::printf("%lld tokens, H = %lld, Hkv = 1, D = %lld: %.0f ms, workspace %.1f GiB\n",
              static_cast<long long>(kTokens), static_cast<long long>(kHeads), static_cast<long long>(kDim), ms,
              static_cast<double>(context.workspace_size) / (1 << 30));

  NsaAttentionParams host = params;
  std::vector<Tensor> copies;
  for (TensorView* t : {&host.k_c, &host.v_c, &host.k_slc, &host.v_slc}) {
    copies.push_back(rows_of(*t, 0, t->size(1)));
    *t = copies.back();
  }
  host.k_swa = host.k_slc;
  host.v_swa = host.v_slc;
  std::vector<std::future<void>> checks;
  for (const std::int64_t t :
       {0l, 31l, 1023l, 4097l, 65535l, 300001l, 524287l, 524288l, 700000l, kTokens - 64, kTokens - 2, kTokens - 1})
    checks.push_back(std::async(std::launch::async, [&, t] {
      SCOPED_TRACE(testing::Message() << "query " << t);
      const Tensor q = rows_of(params.q, t, t + 1), gates = rows_of(params.gates, t, t + 1),
                   o = rows_of(params.o, t, t + 1), indices = rows_of(params.indices, t, t + 1);
      const std::int64_t visible = host.cfg.num_compressed(t + 1);
      const Tensor lse(DType::kFloat32, {1, kHeads, 1});  // its shape: the check computes its own
      const SelectBlocksParams select{q, slice(host.k_c, 1, 0, visible), lse, host.cfg, {}, t + 1};
      expect_valid_selection(select, indices, 1e-3);
      EXPECT_TRUE(within_bound(o, attend(host, t, q, gates, indices, DType::kBFloat16),
                               attend(host, t, q, gates, indices, DType::kFloat64)));
    }));
  for (auto& check : checks) check.get();
}

/// Adds one where two words differ.
__global__ void count_differences(const unsigned* a, const unsigned* b, std::int64_t words, unsigned* count) {
  unsigned mine = 0;
  for (std::int64_t i = blockIdx.x * 256ll + threadIdx.x; i < words; i += gridDim.x * 256ll) mine += a[i] != b[i];
  if (mine) atomicAdd(count, mine);
}

/// The outputs of a call, twice.
class Outputs {
 public:
  explicit Outputs(bench::Tensors& device) : device_(device), count_(device.tensor(DType::kInt32, {1})) {}

  TensorView make(DType dtype, std::initializer_list<std::int64_t> shape) {
    views_.push_back(device_.tensor(dtype, shape));
    firsts_.push_back(device_.tensor(dtype, shape));
    return views_.back();
  }
  void keep() const {
    for (std::size_t i = 0; i < views_.size(); ++i)
      bench::check(cudaMemcpy(firsts_[i].data, views_[i].data, bytes(i), cudaMemcpyDeviceToDevice), "cudaMemcpy");
  }
  /// Clears the outputs, which the next call has to write.
  void clear() const {
    for (std::size_t i = 0; i < views_.size(); ++i)
      bench::check(cudaMemsetAsync(views_[i].data, 0xff, bytes(i)), "cudaMemset");
  }
  unsigned differences() const {
    bench::check(cudaMemsetAsync(count_.data, 0, 4), "cudaMemset");
    for (std::size_t i = 0; i < views_.size(); ++i)
      count_differences<<<1056, 256>>>(views_[i].as<const unsigned>(), firsts_[i].as<const unsigned>(),
                                       static_cast<std::int64_t>(bytes(i) / 4), count_.as<unsigned>());
    unsigned count = 0;
    bench::check(cudaMemcpy(&count, count_.data, 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return count;
  }

 private:
  std::size_t bytes(std::size_t i) const {
    return static_cast<std::size_t>(views_[i].numel()) * size_of(views_[i].dtype);
  }

  bench::Tensors& device_;
  TensorView count_;
  std::vector<TensorView> views_, firsts_;
};

struct Repeated {
  std::string name;
  std::int64_t kv_heads, key_dim;
  friend void PrintTo(const Repeated& problem, std::ostream* out) { *out << problem.name; }
};

class Repeats : public testing::TestWithParam<Repeated> {};

TEST_P(Repeats, TheSameBitsEveryTime) {
  constexpr std::int64_t kLength = 1 << 16, kQueryHeads = 64;
  const std::int64_t kv_heads = GetParam().kv_heads, key_dim = GetParam().key_dim;
  const char* wish = std::getenv("NSA_FULL_SIZE_REPEATS");
  const int repeats = wish ? std::atoi(wish) : 5;
  if (free_memory() < kMemory) GTEST_SKIP() << "needs " << (kMemory >> 30) << " GiB of GPU memory";
  bench::Tensors device;
  const auto keys = [&](std::int64_t rows) { return device.random({1, rows, kv_heads, key_dim}); };
  const auto values = [&](std::int64_t rows) { return device.random({1, rows, kv_heads, kDim}); };
  Outputs outputs(device), gradients(device);
  NsaAttentionBackwardParams params;
  NsaAttentionParams& f = params.forward;
  const std::int64_t blocks = f.cfg.num_compressed(kLength);
  f.q = device.random({1, kLength, kQueryHeads, key_dim});
  params.d_o = device.random({1, kLength, kQueryHeads, kDim});
  f.k_c = keys(blocks), f.v_c = values(blocks);
  f.k_slc = keys(kLength), f.v_slc = values(kLength), f.k_swa = keys(kLength), f.v_swa = values(kLength);
  f.gates = device.random({1, kLength, kQueryHeads, 3}, 0.1f, 0.5f);
  for (TensorView* t : {&f.o, &f.o_cmp, &f.o_slc, &f.o_swa})
    *t = outputs.make(DType::kBFloat16, {1, kLength, kQueryHeads, kDim});
  for (TensorView* t : {&f.lse_cmp, &f.lse_slc, &f.lse_swa})
    *t = outputs.make(DType::kFloat32, {1, kQueryHeads, kLength});
  f.indices = outputs.make(DType::kInt32, {1, kLength, kv_heads, f.cfg.topk});
  params.d_q = gradients.make(DType::kBFloat16, {1, kLength, kQueryHeads, key_dim});
  params.d_k_c = gradients.make(DType::kBFloat16, {1, blocks, kv_heads, key_dim});
  params.d_v_c = gradients.make(DType::kBFloat16, {1, blocks, kv_heads, kDim});
  for (TensorView* t : {&params.d_k_slc, &params.d_k_swa})
    *t = gradients.make(DType::kBFloat16, {1, kLength, kv_heads, key_dim});
  for (TensorView* t : {&params.d_v_slc, &params.d_v_swa})
    *t = gradients.make(DType::kBFloat16, {1, kLength, kv_heads, kDim});
  params.d_gates = gradients.make(DType::kBFloat16, {1, kLength, kQueryHeads, 3});
  Context context;
  std::size_t for_backward = 0;
  ASSERT_TRUE(workspace_size(f, context.workspace_size).ok());
  ASSERT_TRUE(workspace_size(params, for_backward).ok());
  context.workspace_size = std::max(context.workspace_size, for_backward);
  context.workspace = device.take(context.workspace_size);

  const auto repeat = [&](const char* name, int times, const Outputs& found, const auto& call) {
    for (int i = 0; i < times; ++i) {
      found.clear();
      bench::check(cudaMemsetAsync(context.workspace, 0xff, context.workspace_size), "cudaMemset");
      bench::check(call(), name);
      if (i == 0) {
        found.keep();
      } else {
        ASSERT_EQ(found.differences(), 0u) << name << ", call " << i;
      }
    }
  };
  repeat("nsa_attention", repeats, outputs, [&] { return nsa_attention(f, context); });
  {  // Fewer thread blocks have more tiles each, so that compressed_select serves KV heads in turn where they are many.
    const Environment processors("NSA_CUDA_PROCESSORS", "16");
    outputs.clear();
    bench::check(nsa_attention(f, context), "nsa_attention");
    EXPECT_EQ(outputs.differences(), 0u) << "with 16 thread blocks";
  }
  repeat("nsa_attention_backward", std::max(2, repeats / 5), gradients,
         [&] { return nsa_attention_backward(params, context); });
}

INSTANTIATE_TEST_SUITE_P(FullSize, Repeats,
                         testing::Values(Repeated{"defaults", 4, 128}, Repeated{"keys192", 4, 192},
                                         Repeated{"group2", 32, 128}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace nsa::test
