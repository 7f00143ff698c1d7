#include "lm/generate/layer_cache.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/le.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "bridge/attention.h"
#include "bridge/call.h"
#include "nsa/decode.h"

namespace nsa::lm {
namespace {

/// The memory that nsa::prefill and nsa::decode read, laid out as in nsa::KVCache with one page for all tokens; torch's
/// because that owns only host memory. Its capacity is reserved, so no step overflows.
class SparseCache : public LayerCache {
 public:
  SparseCache(const ModelConfig& config, std::int64_t capacity, const at::TensorOptions& options,
              const Rotation& rotation)
      : cfg_(config.nsa), rotation_(rotation) {
    // A window longer than the sequence sees the same and would only take memory.
    cfg_.window_size = static_cast<int>(std::min<std::int64_t>(cfg_.window_size, capacity));
    const auto page = [](std::int64_t tokens) { return (std::max<std::int64_t>(tokens, 1) + 15) / 16 * 16; };
    const auto room = [&](std::int64_t tokens, std::int64_t width) {
      return keep(at::zeros({1, tokens, config.num_kv_heads, width}, options));
    };
    const auto pair = [&](std::int64_t tokens, TensorView& keys, TensorView& values) {
      keys = room(tokens, config.head_dim);
      values = room(tokens, config.v_head_dim);
    };
    const auto integer = [&](at::IntArrayRef shape) { return keep(at::zeros(shape, options.dtype(at::kInt))); };
    pair(page(capacity), view_.k_slc, view_.v_slc);
    pair(page(cfg_.num_compressed(capacity)), view_.k_c, view_.v_c);
    pair(cfg_.window_size + kRollback, view_.k_swa_ring, view_.v_swa_ring);
    pair(cfg_.kernel_size + kRollback, view_.k_cmp_ring, view_.v_cmp_ring);
    view_.block_table = integer({1, 1});  // page 0
    view_.block_table_c = integer({1, 1});
    view_.cache_seqlens = integer({1});
    view_.overflow = integer({1});
  }

  at::Tensor attend(const BlockWeights& weights, const AttentionInputs& in) override {
    const auto row = [](const at::Tensor& t) { return bridge::view_of(t.unsqueeze(0)); };
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
    params.cache = view_;
    params.weights_k = weights.phi_k.views();
    params.weights_v = weights.phi_v.views();
    params.cfg = cfg_;
    params.rope_cos = bridge::view_of(rotation_.cos);
    params.rope_sin = bridge::view_of(rotation_.sin);
    params.o = row(o);
    bridge::call(in.q.size(0) <= kMaxDecodeTokens ? nsa::decode : nsa::prefill, params, o.device());
    return o;
  }

 private:
  TensorView keep(const at::Tensor& tensor) { return bridge::view_of(storage_.emplace_back(tensor)); }

  NSAConfig cfg_;
  const Rotation& rotation_;
  std::vector<at::Tensor> storage_;  // what the view points into
  KVCacheView view_;
};

/// All keys and values in one tensor each: for full and window attention.
class DenseCache : public LayerCache {
 public:
  DenseCache(const ModelConfig& config, std::int64_t capacity, const at::TensorOptions& options)
      : config_(config),
        k_(at::empty({capacity, config.num_kv_heads, config.head_dim}, options)),
        v_(at::empty({capacity, config.num_kv_heads, config.v_head_dim}, options)) {}

  at::Tensor attend(const BlockWeights&, const AttentionInputs& in) override {
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
    if (start == 0) return bridge::causal_attention(q, k_.slice(0, 0, length_), v_.slice(0, 0, length_));
    std::optional<at::Tensor> mask;
    if (m > 1) {
      const auto integers = q.options().dtype(at::kLong);
      mask = at::le(at::arange(length_, integers).unsqueeze(0), at::arange(start, length_, integers).unsqueeze(1));
    }
    return at::scaled_dot_product_attention(heads_first(q), heads_first(k_.slice(0, 0, length_)),
                                            heads_first(v_.slice(0, 0, length_)), mask, 0.0, /*is_causal=*/false, {},
                                            /*enable_gqa=*/true)
        .squeeze(0)
        .transpose(0, 1);
  }

  at::Tensor window(const at::Tensor& q) const {
    const std::int64_t first = std::max<std::int64_t>(0, length_ - q.size(0) - config_.nsa.window_size + 1);
    const auto row = [](const at::Tensor& t) { return bridge::view_of(t.unsqueeze(0)); };
    const auto o = at::empty({q.size(0), q.size(1), v_.size(2)}, q.options());
    const auto lse = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
    SlidingWindowAttentionParams params;
    params.q = row(q);
    params.k = row(k_.slice(0, first, length_));
    params.v = row(v_.slice(0, first, length_));
    params.window_size = config_.nsa.window_size;
    params.o = row(o);
    params.lse = row(lse);
    bridge::call(nsa::sliding_window_attention, params, o.device());
    return o;
  }

  ModelConfig config_;
  at::Tensor k_, v_;
  std::int64_t length_ = 0;
};

}  // namespace

std::unique_ptr<LayerCache> make_layer_cache(const ModelConfig& config, std::int64_t capacity,
                                             const at::TensorOptions& options, const Rotation& rotation) {
  if (config.attention == AttentionKind::kNsa) {
    return std::make_unique<SparseCache>(config, capacity, options, rotation);
  }
  return std::make_unique<DenseCache>(config, capacity, options);
}

}  // namespace nsa::lm
