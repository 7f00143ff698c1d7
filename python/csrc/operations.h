// The operations as torch calls them: they allocate their outputs. library.cpp holds their schemas; shapes, dtypes and
// errors are those of include/nsa/operations.h. `needs` of a backward says which gradients are wanted, in the order in
// which they are returned; a tensor that is not wanted comes back 1-D without elements.
#pragma once

#include <tuple>
#include <utility>

#include "run.h"

namespace nsa::python {

using Ints = std::vector<std::int64_t>;
using Bools = std::vector<bool>;
using Scale = std::optional<double>;
using Length = std::optional<std::int64_t>;

template <class Indices>
struct TensorTuple;
template <std::size_t... I>
struct TensorTuple<std::index_sequence<I...>> {
  using type = std::tuple<std::enable_if_t<(I >= 0), Tensor>...>;
};
/// std::tuple of n tensors.
template <std::size_t n>
using Tensors = typename TensorTuple<std::make_index_sequence<n>>::type;

Tensor compress(const Tensor& k, std::string kind, OptionalTensor pe, OptionalTensor w1, OptionalTensor b1,
                OptionalTensor w2, OptionalTensor b2, Ints cfg, OptionalTensor cu_seqlens);
/// d_k, d_pe, d_w1, d_b1, d_w2, d_b2
Tensors<6> compress_backward(const Tensor& d_out, const Tensor& k, std::string kind, OptionalTensor pe,
                             OptionalTensor w1, OptionalTensor b1, OptionalTensor w2, OptionalTensor b2, Ints cfg,
                             OptionalTensor cu_seqlens, Bools needs);
Tensor compressed_cu_seqlens(const Tensor& cu_seqlens, Ints cfg);

/// o, lse
Tensors<2> compressed_attention(const Tensor& q, const Tensor& k_c, const Tensor& v_c, Ints cfg, Scale softmax_scale,
                                Length seqlen_k, OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k,
                                std::int64_t max_seqlen_q, std::int64_t max_seqlen_k);
/// d_q, d_k_c, d_v_c
Tensors<3> compressed_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k_c, const Tensor& v_c,
                                         const Tensor& o, const Tensor& lse, Ints cfg, Scale softmax_scale,
                                         Length seqlen_k, OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k,
                                         std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, Bools needs);

Tensor select_blocks(const Tensor& q, const Tensor& k_c, const Tensor& lse, Ints cfg, Scale softmax_scale,
                     Length seqlen_k, double noise, std::int64_t seed, OptionalTensor cu_seqlens_q,
                     OptionalTensor cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k);

/// o, lse
Tensors<2> selected_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& indices,
                              std::int64_t block_size, Scale softmax_scale, OptionalTensor cu_seqlens_q,
                              OptionalTensor cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k);
/// d_q, d_k, d_v
Tensors<3> selected_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v,
                                       const Tensor& indices, const Tensor& o, const Tensor& lse,
                                       std::int64_t block_size, Scale softmax_scale, OptionalTensor cu_seqlens_q,
                                       OptionalTensor cu_seqlens_k, std::int64_t max_seqlen_q,
                                       std::int64_t max_seqlen_k, Bools needs);

/// o, lse
Tensors<2> sliding_window_attention(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t window_size,
                                    Scale softmax_scale, OptionalTensor cu_seqlens_q, OptionalTensor cu_seqlens_k,
                                    std::int64_t max_seqlen_q, std::int64_t max_seqlen_k);
/// d_q, d_k, d_v
Tensors<3> sliding_window_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& o, const Tensor& lse, std::int64_t window_size,
                                             Scale softmax_scale, OptionalTensor cu_seqlens_q,
                                             OptionalTensor cu_seqlens_k, std::int64_t max_seqlen_q,
                                             std::int64_t max_seqlen_k, Bools needs);

Tensor combine(const Tensor& o_cmp, const Tensor& o_slc, const Tensor& o_swa, const Tensor& gates);
/// d_o_cmp, d_o_slc, d_o_swa, d_gates
Tensors<4> combine_backward(const Tensor& d_o, const Tensor& o_cmp, const Tensor& o_slc, const Tensor& o_swa,
                            const Tensor& gates, Bools needs);

