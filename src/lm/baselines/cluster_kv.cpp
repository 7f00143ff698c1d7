// ClusterKV: Liu et al., "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression", arXiv
// 2412.03213. The first 16 tokens are always read. The others are clustered in stretches of 320, as the paper does with
// what it decodes: whenever a chunk is complete, k-means by the cosine of the keys makes a cluster for every 80 tokens
// of it. Clusters are read in the order of their centroids' scores with the query, summed over the query heads of the
// KV head; the last one is cut where the budget ends. Tokens of an incomplete chunk are all read. Budgets below
// 640 (64) tokens have stretches (sinks) of half (a quarter of) their size. Simplified: a prompt is treated as if it
// were decoded, not clustered all at once; k-means starts from evenly spaced keys, not random ones, and ends after ten
// rounds; every layer chooses, where the paper's code leaves the first two dense.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "lm/baselines/baseline.h"

namespace nsa::lm {
namespace {

at::Tensor unit(const at::Tensor& rows) {
  return rows / at::linalg_vector_norm(rows, 2, at::IntArrayRef{-1}, /*keepdim=*/true).clamp_min(1e-12);
}

class ClusterKV : public Baseline {
 public:
  ClusterKV(const at::Tensor& k, std::int64_t budget)
      : sinks_(std::min<std::int64_t>(16, budget / 4)), stretch_(std::clamp<std::int64_t>(budget / 2, 1, 320)) {
    constexpr int kRounds = 10;
    const std::int64_t clusters = (stretch_ + 79) / 80;
    const auto keys = whole_spans(k.slice(1, std::min(sinks_, k.size(1))), stretch_);  // (Hkv, stretches, tokens, Dk)
    const auto evenly = at::arange(clusters, k.options().dtype(at::kLong)) * stretch_;
    auto centroids = keys.index_select(2, evenly.floor_divide(clusters));
    at::Tensor nearest;
    for (int round = 0; round < kRounds; ++round) {
      nearest = at::matmul(unit(keys), unit(centroids).transpose(2, 3)).argmax(-1);  // (Hkv, stretches, tokens)
      const auto members = at::one_hot(nearest, clusters).to(k.scalar_type()).transpose(2, 3);
      const auto counts = members.sum(-1, /*keepdim=*/true);
      centroids = at::where(counts > 0, at::matmul(members, keys) / counts.clamp_min(1), centroids);
    }
    const auto first = at::arange(keys.size(1), nearest.options()).unsqueeze(1) * clusters;
    cluster_ = (nearest + first).flatten(1);
    centroids_ = centroids.flatten(1, 2).transpose(1, 2);
  }

  at::Tensor priorities(const QueryBlock& block) override {
    const auto of_clusters = at::matmul(block.q.sum(1), centroids_);  // (Hkv, T, clusters)
    const auto cluster = cluster_.unsqueeze(1).expand({-1, of_clusters.size(1), -1});
    const auto clustered = at::constant_pad_nd(of_clusters.gather(2, cluster), {sinks_, stretch_ + sinks_});
    const auto stretch_from = (positions(block) - sinks_).floor_divide(stretch_) * stretch_ + sinks_;
    return read_in_any_case(clustered.narrow(2, 0, block.end()), sinks_, stretch_from);
  }

 private:
  std::int64_t sinks_, stretch_;  // tokens
  at::Tensor cluster_;            // int64 (Hkv, clustered tokens)
  at::Tensor centroids_;          // (Hkv, Dk, clusters)
};

}  // namespace

std::unique_ptr<Baseline> make_cluster_kv(const at::Tensor&, const at::Tensor& k, std::int64_t budget) {
  return std::make_unique<ClusterKV>(k, budget);
}

}  // namespace nsa::lm
