// What nsa_attention and native_sparse_attention share.
#pragma once

#include "operations.h"

namespace nsa::python {

/// All but compressed keys and values, options of the forward and outputs.
NsaAttentionParams attention_of(const BranchArguments& branches, const Ints& cfg, Scale softmax_scale,
                                const PackedArguments& packed, const OptionalTensor& block_indices);

/// The outputs of a forward, on the way into its backward.
void take_outputs(NsaAttentionParams& params, const Tensor& indices, const SavedArguments& saved);

/// New outputs, bound to the parameters; those for the backward are 1-D without elements and not bound unless `keep`.
struct Outputs {
  Outputs(NsaAttentionParams& params, const BranchArguments& branches, bool keep);

  Tensor o, indices;
  SavedArguments saved;
};

/// Gradients of what the branches read, wanted as the first of `needs` say.
struct BranchGradients {
  BranchGradients(const BranchArguments& of, const Bools& needs);

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

}  // namespace nsa::python
