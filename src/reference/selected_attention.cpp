// Attention to the selected blocks: query t sees all tokens u <= t of its blocks.
#include <set>

#include "core/backend.h"
#include "reference/attention.h"

namespace nsa::reference {
namespace {

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

}  // namespace

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

}  // namespace nsa::reference
