// Trains the block selector, as block selection has no gradient: KL divergence from the attention that the selected
// branch would have over the whole past to the block importances.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bridge/compression.h"
#include "lm/layers/rope.h"
#include "lm/model/config.h"
#include "nsa/config.h"

namespace nsa::lm {

/// Throws Error where a selector loss of this weight has nothing to train: shared keys and a φ without weights.
void require_a_selector(const ModelConfig& config, double weight);

// What follows takes one layer, or several of the same shape as a first dimension of every tensor but `positions`.

/// The compressed keys (blocks, Hkv, D) of one sequence's k (S, Hkv, D), which are not rotated; they are, by the rows
/// of `table` at which the blocks begin. By torch's operations, φ in k's dtype.
at::Tensor compressed_keys(const at::Tensor& k, const bridge::CompressionTensors& phi, const Rotation& table,
                           const NSAConfig& cfg);

/// Of one sequence, float32 or double (T, Hkv, selection blocks), for queries q (T, H, D) at `positions`, int64 (T):
/// the importance of each block (docs/operations.md) from the compressed keys, NaN of a query that sees none, and what
/// lies in it of the attention to the keys k (S, Hkv, D).
at::Tensor block_importances(const at::Tensor& q, const at::Tensor& k_c, const at::Tensor& positions,
                             std::int64_t num_blocks, const NSAConfig& cfg);
at::Tensor block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& positions, const NSAConfig& cfg);

/// KL(attention || importances) over the blocks that are not forced, both as shares: a mean over queries, each weighed
/// by how much of its attention goes to these blocks, and over KV heads. `attention` gets no gradient.
at::Tensor block_divergence(const at::Tensor& attention, const at::Tensor& importances, const at::Tensor& positions,
                            const NSAConfig& cfg);

/// Queries of one of a batch's packed sequences.
struct SelectorSample {
  std::int64_t begin = 0, end = 0;  // rows of the sequence
  at::Tensor positions;             // int64 (T) in the sequence, on the device
};
/// Draws a sequence, with a probability proportional to its queries that have more blocks than they select, and up to
/// `num_queries` of these queries evenly over it. Nothing if there is no such query.
std::optional<SelectorSample> draw_queries(const std::vector<std::int64_t>& offsets, const NSAConfig& cfg,
                                           std::int64_t num_queries, std::uint64_t seed, at::Device device);

/// What a layer is asked: the queries (T, H, D) of a sample, rotated, its sequence's keys (S, Hkv, D), of which those
/// of the selected branch are rotated, and φ of keys, in any dtype.
struct SelectorInputs {
  at::Tensor q, k_cmp, k_slc;
  bridge::CompressionTensors phi;
};
/// The divergence of each layer: float32 or double (layers). Layers are computed together as far as memory allows,
/// since a GPU would wait for the host in each small operation. Gradients reach φ and k_cmp alone (detach a k_cmp that
/// k_slc is made from): a gradient to q would move the target.
at::Tensor selector_losses(const std::vector<SelectorInputs>& layers, const at::Tensor& positions,
                           const Rotation& table, const NSAConfig& cfg);

}  // namespace nsa::lm
