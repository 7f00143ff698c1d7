// KVCache beside a plain model of it: which pages it gives to whom, what they contain, what it refuses.
#include "nsa/kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "support/tensor.h"

namespace nsa::test {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::int64_t kPage = 16, kCapacity = 96, kVocabulary = 64, kHeads = 1, kDim = 8;
const NSAConfig kConfig = {8, 4, 16, 4, 1, 2, 20};

KVCache make(std::int64_t batch, std::int64_t num_pages, std::int64_t num_prefixes) {
  KVCacheOptions options;
  options.batch = batch, options.key_dim = options.value_dim = kDim, options.dtype = DType::kFloat32;
  options.cfg = kConfig, options.capacity = kCapacity, options.page_size = kPage;
  options.num_pages = num_pages, options.num_prefixes = num_prefixes;
  KVCache cache;
  const Status status = KVCache::create(options, cache);
  EXPECT_TRUE(status.ok()) << status.message();
  return cache;
}

/// Queries, keys and values that depend on a token's id alone.
struct Vocabulary {
  Vocabulary() {
    unsigned seed = 0;
    for (Tensor* t : {&q, &k_cmp, &v_cmp, &k_slc, &v_slc, &k_swa, &v_swa}) {
      *t = Tensor(DType::kFloat32, {kVocabulary, kDim});
      fill_normal(*t, ++seed);
    }
  }

  /// The sequence takes these tokens, for which it has room; returns what the last one gets.
  std::vector<double> append(KVCache& cache, std::int64_t sequence, const Ids& ids) const {
    const std::int64_t batch = cache.options().batch, m = std::ssize(ids);
    std::vector<Tensor> taken;
    taken.reserve(8);
    const auto take = [&](const Tensor& from) {
      taken.emplace_back(DType::kFloat32, std::vector<std::int64_t>{batch, m, kHeads, kDim});
      for (std::int64_t r = 0; r < m; ++r)
        for (std::int64_t d = 0; d < kDim; ++d)
          taken.back().set({sequence, r, 0, d}, from.get({ids[static_cast<std::size_t>(r)], d}));
      return taken.back().view();
    };
    Tensor num_new(DType::kInt32, {batch}), gates(DType::kFloat32, {batch, m, kHeads, 3});
    for (std::int64_t b = 0; b < batch; ++b) num_new.set({b}, b == sequence ? static_cast<double>(m) : 0);
    for_each_index(gates, [&](const Index& i) { gates.set(i, 1); });
    const Tensor o(DType::kFloat32, {batch, m, kHeads, kDim});
    DecodeParams p;
    p.q = take(q), p.gates = gates, p.num_new = num_new, p.o = o;
    p.k_cmp = take(k_cmp), p.k_slc = take(k_slc), p.k_swa = take(k_swa);
    p.v_cmp = take(v_cmp), p.v_slc = take(v_slc), p.v_swa = take(v_swa);
    p.cache = cache.view(), p.cfg = kConfig;
    p.weights_k = p.weights_v = {CompressionKind::kMean, {}, {}, {}, {}, {}};
    const Status status = m > kMaxDecodeTokens ? prefill(p, {Backend::kCPU, 1}) : decode(p, {Backend::kCPU, 1});
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(cache.check().ok());
    return values_of(slice(slice(o, 0, sequence, sequence + 1), 1, m - 1, m));
  }

