// What decode, prefill, fork and KVCache refuse, and the message that says why.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "core/support.h"
#include "core/validation/validate.h"
#include "decode_support.h"

namespace nsa::test {
namespace {

/// A valid call of decode: 2 sequences at lengths 0, a page of 16 tokens each.
struct Step {
  explicit Step(const StreamCase& its_case = {}) : c(its_case) { begin(); }

  StreamCase c;
  Stream stream{c};
  KVCache cache = make_cache(c);
  Tensor o{DType::kFloat64, {2, 3, 6, 8}}, num_new{DType::kInt32, {2}}, indices{DType::kInt32, {2, 3, 2, 4}};
  DecodeParams params;

  void begin() {
    EXPECT_TRUE(cache.reserve({16, 16}).ok());
    const auto first = [](const TensorView& t) { return slice(t, 1, 0, 3); };
    params.q = first(stream.q), params.gates = first(stream.gates);
    params.k_cmp = first(stream.k_cmp), params.k_slc = first(stream.k_slc), params.k_swa = first(stream.k_swa);
    params.v_cmp = first(stream.v_cmp), params.v_slc = first(stream.v_slc), params.v_swa = first(stream.v_swa);
    params.weights_k = stream.weights_k.view(), params.weights_v = stream.weights_v.view();
    params.rope_cos = stream.rope_cos, params.rope_sin = stream.rope_sin;
    params.cache = cache.view();
    params.cfg = c.cfg;
    params.num_new = num_new, params.o = o, params.indices = indices;
    fill_value(num_new, 3);
  }
};

TEST(CacheRefused, Decode) {
  Step step;
  ASSERT_EQ(decode(step.params, {Backend::kReference}).message(), "");
  struct Refusal {
    std::function<void(DecodeParams&)> spoil;
    std::string message;
  };
  Tensor table(DType::kInt32, {2, 6}), shared(DType::kInt32, {2, 6}), lengths(DType::kInt32, {2});
  Tensor too_many(DType::kInt32, {2}), seven(DType::kInt32, {2});
  fill_value(seven, 7);
  fill_value(table, 12);
  fill_value(shared, 3);
  fill_value(lengths, -1);
  fill_value(too_many, 4);
  using P = DecodeParams;
  const std::vector<Refusal> refusals = {
      {[](P& p) { p.cfg.window_size = 0; }, "window_size = 0: must be >= 1"},
      {[](P& p) { p.q = {}; }, "q: not given: expected float32 (B, m, H, Dk)"},
      {[](P& p) { p.q = slice(p.q, 1, 0, 0); }, "q: float64 (2, 0, 6, 16): m must be >= 1"},
      {[](P& p) { p.k_slc.dtype = DType::kFloat32; }, "k_slc: float32 (2, 3, 2, 16): expected float64 as q"},
      {[](P& p) { p.v_swa.shape[3] = 16; },
       "v_swa: float64 (2, 3, 2, 16): expected the shape (B = 2, m = 3, Hkv = 2, Dv = 8)"},
      {[](P& p) { p.q.shape[2] = p.gates.shape[2] = p.o.shape[2] = 5; },
       "H = 5, Hkv = 2: Hkv must divide H, both >= 1"},
      {[](P& p) { p.cfg.window_size = 21; },
       "cache.k_swa_ring: float64 (2, 52, 2, 16): expected the shape (B = 2, window_size + 32 = 53, Hkv = 2, Dk = 16)"},
      {[](P& p) { p.cfg.kernel_size = 4; },
       "cache.k_cmp_ring: float64 (2, 40, 2, 16): expected the shape (B = 2, kernel_size + 32 = 36, Hkv = 2, Dk = 16)"},
      {[](P& p) { p.cache.k_slc.shape[1] = p.cache.v_slc.shape[1] = 8; },
       "cache.k_slc: page_size = 8: must be a positive multiple of 16"},
      {[](P& p) { p.cache.v_slc.shape[0] = 11; },
       "cache.v_slc: float64 (11, 16, 2, 8): expected the shape (num_pages = 12, page_size = 16, Hkv = 2, Dv = 8)"},
      {[](P& p) { p.cache.k_slc.stride[2] = 0; },
       "cache.k_slc: float64 (12, 16, 2, 16): dimension 2 of an output has stride 0"},
      {[&](P& p) { p.cache.block_table = table; },
       "cache.block_table[0, 0] = 12: must be -1 or below 12, the number of pages"},
      {[&](P& p) { p.cache.block_table = shared; },
       "cache.block_table[1, 0] = 3: [0, 0] is this page too, and the step writes to it: only full pages can be "
       "shared"},
      {[&](P& p) { p.cache.block_table_c = slice(shared, 1, 0, 2), p.cache.cache_seqlens = seven; },
       "cache.block_table_c[1, 0] = 3: [0, 0] is this page too, and the step writes to it: only full pages can be "
       "shared"},
      {[&](P& p) { p.cache.cache_seqlens = lengths; }, "cache.cache_seqlens[0] = -1: must be >= 0"},
      {[](P& p) { p.cache.overflow = {}; }, "cache.overflow: not given: expected int32 (1)"},
      {[&](P& p) { p.num_new = too_many; }, "num_new[0] = 4: must be 0 ... m = 3"},
      {[](P& p) { p.rope_sin = {}; }, "rope_sin: not given: rope_cos and rope_sin come together"},
      {[](P& p) { p.rope_cos.shape[1] = 16; },
       "rope_cos: float32 (90, 16): expected the shape (max_positions, Dk / 2 = 8)"},
      {[](P& p) { p.rotate = true, p.rope_cos = p.rope_sin = {}; },
       "rotate: given without rope_cos: goes with rope_cos and rope_sin"},
      {[](P& p) { p.rotate = true, p.rope_cos.shape[0] = p.rope_sin.shape[0] = 2; },
       "rope_cos: float32 (2, 8): sequence 0 rotates a token at position 5"},
      {[](P& p) { p.weights_v.w2 = {}; }, "weights_v.w2: not given: expected float64 (P = 2, E = 16, Dv = 8)"},
      {[](P& p) { p.block_indices = slice(p.indices, 3, 0, 2); },
       "block_indices: int32 (2, 3, 2, 2): expected the shape (B = 2, m = 3, Hkv = 2, topk = 4)"},
      {[](P& p) { p.o = p.q; }, "o: float64 (2, 3, 6, 16): expected the shape (B = 2, m = 3, H = 6, Dv = 8)"},
      {[](P& p) { p.k_slc.device.type = DeviceType::kCUDA; }, "k_slc: on cuda:0: expected cpu as q"},
  };
  for (const Refusal& refusal : refusals) {
    DecodeParams params = step.params;
    refusal.spoil(params);
    const Status status = decode(params, {Backend::kReference});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "decode: " + refusal.message);
  }
}

/// The first tokens of a tensor, packed.
TensorView packed(TensorView t, std::int64_t tokens) {
  t.rank = 3;
  t.shape = {tokens, t.shape[2], t.shape[3]}, t.stride = {t.stride[1], t.stride[2], t.stride[3]};
  return t;
}

TEST(CacheRefused, WhatAnEngineGives) {
  Step step;
  const StreamCase& c = step.c;
  Tensor starts(DType::kInt32, {3}), table(DType::kInt32, {2, 6}), pages(c.dtype, {12, 4, 2, 16});
  Tensor pages_v(c.dtype, {12, 4, 2, 8}), k_pages(c.dtype, {5, 16, 2, 16}), v_pages(c.dtype, {5, 16, 2, 8});
  const auto set_starts = [&](int first, int second) { starts.set({1}, first), starts.set({2}, second); };
  set_starts(2, 3);
  starts.set({0}, 0);
  fill_value(table, 5);
  using P = DecodeParams;
  const auto pack = [&](P& p) {
    for (TensorView* t : {&p.q, &p.gates, &p.k_cmp, &p.v_cmp, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa, &p.o, &p.indices})
      *t = packed(*t, 3);
    p.num_new = {};
    p.query_start_loc = starts;
  };
  const auto with_tokens = [&](P& p) { p.cache.k_c = pages, p.cache.v_c = pages_v, p.cache.block_table_c = {}; };
  const auto windows = [&](P& p) {
    p.cache.k_swa_ring = k_pages, p.cache.v_swa_ring = v_pages, p.cache.block_table_swa = table;
  };
  struct Refusal {
    std::function<void(P&)> change;
    std::string message;  // of decode; empty: it is accepted
  };
  const std::vector<Refusal> refusals = {
      {pack, ""},
      {with_tokens, ""},
      {[&](P& p) { pack(p), p.q.rank = 2; }, "q: float64 (3, 6): expected the shape (T, H, Dk)"},
      {[&](P& p) { pack(p), p.num_new = step.num_new; },
       "num_new: given beside query_start_loc, which says how many tokens are new"},
      {[&](P& p) { pack(p), p.max_query_len = -1; }, "max_query_len = -1: must be >= 0"},
      {[&](P& p) { pack(p), p.max_query_len = 1; },
       "query_start_loc: sequence 0 has 2 new tokens: at most max_query_len = 1"},
      {[&](P& p) { pack(p), p.max_query_len = 17; }, "max_query_len = 17: at most 16 new tokens; prefill takes more"},
      {[&](P& p) { pack(p), p.query_start_loc = slice(starts, 0, 0, 2); },
       "query_start_loc: int32 (2): expected the shape (B + 1 = 3)"},
      {[&](P& p) { pack(p), p.gates = slice(p.gates, 0, 0, 2); },
       "gates: float64 (2, 6, 3): expected the shape (T = 3, H = 6, 3)"},
      {[&](P& p) { p.cache.advance = false; },
       "cache.cache_seqlens[0] = 0: without advance it counts the new tokens too, 3"},
      {[&](P& p) { with_tokens(p), p.cache.k_c.shape[1] = 3; },
       "cache.k_c: float64 (12, 3, 2, 16): expected the shape (num_pages = 12, page_size / kernel_stride = 4, Hkv = 2, "
       "Dk = 16)"},
      {[&](P& p) { p.cfg.kernel_size = p.cfg.kernel_stride = p.cfg.block_size = 48, with_tokens(p); },
       "cache.k_slc: page_size = 16: without block_table_c kernel_stride = 48 must divide it"},
      {windows, "cache.block_table_swa[0, 0] = 5: must be -1 or below 5, the number of pages"},
      {[&](P& p) { windows(p), p.cache.block_table_swa = slice(table, 0, 0, 1); },
       "cache.block_table_swa: int32 (1, 6): expected the shape (B = 2, max_pages)"},
      {[&](P& p) { windows(p), p.cache.v_swa_ring = slice(v_pages, 0, 0, 4); },
       "cache.v_swa_ring: float64 (4, 16, 2, 8): expected the shape (num_pages = 5, page_size = 16, Hkv = 2, Dv = 8)"},
      {[&](P& p) {
         p.cache.k_cmp_ring = slice(k_pages, 1, 0, 8), p.cache.v_cmp_ring = slice(v_pages, 1, 0, 8);
         p.cache.block_table_cmp = table;
       },
       "cache.k_cmp_ring: page_size = 8: must be a positive multiple of 16"},
  };
  for (const Refusal& refusal : refusals) {
    DecodeParams params = step.params;
    refusal.change(params);
    if (refusal.message.empty()) {
      Call call;
      EXPECT_EQ(validate(params, call).message(), "");
      continue;
    }
    const Status status = decode(params, {Backend::kReference});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "decode: " + refusal.message);
  }
  Call call;
  fill_value(table, 4);
  table.set({1, 0}, 3);
  DecodeParams params = step.params;
  windows(params);
  EXPECT_EQ(validate(params, call).message(), "");
  call = {};
  step.params.cache.advance = false;
  fill_value(step.num_new, 0);
  EXPECT_EQ(validate(step.params, call).message(), "");
}

