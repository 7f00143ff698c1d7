// The selector loss beside a rendering in plain loops, finite differences, and the choice of the library.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/random.h"
#include "bridge/attention.h"
#include "lm/layers/rope_frequencies.h"
#include "lm/model/model.h"
#include "lm/model/selection_stats.h"
#include "lm/model/selector_loss.h"

namespace nsa::lm {
namespace {

constexpr std::int64_t kHeads = 4, kKvHeads = 2, kGroup = kHeads / kKvHeads, kDim = 16;
constexpr std::int64_t kAll = 1 << 20;  // queries
const NSAConfig kConfig{.kernel_size = 8,
                        .kernel_stride = 4,
                        .block_size = 16,
                        .topk = 5,
                        .init_blocks = 1,
                        .local_blocks = 2,
                        .window_size = 8};

/// Three packed sequences, of which the second is too short for a choice.
struct Inputs {
  std::vector<std::int64_t> offsets = {0, 150, 190, 300};
  at::Tensor q, k_cmp, k_slc;
  bridge::CompressionTensors phi;
  Rotation table = rotation_table(256, rope_frequencies(kDim, 1e4, {}), at::kCPU);

  Inputs(CompressionKind kind, std::int64_t sets, at::ScalarType dtype) {
    at::manual_seed(1);
    const auto options = at::TensorOptions().dtype(dtype);
    const auto normal = [&](at::IntArrayRef sizes, double deviation) { return deviation * at::randn(sizes, options); };
    q = normal({offsets.back(), kHeads, kDim}, 2);
    k_cmp = normal({offsets.back(), kKvHeads, kDim}, 1.5);
    k_slc = normal({offsets.back(), kKvHeads, kDim}, 1);
    phi.kind = kind;
    if (kind == CompressionKind::kMean) return;
    const std::int64_t in = kConfig.kernel_size * kDim, out = kind == CompressionKind::kMlp ? 24 : kDim;
    phi.pe = normal({sets, kConfig.kernel_size, kDim}, .3);
    phi.w1 = normal({sets, in, out}, .15), phi.b1 = normal({sets, out}, .1);
    if (kind == CompressionKind::kMlp) phi.w2 = normal({sets, out, kDim}, .4), phi.b2 = normal({sets, kDim}, .1);
  }

