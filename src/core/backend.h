// A backend: the same functions in every backend's namespace. dispatch.cpp calls them with arguments that validate.h
// accepted and that support.h says the backend can do; in addition the last dimension of incoming gradients (d_o,
// d_out) is contiguous there. They may throw: dispatch turns exceptions into Status::internal.
#pragma once

#include <string>

#include "nsa/cache.h"
#include "nsa/operations.h"

/// fp64 loops straight from the specification: the oracle.
namespace nsa::reference {
/// Which variant of its kernels the backend runs on this machine, for logs.
const char* variant();
Status compress(const CompressParams& params, const Context& context);
Status compress_backward(const CompressBackwardParams& params, const Context& context);
Status compressed_attention(const CompressedAttentionParams& params, const Context& context);
Status compressed_attention_backward(const CompressedAttentionBackwardParams& params, const Context& context);
Status select_blocks(const SelectBlocksParams& params, const Context& context);
Status selected_attention(const SelectedAttentionParams& params, const Context& context);
Status selected_attention_backward(const SelectedAttentionBackwardParams& params, const Context& context);
Status sliding_window_attention(const SlidingWindowAttentionParams& params, const Context& context);
Status sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams& params, const Context& context);
Status combine(const CombineParams& params, const Context& context);
Status combine_backward(const CombineBackwardParams& params, const Context& context);
Status nsa_attention(const NsaAttentionParams& params, const Context& context);
Status nsa_attention_backward(const NsaAttentionBackwardParams& params, const Context& context);
/// Serves nsa::decode and nsa::prefill.
Status decode(const DecodeParams& params, const Context& context);
}  // namespace nsa::reference

/// Vectorised and threaded.
namespace nsa::cpu {
const char* variant();
/// As nsa::describe_instruction_sets.
std::string describe_instruction_sets();
Status compress(const CompressParams& params, const Context& context);
Status compress_backward(const CompressBackwardParams& params, const Context& context);
Status compressed_attention(const CompressedAttentionParams& params, const Context& context);
Status compressed_attention_backward(const CompressedAttentionBackwardParams& params, const Context& context);
Status select_blocks(const SelectBlocksParams& params, const Context& context);
Status selected_attention(const SelectedAttentionParams& params, const Context& context);
Status selected_attention_backward(const SelectedAttentionBackwardParams& params, const Context& context);
Status sliding_window_attention(const SlidingWindowAttentionParams& params, const Context& context);
Status sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams& params, const Context& context);
Status combine(const CombineParams& params, const Context& context);
Status combine_backward(const CombineBackwardParams& params, const Context& context);
Status nsa_attention(const NsaAttentionParams& params, const Context& context);
Status nsa_attention_backward(const NsaAttentionBackwardParams& params, const Context& context);
Status decode(const DecodeParams& params, const Context& context);
/// Copies bytes only: the reference backend shares it.
Status fork(const ForkParams& params, const Context& context);
}  // namespace nsa::cpu
