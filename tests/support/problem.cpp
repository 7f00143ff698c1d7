#include "support/problem.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <ostream>

#include "core/backend.h"

namespace nsa::test {
namespace {

std::int64_t sum(const std::vector<std::int64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

Tensor offsets(const std::vector<std::int64_t>& lengths) {
  Tensor cu(DType::kInt32, {static_cast<std::int64_t>(lengths.size()) + 1});
  std::int64_t end = 0;
  cu.set({0}, 0);
  for (std::size_t b = 0; b < lengths.size(); ++b)
    cu.set({static_cast<std::int64_t>(b) + 1}, static_cast<double>(end += lengths[b]));
  return cu;
}

}  // namespace

std::int64_t Case::total_q() const { return sum(q_lens) + slack; }
std::int64_t Case::total_k() const { return sum(key_lengths()) + slack; }

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

std::vector<Sequence> sequences_of(const Case& c) {
  std::vector<Sequence> result;
  Sequence s;
  for (std::size_t b = 0; b < c.q_lens.size(); ++b) {
    s.index = static_cast<std::int64_t>(b);
    s.q_len = c.q_lens[b], s.k_len = c.key_lengths()[b], s.c_len = c.cfg.num_compressed(s.k_len);
    result.push_back(s);
    if (c.packed)
      s.q_begin += s.q_len, s.k_begin += s.k_len, s.c_begin += s.c_len;
    else
      ++s.batch;
  }
  return result;
}

NSAConfig small_config() {
  return {.kernel_size = 8,
          .kernel_stride = 4,
          .block_size = 16,
          .topk = 4,
          .init_blocks = 1,
          .local_blocks = 2,
          .window_size = 24};
}

Tensor Problem::query_rows(std::int64_t heads, std::int64_t width, DType dtype) const {
  if (c.packed) return {dtype, {c.total_q(), heads, width}, c.layout};
  return {dtype, {static_cast<std::int64_t>(c.q_lens.size()), c.q_lens[0], heads, width}, c.layout};
}

Tensor Problem::key_rows(std::int64_t width, DType dtype) const {
  if (c.packed) return {dtype, {c.total_k(), c.kv_heads, width}, c.layout};
  return {dtype, {static_cast<std::int64_t>(c.q_lens.size()), c.key_lengths()[0], c.kv_heads, width}, c.layout};
}

Tensor Problem::compressed_rows(std::int64_t width, DType dtype) const {
  if (c.packed) return {dtype, {c.total_k() / c.cfg.kernel_stride, c.kv_heads, width}, c.layout};
  return {dtype,
          {static_cast<std::int64_t>(c.q_lens.size()), c.cfg.num_compressed(c.key_lengths()[0]), c.kv_heads, width},
          c.layout};
}

Tensor Problem::lse_rows(DType dtype) const {
  if (c.packed) return {dtype, {c.heads(), c.total_q()}, c.layout};
  return {dtype, {static_cast<std::int64_t>(c.q_lens.size()), c.heads(), c.q_lens[0]}, c.layout};
}

Tensor Problem::random_query_rows(std::int64_t heads, std::int64_t width, unsigned seed) const {
  Tensor tensor = query_rows(heads, width, c.dtype);
  fill_normal(tensor, seed, 1, sum(c.q_lens));
  return tensor;
}

Tensor Problem::random_key_rows(std::int64_t width, unsigned seed) const {
  Tensor tensor = key_rows(width, c.dtype);
  fill_normal(tensor, seed, 1, sum(c.key_lengths()));
  return tensor;
}

Tensor Problem::random_compressed_rows(std::int64_t width, unsigned seed) const {
  Tensor tensor = compressed_rows(width, c.dtype);
  std::int64_t used = 0;
  for (std::int64_t length : c.key_lengths()) used += c.cfg.num_compressed(length);
  fill_normal(tensor, seed, 1, used);
  return tensor;
}

Problem::Weights Problem::make_weights(std::int64_t width, unsigned seed) const {
  Weights w;
  if (c.kind == CompressionKind::kMean) return w;
  const bool mlp = c.kind == CompressionKind::kMlp;
  const std::int64_t P = c.shared_weights ? 1 : c.kv_heads, l = c.cfg.kernel_size;
  const std::int64_t E = mlp ? (c.hidden ? c.hidden : 2 * width) : width;
  const auto make = [&](std::vector<std::int64_t> shape, double deviation) {
    Tensor tensor(c.dtype, std::move(shape));
    fill_normal(tensor, seed++, deviation);
    return tensor;
  };
  w.w1 = make({P, l * width, E}, 1 / std::sqrt(static_cast<double>(l * width)));
  if (mlp) w.w2 = make({P, E, width}, 1 / std::sqrt(static_cast<double>(E)));
  if (c.optional_weights) {
    w.pe = make({P, l, width}, 0.5);
    w.b1 = make({P, E}, 0.5);
    if (mlp) w.b2 = make({P, width}, 0.5);
  }
  return w;
}

CompressionWeights Problem::Weights::view(CompressionKind kind) const {
  return {kind, pe.view(), w1.view(), b1.view(), w2.view(), b2.view()};
}

Problem::Problem(const Case& c, unsigned seed) : c(c), seed(seed) {
  if (c.packed) {
    cu_q = offsets(c.q_lens);
    cu_k = offsets(c.key_lengths());
    packed.cu_seqlens_q = cu_q;
    if (!c.k_lens.empty()) packed.cu_seqlens_k = cu_k;
  }
  seed *= 100;
  q = random_query_rows(c.heads(), c.dk, ++seed);
  for (Tensor* k : {&k_cmp, &k_slc, &k_swa}) *k = random_key_rows(c.dk, ++seed);
  for (Tensor* v : {&v_cmp, &v_slc, &v_swa}) *v = random_key_rows(c.dv, ++seed);
  gates = random_query_rows(c.heads(), 3, ++seed);
  for (Tensor* o : {&o_cmp, &o_slc, &o_swa}) *o = random_query_rows(c.heads(), c.dv, ++seed);
  d_o = random_query_rows(c.heads(), c.dv, ++seed);
  weights_k = make_weights(c.dk, ++seed);
  weights_v = make_weights(c.dv, seed + 10);

  if (c.rope) {
    const auto& lengths = c.key_lengths();
    const std::int64_t positions = lengths.empty() ? 1 : std::max<std::int64_t>(1, *std::ranges::max_element(lengths));
    rope_cos = Tensor(DType::kFloat32, {positions, c.dk / 2}),
    rope_sin = Tensor(DType::kFloat32, {positions, c.dk / 2});
    for (std::int64_t t = 0; t < positions; ++t)
      for (std::int64_t j = 0; j < c.dk / 2; ++j) {
        const double angle = static_cast<double>(t) / static_cast<double>(j + 1);
        rope_cos.set({t, j}, std::cos(angle)), rope_sin.set({t, j}, std::sin(angle));
      }
  }

  k_c = random_compressed_rows(c.dk, ++seed);
  v_c = random_compressed_rows(c.dv, ++seed);
  d_k_c = random_compressed_rows(c.dk, ++seed);
  d_v_c = random_compressed_rows(c.dv, ++seed);

  lse = lse_rows(DType::kFloat32);
  Tensor o = query_rows(c.heads(), c.dv, DType::kFloat64);
  CompressedAttentionParams attention = compressed();
  attention.o = o, attention.lse = lse;
  (void)reference::run(attention, Context{});
  indices = query_rows(c.kv_heads, c.cfg.topk, DType::kInt32);
  SelectBlocksParams select = selection();
  select.indices = indices;
  (void)reference::run(select, Context{});
}

Problem Problem::alone(std::size_t b) const {
  Case single = c;
  single.packed = false, single.slack = 0;
  single.q_lens = {c.q_lens[b]}, single.k_lens = {c.key_lengths()[b]};
  const Sequence s = sequences_of(c)[b];
  Problem result(single, seed);
  const auto take = [&](Rows rows, const Tensor& from, const Tensor& to) { assign(part_of(from, rows, s), to); };
  for (auto [from, to] : {std::pair{&q, &result.q},
                          {&gates, &result.gates},
                          {&o_cmp, &result.o_cmp},
                          {&o_slc, &result.o_slc},
                          {&o_swa, &result.o_swa},
                          {&d_o, &result.d_o},
                          {&indices, &result.indices}})
    take(Rows::kQueries, *from, *to);
  for (auto [from, to] : {std::pair{&k_cmp, &result.k_cmp},
                          {&v_cmp, &result.v_cmp},
                          {&k_slc, &result.k_slc},
                          {&v_slc, &result.v_slc},
                          {&k_swa, &result.k_swa},
                          {&v_swa, &result.v_swa}})
    take(Rows::kKeys, *from, *to);
  for (auto [from, to] :
       {std::pair{&k_c, &result.k_c}, {&v_c, &result.v_c}, {&d_k_c, &result.d_k_c}, {&d_v_c, &result.d_v_c}})
    take(Rows::kCompressed, *from, *to);
  take(Rows::kLse, lse, result.lse);
  return result;
}

void Problem::compress() {
  for (auto [params, out] : {std::pair{compress_keys(), &k_c}, std::pair{compress_values(), &v_c}}) {
    params.out = *out;
    (void)nsa::compress(params, {.backend = Backend::kCPU});
  }
}

CompressParams Problem::compress_keys() const {
  return {k_cmp, weights_k.view(c.kind), c.cfg, packed.packed() ? cu_k.view() : TensorView{}, {}};
}

CompressParams Problem::compress_values() const {
  return {v_cmp, weights_v.view(c.kind), c.cfg, packed.packed() ? cu_k.view() : TensorView{}, {}};
}

CompressedAttentionParams Problem::compressed() const {
  const std::optional<std::int64_t> seqlen_k = c.packed ? std::nullopt : std::optional(c.key_lengths()[0]);
  return {q, k_c, v_c, c.cfg, c.softmax_scale, seqlen_k, packed, {}, {}};
}

SelectBlocksParams Problem::selection() const {
  const std::optional<std::int64_t> seqlen_k = c.packed ? std::nullopt : std::optional(c.key_lengths()[0]);
  return {q, k_c, lse, c.cfg, c.softmax_scale, seqlen_k, c.noise, c.seed, packed, {}};
}

SelectedAttentionParams Problem::selected() const {
  return {q, k_slc, v_slc, indices, c.cfg.block_size, c.softmax_scale, packed, {}, {}};
}

SlidingWindowAttentionParams Problem::window() const {
  return {q, k_swa, v_swa, c.cfg.window_size, c.softmax_scale, packed, {}, {}};
}

CombineParams Problem::combination() const { return {o_cmp, o_slc, o_swa, gates, {}}; }

NsaAttentionParams Problem::whole() const {
  NsaAttentionParams p;
  p.q = q, p.k_c = k_c, p.v_c = v_c;
  p.k_slc = k_slc, p.v_slc = v_slc, p.k_swa = k_swa, p.v_swa = v_swa;
  p.gates = gates;
  p.cfg = c.cfg;
  p.softmax_scale = c.softmax_scale;
  p.noise = c.noise, p.seed = c.seed;
  p.packed = packed;
  return p;
}

NativeSparseAttentionParams Problem::layer() const {
  NativeSparseAttentionParams p;
  p.k_cmp = k_cmp, p.v_cmp = v_cmp;
  p.weights_k = weights_k.view(c.kind), p.weights_v = weights_v.view(c.kind);
  p.rope_cos = rope_cos, p.rope_sin = rope_sin;
  p.attention = whole();
  p.attention.k_c = p.attention.v_c = {};
  return p;
}

}  // namespace nsa::test
