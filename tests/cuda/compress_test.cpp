// phi on the device: what a row's bits may not depend on, and calls with two tensors.
#include <gtest/gtest.h>

#include <string>

#include "core/backend.h"
#include "core/execution.h"
#include "device.h"
#include "under_test.h"

namespace nsa::cuda {
Status compress(const CompressParams& p, const CompressParams* second, Execution& e);
Status compress_backward(const CompressBackwardParams& p, const CompressBackwardParams* second, Execution& e);
}  // namespace nsa::cuda

namespace nsa::test {
namespace {

/// Enough compressed rows for wide tiles on any card.
Case long_case(CompressionKind kind) {
  return {.dtype = DType::kBFloat16,
          .q_lens = {2300},
          .kv_heads = 8,
          .group = 1,
          .cfg = {.kernel_size = 4, .kernel_stride = 1, .block_size = 16},
          .kind = kind};
}

std::vector<Tensor> compressed(const Problem& p, const CompressParams& f) {
  return outputs_of(f, compress_outputs(p, f), false,
                    [](const CompressParams& params) { return under_test.compress(params, kCpu); });
}

TEST(Compress, LengthsDoNotShowInBits) {
  // A long call takes other tiles than its first tokens alone.
  for (const CompressionKind kind : {CompressionKind::kMlp, CompressionKind::kLinear}) {
    const Problem p(long_case(kind));
    CompressParams f = p.compress_keys();
    const std::vector<Tensor> all = compressed(p, f);
    f.k = slice(f.k, 1, 0, 100);
    Tensor out(f.k.dtype, {1, p.c.cfg.num_compressed(100), p.c.kv_heads, p.c.dk});
    f.out = out;
    ASSERT_TRUE(under_test.compress(f, kCpu).ok());
    EXPECT_TRUE(same_bits(out, slice(all[0], 1, 0, out.view().size(1))));
  }
}

/// Nothing is read a stride of one batch or one head apart, so that these need not be multiples of 16 bytes, as torch's
/// often are not.
TEST(Compress, StridesOfOneEntryDoNotMatter) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    SCOPED_TRACE(name_of(dtype));
    const Problem p({.dtype = dtype, .q_lens = {200}, .kv_heads = 1, .group = 1});
    const auto odd = [](TensorView t) {
      t.stride[0] = 12345, t.stride[2] = 77;
      return t;
    };
    CompressParams f = p.compress_keys();
    const Tensor expected = std::move(compressed(p, f)[0]);
    const Tensor out = p.compressed_rows(p.c.dk, dtype);
    f.k = odd(f.k), f.out = odd(out);
    ASSERT_TRUE(under_test.compress(f, kCpu).ok());
    EXPECT_TRUE(same_bits(out, expected));

    const Tensor d_out = p.random_compressed_rows(p.c.dk, 77), d_k = p.key_rows(p.c.dk, dtype);
    CompressBackwardParams b{p.compress_keys(), d_out, {}, {}};
    const std::vector<Tensor> gradient =
        outputs_of(b, compress_backward_outputs(p, b.forward), false,
                   [](const CompressBackwardParams& params) { return under_test.compress_backward(params, kCpu); });
    b.forward.k = f.k, b.d_out = odd(d_out), b.d_k = odd(d_k);
    ASSERT_TRUE(under_test.compress_backward(b, kCpu).ok());
    EXPECT_TRUE(same_bits(d_k, gradient[0]));
  }
}

/// The outputs of both by one call, through the function of the backend.
template <class Params>
std::vector<Tensor> together(Params first, Params second, const std::vector<Output<Params>>& of_first,
                             const std::vector<Output<Params>>& of_second,
                             Status (*operation)(const Params&, const Params*, Execution&)) {
  std::vector<Tensor> results;
  const auto prepare = [&](Params& params, const std::vector<Output<Params>>& outputs) {
    for (const auto& output : outputs) {
      results.push_back(output.make(output.dtype));
      output.slot(params) = results.back();
    }
  };
  prepare(first, of_first), prepare(second, of_second);
  DeviceCopies copies;
  EXPECT_TRUE(to_device(first, copies).ok() && to_device(second, copies).ok());
  Execution measured;
  EXPECT_TRUE(operation(first, &second, measured).ok());
  const DeviceMemory workspace(measured.arena.used());
  Execution execution;
  execution.arena = Arena(workspace.data, workspace.bytes);
  const Status status = operation(first, &second, execution);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(copies.copy_back().ok());
  return results;
}

TEST(Compress, TwoTensorsAtOnceHaveTheBitsOfEach) {
  for (const std::int64_t dv : {128, 64})
    for (const bool packed : {false, true}) {
      SCOPED_TRACE(std::to_string(dv) + (packed ? ", packed" : ""));
      const Problem p(
          {.dtype = DType::kBFloat16,
           .packed = packed,
           .q_lens = packed ? std::vector<std::int64_t>{300, 7, 0, 200} : std::vector<std::int64_t>{210, 210},
           .slack = packed ? 40 : 0,
           .dk = 128,
           .dv = dv,
           .kind = CompressionKind::kMlp});
      const CompressParams f[] = {p.compress_keys(), p.compress_values()};
      const std::vector<Output<CompressParams>> outputs[] = {compress_outputs(p, f[0]), compress_outputs(p, f[1])};
      const std::vector<Tensor> both = together(f[0], f[1], outputs[0], outputs[1], cuda::compress);
      for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(same_bits(both[i], compressed(p, f[i])[0])) << "tensor " << i;

      const Tensor d_out[] = {p.random_compressed_rows(128, 77), p.random_compressed_rows(dv, 78)};
      CompressBackwardParams b[2];
      std::vector<Output<CompressBackwardParams>> gradients[2];
      std::vector<Tensor> alone;
      for (std::size_t i = 0; i < 2; ++i) {
        b[i] = {f[i], d_out[i], {}, {}};
        gradients[i] = compress_backward_outputs(p, f[i]);
        for (Tensor& t : outputs_of(b[i], gradients[i], false, [](const CompressBackwardParams& params) {
               return under_test.compress_backward(params, kCpu);
             }))
          alone.push_back(std::move(t));
      }
      const std::vector<Tensor> pair = together(b[0], b[1], gradients[0], gradients[1], cuda::compress_backward);
      ASSERT_EQ(pair.size(), alone.size());
      for (std::size_t i = 0; i < pair.size(); ++i) EXPECT_TRUE(same_bits(pair[i], alone[i])) << "gradient " << i;
    }
}

}  // namespace
}  // namespace nsa::test
