// The outputs of each operation on a problem.
#pragma once

#include "support/tolerance.h"

namespace nsa::test {

std::vector<Output<CompressParams>> compress_outputs(const Problem& p, const CompressParams& params);
std::vector<Output<CompressBackwardParams>> compress_backward_outputs(const Problem& p, const CompressParams& forward);
std::vector<Output<CompressedAttentionParams>> compressed_outputs(const Problem& p);
std::vector<Output<CompressedAttentionBackwardParams>> compressed_backward_outputs(const Problem& p);
std::vector<Output<SelectBlocksParams>> selection_outputs(const Problem& p);
std::vector<Output<SelectedAttentionParams>> selected_outputs(const Problem& p);
std::vector<Output<SelectedAttentionBackwardParams>> selected_backward_outputs(const Problem& p);
std::vector<Output<SlidingWindowAttentionParams>> window_outputs(const Problem& p);
std::vector<Output<SlidingWindowAttentionBackwardParams>> window_backward_outputs(const Problem& p);
std::vector<Output<CombineParams>> combine_outputs(const Problem& p);
std::vector<Output<CombineBackwardParams>> combine_backward_outputs(const Problem& p);
/// o, indices, o_cmp, o_slc, o_swa, lse_cmp, lse_slc, lse_swa
std::vector<Output<NsaAttentionParams>> whole_outputs(const Problem& p);
std::vector<Output<NsaAttentionBackwardParams>> whole_backward_outputs(const Problem& p);
/// As whole_outputs, then k_c, v_c.
std::vector<Output<NativeSparseAttentionParams>> layer_outputs(const Problem& p);
std::vector<Output<NativeSparseAttentionBackwardParams>> layer_backward_outputs(const Problem& p);

/// Backward parameters from the outputs of the forward, gradients still undefined.
CompressedAttentionBackwardParams backward_of(CompressedAttentionParams f, const std::vector<TensorView>& outputs,
                                              const TensorView& d_o);
SelectedAttentionBackwardParams backward_of(SelectedAttentionParams f, const std::vector<TensorView>& outputs,
                                            const TensorView& d_o);
SlidingWindowAttentionBackwardParams backward_of(SlidingWindowAttentionParams f, const std::vector<TensorView>& outputs,
                                                 const TensorView& d_o);
NsaAttentionBackwardParams backward_of(NsaAttentionParams f, const std::vector<TensorView>& outputs,
                                       const TensorView& d_o);

NativeSparseAttentionBackwardParams backward_of(NativeSparseAttentionParams f, const std::vector<TensorView>& outputs,
                                                const TensorView& d_o);

}  // namespace nsa::test
