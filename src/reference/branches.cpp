// The attention of each branch: which keys a query sees, then attend() of attention.h.
#include <algorithm>
#include <set>
#include <vector>

#include "core/backend.h"
#include "reference/attention.h"

namespace nsa::reference {
namespace {

/// Query t sees compressed key i exactly if i*d + l - 1 <= t.
Attention attention_of(const CompressedAttentionParams& p, DType precision) {
  Attention a;
  a.q = p.q, a.k = p.k_c, a.v = p.v_c;
  a.sequences = sequences_of(p.q, raw_length(p.q, p.seqlen_k), p.packed, p.cfg);
  a.compressed_keys = true;
  a.scale = softmax_scale_of(p.softmax_scale, p.q);
  a.precision = precision;
  a.visible = [cfg = p.cfg](const Sequence& s, std::int64_t, std::int64_t row) {
    std::vector<std::int64_t> blocks;
    for (std::int64_t i = 0; i * cfg.kernel_stride + cfg.kernel_size - 1 <= s.position(row); ++i) blocks.push_back(i);
    return blocks;
  };
  return a;
}

/// Query t sees all tokens u <= t of its blocks.
Attention attention_of(const SelectedAttentionParams& p, DType precision) {
  Attention a;
  a.q = p.q, a.k = p.k, a.v = p.v;
  a.sequences = sequences_of(p.q, p.k.size(1), p.packed, NSAConfig{});
  a.scale = softmax_scale_of(p.softmax_scale, p.q);
  a.precision = precision;
  a.visible = [p](const Sequence& s, std::int64_t kv_head, std::int64_t row) {
    const std::int64_t t = s.position(row);
    const std::int32_t* indices = rows_of<const std::int32_t>(p.indices, s.batch, s.q_begin).at(row, kv_head);
    // A set: sorted, each block once. Whatever is not a candidate block of this query is ignored.
    std::set<std::int64_t> blocks;
    for (std::int64_t n = 0; n < p.indices.size(-1); ++n)
      if (indices[n] >= 0 && indices[n] <= t / p.block_size) blocks.insert(indices[n]);
    std::vector<std::int64_t> tokens;
    for (std::int64_t j : blocks)
      for (std::int64_t u = j * p.block_size; u < (j + 1) * p.block_size && u <= t; ++u) tokens.push_back(u);
    return tokens;
  };
  return a;
}

/// Query t sees max(0, t - w + 1) ... t.
Attention attention_of(const SlidingWindowAttentionParams& p, DType precision) {
  Attention a;
  a.q = p.q, a.k = p.k, a.v = p.v;
  a.sequences = sequences_of(p.q, p.k.size(1), p.packed, NSAConfig{});
  a.scale = softmax_scale_of(p.softmax_scale, p.q);
  a.precision = precision;
  a.visible = [w = p.window_size](const Sequence& s, std::int64_t, std::int64_t row) {
    const std::int64_t t = s.position(row);
    std::vector<std::int64_t> tokens;
    for (std::int64_t u = std::max<std::int64_t>(0, t - w + 1); u <= t; ++u) tokens.push_back(u);
    return tokens;
  };
  return a;
}

}  // namespace

Status run(const CompressedAttentionParams& p, DType precision) {
  attend(attention_of(p, precision), p.o, p.lse);
  return {};
}

Status run(const CompressedAttentionBackwardParams& p, DType precision) {
  attend_backward(attention_of(p.forward, precision), p.d_o, p.d_q, p.d_k_c, p.d_v_c);
  return {};
}

Status run(const CompressedAttentionParams& p, const Context&) { return run(p, DType::kFloat64); }

Status run(const CompressedAttentionBackwardParams& p, const Context&) { return run(p, DType::kFloat64); }

Status run(const SelectedAttentionParams& p, DType precision) {
  attend(attention_of(p, precision), p.o, p.lse);
  return {};
}

Status run(const SelectedAttentionBackwardParams& p, DType precision) {
  attend_backward(attention_of(p.forward, precision), p.d_o, p.d_q, p.d_k, p.d_v);
  return {};
}

Status run(const SelectedAttentionParams& p, const Context&) { return run(p, DType::kFloat64); }

Status run(const SelectedAttentionBackwardParams& p, const Context&) { return run(p, DType::kFloat64); }

Status run(const SlidingWindowAttentionParams& p, DType precision) {
  attend(attention_of(p, precision), p.o, p.lse);
  return {};
}

Status run(const SlidingWindowAttentionBackwardParams& p, DType precision) {
  attend_backward(attention_of(p.forward, precision), p.d_o, p.d_q, p.d_k, p.d_v);
  return {};
}

Status run(const SlidingWindowAttentionParams& p, const Context&) { return run(p, DType::kFloat64); }

Status run(const SlidingWindowAttentionBackwardParams& p, const Context&) { return run(p, DType::kFloat64); }

}  // namespace nsa::reference