TEST(CacheRefused, Float8) {
  StreamCase c;
  c.k_scale = {0.5f, 2.0f}, c.v_scale = {1.0f, 1.0f};
  Step step(c);
  ASSERT_EQ(decode(step.params, {Backend::kReference}).message(), "");
  Tensor scale(DType::kFloat32, {2}), wide(DType::kFloat64, {2}), ring(DType::kFloat64, {2, 52, 2, 16});
  const auto scale_of = [&](float x) {
    return [&scale, x](DecodeParams& p) { scale.set({1}, x), p.cache.k_scale = scale; };
  };
  scale.set({0}, 1);
  struct Refusal {
    std::function<void(DecodeParams&)> spoil;
    std::string message;
  };
  using P = DecodeParams;
  const std::vector<Refusal> refusals = {
      {[](P& p) { p.cache.k_scale = {}; }, "cache.k_scale: not given: expected float32 (Hkv = 2)"},
      {[](P& p) { p.cache.v_scale = {}; }, "cache.v_scale: not given: expected float32 (Hkv = 2)"},
      {[](P& p) { p.cache.k_scale = slice(p.cache.k_scale, 0, 0, 1); },
       "cache.k_scale: float32 (1): expected the shape (Hkv = 2)"},
      {[&](P& p) { p.cache.v_scale = wide; }, "cache.v_scale: float64 (2): expected float32"},
      {scale_of(0), "cache.k_scale[1] = 0: must be positive and finite"},
      {scale_of(-1), "cache.k_scale[1] = -1: must be positive and finite"},
      {scale_of(INFINITY), "cache.k_scale[1] = inf: must be positive and finite"},
      {scale_of(NAN), "cache.k_scale[1] = nan: must be positive and finite"},
      {scale_of(0x1p-149f), "cache.k_scale[1] = 1e-45: must be at least 2^-126"},
      {[&](P& p) { p.cache.k_swa_ring = ring; },
       "cache.k_swa_ring: float64 (2, 52, 2, 16): expected float8_e4m3fn as cache.k_slc"},
      {[](P& p) { p.cache.v_c.dtype = DType::kBFloat16; },
       "cache.v_c: bfloat16 (4, 16, 2, 8): expected float8_e4m3fn as cache.k_slc"},
      {[](P& p) { p.cache.k_cmp_ring.dtype = DType::kFloat8E4M3; },
       "cache.k_cmp_ring: float8_e4m3fn (2, 40, 2, 16): expected float64 as q"},
      {[](P& p) { p.k_slc.dtype = DType::kFloat8E4M3; }, "k_slc: float8_e4m3fn (2, 3, 2, 16): expected float64 as q"},
      {[](P& p) { p.weights_k.w1.dtype = DType::kFloat8E4M3; },
       "weights_k.w1: float8_e4m3fn (2, 128, 32): expected float64 as q"},
  };
  for (const Refusal& refusal : refusals) {
    DecodeParams params = step.params;
    refusal.spoil(params);
    EXPECT_EQ(decode(params, {Backend::kReference}).message(), "decode: " + refusal.message);
  }
  // One scale for all heads is a stride of 0; values on a device are not looked at.
  DecodeParams params = step.params;
  params.cache.k_scale = broadcast(scale, 0), params.cache.v_scale = broadcast(scale, 0);
  EXPECT_EQ(decode(params, {Backend::kReference}).message(), "");
  // The CUDA backend takes steps and forks of it; there rows in e4m3 begin at multiples of 16 bytes, too.
  Call call, forking;
  EXPECT_EQ(validate(step.params, call).message(), "");
  EXPECT_EQ(call.problem.dtype, DType::kFloat64);
  EXPECT_EQ(validate(ForkParams{step.cache.view(), c.cfg, 0, 1, 3}, forking).message(), "");
  EXPECT_EQ(forking.problem.dtype, DType::kFloat64);
  EXPECT_EQ(supports_layout(call).message(),
            "backend cuda: cache.v_slc: float8_e4m3fn (12, 16, 2, 8): every row must begin at a multiple of 16 bytes");

  Step plain;
  plain.params.cache.v_scale = scale;
  EXPECT_EQ(decode(plain.params, {Backend::kReference}).message(),
            "decode: cache.v_scale: given for a cache in float64: goes with float8_e4m3fn");
}

