// A decoder-only language model: RMSNorm, rotary positions, grouped-query attention of one of three kinds, SwiGLU.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lm/model/config.h"
#include "lm/model/parameters.h"

namespace nsa::lm {

/// Sequences laid one after the other, in host memory; nothing attends from one to another.
struct Batch {
  at::Tensor tokens;      // int64 (total)
  at::Tensor cu_seqlens;  // int32 (B + 1), first 0, last = total
};

/// One sequence, and several.
Batch single(const std::vector<std::int64_t>& tokens);
Batch packed(const std::vector<std::vector<std::int64_t>>& sequences);

/// What one layer of attention `nsa` did; nothing is defined of a dense layer.
struct LayerTrace {
  at::Tensor gates;          // (total, H, 3) in the order cmp, slc, swa, with its gradient
  at::Tensor indices;        // int32 (total, Hkv, topk)
  at::Tensor q;              // (total, H, Dk), rotated; where ForwardOptions::trace_keys asks for it, as the keys:
  at::Tensor k_cmp, k_slc;   // (total, Hkv, Dk), the latter rotated
  at::Tensor selector_loss;  // scalar, with its gradient; where ForwardOptions::selector_queries asks for it
};
/// Their sum over the layers.
at::Tensor selector_loss(const std::vector<LayerTrace>& trace);

constexpr std::int64_t kSelectorQueries = 128;
/// How many queries of a batch training asks for the selector loss: one of 256 tokens, so that its part of a step does
/// not depend on the batch, and beyond 8192 tokens of context fewer, as each is compared with all that is before it. 16
/// ... kSelectorQueries.
std::int64_t default_selector_queries(std::int64_t tokens, std::int64_t context);

/// Causal attention of one sequence: q (S, H, Dk) and k (S, Hkv, Dk), rotated, v (S, Hkv, Dv) -> (S, H, Dv).
using SequenceAttention = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;

struct ForwardOptions {
  double noise = 0;                              // exploration noise of the selection
  std::uint64_t seed = 0;                        // of the noise; each layer derives its own
  std::array<double, 3> gate_scale = {1, 1, 1};  // multiplies g_cmp, g_slc, g_swa: 0 takes a branch out
  std::vector<LayerTrace>* trace = nullptr;      // filled with one entry per layer; `nsa` only
  bool trace_keys = false;                       // not with `selector_queries`
  std::int64_t selector_queries = 0;             // of a batch, for LayerTrace::selector_loss; drawn by `seed`
  bool recompute = false;                        // layers keep their inputs alone for the backward, and run again in it
  SequenceAttention attention;                   // in place of torch's dense one; `full` only
  at::Tensor logit_rows;                         // int64, host memory: the rows to have logits; undefined: all
};

class Model {
 public:
  /// Fresh weights from `seed`, the same for every device, in host memory. Without one their values are whatever the
  /// memory holds, for a checkpoint that has them all. `matrices`: their dtype, other than float32 for a model that
  /// will be fused. Throws Error when `config` is invalid.
  Model(const ModelConfig& config, std::optional<std::uint64_t> seed, at::ScalarType matrices = at::kFloat);
  ~Model();
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;

  const ModelConfig& config() const;

  /// Parameters in a fixed order, float32, under the names of the checkpoint; they share memory with the model.
  const NamedTensors& parameters() const;

  /// Moves the parameters to `device` and sets the dtype of matmuls and attention: float32 (default),
  /// bfloat16 or, on CUDA, float16. Norms, the residual stream, the logits and the parameters themselves stay float32.
  /// Throws Error when libnsa cannot attend there with the model's head dims or in that dtype.
  void place(at::Device device, at::ScalarType dtype);
  at::Device device() const;
  at::ScalarType compute_dtype() const;

  /// For inference alone: keeps the weights as a forward uses them, in the compute dtype, and frees the parameters, so
  /// that parameters() is empty. Called last, after place() and loading.
  void fuse();

  /// Logits float32 (total or logit_rows, vocab_size) of the token after each token, on the device. Differentiable
  /// unless under at::NoGradGuard.
  at::Tensor forward(const Batch& batch, const ForwardOptions& options = {}) const;

  /// The compressed keys (blocks, Hkv, Dk), rotated, of one sequence's LayerTrace::k_cmp in a layer.
  at::Tensor compressed_keys(std::size_t layer, const at::Tensor& k_cmp) const;

 private:
  friend class Decoder;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nsa::lm
