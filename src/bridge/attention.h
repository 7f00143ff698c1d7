// Attention on packed torch tensors, differentiable: native sparse attention and the sliding window of libnsa, and
// torch's own dense attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "bridge/compression.h"
#include "nsa/config.h"

namespace nsa::bridge {

struct NsaInputs {
  at::Tensor q;             // (total, H, Dk), rotated
  at::Tensor k_cmp, v_cmp;  // (total, Hkv, D), keys not rotated
  at::Tensor k_slc, v_slc;  // (total, Hkv, D), keys rotated
  at::Tensor k_swa, v_swa;
  at::Tensor gates;  // (total, H, 3)
  CompressionTensors phi_k, phi_v;
  at::Tensor rope_cos, rope_sin;  // float32 (positions, Dk / 2): of every position up to the longest sequence's
  at::Tensor cu_seqlens;          // int32 (B + 1)
  std::int64_t longest = 0;       // sequence, tokens; 0: not known
  double noise = 0;
  std::uint64_t seed = 0;
};
struct NsaOutputs {
  at::Tensor o;        // (total, H, Dv)
  at::Tensor indices;  // int32 (total, Hkv, topk)
};
NsaOutputs native_sparse_attention(const NsaInputs& inputs, const NSAConfig& cfg);

/// torch's dense attention: q (S, H, Dk), k and v (S, Hkv, D) of one sequence -> (S, H, Dv).
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

/// q (total, H, Dk), k and v (total, Hkv, D) -> (total, H, Dv).
at::Tensor sliding_window_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const at::Tensor& cu_seqlens, std::int64_t longest, std::int64_t window_size);

}  // namespace nsa::bridge