TEST(CacheRefused, MoreNewTokensThanAStepTakes) {
  Step step;
  step.params.q = slice(step.stream.q, 1, 0, 17);
  EXPECT_EQ(decode(step.params).message(),
            "decode: q: float64 (2, 17, 6, 16): at most 16 new tokens; prefill takes more");
}

TEST(CacheRefused, ARotationTableThatIsTooShort) {
  Step step;
  step.params.rope_cos = slice(step.params.rope_cos, 0, 0, 4),
  step.params.rope_sin = slice(step.params.rope_sin, 0, 0, 4);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(decode(step.params, {Backend::kReference}).message(), "");
  EXPECT_EQ(step.cache.length(0), 9);  // one block, at position 0; the next stands at 4
  EXPECT_EQ(decode(step.params, {Backend::kReference}).message(),
            "decode: rope_cos: float32 (4, 8): sequence 0 rotates a compressed key at position 4");
}

TEST(CacheRefused, OnlyFullPagesAreShared) {
  Step step;
  Tensor table(DType::kInt32, {2, 6}), lengths(DType::kInt32, {2});
  step.params.cache.block_table = table;
  step.params.cache.cache_seqlens = lengths;
  const auto message = [&](std::int32_t length, std::vector<std::int32_t> first, std::vector<std::int32_t> second) {
    fill_value(lengths, length);
    fill_value(table, -1);
    for (std::int64_t p = 0; p < 2; ++p) table.set({0, p}, first[p]), table.set({1, p}, second[p]);
    return decode(step.params, {Backend::kReference}).message();
  };
  const std::string rule = " is this page too, and the step writes to it: only full pages can be shared";
  EXPECT_EQ(message(16, {5, 6}, {5, 7}), "");
  EXPECT_EQ(message(15, {5, 6}, {5, 7}), "decode: cache.block_table[1, 0] = 5: [0, 0]" + rule);
  EXPECT_EQ(message(16, {5, 6}, {7, 5}), "decode: cache.block_table[0, 0] = 5: [1, 1]" + rule);
  EXPECT_EQ(message(16, {5, 5}, {7, 8}), "decode: cache.block_table[0, 0] = 5: [0, 1]" + rule);
  step.num_new.set({1}, 0);  // an idle row may name anything
  EXPECT_EQ(message(15, {5, 6}, {5, 7}), "");
}

