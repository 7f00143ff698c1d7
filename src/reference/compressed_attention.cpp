// Attention to the compressed keys: query t sees block i exactly if i*d + l - 1 <= t.
#include "core/backend.h"
#include "reference/attention.h"

namespace nsa::reference {
namespace {

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

}  // namespace nsa::reference
