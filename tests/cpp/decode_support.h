// Streams of tokens that tests feed into a cache step by step, and the same through one forward pass.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "nsa/kv_cache.h"
#include "support/tensor.h"
#include "support/tolerance.h"

namespace nsa::test {

struct StreamCase {
  Backend backend = Backend::kReference;
  DType dtype = DType::kFloat64;
  std::int64_t batch = 2, length = 90, kv_heads = 2, group = 3, dk = 16, dv = 8;
  CompressionKind kind = CompressionKind::kMlp;
  std::int64_t hidden = 0;  // of the MLP; 0: twice the head dim
  bool rope = true;
  std::int64_t page_size = 16;  // 0: contiguous
  NSAConfig cfg = {8, 4, 16, 4, 1, 2, 20};
  std::vector<float> k_scale, v_scale;  // of each KV head: the cache is in e4m3
  std::int64_t oracle_from = -1;        // a forward pass is the oracle's, from this token on
  bool float8() const { return !k_scale.empty(); }
};

inline void PrintTo(const StreamCase& c, std::ostream* out) { *out << name_of(c.backend) << ' ' << name_of(c.dtype); }

/// The backends that the decode tests are linked with.
struct DecodeOperations {
  Operation<CompressParams> compress;
  Operation<NsaAttentionParams> nsa_attention;
  Operation<DecodeParams> decode, prefill;
  Operation<ForkParams> fork;
  bool prefill_has_the_bits_of_steps;
  bool (*chunks_compress_as_steps_do)();
  bool (*step_has_the_bits_of_compress)();
};

extern const DecodeOperations under_test;

std::vector<StreamCase> decode_cases();

StreamCase with(Backend backend, DType dtype, auto&& change) {
  StreamCase c;
  c.backend = backend, c.dtype = dtype;
  change(c);
  return c;
}

/// All tensors (B, length, heads, D) of B sequences.
struct Stream {
  explicit Stream(const StreamCase& c, unsigned seed = 1) : c(c) {
    const auto rows = [&](std::int64_t heads, std::int64_t width) {
      Tensor t(c.dtype, {c.batch, c.length, heads, width});
      fill_normal(t, ++seed * 7919);
      return t;
    };
    const std::int64_t heads = c.kv_heads * c.group;
    q = rows(heads, c.dk), gates = rows(heads, 3);
    k_cmp = rows(c.kv_heads, c.dk), k_slc = rows(c.kv_heads, c.dk), k_swa = rows(c.kv_heads, c.dk);
    v_cmp = rows(c.kv_heads, c.dv), v_slc = rows(c.kv_heads, c.dv), v_swa = rows(c.kv_heads, c.dv);
    weights_k = make_weights(c.dk, 5), weights_v = make_weights(c.dv, 6);
    if (!c.rope) return;
    rope_cos = Tensor(DType::kFloat32, {c.length, c.dk / 2}), rope_sin = Tensor(DType::kFloat32, {c.length, c.dk / 2});
    for (std::int64_t t = 0; t < c.length; ++t)
      for (std::int64_t j = 0; j < c.dk / 2; ++j) {
        const double angle =
            static_cast<double>(t) * std::pow(1e4, -2.0 * static_cast<double>(j) / static_cast<double>(c.dk));
        rope_cos.set({t, j}, std::cos(angle)), rope_sin.set({t, j}, std::sin(angle));
      }
  }

  struct Weights {
    Tensor w1, w2;
    CompressionKind kind;
    CompressionWeights view() const { return {kind, {}, w1, {}, w2, {}}; }
  };

