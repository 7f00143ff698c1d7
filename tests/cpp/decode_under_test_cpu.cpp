#include "decode_support.h"

namespace nsa::test {

const DecodeOperations under_test{compress,           nsa_attention, decode, prefill, fork, true, [] { return true; },
                                  [] { return true; }};

std::vector<StreamCase> decode_cases() {
  constexpr Backend kReference = Backend::kReference, kCPU = Backend::kCPU;
  constexpr DType f64 = DType::kFloat64, f32 = DType::kFloat32, bf16 = DType::kBFloat16;
  // The last scale is too small: a fraction of the values saturates.
  const auto e4m3 = [](StreamCase& c) { c.k_scale = {0.01f, 0.75f}, c.v_scale = {0.3f, 0.004f}; };
  return {with(kReference, f64, [](auto&) {}),
          with(kReference, f64, [](auto& c) { c.page_size = 0, c.rope = false; }),
          with(kReference, bf16, [](auto& c) { c.kind = CompressionKind::kMean; }),
          with(kReference, f64, e4m3),
          with(kReference, bf16, [&](auto& c) { e4m3(c), c.page_size = 0; }),
          with(kCPU, f32, [](auto&) {}),
          with(kCPU, f32, e4m3),
          with(kCPU, bf16, [&](auto& c) { e4m3(c), c.page_size = 48, c.group = 5; }),
          with(kCPU, bf16, [&](auto& c) { e4m3(c), c.page_size = 0, c.kind = CompressionKind::kLinear; }),
          with(kCPU, f32, [](auto& c) { c.page_size = 48, c.group = 1; }),
          with(kCPU, f32, [](auto& c) { c.page_size = 0, c.cfg.block_size = 32; }),
          with(kCPU, bf16, [](auto& c) { c.kind = CompressionKind::kLinear; }),
          with(kCPU, bf16, [](auto& c) { c.page_size = 0, c.group = 5, c.rope = false; })};
}

}  // namespace nsa::test