/// o, indices and, only if `keep`, what the backward needs: o_cmp, o_slc, o_swa, lse_cmp, lse_slc, lse_swa
Tensors<8> nsa_attention(const Tensor& q, const Tensor& k_c, const Tensor& v_c, const Tensor& k_slc,
                         const Tensor& v_slc, const Tensor& k_swa, const Tensor& v_swa, const Tensor& gates, Ints cfg,
                         Scale softmax_scale, double noise, std::int64_t seed, OptionalTensor cu_seqlens_q,
                         OptionalTensor cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                         OptionalTensor imposed_indices, bool keep);
/// d_q, d_k_c, d_v_c, d_k_slc, d_v_slc, d_k_swa, d_v_swa, d_gates
Tensors<8> nsa_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k_c, const Tensor& v_c,
                                  const Tensor& k_slc, const Tensor& v_slc, const Tensor& k_swa, const Tensor& v_swa,
                                  const Tensor& gates, const Tensor& indices, const Tensor& o_cmp, const Tensor& o_slc,
                                  const Tensor& o_swa, const Tensor& lse_cmp, const Tensor& lse_slc,
                                  const Tensor& lse_swa, Ints cfg, Scale softmax_scale, OptionalTensor cu_seqlens_q,
                                  OptionalTensor cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                                  OptionalTensor imposed_indices, Bools needs);

/// o, indices; only if `keep_compressed`, k_c (rotated) and v_c; only if `keep`, the rest that nsa_attention_backward
/// needs: o_cmp, o_slc, o_swa, lse_cmp, lse_slc, lse_swa
Tensors<10> native_sparse_attention(const Tensor& q, const Tensor& k_cmp, const Tensor& v_cmp, const Tensor& k_slc,
                                    const Tensor& v_slc, const Tensor& k_swa, const Tensor& v_swa, const Tensor& gates,
                                    const std::string& kind_k, const OptionalTensor& pe_k, const OptionalTensor& w1_k,
                                    const OptionalTensor& b1_k, const OptionalTensor& w2_k, const OptionalTensor& b2_k,
                                    const std::string& kind_v, const OptionalTensor& pe_v, const OptionalTensor& w1_v,
                                    const OptionalTensor& b1_v, const OptionalTensor& w2_v, const OptionalTensor& b2_v,
                                    const Ints& cfg, Scale softmax_scale, const OptionalTensor& rope_cos,
                                    const OptionalTensor& rope_sin, double noise, std::int64_t seed,
                                    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                                    std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                                    const OptionalTensor& imposed_indices, bool keep, bool keep_compressed);
/// d_q, d_k_cmp, d_v_cmp, d_k_slc, d_v_slc, d_k_swa, d_v_swa, d_gates, d_pe, d_w1, d_b1, d_w2, d_b2 of keys and of
/// values. k_c and v_c are computed again if they were not kept.
Tensors<18> native_sparse_attention_backward(
    const Tensor& d_o, const Tensor& q, const Tensor& k_cmp, const Tensor& v_cmp, const Tensor& k_slc,
    const Tensor& v_slc, const Tensor& k_swa, const Tensor& v_swa, const Tensor& gates, const std::string& kind_k,
    const OptionalTensor& pe_k, const OptionalTensor& w1_k, const OptionalTensor& b1_k, const OptionalTensor& w2_k,
    const OptionalTensor& b2_k, const std::string& kind_v, const OptionalTensor& pe_v, const OptionalTensor& w1_v,
    const OptionalTensor& b1_v, const OptionalTensor& w2_v, const OptionalTensor& b2_v, const Tensor& indices,
    const Tensor& k_c, const Tensor& v_c, const Tensor& o_cmp, const Tensor& o_slc, const Tensor& o_swa,
    const Tensor& lse_cmp, const Tensor& lse_slc, const Tensor& lse_swa, const Ints& cfg, Scale softmax_scale,
    const OptionalTensor& rope_cos, const OptionalTensor& rope_sin, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
    const OptionalTensor& imposed_indices, const Bools& needs);

// decode, prefill and fork change the cache's tensors; decode.cpp has their schemas beside them.
using Library = torch::stable::detail::StableLibrary;
void define_decode(Library& m);
void implement_decode(Library& m);

}  // namespace nsa::python
