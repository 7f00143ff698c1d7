#include "lm/generate/layer_cache.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/le.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "bridge/attention.h"
#include "bridge/call.h"
#include "nsa/decode.h"

namespace nsa::lm {
namespace {

/// (count * m, ...) -> (count, m, ...)
at::Tensor by_sequence(const at::Tensor& t, const CacheRows& rows) {
  return t.unflatten(0, {rows.count, t.size(0) / rows.count});
}

std::int64_t bytes_of(at::TensorList tensors) {
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

/// The memory that nsa::prefill and nsa::decode read, laid out as in nsa::KVCache with one page for all tokens of a
/// sequence; in tensors, because torch puts a first chunk there. Its capacity is reserved, so no step overflows.
class SparseCache : public LayerCache {
 public:
  SparseCache(const ModelConfig& config, std::int64_t sequences, std::int64_t capacity,
              const at::TensorOptions& options, bool fp8, const Rotation& rotation)
      : cfg_(config.nsa), rotation_(rotation) {
    // A window longer than the sequence sees the same and would only take memory.
    cfg_.window_size = static_cast<int>(std::min<std::int64_t>(cfg_.window_size, capacity));
    const auto page = [](std::int64_t tokens) { return (std::max<std::int64_t>(tokens, 1) + 15) / 16 * 16; };
    const auto pair = [&](std::int64_t tokens, at::Tensor& keys, at::Tensor& values, const at::TensorOptions& stored) {
      keys = at::zeros({sequences, tokens, config.num_kv_heads, config.head_dim}, stored);
      values = at::zeros({sequences, tokens, config.num_kv_heads, config.v_head_dim}, stored);
    };
    const auto attended = fp8 ? options.dtype(at::kFloat8_e4m3fn) : options;
    pair(page(capacity), k_slc_, v_slc_, attended);
    pair(page(cfg_.num_compressed(capacity)), k_c_, v_c_, attended);
    pair(cfg_.window_size + kRollback, k_swa_ring_, v_swa_ring_, attended);
    pair(cfg_.kernel_size + kRollback, k_cmp_ring_, v_cmp_ring_, options);
    if (fp8) scale_ = at::ones({config.num_kv_heads}, options.dtype(at::kFloat));
    block_table_ = at::arange(sequences, options.dtype(at::kInt)).unsqueeze(1);  // sequence b has page b
    cache_seqlens_ = at::zeros({sequences}, options.dtype(at::kInt));
    overflow_ = at::zeros({1}, options.dtype(at::kInt));
  }

  at::Tensor attend(const BlockWeights& weights, const AttentionInputs& in, const CacheRows& rows) override {
    // On a GPU the forward of training is faster than a prefill. It wants a compressed token, and reads keys as they
    // are given: not as e4m3 stores them.
    if (rows.start == 0 && in.q.is_cuda() && !scale_.defined() && cfg_.num_compressed(in.q.size(0)) > 0)
      return attend_first(weights, in, rows);
    const auto given = [&](const at::Tensor& t) { return bridge::view_of(by_sequence(t, rows)); };
    const auto ours = [&](const at::Tensor& t) { return bridge::view_of(t.narrow(0, rows.first, rows.count)); };
    const auto o = at::empty({in.q.size(0), in.q.size(1), in.v_slc.size(2)}, in.q.options());
    const TensorView scale = scale_.defined() ? bridge::view_of(scale_) : TensorView{};
    const DecodeParams params{
        .q = given(in.q),
        .k_cmp = given(in.k_cmp),
        .v_cmp = given(in.v_cmp),
        .k_slc = given(in.k_slc),
        .v_slc = given(in.v_slc),
        .k_swa = given(in.k_swa),
        .v_swa = given(in.v_swa),
        .gates = given(in.gates),
        .cache = {.k_slc = bridge::view_of(k_slc_),
                  .v_slc = bridge::view_of(v_slc_),
                  .block_table = ours(block_table_),
                  .k_c = bridge::view_of(k_c_),
                  .v_c = bridge::view_of(v_c_),
                  .block_table_c = ours(block_table_),
                  .k_swa_ring = ours(k_swa_ring_),
                  .v_swa_ring = ours(v_swa_ring_),
                  .k_cmp_ring = ours(k_cmp_ring_),
                  .v_cmp_ring = ours(v_cmp_ring_),
                  .k_scale = scale,
                  .v_scale = scale,
                  .cache_seqlens = ours(cache_seqlens_),
                  .overflow = bridge::view_of(overflow_)},
        .weights_k = weights.phi_k.views(),
        .weights_v = weights.phi_v.views(),
        .cfg = cfg_,
        .rope_cos = bridge::view_of(rotation_.cos),
        .rope_sin = bridge::view_of(rotation_.sin),
        .num_new = rows.num_new.defined() ? bridge::view_of(rows.num_new) : TensorView{},
        .o = given(o),
    };
    bridge::call(params.q.size(1) <= kMaxDecodeTokens ? nsa::decode : nsa::prefill, params, o.device());
    return o;
  }

  bool steps_are_alike() const override { return true; }

  std::int64_t bytes() const override {
    return bytes_of({k_slc_, v_slc_, k_c_, v_c_, k_swa_ring_, v_swa_ring_, k_cmp_ring_, v_cmp_ring_});
  }

 private:
  /// What attend does, by one forward pass among the new tokens, which then go to the cache.
  at::Tensor attend_first(const BlockWeights& weights, const AttentionInputs& in, const CacheRows& rows) {
    const std::int64_t m = in.q.size(0), blocks = cfg_.num_compressed(m);
    const auto given = [&](const at::Tensor& t) { return bridge::view_of(by_sequence(t, rows)); };
    const auto ours = [&](const at::Tensor& t) { return t.narrow(0, rows.first, 1); };
    const auto o = at::empty({m, in.q.size(1), in.v_slc.size(2)}, in.q.options());
    const NativeSparseAttentionParams params{
        .k_cmp = given(in.k_cmp),
        .v_cmp = given(in.v_cmp),
        .weights_k = weights.phi_k.views(),
        .weights_v = weights.phi_v.views(),
        .rope_cos = bridge::view_of(rotation_.cos),
        .rope_sin = bridge::view_of(rotation_.sin),
        .attention = {.q = given(in.q),
                      .k_c = bridge::view_of(ours(k_c_).narrow(1, 0, blocks)),
                      .v_c = bridge::view_of(ours(v_c_).narrow(1, 0, blocks)),
                      .k_slc = given(in.k_slc),
                      .v_slc = given(in.v_slc),
                      .k_swa = given(in.k_swa),
                      .v_swa = given(in.v_swa),
                      .gates = given(in.gates),
                      .cfg = cfg_,
                      .o = given(o)},
    };
    bridge::call(nsa::native_sparse_attention, params, o.device());
    ours(k_slc_).squeeze(0).narrow(0, 0, m).copy_(in.k_slc);
    ours(v_slc_).squeeze(0).narrow(0, 0, m).copy_(in.v_slc);
    const auto to_ring = [&](const at::Tensor& ring, const at::Tensor& tokens) {
      const auto last = at::arange(std::max<std::int64_t>(m - ring.size(1), 0), m, ring.options().dtype(at::kLong));
      ours(ring).squeeze(0).index_copy_(0, last.remainder(ring.size(1)), tokens.slice(0, m - last.size(0)));
    };
    to_ring(k_swa_ring_, in.k_swa), to_ring(v_swa_ring_, in.v_swa);
    to_ring(k_cmp_ring_, in.k_cmp), to_ring(v_cmp_ring_, in.v_cmp);
    ours(cache_seqlens_).fill_(m);
    return o;
  }

  NSAConfig cfg_;
  const Rotation& rotation_;
  at::Tensor k_slc_, v_slc_, k_c_, v_c_, k_swa_ring_, v_swa_ring_, k_cmp_ring_, v_cmp_ring_;
  at::Tensor block_table_, cache_seqlens_, overflow_;
  at::Tensor scale_;  // float32 (Hkv) of keys and of values in e4m3, else undefined
};

/// All keys and values in one tensor each: for full and window attention.
class DenseCache : public LayerCache {
 public:
  DenseCache(const ModelConfig& config, std::int64_t sequences, std::int64_t capacity, const at::TensorOptions& options)
      : config_(config),
        k_(at::empty({sequences, capacity, config.num_kv_heads, config.head_dim}, options)),
        v_(at::empty({sequences, capacity, config.num_kv_heads, config.v_head_dim}, options)),
        lengths_(static_cast<std::size_t>(sequences), 0) {
    if (!steps_are_alike()) return;
    first_query_ = at::arange(sequences + 1, options.dtype(at::kInt));
    first_key_ = first_query_ * capacity;
  }

  bool steps_are_alike() const override {
    // What torch's FlashAttention-2 takes. It reads lengths on the device, and a key once for all heads of a group.
    return config_.attention == AttentionKind::kFull && k_.is_cuda() && k_.element_size() == 2 &&
           config_.head_dim == config_.v_head_dim && config_.head_dim % 8 == 0 && config_.head_dim <= 256;
  }

  std::int64_t bytes() const override { return bytes_of({k_, v_}); }

  at::Tensor attend(const BlockWeights&, const AttentionInputs& in, const CacheRows& rows) override {
    if (rows.start < 0 && steps_are_alike()) return step(in, rows);
    if (rows.start >= 0) lengths_[static_cast<std::size_t>(rows.first)] = rows.start;
    const auto q = by_sequence(in.q, rows), k = by_sequence(in.k_slc, rows), v = by_sequence(in.v_slc, rows);
    const std::int64_t m = q.size(1);
    const auto o = at::zeros({rows.count, m, q.size(2), v.size(3)}, q.options());
    const auto is_idle = [&](std::int64_t i) { return !rows.idle.empty() && rows.idle[static_cast<std::size_t>(i)]; };
    const auto length = [&](std::int64_t i) -> std::int64_t& {
      return lengths_[static_cast<std::size_t>(rows.first + i)];
    };
    for (std::int64_t begin = 0, end; begin < rows.count; begin = end) {  // neighbours of one length in one call
      end = begin + 1;
      if (is_idle(begin)) continue;
      while (end < rows.count && !is_idle(end) && length(end) == length(begin)) ++end;
      const std::int64_t start = length(begin);
      const auto cached = [&](const at::Tensor& t, std::int64_t from) {
        return t.slice(0, rows.first + begin, rows.first + end).slice(1, from, start + m);
      };
      cached(k_, start).copy_(k.slice(0, begin, end));
      cached(v_, start).copy_(v.slice(0, begin, end));
      const bool is_full = config_.attention == AttentionKind::kFull;
      const auto first = is_full ? 0 : std::max<std::int64_t>(0, start - config_.nsa.window_size + 1);
      const auto attend = !is_full ? window : start > 0 && steps_are_alike() ? flash : full;
      o.slice(0, begin, end).copy_(attend(q.slice(0, begin, end), cached(k_, first), cached(v_, first), config_));
      for (std::int64_t i = begin; i < end; ++i) length(i) += m;
    }
    return o.flatten(0, 1);
  }

 private:
  /// One token of every sequence, by lengths on the device.
  at::Tensor step(const AttentionInputs& in, const CacheRows& rows) {
    const auto keys = k_.flatten(0, 1), values = v_.flatten(0, 1);
    keys.index_copy_(0, rows.slots, in.k_slc);
    values.index_copy_(0, rows.slots, in.v_slc);
    return std::get<0>(at::_flash_attention_forward(in.q, keys, values, first_query_, first_key_, 1, k_.size(1), 0.0,
                                                    /*is_causal=*/false, /*return_debug_mask=*/false, {}, {}, {},
                                                    rows.lengths));
  }

  /// q (B, m, H, Dk), the last of the sequences k (B, S, Hkv, Dk), v (B, S, Hkv, Dv) -> (B, m, H, Dv). FlashAttention-2
  /// aligns the last query with the last key and needs no mask, which would be m x S.
  static at::Tensor flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ModelConfig&) {
    return std::get<0>(at::_flash_attention_forward(q, k, v, {}, {}, q.size(1), k.size(1), 0.0, /*is_causal=*/true,
                                                    /*return_debug_mask=*/false));
  }

  /// The same wherever torch has attention.
  static at::Tensor full(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ModelConfig&) {
    const std::int64_t m = q.size(1), length = k.size(1), start = length - m;
    // torch's is_causal aligns the first query with the first key, which is right only for a fresh cache.
    if (start == 0 && q.size(0) == 1) return bridge::causal_attention(q[0], k[0], v[0]).unsqueeze(0);
    std::optional<at::Tensor> mask;
    if (m > 1) {
      const auto integers = q.options().dtype(at::kLong);
      mask = at::le(at::arange(length, integers).unsqueeze(0), at::arange(start, length, integers).unsqueeze(1));
    }
    return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, 0.0,
                                            /*is_causal=*/false, {}, /*enable_gqa=*/true)
        .transpose(1, 2);
  }

  static at::Tensor window(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ModelConfig& config) {
    const auto o = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
    const auto lse = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat));
    const SlidingWindowAttentionParams params{.q = bridge::view_of(q),
                                              .k = bridge::view_of(k),
                                              .v = bridge::view_of(v),
                                              .window_size = config.nsa.window_size,
                                              .o = bridge::view_of(o),
                                              .lse = bridge::view_of(lse)};
    bridge::call(nsa::sliding_window_attention, params, o.device());
    return o;
  }

  ModelConfig config_;
  at::Tensor k_, v_;
  std::vector<std::int64_t> lengths_;   // steps that are alike do not count here
  at::Tensor first_query_, first_key_;  // of each sequence in such a step, int32 (B + 1)
};

}  // namespace

std::unique_ptr<LayerCache> make_layer_cache(const ModelConfig& config, std::int64_t sequences, std::int64_t capacity,
                                             const at::TensorOptions& options, bool fp8, const Rotation& rotation) {
  if (config.attention == AttentionKind::kNsa) {
    return std::make_unique<SparseCache>(config, sequences, capacity, options, fp8, rotation);
  }
  return std::make_unique<DenseCache>(config, sequences, capacity, options);
}

}  // namespace nsa::lm
