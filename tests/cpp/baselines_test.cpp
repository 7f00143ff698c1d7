// The baselines that NSA is set against beside renderings of them in plain loops: for one query after the other the
// list of tokens that it reads, then attention to these.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "base/error.h"
#include "bridge/attention.h"
#include "lm/baselines/baseline.h"

namespace nsa::lm {
namespace {

constexpr std::int64_t kHeads = 4, kKvHeads = 2, kGroup = kHeads / kKvHeads, kKeyDim = 8, kValueDim = 4;

struct Sequence {
  at::Tensor q, k, v;  // float64

  explicit Sequence(std::int64_t length, std::uint64_t seed = 1) {
    at::manual_seed(seed);
    const auto rows = [&](std::int64_t heads, std::int64_t dim) {
      return at::randn({length, heads, dim}, at::kDouble);
    };
    q = 1.5 * rows(kHeads, kKeyDim), k = rows(kKvHeads, kKeyDim), v = rows(kKvHeads, kValueDim);
  }
  Sequence(at::Tensor q, at::Tensor k, at::Tensor v) : q(std::move(q)), k(std::move(k)), v(std::move(v)) {}
  Sequence first(std::int64_t length) const {
    return {q.slice(0, 0, length), k.slice(0, 0, length), v.slice(0, 0, length)};
  }
  std::int64_t length() const { return q.size(0); }
};

using Vector = std::vector<double>;
using Tokens = std::set<std::int64_t>;

/// What a rendering sees of a sequence: one KV head and its group of query heads.
struct Head {
  std::vector<std::vector<Vector>> q;  // [g][t]
  std::vector<Vector> k;               // [t]

