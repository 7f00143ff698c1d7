// Caches as a serving engine has them: what lies where changes no bit of what a sequence gets.
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "decode_support.h"
#include "support/environment.h"

namespace nsa::test {
namespace {

struct EngineOptions {
  const char* name;
  bool packed = false, caller_lengths = false, compressed_with_tokens = false, window_pages = false, raw_pages = false;
  bool shares = false;  // the window's memory and that of raw values are the selection's; raw keys have 32 slots
  bool rotate = false;  // in the call
};
constexpr EngineOptions kAll{"all", true, true, true, true, true},
    kShared{"shared", true, true, true, true, true, true};

/// A cache in memory of an engine: pages in any order, or rings where no pages are asked for.
class EngineCache {
 public:
  EngineCache(const StreamCase& c, const EngineOptions& options)
      : c_(c), options_(options), stored_(c.float8() ? DType::kFloat8E4M3 : c.dtype) {
    page_size = c.page_size ? c.page_size : (c.length + 15) / 16 * 16;
    pages = (c.length + page_size - 1) / page_size;
    const std::int64_t page_size_c = page_size / c.cfg.kernel_stride;
    slc = make(page_size, &table);
    compressed = make(options.compressed_with_tokens ? page_size_c : (page_size_c + 15) / 16 * 16,
                      options.compressed_with_tokens ? nullptr : &table_c);
    if (options.compressed_with_tokens) table_c = {};
    swa = options.window_pages ? make(page_size, &table_swa) : make_rings(c.cfg.window_size + kRollback);
    stored_ = c.dtype;
    // A repeated page keeps the last raw tokens: l + 15 of them are needed.
    const std::int64_t raw = options.shares && page_size % 32 == 0 && c.cfg.kernel_size + 15 <= 32 ? 32 : page_size;
    cmp = options.raw_pages ? make(raw, &table_cmp) : make_rings(c.cfg.kernel_size + kRollback);
    if (options.raw_pages) repeat_pages(table_cmp, page_size / raw);
    k_scale = c.k_scale, v_scale = c.v_scale;
    lengths = Tensor(DType::kInt32, {c.batch}), overflow = Tensor(DType::kInt32, {1});
    fill_value(lengths, 0), fill_value(overflow, 0);
    tokens.assign(static_cast<std::size_t>(c.batch), 0);
  }

  KVCacheView view() {
    KVCacheView v;
    v.k_slc = slc.k, v.v_slc = slc.v, v.block_table = table;
    v.k_c = compressed.k, v.v_c = compressed.v;
    if (!options_.compressed_with_tokens) v.block_table_c = table_c;
    v.k_swa_ring = swa.k, v.v_swa_ring = swa.v, v.k_cmp_ring = cmp.k, v.v_cmp_ring = cmp.v;
    if (options_.window_pages) v.block_table_swa = table_swa;
    if (options_.raw_pages) v.block_table_cmp = table_cmp;
    if (options_.shares) v.k_swa_ring = v.v_swa_ring = v.block_table_swa = {};
    if (shares_values()) v.v_cmp_ring = {};
    v.cache_seqlens = lengths, v.overflow = overflow;
    v.advance = !options_.caller_lengths;
    if (!c_.float8()) return v;
    v.k_scale = TensorView::contiguous(k_scale.data(), DType::kFloat32, {c_.kv_heads});
    v.v_scale = TensorView::contiguous(v_scale.data(), DType::kFloat32, {c_.kv_heads});
    return v;
  }