  at::Tensor loss(std::int64_t num_queries = kAll, std::uint64_t seed = 1) const {
    const auto sample = draw_queries(offsets, kConfig, num_queries, seed, at::kCPU);
    if (!sample) return at::zeros({1});
    const auto sequence = [&](const at::Tensor& t) { return t.slice(0, sample->begin, sample->end); };
    const SelectorInputs one = {sequence(q).index_select(0, sample->positions), sequence(k_cmp), sequence(k_slc), phi};
    const auto losses = selector_losses({one, one}, sample->positions, table, kConfig);
    EXPECT_EQ(losses[0].item<double>(), losses[1].item<double>());
    return losses[0];
  }
};

using Vector = std::vector<double>;

Vector values(const at::Tensor& t) {
  const auto dense = t.detach().to(at::kDouble).contiguous();
  return {dense.const_data_ptr<double>(), dense.const_data_ptr<double>() + dense.numel()};
}

/// One compressed key, from the rows of its block.
Vector compressed_key(const Inputs& in, std::int64_t start, std::int64_t block, std::int64_t head) {
  const std::int64_t l = kConfig.kernel_size, first = block * kConfig.kernel_stride;
  Vector x;
  for (std::int64_t i = 0; i < l; ++i) {
    for (const double value : values(in.k_cmp[start + first + i][head])) x.push_back(value);
  }
  Vector key(kDim, 0);
  if (in.phi.kind == CompressionKind::kMean) {
    for (std::size_t i = 0; i < x.size(); ++i) key[i % kDim] += x[i] / static_cast<double>(l);
  } else {
    const auto of_head = [&](const at::Tensor& t) { return values(t[t.size(0) == 1 ? 0 : head]); };
    const auto layer = [&](const Vector& from, const at::Tensor& weight, const at::Tensor& bias) {
      const auto w = of_head(weight);
      auto to = of_head(bias);
      for (std::size_t i = 0; i < from.size(); ++i) {
        for (std::size_t j = 0; j < to.size(); ++j) to[j] += from[i] * w[i * to.size() + j];
      }
      return to;
    };
    const auto pe = of_head(in.phi.pe);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += pe[i];
    key = layer(x, in.phi.w1, in.phi.b1);
    if (in.phi.kind == CompressionKind::kMlp) {
      for (double& unit : key) unit /= 1 + std::exp(-unit);
      key = layer(key, in.phi.w2, in.phi.b2);
    }
  }
  const auto cos = values(in.table.cos[first]), sin = values(in.table.sin[first]);
  Vector turned(kDim);
  for (std::size_t i = 0; i < kDim / 2; ++i) {
    turned[i] = key[i] * cos[i] - key[i + kDim / 2] * sin[i];
    turned[i + kDim / 2] = key[i + kDim / 2] * cos[i] + key[i] * sin[i];
  }
  return turned;
}

Vector softmax(const Vector& q, const std::vector<Vector>& keys) {
  Vector weights;
  double sum = 0;
  for (const Vector& key : keys) {
    double score = 0;
    for (std::size_t i = 0; i < key.size(); ++i) score += q[i] * key[i];
    sum += weights.emplace_back(std::exp(score / std::sqrt(static_cast<double>(kDim))));
  }
  for (double& weight : weights) weight /= sum;
  return weights;
}

const std::int64_t kFirstChoice = kConfig.topk * kConfig.block_size;

/// The mean divergence over the queries of a sequence that have a choice, one after the other.
double rendering(const Inputs& in, std::size_t b) {
  const std::int64_t l = kConfig.kernel_size, d = kConfig.kernel_stride, size = kConfig.block_size;
  double mean = 0;
  const std::int64_t start = in.offsets[b], length = in.offsets[b + 1] - start;
  for (std::int64_t head = 0; head < kKvHeads; ++head) {
    std::vector<Vector> compressed, keys;
    double sum = 0, masses = 0;
    for (std::int64_t t = 0; t < length; ++t) {
      keys.push_back(values(in.k_slc[start + t][head]));
      if (t + 1 >= l && (t + 1 - l) % d == 0) compressed.push_back(compressed_key(in, start, (t + 1 - l) / d, head));
      if (t < kFirstChoice) continue;
      Vector importance(static_cast<std::size_t>(t / size + 1), 0), attention = importance;
      for (std::int64_t g = 0; g < kGroup; ++g) {
        const auto q = values(in.q[start + t][head * kGroup + g]);
        const auto p = softmax(q, compressed), a = softmax(q, keys);
        for (std::int64_t i = 0; i < std::ssize(p); ++i) {
          for (std::int64_t u = i * d; u < i * d + l; ++u) {
            if (u / size < std::ssize(importance)) importance[u / size] += p[i] / static_cast<double>(d);
          }
        }
        for (std::int64_t u = 0; u <= t; ++u) attention[u / size] += a[u];
      }
      double all = 0, all_attention = 0, divergence = 0;
      const auto free = [&](std::size_t j) { return !is_forced(static_cast<std::int64_t>(j), t, kConfig); };
      for (std::size_t j = 0; j < importance.size(); ++j) {
        if (free(j)) all += importance[j], all_attention += attention[j];
      }
      for (std::size_t j = 0; j < importance.size(); ++j) {
        const double share = attention[j] / all_attention;
        if (free(j)) divergence += share * std::log(share / (importance[j] / all));
      }
      sum += all_attention * divergence, masses += all_attention;
    }
    mean += sum / masses / kKvHeads;
  }
  return mean;
}

struct Kind {
  std::string name;
  CompressionKind kind;
  std::int64_t sets;
};
const std::array<Kind, 4> kKinds = {{{"mean", CompressionKind::kMean, 1},
                                     {"linear", CompressionKind::kLinear, 1},
                                     {"mlp", CompressionKind::kMlp, 1},
                                     {"mlp, weights for each head", CompressionKind::kMlp, kKvHeads}}};

/// Of the first or the third sequence, drawn by their 70 and 30 queries; the second has none to draw.
TEST(SelectorLoss, IsThatOfPlainLoops) {
  for (const auto& [name, kind, sets] : kKinds) {
    const Inputs in(kind, sets, at::kDouble);
    const double first = rendering(in, 0), third = rendering(in, 2);
    EXPECT_GT(std::min(first, third), .1) << name;
    ASSERT_GT(std::abs(first - third), 1e-3 * first) << name;
    int firsts = 0;
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
      const double loss = in.loss(kAll, seed).item<double>();
      const bool of_first = std::abs(loss - first) < std::abs(loss - third);
      const double expected = of_first ? first : third;
      EXPECT_NEAR(loss, expected, 1e-9 * expected) << name;
      firsts += of_first;
    }
    EXPECT_NEAR(firsts, 70, 15) << name;
  }
}

TEST(SelectorLoss, GradientsAreFiniteDifferences) {
  for (const auto& [name, kind, sets] : kKinds) {
    Inputs in(kind, sets, at::kDouble);
    std::vector<at::Tensor> learning = {in.k_cmp};
    for (const at::Tensor& weight : {in.phi.pe, in.phi.w1, in.phi.b1, in.phi.w2, in.phi.b2}) {
      if (weight.defined()) learning.push_back(weight);
    }
    in.q.requires_grad_(), in.k_slc.requires_grad_();
    for (at::Tensor& tensor : learning) tensor.requires_grad_();
    in.loss().backward();
    EXPECT_FALSE(in.q.grad().defined() || in.k_slc.grad().defined()) << name;  // the target has no gradient
    const at::NoGradGuard no_grad;
    for (at::Tensor& tensor : learning) {
      const auto direction = at::randn_like(tensor);
      const double found = (tensor.grad() * direction).sum().item<double>();
      const auto moved = [&](double step) {
        tensor.add_(direction, step);
        const double loss = in.loss().item<double>();
        tensor.sub_(direction, step);
        return loss;
      };
      constexpr double kStep = 1e-5;
      const double expected = (moved(kStep) - moved(-kStep)) / (2 * kStep);
      EXPECT_NEAR(found, expected, 1e-6 + 1e-5 * std::abs(expected)) << name;
    }
  }
}

/// Away from ties the most important blocks are those that the operation chose.
TEST(SelectorLoss, ItsImportancesAreTheLibrarys) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& [name, kind, sets] : kKinds) {
      const Inputs in(kind, sets, dtype);
      std::vector<std::int32_t> starts(in.offsets.begin(), in.offsets.end());
      const auto gates = at::full({in.q.size(0), kHeads, 3}, .5, in.q.options());
      const auto chosen = bridge::native_sparse_attention({.q = in.q,
                                                           .k_cmp = in.k_cmp,
                                                           .v_cmp = in.k_slc,
                                                           .k_slc = in.k_slc,
                                                           .v_slc = in.k_slc,
                                                           .k_swa = in.k_slc,
                                                           .v_swa = in.k_slc,
                                                           .gates = gates,
                                                           .phi_k = in.phi,
                                                           .phi_v = in.phi,
                                                           .rope_cos = in.table.cos,
                                                           .rope_sin = in.table.sin,
                                                           .cu_seqlens = at::tensor(starts, at::kInt)},
                                                          kConfig)
                              .indices;
      const double tie = dtype == at::kFloat ? 1e-4 : .25;  // relative
      std::int64_t compared = 0, queries = 0;
      for (std::size_t b = 0; b + 1 < in.offsets.size(); ++b) {
        const std::int64_t start = in.offsets[b], length = in.offsets[b + 1] - start;
        const auto positions = at::arange(length);
        const auto keys = compressed_keys(in.k_cmp.slice(0, start, start + length), in.phi, in.table, kConfig);
        const std::int64_t blocks = (length - 1) / kConfig.block_size + 1;
        const auto all = block_importances(in.q.slice(0, start, start + length), keys, positions, blocks, kConfig);
        for (std::int64_t t = kConfig.topk * kConfig.block_size; t < length; ++t) {
          for (std::int64_t head = 0; head < kKvHeads; ++head) {
            const auto importance = values(all[t][head]);
            std::vector<std::int32_t> free;
            std::set<std::int32_t> picked;
            for (std::int32_t j = 0; j <= t / kConfig.block_size; ++j) {
              if (!is_forced(j, t, kConfig)) free.push_back(j);
            }
            const auto row = chosen[start + t][head].contiguous();
            for (std::int64_t i = 0; i < kConfig.topk; ++i) {
              const auto j = row.const_data_ptr<std::int32_t>()[i];
              if (!is_forced(j, t, kConfig)) picked.insert(j);
            }
            std::sort(free.begin(), free.end(), [&](auto i, auto j) { return importance[i] > importance[j]; });
            const auto places = picked.size();
            ++queries;
            if (importance[free[places - 1]] < (1 + tie) * importance[free[places]]) continue;
            ++compared;
            EXPECT_EQ(picked, std::set<std::int32_t>(free.begin(), free.begin() + static_cast<std::int64_t>(places)))
                << name << ", " << dtype << ", query " << t;
          }
        }
      }
      EXPECT_GT(compared, queries / 3) << name << ", " << dtype;
    }
  }
}