  Weights make_weights(std::int64_t width, unsigned seed) const {
    Weights w{{}, {}, c.kind};
    const std::int64_t flat = c.cfg.kernel_size * width, hidden = c.hidden ? c.hidden : 2 * width;
    if (c.kind == CompressionKind::kMean) return w;
    const bool mlp = c.kind == CompressionKind::kMlp;
    w.w1 = Tensor(c.dtype, {c.kv_heads, flat, mlp ? hidden : width});
    fill_normal(w.w1, seed, 1 / std::sqrt(static_cast<double>(flat)));
    if (!mlp) return w;
    w.w2 = Tensor(c.dtype, {c.kv_heads, hidden, width});
    fill_normal(w.w2, seed + 1, 2 / std::sqrt(static_cast<double>(hidden)));
    return w;
  }

  StreamCase c;
  Tensor q, gates, k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa, rope_cos, rope_sin;
  Weights weights_k, weights_v;
};

/// Results for every token of a stream.
struct Results {
  explicit Results(const StreamCase& c)
      : o(c.dtype, {c.batch, c.length, c.kv_heads * c.group, c.dv}),
        indices(DType::kInt32, {c.batch, c.length, c.kv_heads, c.cfg.topk}) {}
  Tensor o, indices;
};

/// e4m3 of a tensor (.., .., Hkv, D) by the formula of KVCacheView.
inline Tensor quantised(const TensorView& x, const std::vector<float>& scales) {
  Tensor y(DType::kFloat8E4M3, shape_of(x));
  for_each_index(x, [&](const Index& i) {
    y.set(i, static_cast<float>(get_element(x, offset_of(x, i))) / scales[static_cast<std::size_t>(i[2])]);
  });
  return y;
}
/// What it stands for, in float64: not always one of bfloat16's numbers.
inline Tensor read_again(const TensorView& x, const std::vector<float>& scales) {
  Tensor y(DType::kFloat64, shape_of(x));
  for_each_index(x, [&](const Index& i) {
    y.set(i, get_element(x, offset_of(x, i)) * double{scales[static_cast<std::size_t>(i[2])]});
  });
  return y;
}

/// Compressed tokens of a cache, the first ones of each sequence, over those of a tensor (B, blocks, Hkv, D).
inline void take_compressed(KVCache& cache, const NSAConfig& cfg, const TensorView& pages, const TensorView& to);

/// What steps are to give. From a cache in e4m3 it is what the oracle makes of the keys and values that it stands for;
/// compressed tokens are those of `cache`, if it is given: where they are made by other kernels than those of
/// compress, both agree within rounding, which e4m3 makes an eighth.
struct Forward : Results {
  explicit Forward(const Stream& s, KVCache* cache = nullptr) : Results(s.c) {
    const std::int64_t blocks = s.c.cfg.num_compressed(s.c.length);
    k_c = Tensor(s.c.dtype, {s.c.batch, blocks, s.c.kv_heads, s.c.dk});
    v_c = Tensor(s.c.dtype, {s.c.batch, blocks, s.c.kv_heads, s.c.dv});
    const Context context{s.c.backend, 1};
    expect_ok(under_test.compress({s.k_cmp, s.weights_k.view(), s.c.cfg, {}, k_c}, context));
    expect_ok(under_test.compress({s.v_cmp, s.weights_v.view(), s.c.cfg, {}, v_c}, context));
    for (std::int64_t b = 0; s.c.rope && b < s.c.batch; ++b)
      for (std::int64_t i = 0; i < blocks; ++i)
        for (std::int64_t h = 0; h < s.c.kv_heads; ++h)
          for (std::int64_t j = 0, half = s.c.dk / 2; j < half; ++j) {
            const double cos = s.rope_cos.get({i * s.c.cfg.kernel_stride, j});
            const double sin = s.rope_sin.get({i * s.c.cfg.kernel_stride, j});
            const double x = k_c.get({b, i, h, j}), y = k_c.get({b, i, h, j + half});
            k_c.set({b, i, h, j}, x * cos - y * sin), k_c.set({b, i, h, j + half}, y * cos + x * sin);
          }
    NsaAttentionParams p;
    p.q = s.q, p.k_c = k_c, p.v_c = v_c, p.k_slc = s.k_slc, p.v_slc = s.v_slc, p.k_swa = s.k_swa, p.v_swa = s.v_swa;
    p.gates = s.gates, p.cfg = s.c.cfg, p.o = o, p.indices = indices;
    if (s.c.oracle_from >= 0)
      for (TensorView* x : {&p.q, &p.gates, &p.o, &p.indices}) *x = slice(*x, 1, s.c.oracle_from, s.c.length);
    std::vector<Tensor> read;
    for (TensorView* x : {&p.k_c, &p.v_c, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa}) {
      if (!s.c.float8()) continue;
      const bool keys = x == &p.k_c || x == &p.k_slc || x == &p.k_swa;
      const std::vector<float>& scales = keys ? s.c.k_scale : s.c.v_scale;
      const Tensor stored = quantised(*x, scales);
      if (cache && x == &p.k_c) take_compressed(*cache, s.c.cfg, cache->view().k_c, stored);
      if (cache && x == &p.v_c) take_compressed(*cache, s.c.cfg, cache->view().v_c, stored);
      read.push_back(read_again(stored, scales));
      *x = read.back();
    }
    const bool oracle = s.c.oracle_from >= 0 || s.c.float8();
    expect_ok(oracle ? reference::run(p, DType::kFloat64) : under_test.nsa_attention(p, context));
  }

