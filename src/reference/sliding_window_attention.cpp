// Attention to the last tokens: query t sees max(0, t - w + 1) ... t.
#include "core/backend.h"
#include "reference/attention.h"

namespace nsa::reference {
namespace {

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
