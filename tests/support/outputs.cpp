#include "support/outputs.h"

#include <type_traits>
#include <utility>

namespace nsa::test {
namespace {

template <class Params>
std::function<TensorView&(Params&)> at(TensorView Params::*member) {
  return [member](Params& params) -> TensorView& { return params.*member; };
}

template <class Params>
Output<Params> queries(const Problem& p, const char* name, TensorView Params::*member, std::int64_t heads,
                       std::int64_t width, DType dtype) {
  return {name, Rows::kQueries, at(member), [&p, heads, width](DType t) { return p.query_rows(heads, width, t); },
          dtype};
}

template <class Params>
Output<Params> keys(const Problem& p, const char* name, TensorView Params::*member, std::int64_t width) {
  return {name, Rows::kKeys, at(member), [&p, width](DType t) { return p.key_rows(width, t); }, p.c.dtype};
}

template <class Params>
Output<Params> compressed(const Problem& p, const char* name, TensorView Params::*member, std::int64_t width) {
  return {name, Rows::kCompressed, at(member), [&p, width](DType t) { return p.compressed_rows(width, t); }, p.c.dtype};
}

/// Like o, or lse.
template <class Params>
Output<Params> o_rows(const Problem& p, const char* name, TensorView Params::*member) {
  return queries(p, name, member, p.c.heads(), p.c.dv, p.c.dtype);
}
template <class Params>
Output<Params> lse_rows(const Problem& p, const char* name, TensorView Params::*member) {
  return {name, Rows::kLse, at(member), [&p](DType t) { return p.lse_rows(t); }, DType::kFloat32};
}
template <class Params>
Output<Params> d_q_rows(const Problem& p) {
  return queries(p, "d_q", &Params::d_q, p.c.heads(), p.c.dk, p.c.dtype);
}
template <class Params>
Output<Params> index_rows(const Problem& p) {
  return queries(p, "indices", &Params::indices, p.c.kv_heads, p.c.cfg.topk, DType::kInt32);
}

template <class Params>
std::vector<Output<Params>> attention_outputs(const Problem& p) {
  return {o_rows(p, "o", &Params::o), lse_rows(p, "lse", &Params::lse)};
}

/// Of attention to raw keys.
template <class Params>
std::vector<Output<Params>> raw_backward_outputs(const Problem& p) {
  return {d_q_rows<Params>(p), keys(p, "d_k", &Params::d_k, p.c.dk), keys(p, "d_v", &Params::d_v, p.c.dv)};
}

/// The gradients of phi's weights, which lie in member `gradients` of the parameters.
template <class Params>
void add_weight_gradients(std::vector<Output<Params>>& outputs, const std::string& prefix,
                          const CompressionWeights& weights, CompressionWeights Params::*gradients, DType type) {
  const auto add = [&](const char* name, TensorView CompressionWeights::*weight) {
    const TensorView& like = weights.*weight;
    if (!like.defined()) return;
    outputs.push_back({prefix + name, Rows::kNone, [=](Params& b) -> TensorView& { return b.*gradients.*weight; },
                       [shape = shape_of(like)](DType dtype) { return Tensor(dtype, shape); }, type});
  };
  add("pe", &CompressionWeights::pe);
  add("w1", &CompressionWeights::w1);
  add("b1", &CompressionWeights::b1);
  add("w2", &CompressionWeights::w2);
  add("b2", &CompressionWeights::b2);
}

template <class Backward, class Forward>
Backward attention_backward_of(Forward f, const std::vector<TensorView>& outputs, const TensorView& d_o) {
  f.o = outputs[0], f.lse = outputs[1];
  Backward b;
  b.forward = f;
  b.d_o = d_o;
  return b;
}

}  // namespace

std::vector<Output<CompressParams>> compress_outputs(const Problem& p, const CompressParams& params) {
  return {compressed(p, "out", &CompressParams::out, params.k.size(-1))};
}

std::vector<Output<CompressBackwardParams>> compress_backward_outputs(const Problem& p, const CompressParams& forward) {
  using Params = CompressBackwardParams;
  std::vector<Output<Params>> outputs{keys(p, "d_k", &Params::d_k, forward.k.size(-1))};
  add_weight_gradients(outputs, "d_", forward.weights, &Params::d_weights, p.c.dtype);
  return outputs;
}

std::vector<Output<CompressedAttentionParams>> compressed_outputs(const Problem& p) {
  return attention_outputs<CompressedAttentionParams>(p);
}

std::vector<Output<CompressedAttentionBackwardParams>> compressed_backward_outputs(const Problem& p) {
  using Params = CompressedAttentionBackwardParams;
  return {d_q_rows<Params>(p), compressed(p, "d_k_c", &Params::d_k_c, p.c.dk),
          compressed(p, "d_v_c", &Params::d_v_c, p.c.dv)};
}

std::vector<Output<SelectBlocksParams>> selection_outputs(const Problem& p) {
  return {index_rows<SelectBlocksParams>(p)};
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

std::vector<Output<CombineParams>> combine_outputs(const Problem& p) { return {o_rows(p, "o", &CombineParams::o)}; }

std::vector<Output<CombineBackwardParams>> combine_backward_outputs(const Problem& p) {
  using Params = CombineBackwardParams;
  return {o_rows(p, "d_o_cmp", &Params::d_o_cmp), o_rows(p, "d_o_slc", &Params::d_o_slc),
          o_rows(p, "d_o_swa", &Params::d_o_swa), queries(p, "d_gates", &Params::d_gates, p.c.heads(), 3, p.c.dtype)};
}

std::vector<Output<NsaAttentionParams>> whole_outputs(const Problem& p) {
  using Params = NsaAttentionParams;
  return {o_rows(p, "o", &Params::o),
          index_rows<Params>(p),
          o_rows(p, "o_cmp", &Params::o_cmp),
          o_rows(p, "o_slc", &Params::o_slc),
          o_rows(p, "o_swa", &Params::o_swa),
          lse_rows(p, "lse_cmp", &Params::lse_cmp),
          lse_rows(p, "lse_slc", &Params::lse_slc),
          lse_rows(p, "lse_swa", &Params::lse_swa)};
}

std::vector<Output<NsaAttentionBackwardParams>> whole_backward_outputs(const Problem& p) {
  using Params = NsaAttentionBackwardParams;
  return {d_q_rows<Params>(p),
          compressed(p, "d_k_c", &Params::d_k_c, p.c.dk),
          compressed(p, "d_v_c", &Params::d_v_c, p.c.dv),
          keys(p, "d_k_slc", &Params::d_k_slc, p.c.dk),
          keys(p, "d_v_slc", &Params::d_v_slc, p.c.dv),
          keys(p, "d_k_swa", &Params::d_k_swa, p.c.dk),
          keys(p, "d_v_swa", &Params::d_v_swa, p.c.dv),
          queries(p, "d_gates", &Params::d_gates, p.c.heads(), 3, p.c.dtype)};
}

std::vector<Output<NativeSparseAttentionParams>> layer_outputs(const Problem& p) {
  using Params = NativeSparseAttentionParams;
  std::vector<Output<Params>> outputs;
  const auto add = [&](const Output<NsaAttentionParams>& output) {
    outputs.push_back({output.name, output.rows,
                       [slot = output.slot](Params& params) -> TensorView& { return slot(params.attention); },
                       output.make, output.dtype});
  };
  for (const auto& output : whole_outputs(p)) add(output);
  add(compressed(p, "k_c", &NsaAttentionParams::k_c, p.c.dk));
  add(compressed(p, "v_c", &NsaAttentionParams::v_c, p.c.dv));
  return outputs;
}

std::vector<Output<NativeSparseAttentionBackwardParams>> layer_backward_outputs(const Problem& p) {
  using Params = NativeSparseAttentionBackwardParams;
  std::vector<Output<Params>> outputs{d_q_rows<Params>(p),
                                      keys(p, "d_k_cmp", &Params::d_k_cmp, p.c.dk),
                                      keys(p, "d_v_cmp", &Params::d_v_cmp, p.c.dv),
                                      keys(p, "d_k_slc", &Params::d_k_slc, p.c.dk),
                                      keys(p, "d_v_slc", &Params::d_v_slc, p.c.dv),
                                      keys(p, "d_k_swa", &Params::d_k_swa, p.c.dk),
                                      keys(p, "d_v_swa", &Params::d_v_swa, p.c.dv),
                                      queries(p, "d_gates", &Params::d_gates, p.c.heads(), 3, p.c.dtype)};
  const NativeSparseAttentionParams f = p.layer();
  add_weight_gradients(outputs, "d_weights_k.", f.weights_k, &Params::d_weights_k, p.c.dtype);
  add_weight_gradients(outputs, "d_weights_v.", f.weights_v, &Params::d_weights_v, p.c.dtype);
  return outputs;
}

CompressedAttentionBackwardParams backward_of(CompressedAttentionParams f, const std::vector<TensorView>& outputs,
                                              const TensorView& d_o) {
  return attention_backward_of<CompressedAttentionBackwardParams>(f, outputs, d_o);
}

SelectedAttentionBackwardParams backward_of(SelectedAttentionParams f, const std::vector<TensorView>& outputs,
                                            const TensorView& d_o) {
  return attention_backward_of<SelectedAttentionBackwardParams>(f, outputs, d_o);
}

SlidingWindowAttentionBackwardParams backward_of(SlidingWindowAttentionParams f, const std::vector<TensorView>& outputs,
                                                 const TensorView& d_o) {
  return attention_backward_of<SlidingWindowAttentionBackwardParams>(f, outputs, d_o);
}

/// The outputs of nsa_attention where it left them.
static void take_outputs(NsaAttentionParams& f, const std::vector<TensorView>& outputs) {
  f.o = outputs[0], f.indices = outputs[1];
  f.o_cmp = outputs[2], f.o_slc = outputs[3], f.o_swa = outputs[4];
  f.lse_cmp = outputs[5], f.lse_slc = outputs[6], f.lse_swa = outputs[7];
}

NsaAttentionBackwardParams backward_of(NsaAttentionParams f, const std::vector<TensorView>& outputs,
                                       const TensorView& d_o) {
  take_outputs(f, outputs);
  NsaAttentionBackwardParams b;
  b.forward = f;
  b.d_o = d_o;
  return b;
}

NativeSparseAttentionBackwardParams backward_of(NativeSparseAttentionParams f, const std::vector<TensorView>& outputs,
                                                const TensorView& d_o) {
  take_outputs(f.attention, outputs);
  f.attention.k_c = outputs[8], f.attention.v_c = outputs[9];
  NativeSparseAttentionBackwardParams b;
  b.forward = f;
  b.d_o = d_o;
  return b;
}

}  // namespace nsa::test