TEST(CacheRefused, Fork) {
  Step step;
  ASSERT_TRUE(decode(step.params, {Backend::kReference}).ok());
  const auto message = [&](std::int64_t parent, std::int64_t child, std::int64_t length) {
    return fork({step.cache.view(), step.c.cfg, parent, child, length}, {Backend::kReference}).message();
  };
  EXPECT_EQ(message(2, 1, 0), "fork: parent = 2: must be 0 ... B - 1 = 1");
  EXPECT_EQ(message(0, 0, 0), "fork: child = 0: must be 0 ... B - 1 = 1 and not the parent");
  EXPECT_EQ(message(0, 1, 4), "fork: length = 4: must be 0 ... the parent's length, 3");
  KVCacheView view = step.cache.view();
  view.block_table.as<std::int32_t>()[view.block_table.stride[0]] = view.block_table.as<std::int32_t>()[0];
  EXPECT_EQ(message(0, 1, 3),
            "fork: cache.block_table[1, 0]: shared with the parent, but not full at the shared length");
  view.block_table.as<std::int32_t>()[view.block_table.stride[0]] = -1;
  EXPECT_EQ(message(0, 1, 3), "fork: cache.block_table[1, 0]: no page for the child's tokens");
  const auto set_row = [&](std::int64_t b, std::int32_t first, std::int32_t second) {
    std::int32_t* row = view.block_table.as<std::int32_t>() + b * view.block_table.stride[0];
    row[0] = first, row[1] = second;
  };
  view.cache_seqlens.as<std::int32_t>()[0] = 20;
  set_row(0, 3, 4);
  const std::string twice = " is copied to, but named twice";
  set_row(1, 3, 3);
  EXPECT_EQ(message(0, 1, 20), "fork: cache.block_table[1, 1]: page 3" + twice);
  set_row(1, 5, 5);
  EXPECT_EQ(message(0, 1, 20), "fork: cache.block_table[1, 1]: page 5" + twice);
  set_row(1, 3, 5);
  EXPECT_EQ(message(0, 1, 20), "");
}