TEST(SelectorLoss, DrawsItsQueriesBySeed) {
  const Inputs in(CompressionKind::kMean, 1, at::kFloat);
  const auto loss = [&](std::int64_t queries, std::uint64_t seed) { return in.loss(queries, seed).item<double>(); };
  EXPECT_EQ(loss(12, 1), loss(12, 1));
  EXPECT_NE(loss(12, 1), loss(12, 2));
  double mean = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) mean += loss(12, seed) / 200;
  const double all = (70 * rendering(in, 0) + 30 * rendering(in, 2)) / 100;
  EXPECT_NEAR(mean, all, .05 * mean);  // drawn evenly
  Inputs short_ones = in;
  short_ones.offsets = {0, 80, 160, 240};
  EXPECT_EQ(short_ones.loss().item<double>(), 0);  // no query has a choice
}

TEST(SelectionStats, AreWhatCountingOneByOneGives) {
  const std::vector<std::int32_t> offsets = {0, 150, 190, 300};
  base::Random random(5);
  const auto indices = at::full({offsets.back(), kKvHeads, kConfig.topk}, -1, at::kInt);
  const auto row = [&](std::int64_t token, std::int64_t head) {
    return std::span(indices.data_ptr<std::int32_t>() + (token * kKvHeads + head) * kConfig.topk,
                     static_cast<std::size_t>(kConfig.topk));
  };
  std::vector<SelectionStats> expected;
  for (std::int64_t head = 0; head < kKvHeads; ++head) {
    std::int64_t picks = 0, unforced = 0, chosen = 0, shared = 0;
    SelectionStats stats;
    for (std::size_t b = 0; b + 1 < offsets.size(); ++b) {
      std::map<std::int32_t, double> counts;  // of the sequence's unforced picks
      double here = 0;
      const std::int64_t length = offsets[b + 1] - offsets[b];
      for (std::int64_t t = 0; t < length; ++t) {
        std::vector<std::int32_t> blocks(static_cast<std::size_t>(t / kConfig.block_size + 1));
        std::iota(blocks.begin(), blocks.end(), 0);
        const bool choice = blocks.size() > static_cast<std::size_t>(kConfig.topk);
        const auto picked = row(offsets[b] + t, head);
        const auto count = std::min(blocks.size(), picked.size());
        for (std::size_t i = 0; i < count; ++i) {
          std::swap(blocks[i], blocks[i + random.below(blocks.size() - i)]);
          picked[i] = blocks[i];
          ++picks;
          if (!is_forced(blocks[i], t, kConfig)) ++unforced, ++here, ++counts[blocks[i]];
          if (!choice) continue;
          const auto before = row(offsets[b] + t - 1, head);
          ++chosen, shared += std::count(before.begin(), before.end(), blocks[i]);
        }
        std::sort(picked.begin(), picked.begin() + static_cast<std::ptrdiff_t>(count));
      }
      for (const auto& [block, n] : counts) stats.entropy -= n * std::log(n / here);
      const auto own = static_cast<double>((length - 1) / kConfig.block_size + 1);
      stats.entropy_max += here * std::log(std::max(1., own - kConfig.init_blocks - kConfig.local_blocks));
    }
    EXPECT_GT(shared, 0);
    EXPECT_LT(shared, chosen);
    stats.entropy /= static_cast<double>(unforced);
    stats.entropy_max /= static_cast<double>(unforced);
    stats.unforced_share = static_cast<double>(unforced) / static_cast<double>(picks);
    stats.neighbour_overlap = static_cast<double>(shared) / static_cast<double>(chosen);
    expected.push_back(stats);
  }
  const auto all = selection_stats(indices, offsets, kConfig);
  ASSERT_EQ(all.size(), expected.size());
  for (std::size_t head = 0; head < all.size(); ++head) {
    EXPECT_DOUBLE_EQ(all[head].unforced_share, expected[head].unforced_share);
    EXPECT_DOUBLE_EQ(all[head].neighbour_overlap, expected[head].neighbour_overlap);
    EXPECT_NEAR(all[head].entropy, expected[head].entropy, 1e-12);
    EXPECT_NEAR(all[head].entropy_max, expected[head].entropy_max, 1e-12);
  }
}

TEST(SelectorLoss, LongerContextsAreAskedByFewerQueries) {
  EXPECT_EQ(default_selector_queries(8192, 4096), 32);
  EXPECT_EQ(default_selector_queries(32768, 8192), 128);
  EXPECT_EQ(default_selector_queries(1 << 20, 4096), 128);
  EXPECT_EQ(default_selector_queries(32768, 32768), 32);
  EXPECT_EQ(default_selector_queries(1 << 20, 1 << 20), 16);
  EXPECT_EQ(default_selector_queries(256, 256), 16);
}

}  // namespace
}  // namespace nsa::lm