  /// Sequence b takes counts[b] tokens of row rows[b] of the stream.
  Status feed(const Stream& stream, const std::vector<std::int64_t>& counts, Results& results,
              const std::vector<std::int64_t>& rows = {0, 1}) {
    const std::int64_t most = std::max<std::int64_t>(1, *std::max_element(counts.begin(), counts.end()));
    const std::int64_t padded = std::accumulate(counts.begin(), counts.end(), std::int64_t{3});
    const auto batch = static_cast<std::int64_t>(counts.size());
    Tensor num_new(DType::kInt32, {batch}), starts(DType::kInt32, {batch + 1});
    starts.set({0}, 0);
    for (std::int64_t b = 0; b < batch; ++b) {
      num_new.set({b}, static_cast<double>(counts[b]));
      starts.set({b + 1}, starts.get({b}) + static_cast<double>(counts[b]));
      lengths.set({b}, static_cast<double>(tokens[b] + (options_.caller_lengths ? counts[b] : 0)));
    }
    const auto place = [&](std::int64_t b) {  // the first index and row of a sequence's new tokens
      return options_.packed ? std::pair{std::int64_t{0}, static_cast<std::int64_t>(starts.get({b}))}
                             : std::pair{b, std::int64_t{0}};
    };
    const auto make_tensor = [&](DType dtype, std::int64_t heads, std::int64_t width) {
      Tensor t(dtype, {options_.packed ? 1 : batch, options_.packed ? padded : most, heads, width});
      poison(t);
      return t;
    };
    const auto given = [&](const TensorView& t) { return options_.packed ? without_batch(t) : t; };
    std::vector<Tensor> taken;
    const auto take = [&](const TensorView& from) {
      taken.push_back(make_tensor(from.dtype, from.size(2), from.size(3)));
      for (std::int64_t b = 0; b < batch; ++b)
        copy_rows(from, rows[b], tokens[b], taken.back(), place(b).first, place(b).second, counts[b]);
      return given(taken.back());
    };
    DecodeParams p;
    p.q = take(stream.q), p.gates = take(stream.gates);
    p.k_cmp = take(stream.k_cmp), p.k_slc = take(stream.k_slc), p.k_swa = take(stream.k_swa);
    p.v_cmp = take(stream.v_cmp), p.v_slc = take(stream.v_slc), p.v_swa = take(stream.v_swa);
    if (options_.shares) p.k_swa = p.k_slc, p.v_swa = p.v_slc;
    if (shares_values()) p.v_cmp = p.v_slc;
    p.cache = view();
    p.weights_k = stream.weights_k.view(), p.weights_v = stream.weights_v.view();
    p.cfg = c_.cfg;
    p.rope_cos = stream.rope_cos, p.rope_sin = stream.rope_sin;
    p.rotate = options_.rotate;
    if (options_.packed) {
      starts.set({batch}, starts.get({batch}) + static_cast<double>(beyond));
      p.query_start_loc = starts, p.max_query_len = most;
    } else {
      p.num_new = num_new;
    }
    const Tensor o = make_tensor(c_.dtype, c_.kv_heads * c_.group, c_.dv);
    const Tensor indices = make_tensor(DType::kInt32, c_.kv_heads, c_.cfg.topk);
    p.o = given(o), p.indices = given(indices);
    const std::vector<double> before = values_of(lengths);
    const auto call = most > kMaxDecodeTokens ? under_test.prefill : under_test.decode;
    const Status status = call(p, {c_.backend, 2});  // threads: the library's own cache is fed by one
    if (options_.caller_lengths) {
      EXPECT_EQ(values_of(lengths), before);
    }
    if (options_.packed && status.ok()) {
      EXPECT_EQ(values_of(slice(o, 1, padded - 3, padded)), zeros(3 * o.view().size(2) * c_.dv));
    }
    for (std::int64_t b = 0; b < batch; ++b) {
      copy_rows(o, place(b).first, place(b).second, results.o, b, tokens[b], counts[b]);
      copy_rows(indices, place(b).first, place(b).second, results.indices, b, tokens[b], counts[b]);
      tokens[b] += counts[b];
    }
    return status;
  }

  static std::vector<double> zeros(std::int64_t count) {
    return std::vector<double>(static_cast<std::size_t>(count), 0.0);
  }
  static void set(const Tensor& table, std::int64_t b, std::int64_t p, std::int32_t page) {
    table.view().as<std::int32_t>()[b * table.view().size(1) + p] = page;
  }
  static std::int32_t get(const Tensor& table, std::int64_t b, std::int64_t p) {
    return table.view().as<std::int32_t>()[b * table.view().size(1) + p];
  }