  Head(const Sequence& of, std::int64_t kv_head) : q(kGroup) {
    const auto row = [](const at::Tensor& t) {
      const auto dense = t.contiguous();
      return Vector(dense.const_data_ptr<double>(), dense.const_data_ptr<double>() + dense.numel());
    };
    for (std::int64_t t = 0; t < of.length(); ++t) {
      for (std::int64_t g = 0; g < kGroup; ++g) {
        q[static_cast<std::size_t>(g)].push_back(row(of.q[t][kv_head * kGroup + g]));
      }
      k.push_back(row(of.k[t][kv_head]));
    }
  }
};

double dot(const Vector& a, const Vector& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

/// Softmax over `tokens` of the scores of a query head.
std::map<std::int64_t, double> weights(const Vector& q, const std::vector<Vector>& k, const Tokens& tokens) {
  std::map<std::int64_t, double> out;
  double sum = 0;
  for (const auto i : tokens) sum += out[i] = std::exp(dot(q, k[i]) / std::sqrt(double{kKeyDim}));
  for (auto& [i, weight] : out) weight /= sum;
  return out;
}

/// Adds tokens of `spans`, the best first, until there are `budget`.
void fill(Tokens& read, std::vector<std::pair<double, std::vector<std::int64_t>>> spans, std::int64_t budget) {
  std::stable_sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [score, tokens] : spans) {
    for (const auto i : tokens) {
      if (static_cast<std::int64_t>(read.size()) < budget) read.insert(i);
    }
  }
}

std::vector<std::int64_t> range(std::int64_t from, std::int64_t to) {
  std::vector<std::int64_t> out;
  for (auto i = from; i < to; ++i) out.push_back(i);
  return out;
}

/// read[t]: what query t reads.
using Rendering = std::function<std::vector<Tokens>(const Head&, std::int64_t budget)>;

std::vector<Tokens> streaming(const Head& head, std::int64_t budget) {
  std::vector<Tokens> read(head.k.size());
  const std::int64_t sinks = std::min<std::int64_t>(4, budget / 2);
  for (std::int64_t t = 0; t < std::ssize(read); ++t) {
    for (const auto i : range(0, t + 1)) {
      if (i < sinks || i > t - (budget - sinks)) read[t].insert(i);
    }
  }
  return read;
}

std::vector<Tokens> exact(const Head& head, std::int64_t budget) {
  std::vector<Tokens> read(head.k.size());
  for (std::int64_t t = 0; t < std::ssize(read); ++t) {
    const auto all = range(0, t + 1);
    std::vector<std::pair<double, std::vector<std::int64_t>>> tokens;
    for (const auto i : all) tokens.push_back({0, {i}});
    for (const auto& q : head.q) {
      for (const auto& [i, weight] : weights(q[t], head.k, Tokens(all.begin(), all.end()))) tokens[i].first += weight;
    }
    fill(read[t], tokens, budget);
  }
  return read;
}

std::vector<Tokens> h2o(const Head& head, std::int64_t budget) {
  std::vector<Tokens> read(head.k.size());
  const std::int64_t recent = budget - budget / 2;
  std::map<std::int64_t, double> attention;
  Tokens cache;
  for (std::int64_t t = 0; t < std::ssize(read); ++t) {
    cache.insert(t);
    if (std::ssize(cache) > budget) {
      auto least = cache.begin();
      for (auto i = cache.begin(); *i <= t - recent; ++i) {
        if (attention[*i] < attention[*least]) least = i;
      }
      cache.erase(least);
    }
    for (const auto& q : head.q) {
      for (const auto& [i, weight] : weights(q[t], head.k, cache)) attention[i] += weight;
    }
    read[t] = cache;
  }
  return read;
}

std::vector<Tokens> quest(const Head& head, std::int64_t budget) {
  std::vector<Tokens> read(head.k.size());
  const std::int64_t page = std::min<std::int64_t>(16, budget);
  for (std::int64_t t = 0; t < std::ssize(read); ++t) {
    const std::int64_t own = t / page;
    for (const auto i : range(own * page, t + 1)) read[t].insert(i);
    std::vector<std::pair<double, std::vector<std::int64_t>>> pages;
    for (const auto p : range(0, own)) {
      double bound = 0;
      for (const auto& q : head.q) {
        for (std::size_t c = 0; c < kKeyDim; ++c) {
          double least = head.k[p * page][c], greatest = least;
          for (const auto i : range(p * page, (p + 1) * page)) {
            least = std::min(least, head.k[i][c]);
            greatest = std::max(greatest, head.k[i][c]);
          }
          bound += std::max(q[t][c] * least, q[t][c] * greatest);
        }
      }
      pages.push_back({bound, range(p * page, (p + 1) * page)});
    }
    fill(read[t], pages, budget);
  }
  return read;
}

std::vector<Tokens> infllm(const Head& head, std::int64_t budget) {
  std::vector<Tokens> read(head.k.size());
  const std::int64_t sinks = std::min<std::int64_t>(128, budget / 16), local = std::max<std::int64_t>(1, budget / 2);
  const std::int64_t size = std::clamp<std::int64_t>(budget / 4, 1, 64);
  std::map<std::int64_t, std::vector<std::int64_t>> representatives;  // of a block, once it has left the window
  for (std::int64_t t = 0; t < std::ssize(read); ++t) {
    for (const auto i : range(0, std::min(sinks, t + 1))) read[t].insert(i);
    const std::int64_t blocks = std::max<std::int64_t>(0, t + 1 - local) / size;
    for (const auto i : range(blocks * size, t + 1)) read[t].insert(i);
    std::vector<std::pair<double, std::vector<std::int64_t>>> ranked;
    for (const auto b : range(0, blocks)) {
      if (representatives.count(b) == 0) {
        std::vector<std::pair<double, std::int64_t>> merits;
        for (const auto i : range(b * size, (b + 1) * size)) {
          double merit = 0;
          for (const auto j : range(i + 1, i + 1 + local)) {
            for (const auto& q : head.q) merit += dot(q[j], head.k[i]);
          }
          merits.emplace_back(-merit, i);
        }
        std::sort(merits.begin(), merits.end());
        for (std::int64_t r = 0; r < std::min<std::int64_t>(4, size); ++r) {
          representatives[b].push_back(merits[r].second);
        }
      }
      double relevance = 0;
      for (const auto i : representatives[b]) {
        for (const auto& q : head.q) relevance += dot(q[t], head.k[i]);
      }
      ranked.push_back({relevance, range(b * size, (b + 1) * size)});
    }
    fill(read[t], ranked, budget);
  }
  return read;
}

std::vector<Tokens> cluster_kv(const Head& head, std::int64_t budget) {
  std::vector<Tokens> read(head.k.size());
  const std::int64_t sinks = std::min<std::int64_t>(16, budget / 4),
                     stretch = std::clamp<std::int64_t>(budget / 2, 1, 320);
  const std::int64_t count = (stretch + 79) / 80;
  const auto cosine = [](const Vector& a, const Vector& b) { return dot(a, b) / std::sqrt(dot(a, a) * dot(b, b)); };
  std::vector<std::pair<Vector, std::vector<std::int64_t>>> clusters;  // centroid, members
  for (std::int64_t t = 0; t < std::ssize(read); ++t) {
    const std::int64_t whole = t < sinks ? 0 : (t - sinks) / stretch, begin = sinks + whole * stretch;
    if (whole > 0 && begin == t) {  // a stretch has become whole
      std::vector<std::pair<Vector, std::vector<std::int64_t>>> own(count);
      for (std::int64_t c = 0; c < count; ++c) own[c].first = head.k[begin - stretch + c * stretch / count];
      for (int round = 0; round < 10; ++round) {
        for (auto& [centroid, members] : own) members.clear();
        for (const auto i : range(begin - stretch, begin)) {
          std::int64_t best = 0;
          for (std::int64_t c = 1; c < count; ++c) {
            if (cosine(head.k[i], own[c].first) > cosine(head.k[i], own[best].first)) best = c;
          }
          own[best].second.push_back(i);
        }
        for (auto& [centroid, members] : own) {
          if (members.empty()) continue;
          centroid.assign(kKeyDim, 0);
          for (const auto i : members) {
            for (std::size_t c = 0; c < kKeyDim; ++c) centroid[c] += head.k[i][c] / static_cast<double>(members.size());
          }
        }
      }
      clusters.insert(clusters.end(), own.begin(), own.end());
    }
    for (const auto i : range(0, t + 1)) {
      if (i < sinks || i >= begin) read[t].insert(i);
    }
    std::vector<std::pair<double, std::vector<std::int64_t>>> ranked;
    for (const auto& [centroid, members] : clusters) {
      double score = 0;
      for (const auto& q : head.q) score += dot(q[t], centroid);
      ranked.emplace_back(score, members);
    }
    fill(read[t], ranked, budget);
  }
  return read;
}

const std::map<std::string, Rendering> kRenderings = {
    {"streaming", streaming}, {"exact", exact},   {"h2o", h2o},
    {"quest", quest},         {"infllm", infllm}, {"clusterkv", cluster_kv}};

/// Attention to what `rendering` reads.
at::Tensor rendered(const Rendering& rendering, const Sequence& of, std::int64_t budget) {
  const auto out = at::zeros({of.length(), kHeads, kValueDim}, at::kDouble);
  auto o = out.accessor<double, 3>();
  const auto v = of.v.accessor<double, 3>();
  for (std::int64_t h = 0; h < kKvHeads; ++h) {
    const Head head(of, h);
    const auto read = rendering(head, budget);
    for (std::int64_t t = 0; t < of.length(); ++t) {
      EXPECT_EQ(std::ssize(read[t]), std::min(t + 1, budget)) << "query " << t;
      for (std::int64_t g = 0; g < kGroup; ++g) {
        for (const auto& [i, weight] : weights(head.q[g][t], head.k, read[t])) {
          for (std::int64_t c = 0; c < kValueDim; ++c) o[t][h * kGroup + g][c] += weight * v[i][h][c];
        }
      }
    }
  }
  return out;
}

at::Tensor attended(const std::string& baseline, const Sequence& to, std::int64_t budget) {
  return baseline_attention(baseline, budget, to.q, to.k, to.v);
}

double distance(const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().max().item<double>(); }

class Baselines : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Baselines, testing::ValuesIn(baseline_names()),
                         [](const auto& info) { return info.param; });

TEST_P(Baselines, AsRendered) {
  const auto& rendering = kRenderings.at(GetParam());
  const Sequence sequence(300);
  for (const std::int64_t budget : {1, 2, 5, 16, 23, 64, 100, 299, 300}) {
    EXPECT_LT(distance(attended(GetParam(), sequence, budget), rendered(rendering, sequence, budget)), 1e-10)
        << "budget " << budget;
  }
}

// Long enough for several clusters in each of several stretches, and for whole blocks of InfLLM.
TEST_P(Baselines, AsRenderedAtLength) {
  const Sequence sequence(1100);
  EXPECT_LT(distance(attended(GetParam(), sequence, 500), rendered(kRenderings.at(GetParam()), sequence, 500)), 1e-10);
}

TEST_P(Baselines, FullAttentionWithinTheBudget) {
  const Sequence sequence(270);
  const auto full = bridge::causal_attention(sequence.q, sequence.k, sequence.v);
  for (const std::int64_t budget : {270, 271, 5000}) {
    EXPECT_LT(distance(attended(GetParam(), sequence, budget), full), 1e-12) << "budget " << budget;
  }
  EXPECT_GT(distance(attended(GetParam(), sequence, 20), full), 1e-2);
  EXPECT_LT(distance(attended(GetParam(), sequence, 20).slice(0, 0, 20), full.slice(0, 0, 20)), 1e-12);
}

TEST_P(Baselines, Causal) {
  const Sequence sequence(700);
  const auto whole = attended(GetParam(), sequence, 200);
  for (const std::int64_t length : {1, 199, 200, 201, 256, 257, 416, 517, 699}) {
    EXPECT_LT(distance(attended(GetParam(), sequence.first(length), 200), whole.slice(0, 0, length)), 1e-12)
        << "first " << length << " tokens";
  }
}

TEST_P(Baselines, Float32) {
  const Sequence sequence(90);
  const auto single = baseline_attention(GetParam(), 90, sequence.q.to(at::kFloat), sequence.k.to(at::kFloat),
                                         sequence.v.to(at::kFloat));
  EXPECT_EQ(single.scalar_type(), at::kFloat);
  EXPECT_LT(distance(single, bridge::causal_attention(sequence.q, sequence.k, sequence.v)), 1e-5);
}

// A key that queries attend to a little and that the last one is all about, beyond any window.
TEST_P(Baselines, FindsWhatAWindowMisses) {
  constexpr std::int64_t kLength = 600, kMatch = 250;
  Sequence sequence(kLength);
  sequence.q.select(2, 0) += 1;
  sequence.q[kLength - 1].select(1, 0) += 40;
  sequence.k[kMatch].select(1, 0).fill_(6);
  const auto o = attended(GetParam(), sequence, 100)[kLength - 1].unflatten(0, {kKvHeads, kGroup});
  const double miss = distance(o, sequence.v[kMatch].unsqueeze(1).expand_as(o));
  if (GetParam() == "streaming") {
    EXPECT_GT(miss, 0.1);
  } else {
    EXPECT_LT(miss, 1e-6);
  }
}

TEST_P(Baselines, SixteenBitNumbersAreComputedWithInFloat32) {
  const Sequence sequence(90);
  const auto attended_as = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return baseline_attention(GetParam(), 20, q, k, v);
  };
  const auto q = sequence.q.to(at::kBFloat16), k = sequence.k.to(at::kBFloat16), v = sequence.v.to(at::kBFloat16);
  const auto narrow = attended_as(q, k, v);
  EXPECT_EQ(narrow.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(narrow.equal(attended_as(q.to(at::kFloat), k.to(at::kFloat), v.to(at::kFloat)).to(at::kBFloat16)));
}

TEST(Baseline, NamesAreChecked) {
  const Sequence sequence(3);
  try {
    attended("snapkv", sequence, 2);
    FAIL() << "taken";
  } catch (const base::Error& error) {
    EXPECT_STREQ(error.what(), "baseline snapkv: must be one of streaming, h2o, quest, infllm, clusterkv, exact");
  }
}

TEST(Baseline, BudgetOfNsa) {
  const NSAConfig config;  // the paper's: 16 blocks of 64, window 512, a compressed key for every 16 tokens
  EXPECT_EQ(nsa_budget(config, 31), 1536);
  EXPECT_EQ(nsa_budget(config, 8192), 1536 + 511);
}

}  // namespace
}  // namespace nsa::lm
