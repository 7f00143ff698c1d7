#include "support/outputs.h"

namespace nsa::test {
namespace {

template <class Params>
std::function<TensorView&(Params&)> at(TensorView Params::*member) {
  return [member](Params& params) -> TensorView& { return params.*member; };
}

/// A fresh tensor per kind of row of the problem.
auto query_rows(const Problem& p, std::int64_t heads, std::int64_t width) {
  return [&p, heads, width](DType dtype) { return p.query_rows(heads, width, dtype); };
}
auto o_rows(const Problem& p) { return query_rows(p, p.c.heads(), p.c.dv); }
auto lse_rows(const Problem& p) {
  return [&p](DType dtype) { return p.lse_rows(dtype); };
}
auto key_rows(const Problem& p, std::int64_t width) {
  return [&p, width](DType dtype) { return p.key_rows(width, dtype); };
}
auto compressed_rows(const Problem& p, std::int64_t width) {
  return [&p, width](DType dtype) { return p.compressed_rows(width, dtype); };
}

/// o and lse of an attention.
template <class Params>
std::vector<Output<Params>> attention_outputs(const Problem& p) {
  return {{"o", at(&Params::o), o_rows(p), p.c.dtype}, {"lse", at(&Params::lse), lse_rows(p), DType::kFloat32}};
}

/// d_q, d_k and d_v of attention to raw keys.
template <class Params>
std::vector<Output<Params>> raw_backward_outputs(const Problem& p) {
  return {{"d_q", at(&Params::d_q), query_rows(p, p.c.heads(), p.c.dk), p.c.dtype},
          {"d_k", at(&Params::d_k), key_rows(p, p.c.dk), p.c.dtype},
          {"d_v", at(&Params::d_v), key_rows(p, p.c.dv), p.c.dtype}};
}

template <class Backward, class Forward>
Backward attention_backward_of(Forward f, const std::vector<Tensor>& outputs, const TensorView& d_o) {
  f.o = outputs[0], f.lse = outputs[1];
  Backward b;
  b.forward = f;
  b.d_o = d_o;
  return b;
}

}  // namespace

std::vector<Output<CompressParams>> compress_outputs(const Problem& p, const CompressParams& params) {
  return {{"out", at(&CompressParams::out), compressed_rows(p, params.k.size(-1)), p.c.dtype}};
}

std::vector<Output<CompressBackwardParams>> compress_backward_outputs(const Problem& p, const CompressParams& forward) {
  using Params = CompressBackwardParams;
  std::vector<Output<Params>> outputs{{"d_k", at(&Params::d_k), key_rows(p, forward.k.size(-1)), p.c.dtype}};
  const auto add = [&](const char* name, TensorView CompressionWeights::*weight) {
    const TensorView& like = forward.weights.*weight;
    if (!like.defined()) return;
    outputs.push_back({name, [weight](Params& b) -> TensorView& { return b.d_weights.*weight; },
                       [shape = shape_of(like)](DType dtype) { return Tensor(dtype, shape); }, p.c.dtype});
  };
  add("d_pe", &CompressionWeights::pe);
  add("d_w1", &CompressionWeights::w1);
  add("d_b1", &CompressionWeights::b1);
  add("d_w2", &CompressionWeights::w2);
  add("d_b2", &CompressionWeights::b2);
  return outputs;
}

std::vector<Output<CompressedAttentionParams>> compressed_outputs(const Problem& p) {
  return attention_outputs<CompressedAttentionParams>(p);
}

std::vector<Output<CompressedAttentionBackwardParams>> compressed_backward_outputs(const Problem& p) {
  using Params = CompressedAttentionBackwardParams;
  return {{"d_q", at(&Params::d_q), query_rows(p, p.c.heads(), p.c.dk), p.c.dtype},
          {"d_k_c", at(&Params::d_k_c), compressed_rows(p, p.c.dk), p.c.dtype},
          {"d_v_c", at(&Params::d_v_c), compressed_rows(p, p.c.dv), p.c.dtype}};
}

std::vector<Output<SelectBlocksParams>> selection_outputs(const Problem& p) {
  return {{"indices", at(&SelectBlocksParams::indices), query_rows(p, p.c.kv_heads, p.c.cfg.topk), DType::kInt32}};
}

std::vector<Output<SelectedAttentionParams>> selected_outputs(const Problem& p) {
  return attention_outputs<SelectedAttentionParams>(p);
}

std::vector<Output<SelectedAttentionBackwardParams>> selected_backward_outputs(const Problem& p) {
  return raw_backward_outputs<SelectedAttentionBackwardParams>(p);
}

std::vector<Output<SlidingWindowAttentionParams>> window_outputs(const Problem& p) {
  return attention_outputs<SlidingWindowAttentionParams>(p);
}

std::vector<Output<SlidingWindowAttentionBackwardParams>> window_backward_outputs(const Problem& p) {
  return raw_backward_outputs<SlidingWindowAttentionBackwardParams>(p);
}

std::vector<Output<CombineParams>> combine_outputs(const Problem& p) {
  return {{"o", at(&CombineParams::o), o_rows(p), p.c.dtype}};
}

std::vector<Output<CombineBackwardParams>> combine_backward_outputs(const Problem& p) {
  using Params = CombineBackwardParams;
  return {{"d_o_cmp", at(&Params::d_o_cmp), o_rows(p), p.c.dtype},
          {"d_o_slc", at(&Params::d_o_slc), o_rows(p), p.c.dtype},
          {"d_o_swa", at(&Params::d_o_swa), o_rows(p), p.c.dtype},
          {"d_gates", at(&Params::d_gates), query_rows(p, p.c.heads(), 3), p.c.dtype}};
}

std::vector<Output<NsaAttentionParams>> whole_outputs(const Problem& p) {
  using Params = NsaAttentionParams;
  return {{"o", at(&Params::o), o_rows(p), p.c.dtype},
          {"indices", at(&Params::indices), query_rows(p, p.c.kv_heads, p.c.cfg.topk), DType::kInt32},
          {"o_cmp", at(&Params::o_cmp), o_rows(p), p.c.dtype},
          {"o_slc", at(&Params::o_slc), o_rows(p), p.c.dtype},
          {"o_swa", at(&Params::o_swa), o_rows(p), p.c.dtype},
          {"lse_cmp", at(&Params::lse_cmp), lse_rows(p), DType::kFloat32},
          {"lse_slc", at(&Params::lse_slc), lse_rows(p), DType::kFloat32},
          {"lse_swa", at(&Params::lse_swa), lse_rows(p), DType::kFloat32}};
}

std::vector<Output<NsaAttentionBackwardParams>> whole_backward_outputs(const Problem& p) {
  using Params = NsaAttentionBackwardParams;
  return {{"d_q", at(&Params::d_q), query_rows(p, p.c.heads(), p.c.dk), p.c.dtype},
          {"d_k_c", at(&Params::d_k_c), compressed_rows(p, p.c.dk), p.c.dtype},
          {"d_v_c", at(&Params::d_v_c), compressed_rows(p, p.c.dv), p.c.dtype},
          {"d_k_slc", at(&Params::d_k_slc), key_rows(p, p.c.dk), p.c.dtype},
          {"d_v_slc", at(&Params::d_v_slc), key_rows(p, p.c.dv), p.c.dtype},
          {"d_k_swa", at(&Params::d_k_swa), key_rows(p, p.c.dk), p.c.dtype},
          {"d_v_swa", at(&Params::d_v_swa), key_rows(p, p.c.dv), p.c.dtype},
          {"d_gates", at(&Params::d_gates), query_rows(p, p.c.heads(), 3), p.c.dtype}};
}

CompressedAttentionBackwardParams backward_of(CompressedAttentionParams f, const std::vector<Tensor>& outputs,
                                              const TensorView& d_o) {
  return attention_backward_of<CompressedAttentionBackwardParams>(f, outputs, d_o);
}

SelectedAttentionBackwardParams backward_of(SelectedAttentionParams f, const std::vector<Tensor>& outputs,
                                            const TensorView& d_o) {
  return attention_backward_of<SelectedAttentionBackwardParams>(f, outputs, d_o);
}

SlidingWindowAttentionBackwardParams backward_of(SlidingWindowAttentionParams f, const std::vector<Tensor>& outputs,
                                                 const TensorView& d_o) {
  return attention_backward_of<SlidingWindowAttentionBackwardParams>(f, outputs, d_o);
}

NsaAttentionBackwardParams backward_of(NsaAttentionParams f, const std::vector<Tensor>& outputs,
                                       const TensorView& d_o) {
  f.o = outputs[0], f.indices = outputs[1];
  f.o_cmp = outputs[2], f.o_slc = outputs[3], f.o_swa = outputs[4];
  f.lse_cmp = outputs[5], f.lse_slc = outputs[6], f.lse_swa = outputs[7];
  NsaAttentionBackwardParams b;
  b.forward = f;
  b.d_o = d_o;
  return b;
}

}  // namespace nsa::test
