// KVCache beside a plain model of it: which pages it gives to whom, what they contain, what it refuses.
#include "kv_cache_support.h"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "nsa/backend.h"

namespace nsa::test {
namespace {

/// The pages of each sequence, of tokens or of compressed tokens.
std::vector<Ids> pages_of(const TensorView& view) {
  const Tensor fetched = under_test.fetch(view);
  const TensorView& table = fetched;
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
  KVCache cache = make(options_of(2, 6, 3));
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

  /// Pages of either kind that no sequence but those left out has: kept prefixes are evicted for the sequences that
  /// need them.
  std::int64_t capacity(bool compressed, std::int64_t without = -1) {
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

  /// A call that is refused exactly where the capacity is exceeded, and then changes nothing.
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
      enough = enough && missing <= capacity(compressed);
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
      enough = enough && (entries(compressed, to) % kPage > 0) <= capacity(compressed, child);
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
      enough = enough && shared <= capacity(compressed);
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
    const Tensor k_slc = under_test.fetch(view.k_slc), v_slc = under_test.fetch(view.v_slc);
    const Tensor lengths = under_test.fetch(view.cache_seqlens);
    for (const bool compressed : {false, true}) {
      const std::vector<Ids> pages = table(compressed);
      for (std::int64_t b = 0; b < kBatch; ++b) {
        const Ids& own = pages[static_cast<std::size_t>(b)];
        EXPECT_EQ(cache_.length(b), length(b));
        EXPECT_EQ(lengths.get({b}), length(b));
        EXPECT_GE(std::ssize(own) * kPage, entries(compressed, length(b)));
        EXPECT_EQ(std::set<std::int32_t>(own.begin(), own.end()).size(), own.size()) << "a page twice in a sequence";
        // Where the sequence will write, the page is its own.
        for (std::int64_t p = entries(compressed, length(b)) / kPage; p < std::ssize(own); ++p)
          for (std::int64_t other = 0; other < kBatch; ++other)
            EXPECT_TRUE(other == b ||
                        !std::ranges::count(pages[static_cast<std::size_t>(other)], own[static_cast<std::size_t>(p)]))
                << "sequences " << b << " and " << other;
        for (std::int64_t t = 0; !compressed && t < length(b); ++t)
          for (const auto& [stored, written] : {std::pair{&k_slc, &vocabulary_.k_slc}, {&v_slc, &vocabulary_.v_slc}})
            EXPECT_EQ(stored->get({own[static_cast<std::size_t>(t / kPage)], t % kPage, 0, 1}),
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
  KVCache cache_ = make(options_of(kBatch, kPages, kPrefixes)), alone_ = make(options_of(1, 0, 0));
  std::vector<Ids> tokens_ = std::vector<Ids>(kBatch);
  std::vector<std::int64_t> longest_ = std::vector<std::int64_t>(kBatch), document_ = longest_;
};

/// Allocations that are counted.
struct Counted {
  std::set<void*> held;
  std::size_t bytes = 0, most = SIZE_MAX;
  KVCacheAllocator allocator() {
    return {[this](std::size_t size, void*) -> void* {
              if (bytes + size > most) return nullptr;
              void* data = std::aligned_alloc(256, (size + 255) / 256 * 256);
              held.insert(data), bytes += size;
              return data;
            },
            [this](void* data, std::size_t size, void*) {
              EXPECT_EQ(held.erase(data), 1u);
              bytes -= size;
              std::free(data);
            }};
  }
};

TEST(KVCacheMemory, OfTheCallersAllocator) {
  KVCacheOptions options = options_of(2, 0, 1);
  options.device = {};
  Counted counted;
  options.allocator = counted.allocator();
  {
    KVCache cache;
    ASSERT_TRUE(KVCache::create(options, cache).ok());
    EXPECT_EQ(counted.held.size(), 9u);
    EXPECT_TRUE(counted.held.contains(cache.view().k_slc.data));
    const std::size_t bytes = counted.bytes;
    ASSERT_TRUE(cache.reserve({40, 0}).ok());
    KVCache copy = cache;
    EXPECT_EQ(counted.bytes, 2 * bytes);
    ASSERT_TRUE(copy.reserve({40, 20}).ok());
    const auto entry = [](KVCache& of, int i) { return of.view().block_table.as<std::int32_t>()[i]; };
    EXPECT_EQ(entry(copy, 6), 3);
    EXPECT_EQ(entry(cache, 6), -1) << "a copy has memory of its own";
    cache = std::move(copy);
    EXPECT_EQ(counted.bytes, bytes);
    EXPECT_EQ(entry(cache, 6), 3);
    counted.most = bytes;
    EXPECT_EQ(KVCache::create(options, copy).code(), StatusCode::kInternal);
    EXPECT_EQ(counted.bytes, bytes) << "nothing is left of what could not be made";
  }
  EXPECT_TRUE(counted.held.empty());
  EXPECT_EQ(counted.bytes, 0u);
}

TEST(KVCacheMemory, Refused) {
  const auto message = [](auto&& change) {
    KVCacheOptions options = options_of(1, 0, 0);
    options.device = {};
    change(options);
    KVCache cache;
    return KVCache::create(options, cache).message();
  };
  int somewhere = 0;
  EXPECT_EQ(message([&](auto& o) { o.stream = &somewhere; }), "stream: must be null in host memory");
  EXPECT_EQ(message([](auto& o) { o.allocator.release = [](void*, std::size_t, void*) {}; }),
            "allocator: no allocate: must have both functions, or none");
  EXPECT_EQ(message([](auto& o) { o.allocator.allocate = [](std::size_t, void*) -> void* { return nullptr; }; }),
            "allocator: no release: must have both functions, or none");
  EXPECT_EQ(message([](auto& o) { o.device = {DeviceType::kCUDA, 4096}; }).substr(0, 14), "backend cuda: ");
}

TEST(KVCacheMemory, StepsThatAreCounted) {
  KVCache cache = make(options_of(2, 0, 0));
  EXPECT_EQ(cache.appended({1}).message(), "appended: 1 numbers: expected one for each of 2 sequences");
  if (under_test.device.type == DeviceType::kCPU) {
    EXPECT_TRUE(cache.appended({90, 90}).ok());
    EXPECT_EQ(cache.length(0), 0) << "the step has changed it already";
    return;
  }
  ASSERT_TRUE(cache.reserve({16, 20}).ok());
  EXPECT_EQ(cache.appended({-1, 0}).message(), "appended: sequence 0: -1 tokens: must be >= 0");
  const Status status = cache.appended({16, 40});
  EXPECT_EQ(status.code(), StatusCode::kOutOfCapacity);
  EXPECT_EQ(status.message(), "appended: sequence 1: 40 tokens: it has no pages for them: reserve() before the step");
  EXPECT_EQ(cache.length(0), 0);
  ASSERT_TRUE(cache.appended({16, 32}).ok());
  EXPECT_EQ(cache.length(1), 32);
  ASSERT_TRUE(cache.check().ok());
  EXPECT_EQ(cache.length(1), 0) << "no step did it";
}

TEST(KVCacheMemory, OverflowOfAStep) {
  KVCache cache = make(options_of(2, 0, 0));
  const Vocabulary vocabulary;
  ASSERT_TRUE(cache.reserve({32, 16}).ok());
  const Vocabulary::Step taken = vocabulary.step(cache, {numbers(0, 10), numbers(0, 16)});
  for (int i = 0; i < 2; ++i) {
    const Status status = under_test.step(taken.params);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  EXPECT_EQ(cache.check().message(), "a step exceeded the capacity of a sequence: reserve() before each step");
  EXPECT_EQ(cache.length(0), 20);
  EXPECT_EQ(cache.length(1), 16);
  EXPECT_TRUE(cache.check().ok());
}

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
