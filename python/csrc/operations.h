// The operations as torch calls them: they allocate their outputs. library.cpp holds their schemas; shapes, dtypes and
// errors are those of include/nsa/operations.h. `needs` of a backward says which gradients are wanted, in the order in
// which they are returned; a tensor that is not wanted comes back 1-D without elements.
#pragma once

#include "arguments.h"
#include "run.h"

namespace nsa::python {

using Ints = std::vector<std::int64_t>;
using Bools = std::vector<bool>;
using Scale = std::optional<double>;
using Length = std::optional<std::int64_t>;

Tensor compress(const Tensor& k, const PhiArguments& weights, const Ints& cfg, const OptionalTensor& cu_seqlens);
/// d_k, d_pe, d_w1, d_b1, d_w2, d_b2
Tensors<6> compress_backward(const Tensor& d_out, const Tensor& k, const PhiArguments& weights, const Ints& cfg,
                             const OptionalTensor& cu_seqlens, const Bools& needs);
Tensor compressed_cu_seqlens(const Tensor& cu_seqlens, const Ints& cfg);

/// o, lse
Tensors<2> compressed_attention(const Tensor& q, const Tensor& k_c, const Tensor& v_c, const Ints& cfg,
                                Scale softmax_scale, Length seqlen_k, const PackedArguments& packed);
/// d_q, d_k_c, d_v_c
Tensors<3> compressed_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k_c, const Tensor& v_c,
                                         const Tensor& o, const Tensor& lse, const Ints& cfg, Scale softmax_scale,
                                         Length seqlen_k, const PackedArguments& packed, const Bools& needs);

Tensor select_blocks(const Tensor& q, const Tensor& k_c, const Tensor& lse, const Ints& cfg, Scale softmax_scale,
                     Length seqlen_k, double noise, std::int64_t seed, const PackedArguments& packed);

/// o, lse
Tensors<2> selected_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& indices,
                              std::int64_t block_size, Scale softmax_scale, const PackedArguments& packed);
/// d_q, d_k, d_v
Tensors<3> selected_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v,
                                       const Tensor& indices, const Tensor& o, const Tensor& lse,
                                       std::int64_t block_size, Scale softmax_scale, const PackedArguments& packed,
                                       const Bools& needs);

/// o, lse
Tensors<2> sliding_window_attention(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t window_size,
                                    Scale softmax_scale, const PackedArguments& packed);
/// d_q, d_k, d_v
Tensors<3> sliding_window_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& o, const Tensor& lse, std::int64_t window_size,
                                             Scale softmax_scale, const PackedArguments& packed, const Bools& needs);

Tensor combine(const Tensor& o_cmp, const Tensor& o_slc, const Tensor& o_swa, const Tensor& gates);
/// d_o_cmp, d_o_slc, d_o_swa, d_gates
Tensors<4> combine_backward(const Tensor& d_o, const Tensor& o_cmp, const Tensor& o_slc, const Tensor& o_swa,
                            const Tensor& gates, const Bools& needs);

/// o, indices (with block_indices only if `return_indices`) and, only if `keep`, what the backward needs: o_cmp, o_slc,
/// o_swa, lse_cmp, lse_slc, lse_swa
Tensors<8> nsa_attention(const BranchArguments& branches, const Ints& cfg, Scale softmax_scale, double noise,
                         std::int64_t seed, const PackedArguments& packed, const OptionalTensor& block_indices,
                         bool keep, bool return_indices);
/// d_q, d_k_c, d_v_c, d_k_slc, d_v_slc, d_k_swa, d_v_swa, d_gates
Tensors<8> nsa_attention_backward(const Tensor& d_o, const BranchArguments& branches, const Tensor& indices,
                                  const SavedArguments& saved, const Ints& cfg, Scale softmax_scale,
                                  const PackedArguments& packed, const OptionalTensor& block_indices,
                                  const Bools& needs);

/// o, indices as from nsa_attention; only if `keep_compressed`, k_c (rotated) and v_c; only if `keep`, the rest that
/// nsa_attention_backward needs: o_cmp, o_slc, o_swa, lse_cmp, lse_slc, lse_swa
Tensors<10> native_sparse_attention(const BranchArguments& branches, const PhiArguments& weights_k,
                                    const PhiArguments& weights_v, const Ints& cfg, Scale softmax_scale,
                                    const RotationArguments& rotation, double noise, std::int64_t seed,
                                    const PackedArguments& packed, const OptionalTensor& block_indices, bool keep,
                                    bool keep_compressed, bool return_indices);
/// d_q, d_k_cmp, d_v_cmp, d_k_slc, d_v_slc, d_k_swa, d_v_swa, d_gates, d_pe, d_w1, d_b1, d_w2, d_b2 of keys and of
/// values. k_c and v_c are computed again if they were not saved.
Tensors<18> native_sparse_attention_backward(const Tensor& d_o, const BranchArguments& branches,
                                             const PhiArguments& weights_k, const PhiArguments& weights_v,
                                             const Tensor& indices, const Tensor& k_c, const Tensor& v_c,
                                             const SavedArguments& saved, const Ints& cfg, Scale softmax_scale,
                                             const RotationArguments& rotation, const PackedArguments& packed,
                                             const OptionalTensor& block_indices, const Bools& needs);

// decode, prefill, decode_paged and fork change the cache's tensors; decode.cpp has their schemas beside them.
using Library = torch::stable::detail::StableLibrary;
void define_decode(Library& m);
void implement_decode(Library& m);

}  // namespace nsa::python
