// nsa_attention and native_sparse_attention, which compresses before it.
#include "operations.h"

namespace nsa::python {
namespace {

/// All but compressed keys and values, options of the forward and outputs.
NsaAttentionParams attention_of(const BranchArguments& branches, const Ints& cfg, Scale softmax_scale,
                                const PackedArguments& packed, const OptionalTensor& block_indices) {
  NsaAttentionParams params;
  params.q = input(branches.q, "q");
  params.k_slc = input(branches.k_slc, "k_slc");
  params.v_slc = input(branches.v_slc, "v_slc");
  params.k_swa = input(branches.k_swa, "k_swa");
  params.v_swa = input(branches.v_swa, "v_swa");
  params.gates = input(branches.gates, "gates");
  params.cfg = config_of(cfg);
  params.softmax_scale = softmax_scale;
  params.packed = packed.views();
  params.block_indices = input(block_indices, "block_indices");
  check(params.cfg.validate());  // before a size is taken from it
  return params;
}

/// A saved tensor; one that was not saved is 1-D without elements.
TensorView saved_input(const Tensor& tensor, const char* name) {
  return tensor.dim() == 1 && tensor.numel() == 0 ? TensorView{} : input(tensor, name);
}

/// The outputs of a forward, on the way into its backward.
void take_outputs(NsaAttentionParams& params, const Tensor& indices, const SavedArguments& saved) {
  params.indices = saved_input(indices, "indices");
  params.o_cmp = input(saved.o_cmp, "o_cmp");
  params.o_slc = input(saved.o_slc, "o_slc");
  params.o_swa = input(saved.o_swa, "o_swa");
  params.lse_cmp = input(saved.lse_cmp, "lse_cmp");
  params.lse_slc = input(saved.lse_slc, "lse_slc");
  params.lse_swa = input(saved.lse_swa, "lse_swa");
}

SavedArguments saved_of(const BranchArguments& branches, bool keep) {
  const auto o = [&] { return keep ? make_o(branches.q, branches.v_slc) : make(branches.q, {0}); };
  const auto lse = [&] { return keep ? make_lse(branches.q) : make(branches.q, {0}, ScalarType::Float); };
  return {.o_cmp = o(), .o_slc = o(), .o_swa = o(), .lse_cmp = lse(), .lse_slc = lse(), .lse_swa = lse()};
}

/// New outputs, bound to the parameters; those for the backward are 1-D without elements and not bound unless `keep`.
/// Nor are the indices if the blocks are given, unless `return_indices`: then no blocks are selected.
struct Outputs {
  Outputs(NsaAttentionParams& params, const BranchArguments& branches, bool keep, bool return_indices)
      : o(make_o(branches.q, branches.v_slc)), saved(saved_of(branches, keep)) {
    const bool selects = return_indices || !params.block_indices.defined();
    indices = selects ? make_indices(branches.q, branches.k_slc, params.cfg) : make(branches.q, {0}, ScalarType::Int);
    params.o = output(o, "o");
    if (selects) params.indices = output(indices, "indices");
    if (!keep) return;
    params.o_cmp = output(saved.o_cmp, "o_cmp");
    params.o_slc = output(saved.o_slc, "o_slc");
    params.o_swa = output(saved.o_swa, "o_swa");
    params.lse_cmp = output(saved.lse_cmp, "lse_cmp");
    params.lse_slc = output(saved.lse_slc, "lse_slc");
    params.lse_swa = output(saved.lse_swa, "lse_swa");
  }

  Tensor o, indices;
  SavedArguments saved;
};

/// Gradients of what the branches read, wanted as the first of `needs` say.
struct BranchGradients {
  BranchGradients(const BranchArguments& of, const Bools& needs)
      : q(of.q, needs[0]),
        k_cmp(of.k_cmp, needs[1]),
        v_cmp(of.v_cmp, needs[2]),
        k_slc(of.k_slc, needs[3]),
        v_slc(of.v_slc, needs[4]),
        k_swa(of.k_swa, needs[5]),
        v_swa(of.v_swa, needs[6]),
        gates(of.gates, needs[7]) {}

  /// All but those of k_cmp and v_cmp.
  template <class Params>
  void bind(Params& params) const {
    params.d_q = q.view("d_q");
    params.d_k_slc = k_slc.view("d_k_slc");
    params.d_v_slc = v_slc.view("d_v_slc");
    params.d_k_swa = k_swa.view("d_k_swa");
    params.d_v_swa = v_swa.view("d_v_swa");
    params.d_gates = gates.view("d_gates");
  }
  Tensors<8> tensors() const {
    return {q.tensor, k_cmp.tensor, v_cmp.tensor, k_slc.tensor, v_slc.tensor, k_swa.tensor, v_swa.tensor, gates.tensor};
  }