TEST(CacheRefused, Options) {
  const auto message = [](auto&& change) {
    KVCacheOptions options;
    options.capacity = 100;
    change(options);
    KVCache cache;
    return KVCache::create(options, cache).message();
  };
  EXPECT_EQ(message([](auto&) {}), "");
  EXPECT_EQ(message([](auto& o) { o.batch = 0; }), "batch = 0: must be >= 1");
  EXPECT_EQ(message([](auto& o) { o.num_kv_heads = 0; }), "num_kv_heads = 0: must be >= 1");
  EXPECT_EQ(message([](auto& o) { o.key_dim = 0; }), "key_dim = 0: must be >= 1");
  EXPECT_EQ(message([](auto& o) { o.value_dim = -8; }), "value_dim = -8: must be >= 1");
  EXPECT_EQ(message([](auto& o) { o.dtype = DType::kInt32; }), "dtype = int32: must be a floating-point type");
  EXPECT_EQ(message([](auto& o) { o.dtype = DType{77}; }), "dtype = unknown: must be a floating-point type");
  EXPECT_EQ(message([](auto& o) { o.dtype = DType::kFloat8E4M3; }),
            "dtype = float8_e4m3fn: must be the type of q; k_scale and v_scale store e4m3");
  EXPECT_EQ(message([](auto& o) { o.k_scale = o.v_scale = {0.5f}; }), "");
  EXPECT_EQ(message([](auto& o) { o.k_scale = {1.0f}; }), "v_scale: 0 numbers: must be one for each of 1 KV heads");
  EXPECT_EQ(message([](auto& o) { o.v_scale = {1.0f}; }), "k_scale: 0 numbers: must be one for each of 1 KV heads");
  EXPECT_EQ(message([](auto& o) { o.k_scale = {1.0f}, o.v_scale = {0.0f}; }),
            "v_scale: 0: must be positive and finite");
  EXPECT_EQ(message([](auto& o) { o.k_scale = {1.0f}, o.v_scale = {0x1p-127f}; }),
            "v_scale: 5.877472e-39: must be at least 2^-126");
  EXPECT_EQ(message([](auto& o) { o.cfg.window_size = INT32_MAX; }),
            "cfg.window_size = 2147483647: must be below 2^31 - 32 in a cache");
  EXPECT_EQ(message([](auto& o) { o.capacity = 0; }), "capacity = 0: must be >= 1 and below 2^31");
  EXPECT_EQ(message([](auto& o) { o.page_size = 24; }),
            "page_size = 24: must be a positive multiple of 16, or 0: contiguous");
  EXPECT_EQ(message([](auto& o) { o.num_pages = -1; }), "num_pages = -1: must be >= 0");
  EXPECT_EQ(message([](auto& o) { o.page_size = 16, o.num_prefixes = -1; }),
            "num_prefixes = -1: must be >= 0 and below 2^31");
  EXPECT_EQ(message([](auto& o) { o.num_prefixes = 1; }), "num_prefixes = 1: must be 0 without page_size");
  EXPECT_EQ(message([](auto& o) { o.cfg.topk = 0; }), "topk = 0: must be >= 1");
  // Sizes whose product does not fit.
  const std::int64_t most = INT32_MAX, beyond = most + 1;
  EXPECT_EQ(message([&](auto& o) { o.key_dim = std::int64_t{1} << 62; }),
            "key_dim = 4611686018427387904: must be below 2^31");
  EXPECT_EQ(message([&](auto& o) { o.batch = beyond; }), "batch = 2147483648: must be below 2^31");
  EXPECT_EQ(message([&](auto& o) { o.num_pages = beyond; }), "num_pages = 2147483648: must be below 2^31");
  EXPECT_EQ(message([&](auto& o) { o.page_size = std::int64_t{1} << 40; }),
            "page_size = 1099511627776: must be below 2^31");
  EXPECT_EQ(message([&](auto& o) { o.key_dim = o.num_kv_heads = o.batch = most; }),
            "KVCache: no memory for it: its size exceeds 2^63 bytes");
}

