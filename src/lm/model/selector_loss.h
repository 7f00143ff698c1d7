// What teaches the choice of blocks, which has no gradient: how far the importances by which blocks are chosen are from
// what the selected branch would attend to, had it the whole past.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "bridge/compression.h"
#include "lm/layers/rope.h"
#include "lm/model/config.h"
#include "nsa/config.h"

namespace nsa::lm {

/// Throws Error where a selector loss of this weight has nothing to teach: shared keys and a φ without weights.
void require_a_selector(const ModelConfig& config, double weight);

/// The compressed keys (blocks, Hkv, D) of one sequence's k (S, Hkv, D), which are not rotated; they are, by the rows
/// of `table` at which the blocks begin. By torch's operations, φ in k's dtype.
at::Tensor compressed_keys(const at::Tensor& k, const bridge::CompressionTensors& phi, const Rotation& table,
                           const NSAConfig& cfg);

/// Of one sequence, float32 or double (T, Hkv, selection blocks), for queries q (T, H, D) at `positions`, int64 (T):
/// the importance of each block (docs/operations.md) from the compressed keys, and what lies in it of the attention to
/// the keys k (S, Hkv, D).
at::Tensor block_importances(const at::Tensor& q, const at::Tensor& k_c, const at::Tensor& positions,
                             std::int64_t num_blocks, const NSAConfig& cfg);
at::Tensor block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& positions, const NSAConfig& cfg);

/// KL(attention || importances) over the blocks that are not forced, both as shares; summed over queries and KV heads.
/// `attention` gets no gradient.
at::Tensor block_divergence(const at::Tensor& attention, const at::Tensor& importances, const at::Tensor& positions,
                            const NSAConfig& cfg);

/// Their mean over KV heads and up to `num_queries` queries that have a choice, of one of the packed sequences with
/// `offsets`. `seed` draws it, by how many such queries it has, and them, evenly over it; one sequence, since a GPU
/// waits for the host in all that is done for each. q (total, H, D) and k_slc (total, Hkv, D) rotated, k_cmp not.
/// Scalar, float32 or double; 0 where no query has a choice. Gradients reach phi and k_cmp alone (detach a k_cmp that
/// k_slc is made from): q asks both, and one that learnt here would move what it teaches.
at::Tensor selector_loss(const at::Tensor& q, const at::Tensor& k_cmp, const at::Tensor& k_slc,
                         const bridge::CompressionTensors& phi, const Rotation& table,
                         const std::vector<std::int64_t>& offsets, const NSAConfig& cfg, std::int64_t num_queries,
                         std::uint64_t seed);

}  // namespace nsa::lm
