// The bridge from torch tensors to libnsa: the operations on packed tensors, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#include "lm/rope.h"
#include "nsa/operations.h"

namespace nsa::lm {

/// A view of `tensor`, which must outlive it; an undefined tensor gives an undefined view.
TensorView view_of(const at::Tensor& tensor);
/// Throws unless `status` is ok: Error where a backend cannot do the call, else std::runtime_error.
void check(const Status& status);

/// `context` with `bytes` of workspace, which `memory` holds, on torch's default stream: the one the language model
/// uses everywhere.
Context with_workspace(Context context, at::Device device, std::size_t bytes, at::Tensor& memory);

/// Runs an operation of libnsa, e.g. call(nsa::combine, params, device), on tensors of `device`. Throws as check does.
/// torch gives the workspace to nobody else before the stream has passed the operation.
template <class Params>
void call(Status (*operation)(const Params&, const Context&), const Params& params, at::Device device,
          const Context& context = {}) {
  if (device.is_cpu()) return check(operation(params, context));
  std::size_t bytes = 0;
  check(workspace_size(params, bytes, context));
  at::Tensor memory;
  check(operation(params, with_workspace(context, device, bytes, memory)));
}

/// Weights of the compression function; undefined tensors are absent.
struct CompressionTensors {
  CompressionKind kind = CompressionKind::kMlp;
  at::Tensor pe, w1, b1, w2, b2;

  /// In the dtype, and on the device if `options` has one.
  CompressionTensors to(const at::TensorOptions& options) const;
  CompressionWeights views() const;
};

struct NsaInputs {
  at::Tensor q;             // (total, H, Dk), rotated
  at::Tensor k_cmp, v_cmp;  // (total, Hkv, D), keys not rotated
  at::Tensor k_slc, v_slc;  // (total, Hkv, D), keys rotated
  at::Tensor k_swa, v_swa;
  at::Tensor gates;  // (total, H, 3)
  CompressionTensors phi_k, phi_v;
  Rotation rotation;         // of every position up to the longest sequence's
  at::Tensor cu_seqlens;     // int32 (B + 1)
  std::int64_t longest = 0;  // sequence, tokens; 0: not known
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

}  // namespace nsa::lm
