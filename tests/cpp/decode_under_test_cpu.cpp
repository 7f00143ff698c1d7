#include "decode_support.h"

namespace nsa::test {

const DecodeOperations under_test{compress,           nsa_attention, decode, prefill, true, [] { return true; },
                                  [] { return true; }};

std::vector<StreamCase> decode_cases() {
  constexpr Backend kReference = Backend::kReference, kCPU = Backend::kCPU;
  constexpr DType f64 = DType::kFloat64, f32 = DType::kFloat32, bf16 = DType::kBFloat16;
  return {with(kReference, f64, [](auto&) {}),
          with(kReference, f64, [](auto& c) { c.page_size = 0, c.rope = false; }),
          with(kReference, bf16, [](auto& c) { c.kind = CompressionKind::kMean; }),
          with(kCPU, f32, [](auto&) {}),
          with(kCPU, f32, [](auto& c) { c.page_size = 48, c.group = 1; }),
          with(kCPU, f32, [](auto& c) { c.page_size = 0, c.cfg.block_size = 32; }),
          with(kCPU, bf16, [](auto& c) { c.kind = CompressionKind::kLinear; }),
          with(kCPU, bf16, [](auto& c) { c.page_size = 0, c.group = 5, c.rope = false; })};
}

}  // namespace nsa::test