  Tensor k_c, v_c;
};

/// Every byte 0xff: NaN, or -1.
inline void poison(const TensorView& view) {
  std::memset(view.data, 0xff, static_cast<std::size_t>(view.numel()) * size_of(view.dtype));
}

inline KVCache make_cache(const StreamCase& c, std::int64_t num_pages = 0, std::int64_t num_prefixes = 0) {
  KVCache cache;
  const Status status = KVCache::create({c.batch, c.kv_heads, c.dk, c.dv, c.dtype, c.cfg, c.length, c.page_size,
                                         num_pages, c.k_scale, c.v_scale, num_prefixes},
                                        cache);
  EXPECT_TRUE(status.ok()) << status.message();
  const KVCacheView view = cache.view();
  for (const TensorView& t :
       {view.k_slc, view.v_slc, view.k_c, view.v_c, view.k_swa_ring, view.v_swa_ring, view.k_cmp_ring, view.v_cmp_ring})
    poison(t);
  return cache;
}

/// Rows to_begin ... of sequence to_row of `to` become `count` rows of sequence from_row of `from`.
inline void copy_rows(const TensorView& from, std::int64_t from_row, std::int64_t from_begin, const TensorView& to,
                      std::int64_t to_row, std::int64_t to_begin, std::int64_t count) {
  for (std::int64_t r = 0; r < count; ++r)
    for (std::int64_t h = 0; h < from.size(2); ++h)
      std::memcpy(to.as<std::byte>() + offset_of(to, {to_row, to_begin + r, h}) * size_of(to.dtype),
                  from.as<std::byte>() + offset_of(from, {from_row, from_begin + r, h}) * size_of(from.dtype),
                  static_cast<std::size_t>(from.size(3)) * size_of(from.dtype));
}

inline void take_compressed(KVCache& cache, const NSAConfig& cfg, const TensorView& pages, const TensorView& to) {
  const TensorView table = cache.view().block_table_c;
  for (std::int64_t b = 0; b < to.size(0); ++b)
    for (std::int64_t i = 0; i < cfg.num_compressed(cache.length(b)); ++i) {
      const std::int64_t page_size = pages.size(1);
      copy_rows(pages, table.as<std::int32_t>()[b * table.stride[0] + i / page_size], i % page_size, to, b, i, 1);
    }
}

/// One call: sequence b takes counts[b] tokens of row rows[b] of the stream, from the sequence's length on.
struct Feed {
  const Stream& stream;
  KVCache& cache;
  const Tensor* given = nullptr;  // indices like Results::indices
  std::optional<double> softmax_scale = {};
  bool wants_indices = true;