  struct Pair {
    Tensor k, v;
  };
  std::int64_t page_size = 0, pages = 0;
  Pair slc, compressed, swa, cmp;
  Tensor table, table_c, table_swa, table_cmp, lengths, overflow;
  std::vector<float> k_scale, v_scale;
  std::vector<std::int64_t> tokens;  // of each sequence; lower them to take tokens back
  std::int64_t beyond = 0;           // what the last packed offset is too large by

 private:
  bool shares_values() const { return options_.shares && !c_.float8(); }
  void repeat_pages(Tensor& of, std::int64_t times) const {
    const Tensor once = std::move(of);
    of = Tensor(DType::kInt32, {c_.batch, pages * times});
    for (std::int64_t b = 0; b < c_.batch; ++b)
      for (std::int64_t p = 0; p < pages * times; ++p) set(of, b, p, get(once, b, p / times));
  }
  static TensorView without_batch(TensorView t) {
    t.rank = 3;
    t.shape = {t.shape[1], t.shape[2], t.shape[3]}, t.stride = {t.stride[1], t.stride[2], t.stride[3]};
    return t;
  }

  /// Poisoned pages, more than there are places for, and a table of some of them.
  Pair make(std::int64_t rows, Tensor* its_table) {
    const std::int64_t places = c_.batch * pages, count = places + 2;
    if (its_table) {
      std::vector<std::int32_t> numbers(static_cast<std::size_t>(count));
      std::iota(numbers.begin(), numbers.end(), 0);
      std::shuffle(numbers.begin(), numbers.end(), random_);
      *its_table = Tensor(DType::kInt32, {c_.batch, pages});
      std::copy_n(numbers.begin(), places, its_table->view().as<std::int32_t>());
    }
    return poisoned(count, rows);
  }
  Pair make_rings(std::int64_t rows) const { return poisoned(c_.batch, rows); }
  Pair poisoned(std::int64_t first, std::int64_t rows) const {
    Pair pair{Tensor(stored_, {first, rows, c_.kv_heads, c_.dk}), Tensor(stored_, {first, rows, c_.kv_heads, c_.dv})};
    poison(pair.k), poison(pair.v);
    return pair;
  }

