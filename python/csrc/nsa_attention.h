// What nsa_attention and native_sparse_attention share.
#pragma once

#include "operations.h"

namespace nsa::python {

/// All but compressed keys and values, options of the forward and outputs.
NsaAttentionParams attention_of(const Tensor& q, const Tensor& k_slc, const Tensor& v_slc, const Tensor& k_swa,
                                const Tensor& v_swa, const Tensor& gates, const Ints& cfg, Scale softmax_scale,
                                const Packed& packed);

/// The outputs of a forward, on the way into its backward.
void take_outputs(NsaAttentionParams& params, const Tensor& indices, const Tensor& o_cmp, const Tensor& o_slc,
                  const Tensor& o_swa, const Tensor& lse_cmp, const Tensor& lse_slc, const Tensor& lse_swa);

/// New outputs, bound to the parameters; those for the backward are 1-D without elements and not bound unless `keep`.
struct Outputs {
  Outputs(NsaAttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v, bool keep);

  Tensor o, indices, o_cmp, o_slc, o_swa, lse_cmp, lse_slc, lse_swa;
};

}  // namespace nsa::python
