#include "lm/model/selector_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/kl_div.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/device.h"
#include "base/error.h"
#include "base/random.h"

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
  const auto scaled = at_least_float(q) / std::sqrt(static_cast<double>(q.size(2)));
  const auto heads = scaled.unflatten(1, {k.size(1), -1}).transpose(0, 1).flatten(1, 2);  // (Hkv, T G, D)
  const auto keys = at_least_float(k).permute({1, 2, 0});                                 // (Hkv, D, n)
  const auto scores = at::matmul(heads, keys).unflatten(1, {q.size(0), -1});
  return scores.masked_fill((first > positions.unsqueeze(1)).unsqueeze(1), -kInfinity).softmax(-1);
}

/// Attention (Hkv, T, G, n) with zeros behind it, summed over the heads of a group and each `size` keys next to each
/// other: (T, Hkv, blocks).
at::Tensor sum_over_blocks(const at::Tensor& attention, std::int64_t size, std::int64_t blocks) {
  const std::int64_t behind = blocks * size - attention.size(-1);
  const auto whole = behind == 0 ? attention : at::constant_pad_nd(attention, {0, behind});
  return whole.unflatten(-1, {-1, size}).sum({2, 4}).transpose(0, 1);
}

/// Neither forced nor later than the query: bool (T, 1, blocks).
at::Tensor eligible(const at::Tensor& positions, std::int64_t num_blocks, const NSAConfig& cfg) {
  const auto block = range_like(num_blocks, positions);
  const auto own = at::floor_divide(positions, cfg.block_size).unsqueeze(1);
  return (block >= cfg.init_blocks).logical_and(block <= own - cfg.local_blocks).unsqueeze(1);
}

}  // namespace

void require_a_selector(const ModelConfig& config, double weight) {
  if (config.attention != AttentionKind::kNsa || !config.share_kv || config.phi != CompressionKind::kMean) return;
  if (weight == 0) return;
  throw base::Error(
      fmt::format("selector_loss = {}: must be 0 with share_kv and phi = mean, where the choice has no "
                  "weights of its own to learn by",
                  weight));
}

at::Tensor compressed_keys(const at::Tensor& k, const bridge::CompressionTensors& phi, const Rotation& table,
                           const NSAConfig& cfg) {
  const auto blocks = k.unfold(0, cfg.kernel_size, cfg.kernel_stride).permute({1, 0, 3, 2});  // (Hkv, n, l, D)
  // (Hkv, n, in) by (1 or Hkv, in, out), which all heads share or each has its own.
  const auto layer = [](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    if (weight.size(0) == 1) return at::addmm(bias, x.flatten(0, 1), weight[0]).unflatten(0, {x.size(0), -1});
    return at::baddbmm(bias.unsqueeze(1), x, weight);
  };
  at::Tensor keys;
  if (phi.kind == CompressionKind::kMean) {
    keys = blocks.mean(2);
  } else {
    keys = layer((blocks + phi.pe.unsqueeze(1)).flatten(2), phi.w1, phi.b1);
    if (phi.kind == CompressionKind::kMlp) keys = layer(at::silu(keys), phi.w2, phi.b2);
  }
  keys = at_least_float(keys);
  const auto halves = keys.chunk(2, 2);
  const auto turn = [&](const at::Tensor& t) {  // the rows at which blocks begin
    return t.slice(0, 0, (keys.size(1) - 1) * cfg.kernel_stride + 1, cfg.kernel_stride).to(keys.scalar_type());
  };
  const auto cos = turn(table.cos), sin = turn(table.sin);
  const auto turned = at::cat({at::addcmul(halves[0] * cos, halves[1], sin, -1),  //
                               at::addcmul(halves[1] * cos, halves[0], sin)},
                              2);
  return turned.transpose(0, 1);
}

at::Tensor block_importances(const at::Tensor& q, const at::Tensor& k_c, const at::Tensor& positions,
                             std::int64_t num_blocks, const NSAConfig& cfg) {
  const std::int64_t stride = cfg.kernel_stride, strides = cfg.kernel_size / stride;
  const auto ends = range_like(k_c.size(0), positions) * stride + (cfg.kernel_size - 1);
  const auto attention = group_attention(q, k_c, ends, positions);
  // A compression block gives a share to each of the strides that it covers.
  at::Tensor covered = attention;
  for (std::int64_t behind = 1; behind < strides; ++behind) {
    const auto moved = at::constant_pad_nd(attention, {behind, strides - 1 - behind});
    covered = behind == 1 ? moved + at::constant_pad_nd(attention, {0, strides - 1}) : covered + moved;
  }
  return sum_over_blocks(covered, cfg.block_size / stride, num_blocks);
}

at::Tensor block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& positions,
                           const NSAConfig& cfg) {
  const std::int64_t blocks = (k.size(0) - 1) / cfg.block_size + 1;
  return sum_over_blocks(group_attention(q, k, range_like(k.size(0), positions), positions), cfg.block_size, blocks);
}

at::Tensor block_divergence(const at::Tensor& attention, const at::Tensor& importances, const at::Tensor& positions,
                            const NSAConfig& cfg) {
  const auto hidden = eligible(positions, importances.size(-1), cfg).logical_not();
  constexpr double kTiny = 1e-20;
  const auto shares = [&](const at::Tensor& masses) {
    const auto kept = masses.masked_fill(hidden, 0);
    return kept / kept.sum(-1, /*keepdim=*/true).clamp_min(kTiny);
  };
  // 0 log 0 = 0
  return at::kl_div(shares(importances).clamp_min(kTiny).log(), shares(attention.detach()), at::Reduction::Sum);
}

at::Tensor selector_loss(const at::Tensor& q, const at::Tensor& k_cmp, const at::Tensor& k_slc,
                         const bridge::CompressionTensors& phi, const Rotation& table,
                         const std::vector<std::int64_t>& offsets, const NSAConfig& cfg, std::int64_t num_queries,
                         std::uint64_t seed) {
  // The first query that may choose: one place less than its blocks.
  const std::int64_t first = std::max<std::int64_t>(std::int64_t{cfg.topk} * cfg.block_size, cfg.kernel_size);
  const auto choices = [&](std::size_t b) { return std::max<std::int64_t>(0, offsets[b + 1] - offsets[b] - first); };
  std::int64_t all = 0;
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b) all += choices(b);
  if (all == 0) return at::zeros({}, q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));

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
  const auto positions = base::upload(at::tensor(c10::ArrayRef<std::int64_t>(places), at::kLong), q.device());
  const auto sequence = [&](const at::Tensor& t) { return t.slice(0, offsets[b], offsets[b + 1]); };
  const auto queries = sequence(q).detach().index_select(0, positions);
  const auto keys = compressed_keys(sequence(k_cmp), phi, table, cfg);
  const auto attention = block_attention(queries, sequence(k_slc).detach(), positions, cfg);
  const auto importances = block_importances(queries, keys, positions, attention.size(-1), cfg);
  return block_divergence(attention, importances, positions, cfg) / static_cast<double>(wanted * k_slc.size(1));
}

}  // namespace nsa::lm