  StreamCase c_;
  EngineOptions options_;
  DType stored_;  // of the pages and rings that are made
  std::mt19937 random_{7};
};

/// Rows begin ... end - 1 of sequence b have the same bits.
void expect_same(const Results& got, const Results& expected, std::int64_t b, std::int64_t begin, std::int64_t end) {
  const auto rows = [&](const TensorView& t) { return slice(slice(t, 0, b, b + 1), 1, begin, end); };
  EXPECT_TRUE(same_bits(rows(got.o), rows(expected.o))) << "sequence " << b;
  EXPECT_TRUE(same_bits(rows(got.indices), rows(expected.indices))) << "sequence " << b;
}

/// The window and raw values become what branches that share memory have.
void share_branches(const Stream& stream) {
  const auto copy = [&](const Tensor& from, const Tensor& to) {
    for (std::int64_t b = 0; b < stream.c.batch; ++b) copy_rows(from, b, 0, to, b, 0, stream.c.length);
  };
  copy(stream.k_slc, stream.k_swa), copy(stream.v_slc, stream.v_swa);
  if (!stream.c.float8()) copy(stream.v_slc, stream.v_cmp);
}

/// Steps of so many tokens of each sequence have the same bits with the library's own cache and with each of these.
void expect_bits_of_rings(const StreamCase& c, const std::vector<std::vector<std::int64_t>>& steps,
                          const std::vector<EngineOptions>& engines) {
  const Stream stream(c);
  if (engines.front().shares) share_branches(stream);
  Results expected(c);
  KVCache rings = make_cache(c);
  for (const auto& counts : steps) expect_ok(Feed{stream, rings}(counts, expected));
  for (const EngineOptions& options : engines) {
    SCOPED_TRACE(options.name);
    EngineCache cache(c, options);
    Results results(c);
    for (const auto& counts : steps) expect_ok(cache.feed(stream, counts, results));
    for (std::int64_t b = 0; b < c.batch; ++b) expect_same(results, expected, b, 0, cache.tokens[b]);
    EXPECT_EQ(cache.overflow.get({0}), 0);
  }
}

class EngineShaped : public testing::TestWithParam<StreamCase> {
 protected:
  StreamCase c = GetParam();
};

// Each way of an engine by itself but packed tokens, of which the kernels of a forward pass serve longer chunks alone.
const std::vector<EngineOptions> kUnpacked{{.name = "lengths of the caller", .caller_lengths = true},
                                           {.name = "compressed with tokens", .compressed_with_tokens = true},
                                           {.name = "window in pages", .window_pages = true},
                                           {.name = "raw tokens in pages", .raw_pages = true}};

TEST_P(EngineShaped, TheBitsOfRingsAndPagesOfTheirOwn) {
  std::vector<EngineOptions> engines{{"none"}, {.name = "packed", .packed = true}, kAll};
  engines.insert(engines.end(), kUnpacked.begin(), kUnpacked.end());
  expect_bits_of_rings(c, {{0, 40}, {16, 0}, {3, 1}, {0, 0}, {0, 7}, {9, 0}, {16, 16}, {40, 2}}, engines);
}

TEST_P(EngineShaped, TheBitsOfRingsInMemoryThatBranchesShare) {
  expect_bits_of_rings(c, {{0, 40}, {16, 0}, {3, 1}, {0, 0}, {0, 7}, {9, 0}, {16, 16}, {40, 2}}, {kShared});
}

/// Rotates x at its tokens' positions. Each product and each sum is rounded to float32, or to float64 for that type.
void rotate_before(Tensor& x, const Stream& stream) {
  const bool wide = stream.c.dtype == DType::kFloat64;
  const auto rounded = [&](double value) { return wide ? value : static_cast<float>(value); };
  for (std::int64_t b = 0; b < x.view().size(0); ++b)
    for (std::int64_t t = 0; t < x.view().size(1); ++t)
      for (std::int64_t h = 0; h < x.view().size(2); ++h)
        for (std::int64_t j = 0, half = stream.c.dk / 2; j < half; ++j) {
          const double cos = stream.rope_cos.get({t, j}), sin = stream.rope_sin.get({t, j});
          const double low = x.get({b, t, h, j}), high = x.get({b, t, h, j + half});
          x.set({b, t, h, j}, rounded(rounded(low * cos) - rounded(high * sin)));
          x.set({b, t, h, j + half}, rounded(rounded(high * cos) + rounded(low * sin)));
        }
}

/// Steps whose call rotates have the bits, in the cache too, of steps whose tokens were rotated before. In float64 a
/// compiler may fuse a product with a sum.
void expect_rotation_in_the_call(const StreamCase& c, const std::vector<std::vector<std::int64_t>>& steps,
                                 const std::vector<EngineOptions>& engines) {
  for (EngineOptions options : engines) {
    SCOPED_TRACE(options.name);
    const Stream raw(c);
    Stream rotated(c);
    for (const Stream* stream : {&raw, static_cast<const Stream*>(&rotated)})
      if (options.shares) share_branches(*stream);
    for (Tensor* x : {&rotated.q, &rotated.k_slc, &rotated.k_swa}) rotate_before(*x, rotated);
    EngineCache before(c, options);
    options.rotate = true;
    EngineCache in_the_call(c, options);
    Results expected(c), results(c);
    for (const auto& counts : steps) {
      expect_ok(before.feed(rotated, counts, expected));
      expect_ok(in_the_call.feed(raw, counts, results));
    }
    EXPECT_EQ(in_the_call.overflow.get({0}), 0);
    if (c.dtype == DType::kFloat64) {
      for (std::int64_t b = 0; b < c.batch; ++b) {
        const auto fed = [&](const TensorView& t) { return slice(slice(t, 0, b, b + 1), 1, 0, before.tokens[b]); };
        expect_close(fed(results.o), fed(expected.o), 1e-12);
      }
      continue;
    }
    for (std::int64_t b = 0; b < c.batch; ++b) expect_same(results, expected, b, 0, before.tokens[b]);
    for (const auto pages : {&EngineCache::slc, &EngineCache::compressed, &EngineCache::swa, &EngineCache::cmp}) {
      EXPECT_TRUE(same_bits((in_the_call.*pages).k, (before.*pages).k));
      EXPECT_TRUE(same_bits((in_the_call.*pages).v, (before.*pages).v));
    }
  }
}

TEST_P(EngineShaped, RotationInTheCallHasTheBitsOfRotatedTokens) {
  if (!c.rope) GTEST_SKIP() << "rotated tokens only";
  c.length = 192;  // whole pages of every size: the tables do not bound the capacity
  expect_rotation_in_the_call(c, {{0, 40}, {16, 0}, {3, 1}, {0, 0}, {9, 0}, {16, 16}, {40, 2}},
                              {{.name = "batch"}, {.name = "packed", .packed = true}, kAll, kShared});
}

/// A case for each head dim, size of pages and type of cache, long enough for the kernels of a forward pass, which the
/// oracle does not have.
std::vector<StreamCase> chunk_cases(std::int64_t batch, std::int64_t length) {
  std::set<std::tuple<std::int64_t, std::int64_t, bool>> seen;
  std::vector<StreamCase> cases;
  for (StreamCase c : decode_cases()) {
    if (c.backend == Backend::kReference || c.dtype != DType::kBFloat16) continue;
    if (!seen.insert({c.dk, c.page_size, c.float8()}).second) continue;
    c.batch = batch, c.length = length, c.group = 16, c.cfg = {16, 8, 32, 5, 1, 2, 40};
    cases.push_back(c);
  }
  return cases;
}
std::string name_of(const StreamCase& c) {
  return "head dim " + std::to_string(c.dk) + ", pages of " + std::to_string(c.page_size) +
         (c.float8() ? ", e4m3" : "");
}

TEST(EngineShapedChunks, TheBitsOfRingsAndPagesOfTheirOwn) {
  for (const StreamCase& c : chunk_cases(2, 520)) {
    SCOPED_TRACE(name_of(c));
    expect_bits_of_rings(c, {{150, 17}, {3, 140}, {200, 1}, {160, 300}}, kUnpacked);
  }
}

const std::vector<EngineOptions> kPacked{{.name = "packed", .packed = true}, kAll};

TEST(EngineShapedChunks, PackedTokensOfOneSequence) {
  for (const StreamCase& c : chunk_cases(1, 520)) {
    SCOPED_TRACE(name_of(c));
    expect_bits_of_rings(c, {{150}, {3}, {140}, {17}, {200}}, kPacked);
  }
}

TEST(EngineShapedChunks, RotationInTheCallHasTheBitsOfRotatedTokens) {
  for (const StreamCase& c : chunk_cases(2, 576)) {
    if (!c.rope) continue;
    SCOPED_TRACE(name_of(c));
    expect_rotation_in_the_call(c, {{150, 17}, {3, 140}, {200, 300}}, {{.name = "batch"}, kAll, kShared});
  }
  for (const StreamCase& c : chunk_cases(1, 576)) {  // packed tokens by the kernels of a forward pass
    if (!c.rope) continue;
    SCOPED_TRACE(name_of(c));
    expect_rotation_in_the_call(c, {{150}, {3}, {140}}, {kAll});
  }
}

TEST(EngineShapedChunks, PackedTokensOfSeveral) {
  // The last step has too few of each for the kernels of a forward pass.
  for (const StreamCase& c : chunk_cases(2, 1140)) {
    if (c.page_size == 0) continue;
    SCOPED_TRACE(name_of(c));
    expect_bits_of_rings(c, {{600, 500}, {522, 522}, {0, 60}}, kPacked);
    expect_bits_of_rings(c, {{10, 1050}, {1030, 1}, {17, 17}}, kPacked);
    expect_bits_of_rings(c, {{10, 1050}, {1030, 1}, {17, 17}}, {kShared});
  }
}

TEST(EngineShapedChunks, OverflowOfAPackedSequenceLeavesTheOthersUnchanged) {
  for (const StreamCase& c : chunk_cases(3, 560)) {
    if (c.page_size != 16) continue;
    SCOPED_TRACE(name_of(c));
    const Stream stream(c);
    Results expected(c);
    KVCache rings = make_cache(c);
    for (const std::int64_t m : {20, 520}) expect_ok(Feed{stream, rings}({m, m, m}, expected));
    for (std::int64_t lost = 0; lost < c.batch; ++lost) {
      SCOPED_TRACE("without capacity: sequence " + std::to_string(lost));
      EngineCache cache(c, kAll);
      Results results(c);
      const std::vector<std::int64_t> rows{0, 1, 2};
      expect_ok(cache.feed(stream, {20, 20, 20}, results, rows));
      EngineCache::set(cache.table, lost, cache.pages - 2, -1);
      expect_ok(cache.feed(stream, {520, 520, 520}, results, rows));
      EXPECT_EQ(cache.overflow.get({0}), 1);
      const auto fed = [&](const TensorView& t) { return slice(slice(t, 0, lost, lost + 1), 1, 20, 540); };
      for (std::int64_t b = 0; b < c.batch; ++b)
        if (b != lost) expect_same(results, expected, b, 0, 540);
      for (const double x : values_of(fed(results.o))) ASSERT_EQ(x, 0);
      for (const double x : values_of(fed(results.indices))) ASSERT_EQ(x, -1);
    }
  }
}

TEST_P(EngineShaped, FullPagesAreSharedWithoutAFork) {
  // The second sequence names the first one's full pages and goes on behind them with tokens of its own.
  if (c.page_size == 0) GTEST_SKIP() << "pages only";
  const Stream stream(c);
  const std::int64_t shared = c.page_size * (48 / c.page_size);
  EngineCache cache(c, kAll);
  Results results(c), expected(c);
  expect_ok(cache.feed(stream, {shared + 5, 0}, results));
  for (const Tensor* table : {&cache.table, &cache.table_swa, &cache.table_cmp})
    for (std::int64_t p = 0; p < shared / c.page_size; ++p)
      EngineCache::set(*table, 1, p, EngineCache::get(*table, 0, p));
  cache.tokens[1] = shared;
  const std::vector<std::vector<std::int64_t>> steps{{1, 3}, {16, 16}, {1, 1}, {0, 7}};
  for (const auto& counts : steps) expect_ok(cache.feed(stream, counts, results));

  KVCache alone = make_cache(c);
  expect_ok(Feed{stream, alone}({shared + 5, 0}, expected));
  expect_ok(Feed{stream, alone}({0, shared}, expected, {0, 0}));
  for (const auto& counts : steps) expect_ok(Feed{stream, alone}(counts, expected));
  expect_same(results, expected, 0, 0, cache.tokens[0]);
  expect_same(results, expected, 1, shared, cache.tokens[1]);
}

TEST_P(EngineShaped, OnlyPagesThatAStepNeedsMustBeThere) {
  if (c.page_size == 0) GTEST_SKIP() << "pages only";
  const Stream stream(c);
  Results results(c), expected(c);
  EngineCache cache(c, kAll), whole(c, kAll);
  for (EngineCache* each : {&cache, &whole})
    expect_ok(each->feed(stream, {60, 60}, each == &cache ? results : expected));
  const std::int64_t window = 60 - c.cfg.window_size + 1;
  const std::int64_t open = c.cfg.num_compressed(60) * c.cfg.kernel_stride;
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t p = 0; p < window / c.page_size; ++p) EngineCache::set(cache.table_swa, b, p, -1);
    for (std::int64_t p = 0; p < open / c.page_size; ++p) EngineCache::set(cache.table_cmp, b, p, -1);
  }
  for (EngineCache* each : {&cache, &whole})
    expect_ok(each->feed(stream, {2, 20}, each == &cache ? results : expected));
  EXPECT_EQ(cache.overflow.get({0}), 0);
  for (std::int64_t b = 0; b < c.batch; ++b) expect_same(results, expected, b, 0, cache.tokens[b]);

