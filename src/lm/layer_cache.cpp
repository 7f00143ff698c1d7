#include "lm/layer_cache.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/le.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>

#include "nsa/kv_cache.h"

namespace nsa::lm {
namespace {

/// nsa::KVCache, read by nsa::prefill and nsa::decode.
class SparseCache : public LayerCache {
 public:
  SparseCache(const ModelConfig& config, std::int64_t capacity, at::ScalarType dtype, const Rotation& rotation)
      : cfg_(config.nsa), rotation_(rotation) {
    // A window longer than the sequence sees the same and would only take memory.
    cfg_.window_size = static_cast<int>(std::min<std::int64_t>(cfg_.window_size, capacity));
    KVCacheOptions options;
    options.num_kv_heads = config.num_kv_heads;
    options.key_dim = config.head_dim;
    options.value_dim = config.v_head_dim;
    options.dtype = dtype == at::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
    options.cfg = cfg_;
    options.capacity = capacity;
    check(KVCache::create(options, cache_));
    check(cache_.reserve({capacity}));
  }

  at::Tensor attend(const BlockWeights& weights, const Projected& in) override {
    const auto row = [](const at::Tensor& t) { return view_of(t.unsqueeze(0)); };
    const auto o = at::empty({in.q.size(0), in.q.size(1), in.v_slc.size(2)}, in.q.options());
    DecodeParams params;
    params.q = row(in.q);
    params.k_cmp = row(in.k_cmp);
    params.v_cmp = row(in.v_cmp);
    params.k_slc = row(in.k_slc);
    params.v_slc = row(in.v_slc);
    params.k_swa = row(in.k_swa);
    params.v_swa = row(in.v_swa);
    params.gates = row(in.gates);
    params.cache = cache_.view();
    params.weights_k = weights.phi_k.views();
    params.weights_v = weights.phi_v.views();
    params.cfg = cfg_;
    params.rope_cos = view_of(rotation_.cos);
    params.rope_sin = view_of(rotation_.sin);
    params.o = row(o);
    check(in.q.size(0) <= kMaxDecodeTokens ? nsa::decode(params) : nsa::prefill(params));
    check(cache_.check());
    return o;
  }

 private:
  NSAConfig cfg_;
  const Rotation& rotation_;
  KVCache cache_;
};

/// All keys and values in one tensor each: for full and window attention.
class DenseCache : public LayerCache {
 public:
  DenseCache(const ModelConfig& config, std::int64_t capacity, at::ScalarType dtype)
      : config_(config),
        k_(at::empty({capacity, config.num_kv_heads, config.head_dim}, dtype)),
        v_(at::empty({capacity, config.num_kv_heads, config.v_head_dim}, dtype)) {}

  at::Tensor attend(const BlockWeights&, const Projected& in) override {
    const std::int64_t m = in.q.size(0), end = length_ + m;
    k_.slice(0, length_, end).copy_(in.k_slc);
    v_.slice(0, length_, end).copy_(in.v_slc);
    length_ = end;
    return config_.attention == AttentionKind::kFull ? full(in.q) : window(in.q);
  }

 private:
  at::Tensor full(const at::Tensor& q) const {
    const std::int64_t m = q.size(0), start = length_ - m;
    const auto heads_first = [](const at::Tensor& t) { return t.transpose(0, 1).unsqueeze(0); };
    // torch's is_causal aligns the first query with the first key, which is right only for a fresh cache.
    std::optional<at::Tensor> mask;
    if (m > 1 && start > 0) mask = at::le(at::arange(length_).unsqueeze(0), at::arange(start, length_).unsqueeze(1));
    return at::scaled_dot_product_attention(heads_first(q), heads_first(k_.slice(0, 0, length_)),
                                            heads_first(v_.slice(0, 0, length_)), mask, 0.0,
                                            /*is_causal=*/m > 1 && start == 0, {}, /*enable_gqa=*/true)
        .squeeze(0)
        .transpose(0, 1);
  }

  at::Tensor window(const at::Tensor& q) const {
    const std::int64_t first = std::max<std::int64_t>(0, length_ - q.size(0) - config_.nsa.window_size + 1);
    const auto row = [](const at::Tensor& t) { return view_of(t.unsqueeze(0)); };
    const auto o = at::empty({q.size(0), q.size(1), v_.size(2)}, q.options());
    const auto lse = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
    SlidingWindowAttentionParams params;
    params.q = row(q);
    params.k = row(k_.slice(0, first, length_));
    params.v = row(v_.slice(0, first, length_));
    params.window_size = config_.nsa.window_size;
    params.o = row(o);
    params.lse = row(lse);
    check(nsa::sliding_window_attention(params));
    return o;
  }

  ModelConfig config_;
  at::Tensor k_, v_;
  std::int64_t length_ = 0;
};

}  // namespace

std::unique_ptr<LayerCache> make_layer_cache(const ModelConfig& config, std::int64_t capacity, at::ScalarType dtype,
                                             const Rotation& rotation) {
  if (config.attention == AttentionKind::kNsa) {
    return std::make_unique<SparseCache>(config, capacity, dtype, rotation);
  }
  return std::make_unique<DenseCache>(config, capacity, dtype);
}

}  // namespace nsa::lm
