#include "lm/model/selector_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/kl_div.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "base/device.h"
#include "base/error.h"
#include "base/random.h"
#include "lm/model/selection_stats.h"

namespace nsa::lm {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor range_like(std::int64_t count, const at::Tensor& like) {
  return at::arange(count, like.options().dtype(at::kLong));
}

at::Tensor at_least_float(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat); }

/// The attention of each query (T, H, D) to the keys (n, Hkv, D), key i being seen from `first[i]` on:
/// (Hkv, T, G, n). NaN where a query sees none.
at::Tensor group_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& first,
                           const at::Tensor& positions) {
  const auto scaled = at_least_float(q) / std::sqrt(static_cast<double>(q.size(-1)));
  const auto heads = scaled.unflatten(-2, {k.size(-2), -1}).transpose(-4, -3).flatten(-3, -2);  // (Hkv, T G, D)
  const auto keys = at_least_float(k).transpose(-3, -2).transpose(-2, -1);                      // (Hkv, D, n)
  const auto scores = at::matmul(heads, keys).unflatten(-2, {q.size(-3), -1});
  return scores.masked_fill((first > positions.unsqueeze(1)).unsqueeze(1), -kInfinity).softmax(-1);
}

/// Attention (Hkv, T, G, n) with zeros behind it, summed over the heads of a group and each `size` keys next to each
/// other: (T, Hkv, blocks).
at::Tensor sum_over_blocks(const at::Tensor& attention, std::int64_t size, std::int64_t blocks) {
  const std::int64_t behind = blocks * size - attention.size(-1);
  const auto padded = behind == 0 ? attention : at::constant_pad_nd(attention, {0, behind});
  return padded.unflatten(-1, {-1, size}).sum({-3, -1}).transpose(-3, -2);
}

/// bool (T, 1, blocks)
at::Tensor eligible(const at::Tensor& positions, std::int64_t num_blocks, const NSAConfig& cfg) {
  return is_eligible(range_like(num_blocks, positions), positions.unsqueeze(1), cfg).unsqueeze(1);
}

}  // namespace

void require_a_selector(const ModelConfig& config, double weight) {
  if (config.attention != AttentionKind::kNsa || !config.share_kv || config.phi != CompressionKind::kMean) return;
  if (weight == 0) return;
  throw base::Error(
      fmt::format("selector_loss = {}: must be 0 with share_kv and phi = mean, as the selector has no "
                  "weights to train",
                  weight));
}

at::Tensor compressed_keys(const at::Tensor& k, const bridge::CompressionTensors& phi, const Rotation& table,
                           const NSAConfig& cfg) {
  const auto blocks = k.unfold(-3, cfg.kernel_size, cfg.kernel_stride).transpose(-4, -3).transpose(-2, -1);
  at::Tensor keys;  // (Hkv, n, D), of blocks (Hkv, n, l, D)
  if (phi.kind == CompressionKind::kMean) {
    keys = blocks.mean(-2);
  } else {
    const std::int64_t sets = phi.w1.size(-3), num_blocks = blocks.size(-3);
    const auto layer = [](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
      return at::matmul(x, weight).add_(bias.unsqueeze(-2));
    };
    // Heads with the same weights are rows of one matmul.
    const auto x = (blocks + phi.pe.unsqueeze(-3)).flatten(-2).unflatten(-3, {sets, -1}).flatten(-3, -2);
    keys = layer(x, phi.w1, phi.b1);
    if (phi.kind == CompressionKind::kMlp) keys = layer(at::silu(keys), phi.w2, phi.b2);
    keys = keys.unflatten(-2, {-1, num_blocks}).flatten(-4, -3);
  }
  keys = at_least_float(keys);
  const auto halves = keys.chunk(2, -1);
  const auto rows = [&](const at::Tensor& t) {  // the rows at which blocks begin
    return t.slice(0, 0, (keys.size(-2) - 1) * cfg.kernel_stride + 1, cfg.kernel_stride).to(keys.scalar_type());
  };
  const auto cos = rows(table.cos), sin = rows(table.sin);
  const auto rotated = at::cat({at::addcmul(halves[0] * cos, halves[1], sin, -1),  //
                                at::addcmul(halves[1] * cos, halves[0], sin)},
                               -1);
  return rotated.transpose(-3, -2);
}

at::Tensor block_importances(const at::Tensor& q, const at::Tensor& k_c, const at::Tensor& positions,
                             std::int64_t num_blocks, const NSAConfig& cfg) {
  const std::int64_t stride = cfg.kernel_stride, strides = cfg.kernel_size / stride;
  const auto ends = range_like(k_c.size(-3), positions) * stride + (cfg.kernel_size - 1);
  auto attention = group_attention(q, k_c, ends, positions);
  // A compression block gives a share to each of the strides that it covers.
  if (const std::int64_t behind = strides - 1; behind > 0) {
    attention = at::constant_pad_nd(attention, {behind, behind}).unfold(-1, strides, 1).sum(-1);
  }
  return sum_over_blocks(attention, cfg.block_size / stride, num_blocks);
}

