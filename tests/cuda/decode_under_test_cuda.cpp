#include "decode_support.h"
#include "device.h"

namespace nsa::test {
namespace {

template <class Params, Status (*function)(const Params&, const Context&)>
Status run(const Params& params, const Context&) {
  return on_device<Params>(params, function);
}

StreamCase with_dims(DType dtype, std::int64_t dk, std::int64_t dv, auto&& change) {
  return with(Backend::kCUDA, dtype, [&](StreamCase& c) {
    c.dk = dk, c.dv = dv;
    change(c);
  });
}

}  // namespace

const DecodeOperations under_test{run<CompressParams, compress>,
                                  run<NsaAttentionParams, nsa_attention>,
                                  run<DecodeParams, decode>,
                                  run<DecodeParams, prefill>,
                                  run<ForkParams, fork>,
                                  false,  // a chunk rounds the branches before it adds them
                                  [] { return !hopper_kernels_run(); },
                                  [] { return !hopper_kernels_run(); }};  // nor does compress

std::vector<StreamCase> decode_cases() {
  constexpr DType f32 = DType::kFloat32, bf16 = DType::kBFloat16, f16 = DType::kFloat16;
  // The last scale is too small: a fraction of the values saturates.
  const auto e4m3 = [](StreamCase& c) { c.k_scale = {0.01f, 0.75f}, c.v_scale = {0.3f, 0.004f}; };
  return {with_dims(f32, 64, 64, [](auto&) {}),
          with_dims(f32, 192, 128, [](auto& c) { c.page_size = 48, c.group = 1, c.kind = CompressionKind::kLinear; }),
          with_dims(bf16, 128, 128, [](auto& c) { c.kind = CompressionKind::kMean; }),
          with_dims(bf16, 64, 64, [](auto& c) { c.page_size = 0, c.cfg.block_size = 32, c.group = 17; }),
          with_dims(f16, 192, 128, [](auto& c) { c.page_size = 0, c.group = 5, c.rope = false; }),
          // The other head dims of each type, so that every kernel runs.
          with_dims(f32, 128, 128, [](auto& c) { c.kind = CompressionKind::kMean; }),
          with_dims(bf16, 192, 128, [](auto& c) { c.group = 4; }),
          with_dims(f16, 64, 64, [](auto& c) { c.page_size = 32, c.group = 3; }),
          with_dims(f32, 192, 128, [](auto& c) { c.page_size = 32; }),
          with_dims(f16, 128, 128, [](auto& c) { c.kind = CompressionKind::kLinear, c.group = 8; }),
          // Steps by the kernels for Hopper: one and two tiles of a query, two and three clusters; blocks of 2, 4, 8
          // and 16 compressed keys.
          with_dims(bf16, 128, 128, [](auto& c) { c.group = 16, c.cfg = {16, 8, 32, 5, 1, 2, 20}; }),
          with_dims(bf16, 64, 64,
                    [](auto& c) { c.page_size = 48, c.group = 3, c.length = 300, c.cfg = {8, 8, 32, 4, 1, 1, 33}; }),
          with_dims(f16, 192, 128,
                    [](auto& c) { c.page_size = 0, c.group = 32, c.length = 200, c.cfg = {64, 16, 64, 2, 0, 1, 70}; }),
          with_dims(f16, 64, 64,
                    [](auto& c) { c.page_size = 64, c.group = 1, c.length = 400, c.cfg = {4, 2, 32, 6, 1, 2, 40}; }),
          with_dims(bf16, 128, 128,
                    [](auto& c) { c.page_size = 16, c.group = 5, c.length = 400, c.cfg = {32, 16, 128, 2, 0, 1, 48}; }),
          with_dims(bf16, 64, 64, [](auto& c) { c.group = 24, c.length = 200, c.cfg = {32, 16, 32, 4, 1, 1, 512}; }),
          with_dims(bf16, 128, 128, [](auto& c) { c.group = 48, c.page_size = 32, c.cfg = {16, 8, 32, 2, 1, 1, 20}; }),
          with_dims(f16, 64, 64, [](auto& c) { c.group = 80, c.page_size = 48, c.cfg = {32, 16, 32, 2, 0, 1, 33}; }),
          with_dims(bf16, 192, 128, [](auto& c) { c.group = 33, c.cfg = {8, 8, 32, 2, 0, 1, 40}; }),
          // Caches in e4m3: by portable kernels, then by those for Hopper.
          with_dims(f32, 64, 64, e4m3), with_dims(f32, 192, 128, [&](auto& c) { e4m3(c), c.page_size = 0; }),
          with_dims(f32, 128, 128,
                    [&](auto& c) { e4m3(c), c.page_size = 48, c.group = 4, c.kind = CompressionKind::kLinear; }),
          with_dims(bf16, 128, 128, [&](auto& c) { e4m3(c), c.page_size = 48, c.kind = CompressionKind::kMean; }),
          with_dims(f16, 64, 64, [&](auto& c) { e4m3(c), c.group = 8; }),
          with_dims(bf16, 128, 128, [&](auto& c) { e4m3(c), c.group = 16, c.cfg = {16, 8, 32, 5, 1, 2, 20}; }),
          with_dims(bf16, 64, 64,
                    [&](auto& c) {
                      e4m3(c), c.page_size = 64, c.kind = CompressionKind::kLinear, c.length = 200;
                      c.cfg = {8, 8, 32, 4, 1, 1, 33};
                    }),
          with_dims(bf16, 64, 64, [&](auto& c) { e4m3(c), c.group = 24, c.cfg = {32, 16, 32, 2, 1, 1, 512}; }),
          with_dims(f16, 192, 128,
                    [&](auto& c) { e4m3(c), c.page_size = 0, c.group = 32, c.cfg = {64, 16, 64, 2, 0, 1, 70}; }),
          with_dims(bf16, 128, 128, [&](auto& c) { e4m3(c), c.group = 64, c.cfg = {16, 8, 32, 2, 1, 1, 20}; })};
}

}  // namespace nsa::test