  // Any page that it needs and has not: nothing is read or written, o = 0 and the flag is set.
  for (Tensor* table : {&cache.table, &cache.table_swa, &cache.table_cmp}) {
    const std::int64_t last = 62 / c.page_size;
    const std::int32_t page = EngineCache::get(*table, 0, last);
    EngineCache::set(*table, 0, last, -1);
    const Tensor before = cache.slc.k.clone();
    cache.overflow.set({0}, 0);
    expect_ok(cache.feed(stream, {1, 0}, results));
    EXPECT_EQ(cache.overflow.get({0}), 1);
    EXPECT_TRUE(same_bits(before, cache.slc.k));
    EXPECT_EQ(values_of(slice(slice(results.o, 0, 0, 1), 1, 62, 63)), EngineCache::zeros(c.kv_heads * c.group * c.dv));
    cache.tokens[0] = 62;
    EngineCache::set(*table, 0, last, page);
  }
}

TEST_P(EngineShaped, OffsetsOutOfBoundsSetOverflow) {
  const Environment one_shape("NSA_BATCH_INVARIANT", "1");  // steps of three tokens and of four
  const Stream stream(c);
  for (const bool rotate : {false, true}) {
    if (rotate && !c.rope) continue;
    SCOPED_TRACE(rotate ? "rotated in the call" : "rotated before");
    EngineOptions options = kAll;
    options.rotate = rotate;
    Results results(c), expected(c);
    EngineCache cache(c, options), whole(c, options);
    for (EngineCache* each : {&cache, &whole})
      expect_ok(each->feed(stream, {20, 20}, each == &cache ? results : expected));
    expect_ok(whole.feed(stream, {3, 0}, expected));
    const Tensor before = cache.slc.k.clone();
    cache.beyond = 5;                                 // as many rows as there are, and two
    if (!cache.feed(stream, {3, 4}, results).ok()) {  // those in host memory are looked at first
      EXPECT_TRUE(same_bits(before, cache.slc.k));
      continue;
    }
    EXPECT_EQ(cache.overflow.get({0}), 1);
    expect_same(results, expected, 0, 0, 23);
    EXPECT_EQ(values_of(slice(slice(results.o, 0, 1, 2), 1, 20, 24)),
              EngineCache::zeros(4 * c.kv_heads * c.group * c.dv));
    EXPECT_EQ(values_of(slice(slice(results.indices, 0, 1, 2), 1, 20, 24)),
              std::vector<double>(static_cast<std::size_t>(4 * c.kv_heads * c.cfg.topk), -1.0));
  }
}