  Gradient q, k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa, gates;
};

NativeSparseAttentionParams params_of(const BranchArguments& branches, const PhiArguments& weights_k,
                                      const PhiArguments& weights_v, const Ints& cfg, Scale softmax_scale,
                                      const RotationArguments& rotation, const PackedArguments& packed,
                                      const OptionalTensor& block_indices) {
  NativeSparseAttentionParams params;
  params.k_cmp = input(branches.k_cmp, "k_cmp");
  params.v_cmp = input(branches.v_cmp, "v_cmp");
  params.weights_k = weights_k.views();
  params.weights_v = weights_v.views();
  params.rope_cos = input(rotation.cos, "rope_cos");
  params.rope_sin = input(rotation.sin, "rope_sin");
  params.attention = attention_of(branches, cfg, softmax_scale, packed, block_indices);
  return params;
}

}  // namespace

Tensors<8> nsa_attention(const BranchArguments& branches, const Ints& cfg, Scale softmax_scale, double noise,
                         std::int64_t seed, const PackedArguments& packed, const OptionalTensor& block_indices,
                         bool keep, bool return_indices) {
  auto params = attention_of(branches, cfg, softmax_scale, packed, block_indices);
  params.k_c = input(branches.k_cmp, "k_c");
  params.v_c = input(branches.v_cmp, "v_c");
  params.noise = noise;
  params.seed = static_cast<std::uint64_t>(seed);
  const Outputs out(params, branches, keep, return_indices);
  const SavedArguments& saved = out.saved;
  run(nsa::nsa_attention, params, branches.q);
  return {out.o, out.indices, saved.o_cmp, saved.o_slc, saved.o_swa, saved.lse_cmp, saved.lse_slc, saved.lse_swa};
}

Tensors<8> nsa_attention_backward(const Tensor& d_o, const BranchArguments& branches, const Tensor& indices,
                                  const SavedArguments& saved, const Ints& cfg, Scale softmax_scale,
                                  const PackedArguments& packed, const OptionalTensor& block_indices,
                                  const Bools& needs) {
  expect_needs(needs, 8);
  NsaAttentionBackwardParams params;
  params.forward = attention_of(branches, cfg, softmax_scale, packed, block_indices);
  params.forward.k_c = input(branches.k_cmp, "k_c");
  params.forward.v_c = input(branches.v_cmp, "v_c");
  take_outputs(params.forward, indices, saved);
  params.d_o = input(d_o, "d_o");
  const BranchGradients d(branches, needs);
  d.bind(params);
  params.d_k_c = d.k_cmp.view("d_k_c");
  params.d_v_c = d.v_cmp.view("d_v_c");
  run(nsa::nsa_attention_backward, params, branches.q);
  return d.tensors();
}

Tensors<10> native_sparse_attention(const BranchArguments& branches, const PhiArguments& weights_k,
                                    const PhiArguments& weights_v, const Ints& cfg, Scale softmax_scale,
                                    const RotationArguments& rotation, double noise, std::int64_t seed,
                                    const PackedArguments& packed, const OptionalTensor& block_indices, bool keep,
                                    bool keep_compressed, bool return_indices) {
  auto params = params_of(branches, weights_k, weights_v, cfg, softmax_scale, rotation, packed, block_indices);
  NsaAttentionParams& attention = params.attention;
  attention.noise = noise;
  attention.seed = static_cast<std::uint64_t>(seed);
  const Outputs out(attention, branches, keep, return_indices);
  const SavedArguments& saved = out.saved;
  const auto compressed = [&](const Tensor& raw) {
    return make(branches.q,
                keep_compressed ? compressed_shape(raw, attention.cfg, attention.packed.packed()) : Shape{0});
  };
  const Tensor k_c = compressed(branches.k_cmp), v_c = compressed(branches.v_cmp);
  if (keep_compressed) {
    attention.k_c = output(k_c, "k_c");
    attention.v_c = output(v_c, "v_c");
  }
  run(nsa::native_sparse_attention, params, branches.q);
  return {out.o,       out.indices, k_c,           v_c,           saved.o_cmp,
          saved.o_slc, saved.o_swa, saved.lse_cmp, saved.lse_slc, saved.lse_swa};
}

Tensors<18> native_sparse_attention_backward(const Tensor& d_o, const BranchArguments& branches,
                                             const PhiArguments& weights_k, const PhiArguments& weights_v,
                                             const Tensor& indices, const Tensor& k_c, const Tensor& v_c,
                                             const SavedArguments& saved, const Ints& cfg, Scale softmax_scale,
                                             const RotationArguments& rotation, const PackedArguments& packed,
                                             const OptionalTensor& block_indices, const Bools& needs) {
  expect_needs(needs, 18);
  NativeSparseAttentionBackwardParams params;
  params.forward = params_of(branches, weights_k, weights_v, cfg, softmax_scale, rotation, packed, block_indices);
  take_outputs(params.forward.attention, indices, saved);
  params.forward.attention.k_c = saved_input(k_c, "k_c");
  params.forward.attention.v_c = saved_input(v_c, "v_c");
  params.d_o = input(d_o, "d_o");
  const BranchGradients d(branches, needs);
  d.bind(params);
  params.d_k_cmp = d.k_cmp.view("d_k_cmp");
  params.d_v_cmp = d.v_cmp.view("d_v_cmp");
  const WeightGradients k(needs, 8, branches.q, weights_k), v(needs, 13, branches.q, weights_v);
  params.d_weights_k = k.views();
  params.d_weights_v = v.views();
  run(nsa::native_sparse_attention_backward, params, branches.q);
  return std::tuple_cat(d.tensors(), k.tensors(), v.tensors());
}

}  // namespace nsa::python
