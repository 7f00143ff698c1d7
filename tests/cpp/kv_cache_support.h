// Tokens whose keys and values depend on their ids alone, and the backend that tests of KVCache are linked with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "nsa/kv_cache.h"
#include "support/tensor.h"
#include "support/tolerance.h"

namespace nsa::test {

using Ids = std::vector<std::int32_t>;

struct CacheUnderTest {
  Device device;
  std::int64_t dim;   // of keys and values
  std::int64_t most;  // new tokens of a call
  /// decode, or prefill: the cache is on the device, all else in host memory.
  Status (*step)(const DecodeParams& params);
  /// What a cache's tensor holds.
  Tensor (*fetch)(const TensorView& view);
};
extern const CacheUnderTest under_test;

constexpr std::int64_t kPage = 16, kCapacity = 96, kVocabulary = 64, kHeads = 1;
inline const NSAConfig kConfig = {8, 4, 16, 4, 1, 2, 20};

inline KVCacheOptions options_of(std::int64_t batch, std::int64_t num_pages, std::int64_t num_prefixes) {
  KVCacheOptions options;
  options.batch = batch, options.key_dim = options.value_dim = under_test.dim, options.dtype = DType::kFloat32;
  options.cfg = kConfig, options.capacity = kCapacity, options.page_size = kPage;
  options.num_pages = num_pages, options.num_prefixes = num_prefixes, options.device = under_test.device;
  return options;
}

inline KVCache make(const KVCacheOptions& options) {
  KVCache cache;
  const Status status = KVCache::create(options, cache);
  EXPECT_TRUE(status.ok()) << status.message();
  return cache;
}

inline Ids numbers(std::int32_t first, std::int64_t count) {
  Ids ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

/// Queries, keys and values of each id.
struct Vocabulary {
  Vocabulary() {
    unsigned seed = 0;
    for (Tensor* t : {&q, &k_cmp, &v_cmp, &k_slc, &v_slc, &k_swa, &v_swa}) {
      *t = Tensor(DType::kFloat32, {kVocabulary, under_test.dim});
      fill_normal(*t, ++seed);
    }
  }

  /// The arguments of a step: sequence b takes ids[b], as long as the longest of them.
  struct Step {
    DecodeParams params;
    std::vector<Tensor> tensors;
  };
  Step step(KVCache& cache, const std::vector<Ids>& ids) const {
    const std::int64_t batch = std::ssize(ids);
    std::int64_t m = 1;
    for (const Ids& row : ids) m = std::max(m, std::ssize(row));
    Step step;
    std::vector<Tensor>& made = step.tensors;
    const auto take = [&](const Tensor& from) {
      made.emplace_back(DType::kFloat32, std::vector<std::int64_t>{batch, m, kHeads, under_test.dim});
      fill_value(made.back(), 0);
      for (std::int64_t b = 0; b < batch; ++b)
        for (std::int64_t r = 0; r < std::ssize(ids[static_cast<std::size_t>(b)]); ++r)
          for (std::int64_t d = 0; d < under_test.dim; ++d)
            made.back().set({b, r, 0, d}, from.get({ids[static_cast<std::size_t>(b)][static_cast<std::size_t>(r)], d}));
      return made.back().view();
    };
    DecodeParams& p = step.params;
    p.q = take(q), p.o = made.emplace_back(DType::kFloat32, shape_of(p.q));
    p.k_cmp = take(k_cmp), p.k_slc = take(k_slc), p.k_swa = take(k_swa);
    p.v_cmp = take(v_cmp), p.v_slc = take(v_slc), p.v_swa = take(v_swa);
    p.gates = made.emplace_back(DType::kFloat32, std::vector<std::int64_t>{batch, m, kHeads, 3});
    p.num_new = made.emplace_back(DType::kInt32, std::vector<std::int64_t>{batch});
    fill_value(p.gates, 1);
    for (std::int64_t b = 0; b < batch; ++b)
      p.num_new.as<std::int32_t>()[b] = static_cast<std::int32_t>(ids[static_cast<std::size_t>(b)].size());
    p.cache = cache.view(), p.cfg = kConfig;
    p.weights_k = p.weights_v = {CompressionKind::kMean, {}, {}, {}, {}, {}};
    return step;
  }

  /// The sequence takes these tokens, for which it has capacity; returns what the last one gets.
  std::vector<double> append(KVCache& cache, std::int64_t sequence, const Ids& ids) const {
    std::vector<double> last;
    for (auto rest = ids.begin(); rest != ids.end();) {
      const auto end = rest + std::min<std::ptrdiff_t>(ids.end() - rest, under_test.most);
      std::vector<Ids> rows(static_cast<std::size_t>(cache.options().batch));
      std::vector<std::int64_t> counts(rows.size());
      rows[static_cast<std::size_t>(sequence)] = {rest, end};
      counts[static_cast<std::size_t>(sequence)] = end - rest;
      const Step taken = step(cache, rows);
      for (const Status& status : {under_test.step(taken.params), cache.appended(counts), cache.check()})
        EXPECT_TRUE(status.ok()) << status.message();
      const TensorView& o = taken.params.o;
      last = values_of(slice(slice(o, 0, sequence, sequence + 1), 1, end - rest - 1, end - rest));
      rest = end;
    }
    return last;
  }

  Tensor q, k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa;
};

}  // namespace nsa::test