at::Tensor block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& positions,
                           const NSAConfig& cfg) {
  const std::int64_t blocks = (k.size(-3) - 1) / cfg.block_size + 1;
  return sum_over_blocks(group_attention(q, k, range_like(k.size(-3), positions), positions), cfg.block_size, blocks);
}

at::Tensor block_divergence(const at::Tensor& attention, const at::Tensor& importances, const at::Tensor& positions,
                            const NSAConfig& cfg) {
  const auto hidden = eligible(positions, importances.size(-1), cfg).logical_not();
  constexpr double kTiny = 1e-20;
  const auto kept = importances.masked_fill(hidden, 0), target = attention.detach().masked_fill(hidden, 0);
  const auto sum = [](const at::Tensor& masses) { return masses.sum(-1, /*keepdim=*/true).clamp_min(kTiny); };
  const auto mass = sum(target);
  // 0 log 0 = 0
  const auto terms = at::kl_div((kept / sum(kept)).clamp_min(kTiny).log(), target / mass, at::Reduction::None);
  return ((mass / mass.sum(-3, /*keepdim=*/true)) * terms).sum({-3, -1}).mean(-1);
}

std::optional<SelectorSample> draw_queries(const std::vector<std::int64_t>& offsets, const NSAConfig& cfg,
                                           std::int64_t num_queries, std::uint64_t seed, at::Device device) {
  // The first query that may choose: topk is one less than its blocks.
  const std::int64_t first = std::max<std::int64_t>(std::int64_t{cfg.topk} * cfg.block_size, cfg.kernel_size);
  const auto choices = [&](std::size_t b) { return std::max<std::int64_t>(0, offsets[b + 1] - offsets[b] - first); };
  std::int64_t all = 0;
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b) all += choices(b);
  if (all == 0) return std::nullopt;

  base::Random random(seed);
  std::size_t b = 0;
  for (auto ticket = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(all))); ticket >= choices(b);) {
    ticket -= choices(b++);
  }
  const std::int64_t wanted = std::min(num_queries, choices(b));
  std::vector<std::int64_t> places;
  for (std::int64_t i = 0; i < wanted; ++i) {
    const std::int64_t from = i * choices(b) / wanted, to = (i + 1) * choices(b) / wanted;
    places.push_back(first + from + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(to - from))));
  }
  return SelectorSample{offsets[b], offsets[b + 1],
                        base::upload(at::tensor(c10::ArrayRef<std::int64_t>(places), at::kLong), device)};
}

at::Tensor selector_losses(const std::vector<SelectorInputs>& layers, const at::Tensor& positions,
                           const Rotation& table, const NSAConfig& cfg) {
  constexpr std::int64_t kScores = std::int64_t{1} << 26;  // at once: 256 MiB of them, several times
  const SelectorInputs& one = layers[0];
  const std::int64_t scores = positions.numel() * one.q.size(1) * one.k_slc.size(0);
  const auto together = static_cast<std::size_t>(std::max<std::int64_t>(1, kScores / scores));
  std::vector<at::Tensor> losses;
  for (std::size_t begin = 0; begin < layers.size(); begin += together) {
    const auto some = std::span(layers).subspan(begin, std::min(together, layers.size() - begin));
    const auto stacked = [&](const auto& of) {
      if (!of(one).defined()) return at::Tensor();
      std::vector<at::Tensor> parts;
      for (const SelectorInputs& layer : some) parts.push_back(of(layer));
      return at::stack(parts);
    };
    const auto weight = [&](at::Tensor bridge::CompressionTensors::*which) {
      const auto all = stacked([&](const SelectorInputs& layer) { return layer.phi.*which; });
      return all.defined() ? all.to(one.k_cmp.scalar_type()) : all;
    };
    using Phi = bridge::CompressionTensors;
    const Phi phi = {one.phi.kind,     weight(&Phi::pe), weight(&Phi::w1),
                     weight(&Phi::b1), weight(&Phi::w2), weight(&Phi::b2)};
    const auto q = stacked([](const SelectorInputs& layer) { return layer.q.detach(); });
    const auto k_slc = stacked([](const SelectorInputs& layer) { return layer.k_slc.detach(); });
    const auto k_cmp = stacked([](const SelectorInputs& layer) { return layer.k_cmp; });
    const auto attention = block_attention(q, k_slc, positions, cfg);
    const auto importances =
        block_importances(q, compressed_keys(k_cmp, phi, table, cfg), positions, attention.size(-1), cfg);
    losses.push_back(block_divergence(attention, importances, positions, cfg));
  }
  return losses.size() == 1 ? losses[0] : at::cat(losses);
}

}  // namespace nsa::lm