  Status operator()(const std::vector<std::int64_t>& counts, Results& results, std::vector<std::int64_t> rows = {},
                    int num_threads = 1, bool reserve = true) const {
    const StreamCase& c = stream.c;
    const std::int64_t m = std::max<std::int64_t>(1, *std::max_element(counts.begin(), counts.end()));
    std::vector<std::int64_t> before, after;
    for (std::int64_t b = 0; b < c.batch; ++b) {
      if (static_cast<std::int64_t>(rows.size()) <= b) rows.push_back(b);
      before.push_back(cache.length(b)), after.push_back(cache.length(b) + counts[b]);
    }
    if (reserve)
      if (Status s = cache.reserve(after); !s.ok()) return s;
    Tensor num_new(DType::kInt32, {c.batch});
    for (std::int64_t b = 0; b < c.batch; ++b) num_new.set({b}, static_cast<double>(counts[b]));
    std::vector<Tensor> taken;
    const auto take = [&](const TensorView& from) {
      taken.emplace_back(from.dtype, std::vector<std::int64_t>{c.batch, m, from.size(2), from.size(3)});
      for (std::int64_t b = 0; b < c.batch; ++b) copy_rows(from, rows[b], before[b], taken.back(), b, 0, counts[b]);
      return taken.back().view();
    };
    DecodeParams p;
    p.q = take(stream.q), p.gates = take(stream.gates);
    p.k_cmp = take(stream.k_cmp), p.k_slc = take(stream.k_slc), p.k_swa = take(stream.k_swa);
    p.v_cmp = take(stream.v_cmp), p.v_slc = take(stream.v_slc), p.v_swa = take(stream.v_swa);
    if (given) p.block_indices = take(*given);
    p.cache = cache.view();
    p.weights_k = stream.weights_k.view(), p.weights_v = stream.weights_v.view();
    p.cfg = c.cfg;
    p.softmax_scale = softmax_scale;
    p.rope_cos = stream.rope_cos, p.rope_sin = stream.rope_sin;
    p.num_new = num_new;
    const Tensor o(c.dtype, {c.batch, m, c.kv_heads * c.group, c.dv});
    const Tensor indices(DType::kInt32, {c.batch, m, c.kv_heads, c.cfg.topk});
    p.o = o;
    if (wants_indices) p.indices = indices;
    const Context context{c.backend, num_threads};
    const Status status = (m > kMaxDecodeTokens ? under_test.prefill : under_test.decode)(p, context);
    for (std::int64_t b = 0; b < c.batch; ++b) {
      const std::int64_t added = cache.length(b) - before[b];
      copy_rows(o, b, 0, results.o, b, before[b], added);
      copy_rows(indices, b, 0, results.indices, b, before[b], added);
      for (std::int64_t r = added; r < m; ++r) {  // idle, or without capacity
        EXPECT_EQ(values_of(slice(slice(o, 0, b, b + 1), 1, r, r + 1)),
                  std::vector<double>(static_cast<std::size_t>(c.kv_heads * c.group * c.dv), 0.0));
        if (!wants_indices) continue;
        EXPECT_EQ(values_of(slice(slice(indices, 0, b, b + 1), 1, r, r + 1)),
                  std::vector<double>(static_cast<std::size_t>(c.kv_heads * c.cfg.topk), -1.0));
      }
    }
    return status;
  }
};

/// max|a - b| <= tolerance * max|b|, no NaN anywhere.
inline void expect_close(const TensorView& a, const TensorView& b, double tolerance) {
  const std::vector<double> x = values_of(a), y = values_of(b);
  ASSERT_EQ(x.size(), y.size());
  double largest = 0, error = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_FALSE(std::isnan(x[i]) || std::isnan(y[i])) << "element " << i;
    largest = std::max(largest, std::abs(y[i])), error = std::max(error, std::abs(x[i] - y[i]));
  }
  EXPECT_LE(error, tolerance * largest);
}

}  // namespace nsa::test