TEST(CacheRefused, Capacity) {
  StreamCase c;
  KVCache cache = make_cache(c, 4);  // pages of 16 tokens for two sequences of up to 90
  EXPECT_EQ(cache.reserve({1}).message(), "reserve: 1 lengths: expected one for each of 2 sequences");
  const Status beyond = cache.reserve({91, 0});
  EXPECT_EQ(beyond.code(), StatusCode::kOutOfCapacity);
  EXPECT_EQ(beyond.message(), "reserve: sequence 0: 91 tokens: the capacity is 90");
  EXPECT_EQ(cache.reserve({40, 20}).message(), "KVCache: sequence 1 needs 2 more pages of tokens, 1 are free");
  ASSERT_TRUE(cache.reserve({40, 16}).ok());
  EXPECT_EQ(cache.reserve({40, 17}).code(), StatusCode::kOutOfCapacity);
  cache.release(0);
  EXPECT_TRUE(cache.reserve({0, 64}).ok());
}

/// Everything a cache shows of its bookkeeping.
std::vector<std::int32_t> bookkeeping(KVCache& cache) {
  std::vector<std::int32_t> all;
  const KVCacheView view = cache.view();
  for (const TensorView& t : {view.block_table, view.block_table_c, view.cache_seqlens})
    all.insert(all.end(), t.as<std::int32_t>(), t.as<std::int32_t>() + t.numel());
  return all;
}