TEST_P(EngineShaped, AForkOfPagesAlone) {
  // Without rings it may be anywhere, here far before the parent's end and in the middle of a page and of a block.
  const Stream stream(c);
  for (const std::int64_t length : {0, 7, 21, 37, 60}) {
    if (length == 7 && !under_test.chunks_compress_as_steps_do()) continue;  // the parent's are of a chunk
    SCOPED_TRACE(length);
    EngineCache cache(c, kAll);
    Results results(c), expected(c);
    expect_ok(cache.feed(stream, {60, 0}, results));
    for (std::int64_t p = 0; p < length / cache.page_size; ++p)  // full pages, of tokens alone
      EngineCache::set(cache.table, 1, p, EngineCache::get(cache.table, 0, p));
    cache.lengths.set({0}, 60);
    expect_ok(under_test.fork({cache.view(), c.cfg, 0, 1, length}, {c.backend, 1}));
    cache.tokens[1] = length;
    for (const std::int64_t m : {3, 16}) expect_ok(cache.feed(stream, {m, m}, results));

    KVCache alone = make_cache(c);
    expect_ok(Feed{stream, alone}({60, 0}, expected));
    if (length > 0) expect_ok(Feed{stream, alone}({0, length}, expected, {0, 0}));
    for (const std::int64_t m : {3, 16}) expect_ok(Feed{stream, alone}({m, m}, expected));
    expect_same(results, expected, 0, 0, cache.tokens[0]);
    expect_same(results, expected, 1, length, cache.tokens[1]);
  }
}

std::string name_of_case(const testing::TestParamInfo<StreamCase>& info) {
  const StreamCase& c = info.param;
  return std::string(name_of(c.backend)) + "_" + name_of(c.dtype) + "_" + name_of(c.kind) + "_g" +
         std::to_string(c.group) + "_page" + std::to_string(c.page_size) + (c.rope ? "" : "_norope") +
         (c.float8() ? "_e4m3" : "");
}

INSTANTIATE_TEST_SUITE_P(Streams, EngineShaped, testing::ValuesIn(decode_cases()), name_of_case);

}  // namespace
}  // namespace nsa::test
