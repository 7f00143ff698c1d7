// The bridge from torch tensors to libnsa: the operations on packed tensors, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "nsa/operations.h"

namespace nsa::lm {

/// A view of `tensor`, which must outlive it; an undefined tensor gives an undefined view.
TensorView view_of(const at::Tensor& tensor);
/// Throws std::runtime_error with the status's message unless it is ok.
void check(const Status& status);

/// Weights of the compression function; undefined tensors are absent.
struct CompressionTensors {
  CompressionKind kind = CompressionKind::kMlp;
  at::Tensor pe, w1, b1, w2, b2;

  CompressionTensors to(at::ScalarType dtype) const;
  CompressionWeights views() const;
};

/// k (total, Hkv, D) -> (floor(total / d), Hkv, D), see nsa::compress.
at::Tensor compress(const at::Tensor& k, const CompressionTensors& weights, const NSAConfig& cfg,
                    const at::Tensor& cu_seqlens);

struct NsaInputs {
  at::Tensor q;             // (total, H, Dk), rotated
  at::Tensor k_c, v_c;      // (floor(total / d), Hkv, D), keys rotated
  at::Tensor k_slc, v_slc;  // (total, Hkv, D), keys rotated
  at::Tensor k_swa, v_swa;
  at::Tensor gates;       // (total, H, 3)
  at::Tensor cu_seqlens;  // int32 (B + 1)
  double noise = 0;
  std::uint64_t seed = 0;
};
struct NsaOutputs {
  at::Tensor o;        // (total, H, Dv)
  at::Tensor indices;  // int32 (total, Hkv, topk)
};
NsaOutputs nsa_attention(const NsaInputs& inputs, const NSAConfig& cfg);

/// q (total, H, Dk), k and v (total, Hkv, D) -> (total, H, Dv).
at::Tensor sliding_window_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const at::Tensor& cu_seqlens, std::int64_t window_size);

}  // namespace nsa::lm
