// The operations of the CUDA backend on tensors in host memory: copied to the device, run there, copied back.
#pragma once

#include "cuda/portable/portable.h"

namespace nsa::test {

/// Whether this machine has a CUDA device.
bool has_device();

// Signatures of support/tolerance.h's Operation.
Status cuda_compress(const CompressParams& params, const Context& context);
Status cuda_compress_backward(const CompressBackwardParams& params, const Context& context);
Status cuda_compressed_attention(const CompressedAttentionParams& params, const Context& context);
Status cuda_compressed_attention_backward(const CompressedAttentionBackwardParams& params, const Context& context);
Status cuda_select_blocks(const SelectBlocksParams& params, const Context& context);
Status cuda_selected_attention(const SelectedAttentionParams& params, const Context& context);
Status cuda_selected_attention_backward(const SelectedAttentionBackwardParams& params, const Context& context);
Status cuda_sliding_window_attention(const SlidingWindowAttentionParams& params, const Context& context);
Status cuda_sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams& params,
                                              const Context& context);
Status cuda_combine(const CombineParams& params, const Context& context);
Status cuda_combine_backward(const CombineBackwardParams& params, const Context& context);
Status cuda_nsa_attention(const NsaAttentionParams& params, const Context& context);
Status cuda_nsa_attention_backward(const NsaAttentionBackwardParams& params, const Context& context);

}  // namespace nsa::test