  Tensor q, k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa;
};

Ids numbers(std::int32_t first, std::int64_t count) {
  Ids ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

/// The pages of each sequence, of tokens or of compressed tokens.
std::vector<Ids> pages_of(const TensorView& table) {
  std::vector<Ids> pages(static_cast<std::size_t>(table.size(0)));
  for (std::int64_t b = 0; b < table.size(0); ++b)
    for (std::int64_t p = 0; p < table.size(1); ++p) {
      const std::int32_t page = table.as<std::int32_t>()[b * table.stride[0] + p * table.stride[1]];
      if (page >= 0) pages[static_cast<std::size_t>(b)].push_back(page);
    }
  return pages;
}

class PrefixCache : public testing::Test {
 protected:
  static void expect_ok(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }
  /// A prompt of `pages` pages through sequence 0, kept and released.
  void keep(const Ids& prompt) {
    expect_ok(cache.reserve({std::ssize(prompt), 0}));
    vocabulary.append(cache, 0, prompt);
    std::int64_t kept = 0;
    expect_ok(cache.keep_prefix(0, prompt, kept));
    EXPECT_EQ(kept, std::ssize(prompt) / kPage * kPage);
    cache.release(0);
  }
  /// What is kept of a prompt that goes on.
  std::int64_t match(Ids prompt) {
    prompt.push_back(0);
    std::int64_t length = -1;
    expect_ok(cache.match_prefix(1, prompt, length));
    EXPECT_EQ(cache.length(1), length);
    cache.release(1);
    return length;
  }

  Vocabulary vocabulary;
  KVCache cache = make(2, 6, 3);
  const Ids a = numbers(0, 32), b = numbers(10, 32), c = numbers(20, 16), d = numbers(30, 16);
};

TEST_F(PrefixCache, TheLeastRecentlyUsedGivesWay) {
  keep(a), keep(b), keep(c);
  EXPECT_EQ(match(a), 32);  // used: b is the oldest now
  keep(d);                  // the fourth of three
  EXPECT_EQ(match(b), 0);
  EXPECT_EQ(match(c), 16);
  EXPECT_EQ(match(d), 16);
  EXPECT_EQ(match(a), 32);
  // Four of six pages are kept. Three for a sequence cost c, which is the oldest; five cost d, and a one page of two.
  expect_ok(cache.reserve({48, 0}));
  EXPECT_EQ(match(c), 0);
  EXPECT_EQ(match(d), 16);
  expect_ok(cache.reserve({64, 0}));
  EXPECT_EQ(match(a), 0);
  EXPECT_EQ(match(d), 16);
}

TEST_F(PrefixCache, LongestThatLeavesATokenToCompute) {
  keep(a);
  Ids half(a.begin(), a.begin() + 20);
  keep(half);  // its first page alone
  std::int64_t length = -1;
  expect_ok(cache.match_prefix(1, a, length));
  EXPECT_EQ(length, 16);
  cache.release(1);
  EXPECT_EQ(match(a), 32);
  Ids changed = a;
  changed[31] = 63;
  EXPECT_EQ(match(changed), 16);
  changed[15] = 63;
  EXPECT_EQ(match(changed), 0);
  expect_ok(cache.match_prefix(1, {}, length));
  EXPECT_EQ(length, 0);
}

TEST_F(PrefixCache, Refused) {
  std::int64_t length = -1;
  EXPECT_EQ(cache.keep_prefix(2, a, length).message(), "keep_prefix: sequence 2: there are 2");
  EXPECT_EQ(cache.match_prefix(-1, a, length).message(), "match_prefix: sequence -1: there are 2");
  EXPECT_EQ(cache.keep_prefix(0, a, length).message(), "keep_prefix: sequence 0: 32 tokens: it has 0");
  expect_ok(cache.reserve({64, 0}));
  vocabulary.append(cache, 0, numbers(0, 60));
  EXPECT_EQ(cache.match_prefix(0, a, length).message(), "match_prefix: sequence 0: must be empty");
  expect_ok(cache.keep_prefix(0, numbers(0, 16), length));
  EXPECT_EQ(length, 0) << "the rings have lost what came before";
  expect_ok(cache.keep_prefix(0, numbers(0, 32), length));
  EXPECT_EQ(length, 32);
  EXPECT_EQ(cache.reserve({64, 48}).message(), "KVCache: sequence 1 needs 3 more pages of tokens, 2 are free");
  EXPECT_EQ(match(a), 32) << "what is refused evicts nothing";
}

/// What the cache should be.
class Soak {
 public:
  void run(int count) {
    for (int i = 0; i < count && !testing::Test::HasFailure(); ++i) {
      SCOPED_TRACE("change " + std::to_string(i));
      change();
      expect_invariants();
      if (i % 500 == 499) expect_every_page();
    }
  }

  int steps = 0, refusals = 0, forks = 0, rollbacks = 0, kept = 0, matches = 0, misses = 0;

 private:
  static constexpr std::int64_t kBatch = 4, kPages = 14, kPrefixes = 3, kDocuments = 4;

  std::int64_t random(std::int64_t below) { return static_cast<std::int64_t>(generator_() % below); }
  Ids& tokens(std::int64_t b) { return tokens_[static_cast<std::size_t>(b)]; }
  std::int64_t length(std::int64_t b) { return std::ssize(tokens(b)); }

  /// Tokens of a document, with now and then another one among them.
  Ids next(std::int64_t b, std::int64_t count) {
    if (tokens(b).empty()) document_[static_cast<std::size_t>(b)] = random(kDocuments);
    Ids ids;
    for (std::int64_t t = length(b); t < length(b) + count; ++t) {
      const std::int64_t written = (17 * t + 29 * document_[static_cast<std::size_t>(b)] + t * t / 7) % kVocabulary;
      ids.push_back(static_cast<std::int32_t>(random(300) == 0 ? random(kVocabulary) : written));
    }
    return ids;
  }

  void change() {
    const std::int64_t b = random(kBatch);
    const std::int64_t what = random(20);
    if (what < 9) {
      append(b);
    } else if (what < 11) {
      fork(b, random(kBatch));
    } else if (what < 13) {
      rollback(b);
    } else if (what < 15) {
      cache_.release(b);
      tokens(b).clear(), longest_[static_cast<std::size_t>(b)] = 0;
    } else if (what < 17) {
      keep(b);
    } else {
      match(b);
    }
  }

  /// Pages of either kind that no sequence but those left out has: kept prefixes give way to whoever needs them.
  std::int64_t room(bool compressed, std::int64_t without = -1) {
    std::set<std::int32_t> held;
    const std::vector<Ids> pages = table(compressed);
    for (std::int64_t b = 0; b < kBatch; ++b)
      if (b != without)
        held.insert(pages[static_cast<std::size_t>(b)].begin(), pages[static_cast<std::size_t>(b)].end());
    return (compressed ? cache_.view().k_c : cache_.view().k_slc).size(0) - std::ssize(held);
  }
  std::vector<Ids> table(bool compressed) {
    return pages_of(compressed ? cache_.view().block_table_c : cache_.view().block_table);
  }
  static std::int64_t entries(bool compressed, std::int64_t length) {
    return compressed ? kConfig.num_compressed(length) : length;
  }

  /// A call that is refused exactly where there is no room, and then changes nothing.
  template <class Call>
  bool granted(bool enough, Call call) {
    const auto before = std::pair{table(false), table(true)};
    const Status status = call();
    EXPECT_EQ(status.ok(), enough) << status.message();
    if (status.ok()) return true;
    ++refusals;
    EXPECT_EQ(status.code(), StatusCode::kOutOfCapacity) << status.message();
    EXPECT_EQ(std::pair(table(false), table(true)), before);
    return false;
  }

  void append(std::int64_t b) {
    const std::int64_t most = kCapacity - length(b);
    if (most == 0) return;
    const Ids ids = next(b, 1 + random(std::min<std::int64_t>(most, random(3) ? 6 : 40)));
    std::vector<std::int64_t> lengths;
    for (std::int64_t s = 0; s < kBatch; ++s) lengths.push_back(length(s) + (s == b ? std::ssize(ids) : 0));
    bool enough = true;
    for (const bool compressed : {false, true}) {
      const std::vector<Ids> pages = table(compressed);
      const std::int64_t missing = (entries(compressed, lengths[static_cast<std::size_t>(b)]) + kPage - 1) / kPage -
                                   std::ssize(pages[static_cast<std::size_t>(b)]);
      enough = enough && missing <= room(compressed);
    }
    if (!granted(enough, [&] { return cache_.reserve(lengths); })) return;
    tokens(b).insert(tokens(b).end(), ids.begin(), ids.end());
    longest_[static_cast<std::size_t>(b)] = std::max(longest_[static_cast<std::size_t>(b)], length(b));
    const std::vector<double> o = vocabulary_.append(cache_, b, ids);
    ++steps;
    // The same tokens through a cache of their own.
    EXPECT_TRUE(alone_.reserve({length(b)}).ok());
    EXPECT_EQ(o, vocabulary_.append(alone_, 0, tokens(b)));
    alone_.release(0);
  }

  std::int64_t back(std::int64_t b) {
    const std::int64_t least = std::max<std::int64_t>(0, longest_[static_cast<std::size_t>(b)] - kRollback);
    return least + random(length(b) - least + 1);
  }

  void fork(std::int64_t parent, std::int64_t child) {
    if (parent == child || length(child) != 0) return;
    const std::int64_t to = back(parent);
    bool enough = true;
    for (const bool compressed : {false, true})
      enough = enough && (entries(compressed, to) % kPage > 0) <= room(compressed, child);
    if (!granted(enough, [&] { return cache_.fork(parent, child, to); })) return;
    ++forks;
    tokens(child).assign(tokens(parent).begin(), tokens(parent).begin() + to);
    longest_[static_cast<std::size_t>(child)] = longest_[static_cast<std::size_t>(parent)];
    document_[static_cast<std::size_t>(child)] = document_[static_cast<std::size_t>(parent)];
  }

  void rollback(std::int64_t b) {
    const std::int64_t to = back(b);
    bool enough = true;
    for (const bool compressed : {false, true}) {
      const std::vector<Ids> pages = table(compressed);
      const Ids& own = pages[static_cast<std::size_t>(b)];
      std::int64_t shared = 0;
      for (std::int64_t p = entries(compressed, to) / kPage; p < std::ssize(own); ++p)
        shared += std::ranges::count_if(pages, [&](const Ids& other) {
                    return std::ranges::count(other, own[static_cast<std::size_t>(p)]);
                  }) > 1;
      enough = enough && shared <= room(compressed);
    }
    if (!granted(enough, [&] { return cache_.rollback(b, to); })) return;
    ++rollbacks;
    tokens(b).resize(static_cast<std::size_t>(to));
  }

  void keep(std::int64_t b) {
    std::int64_t length = -1;
    const Status status = cache_.keep_prefix(b, tokens(b), length);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(length == 0 || length == this->length(b) / kPage * kPage);
    kept += length > 0;
  }

  void match(std::int64_t b) {
    if (length(b) != 0) return;
    const Ids prompt = next(b, kCapacity);
    std::int64_t length = -1;
    const Status status = cache_.match_prefix(b, prompt, length);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(length % kPage == 0 && length < std::ssize(prompt));
    ++(length > 0 ? matches : misses);
    tokens(b).assign(prompt.begin(), prompt.begin() + length);
    longest_[static_cast<std::size_t>(b)] = length + (length > 0 ? kRollback : 0);  // at the most
  }

  void expect_invariants() {
    const KVCacheView view = cache_.view();
    for (const bool compressed : {false, true}) {
      const std::vector<Ids> pages = table(compressed);
      for (std::int64_t b = 0; b < kBatch; ++b) {
        const Ids& own = pages[static_cast<std::size_t>(b)];
        EXPECT_EQ(cache_.length(b), length(b));
        EXPECT_GE(std::ssize(own) * kPage, entries(compressed, length(b)));
        EXPECT_EQ(std::set<std::int32_t>(own.begin(), own.end()).size(), own.size()) << "a page twice in a sequence";
        // Where the sequence will write, the page is its own.
        for (std::int64_t p = entries(compressed, length(b)) / kPage; p < std::ssize(own); ++p)
          for (std::int64_t other = 0; other < kBatch; ++other)
            EXPECT_TRUE(other == b ||
                        !std::ranges::count(pages[static_cast<std::size_t>(other)], own[static_cast<std::size_t>(p)]))
                << "sequences " << b << " and " << other;
        for (std::int64_t t = 0; !compressed && t < length(b); ++t)
          for (const auto& [stored, written] :
               {std::pair{&view.k_slc, &vocabulary_.k_slc}, {&view.v_slc, &vocabulary_.v_slc}})
            EXPECT_EQ(
                get_element(*stored, offset_of(*stored, {own[static_cast<std::size_t>(t / kPage)], t % kPage, 0, 1})),
                written->get({tokens(b)[static_cast<std::size_t>(t)], 1}))
                << "sequence " << b << ", token " << t;
      }
    }
  }

  /// All pages can be had once no sequence has one, and each once.
  void expect_every_page() {
    for (std::int64_t b = 0; b < kBatch; ++b) {
      cache_.release(b);
      tokens(b).clear(), longest_[static_cast<std::size_t>(b)] = 0;
    }
    const Status status = cache_.reserve({kCapacity, kCapacity, (kPages - 12) * kPage, 0});
    EXPECT_TRUE(status.ok()) << status.message();
    std::set<std::int32_t> all;
    for (const Ids& pages : table(false)) all.insert(pages.begin(), pages.end());
    EXPECT_EQ(std::ssize(all), kPages);
    for (std::int64_t b = 0; b < kBatch; ++b) cache_.release(b);
  }

  std::mt19937 generator_{1};
  Vocabulary vocabulary_;
  KVCache cache_ = make(kBatch, kPages, kPrefixes), alone_ = make(1, 0, 0);
  std::vector<Ids> tokens_ = std::vector<Ids>(kBatch);
  std::vector<std::int64_t> longest_ = std::vector<std::int64_t>(kBatch), document_ = longest_;
};

TEST(KVCacheSoak, TenThousandChanges) {
  Soak soak;
  soak.run(10000);
  // It has been everywhere.
  EXPECT_GT(soak.steps, 2000);
  for (const int count : {soak.refusals, soak.forks, soak.rollbacks, soak.kept, soak.matches, soak.misses})
    EXPECT_GT(count, 50);
}

}  // namespace
}  // namespace nsa::test