TEST(CacheRefused, SequencesThatThereAreNot) {
  StreamCase c;
  const Stream stream(c);
  KVCache cache = make_cache(c, 5);
  ASSERT_TRUE(cache.reserve({40, 0}).ok());
  const auto before = bookkeeping(cache);
  for (const std::int64_t sequence : {-1, 2, INT32_MAX}) {
    EXPECT_EQ(cache.length(sequence), 0);
    cache.release(sequence);
    EXPECT_EQ(cache.check().message(), "release: sequence " + std::to_string(sequence) + ": there are 2");
    EXPECT_TRUE(cache.check().ok()) << "an error is reported once";
  }
  EXPECT_EQ(cache.reserve({40, -1}).message(), "reserve: sequence 1: -1 tokens: must be >= 0");
  EXPECT_EQ(bookkeeping(cache), before);
}

TEST(CacheRefused, CallsOfACacheWithoutMemory) {
  StreamCase c;
  const Stream stream(c);
  KVCache made = make_cache(c), moved = std::move(made), never;
  for (KVCache* const cache : {&made, &never}) {  // NOLINT(bugprone-use-after-move)
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(cache->options().batch), 1);
    const std::string why = ": a cache without memory: must be made by create";
    std::int64_t length = -1;
    EXPECT_EQ(cache->reserve(counts).message(), "reserve" + why);
    EXPECT_EQ(cache->appended(counts).message(), "appended" + why);
    EXPECT_EQ(cache->check().message(), "check" + why);
    EXPECT_EQ(cache->rollback(0, 0).message(), "rollback" + why);
    EXPECT_EQ(cache->fork(0, 1, 0).message(), "fork" + why);
    EXPECT_EQ(cache->keep_prefix(0, {}, length).message(), "keep_prefix" + why);
    EXPECT_EQ(cache->match_prefix(0, {}, length).message(), "match_prefix" + why);
    cache->release(0);
    EXPECT_EQ(cache->length(0), 0);
    EXPECT_FALSE(cache->view().k_slc.defined());
  }
}

TEST(CacheRefused, SequencesThatAPageAllocatorHasNot) {
  PageAllocator pages(2, {}, {16, 4, 4}, {16, 4, 4}, 1), none;
  const std::vector<std::int64_t> lengths{20, 0};
  ASSERT_TRUE(pages.reserve(lengths).ok());
  const std::vector<std::int32_t> before(pages.tables().begin(), pages.tables().end()), ids(20);
  PageCopies copies;
  EXPECT_EQ(pages.reserve(std::vector<std::int64_t>{1}).message(),
            "reserve: 1 lengths: expected one for each of 2 sequences");
  EXPECT_EQ(pages.reserve(std::vector<std::int64_t>{20, -1}).message(), "reserve: sequence 1: -1 tokens: must be >= 0");
  EXPECT_EQ(none.reserve(lengths).message(), "reserve: 2 lengths: expected one for each of 0 sequences");
  for (const std::int64_t sequence : {-1, 2}) {
    const std::string why = "sequence " + std::to_string(sequence) + ": there are 2";
    EXPECT_EQ(pages.rollback(sequence, 0, copies).message(), "rollback: " + why);
    EXPECT_EQ(pages.fork(sequence, 1, 0).message(), "fork: " + why);
    EXPECT_EQ(pages.fork(0, sequence, 0).message(),
              "fork: child = " + std::to_string(sequence) + ": must be another of 2 sequences");
    EXPECT_FALSE(pages.has_capacity(sequence, 0));
    EXPECT_EQ(pages.keep_prefix(sequence, ids, copies).length, 0);
    EXPECT_EQ(pages.match_prefix(sequence, ids, copies).length, 0);
    pages.release(sequence);
  }
  EXPECT_EQ(pages.fork(0, 1, -1).message(), "fork: sequence 0: -1 tokens: must be >= 0");
  EXPECT_EQ(pages.rollback(0, -1, copies).message(), "rollback: sequence 0: -1 tokens: must be >= 0");
  EXPECT_TRUE(std::ranges::equal(pages.tables(), before));
}

TEST(CacheRefused, ForkChangesNothing) {
  StreamCase c;
  const Stream stream(c);
  KVCache cache = make_cache(c, 4);  // pages of 16 tokens
  Results results(c);
  ASSERT_TRUE((Feed{stream, cache}({40, 0}, results)).ok());  // three of them, the last one half full
  ASSERT_TRUE(cache.reserve({64, 0}).ok());
  auto before = bookkeeping(cache);
  EXPECT_EQ(cache.fork(0, 1, 40).message(), "KVCache: sequence 1 needs 1 more pages of tokens, 0 are free");
  EXPECT_EQ(bookkeeping(cache), before);
  EXPECT_TRUE(cache.fork(0, 1, 32).ok());  // full pages are shared

  // What the child has reserved is refused with the rest kept, and serves it where it is enough.
  cache = make_cache(c, 4);
  ASSERT_TRUE((Feed{stream, cache}({40, 0}, results)).ok());
  ASSERT_TRUE(cache.reserve({40, 16}).ok());
  before = bookkeeping(cache);
  EXPECT_EQ(cache.fork(0, 1, 5).code(), StatusCode::kInvalidArgument);  // too far back
  EXPECT_EQ(bookkeeping(cache), before);
  EXPECT_TRUE(cache.fork(0, 1, 40).ok());
  EXPECT_EQ(cache.length(1), 40);
}

TEST(CacheRefused, RollbackChangesNothing) {
  StreamCase c;
  const Stream stream(c);
  KVCache cache = make_cache(c, 5);  // pages of 16 tokens, and 3 or more of compressed tokens
  Results results(c);
  ASSERT_TRUE((Feed{stream, cache}({48, 0}, results)).ok());
  ASSERT_TRUE(cache.fork(0, 1, 48).ok());  // all three pages shared
  ASSERT_TRUE(cache.reserve({80, 48}).ok());
  const auto before = bookkeeping(cache);
  EXPECT_EQ(cache.rollback(0, 40).message(), "KVCache: sequence 0 needs 1 more pages of tokens, 0 are free");
  EXPECT_EQ(bookkeeping(cache), before);
  cache.release(1);
  EXPECT_TRUE(cache.rollback(0, 40).ok());
}

TEST(CacheRefused, GoingBackTooFar) {
  StreamCase c;
  const Stream stream(c);
  KVCache cache = make_cache(c);
  Results results(c);
  ASSERT_TRUE((Feed{stream, cache}({60, 5}, results)).ok());
  EXPECT_EQ(cache.rollback(2, 0).message(), "rollback: sequence 2: there are 2");
  EXPECT_EQ(cache.rollback(0, 61).message(), "rollback: sequence 0: length = 61: must be 0 ... its length, 60");
  EXPECT_EQ(cache.rollback(0, 27).message(),
            "rollback: sequence 0: length = 27: at most 32 below the longest it has been, 60");
  EXPECT_EQ(cache.fork(0, 1, 50).message(), "fork: child = 1: must be an empty sequence");
  cache.release(1);
  EXPECT_EQ(cache.fork(0, 1, 27).message(),
            "fork: sequence 0: length = 27: at most 32 below the longest it has been, 60");
  ASSERT_TRUE(cache.rollback(0, 40).ok());
  EXPECT_EQ(cache.length(0), 40);
  EXPECT_EQ(cache.rollback(0, 27).message(),  // the ring has lost what came before
            "rollback: sequence 0: length = 27: at most 32 below the longest it has been, 60");
}

}  // namespace
}  // namespace nsa::test
