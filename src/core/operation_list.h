// Every operation, once: X(function, parameter struct). Functions that exist for each operation are declared or defined
// from this list, so that a new operation is a line here.
#pragma once

/// Those with kernels of their own.
// clang-format off
#define NSA_KERNEL_OPERATIONS(X) \
  X(compress, CompressParams) \
  X(compress_backward, CompressBackwardParams) \
  X(compressed_attention, CompressedAttentionParams) \
  X(compressed_attention_backward, CompressedAttentionBackwardParams) \
  X(select_blocks, SelectBlocksParams) \
  X(selected_attention, SelectedAttentionParams) \
  X(selected_attention_backward, SelectedAttentionBackwardParams) \
  X(sliding_window_attention, SlidingWindowAttentionParams) \
  X(sliding_window_attention_backward, SlidingWindowAttentionBackwardParams) \
  X(combine, CombineParams) \
  X(combine_backward, CombineBackwardParams) \
  X(nsa_attention, NsaAttentionParams) \
  X(nsa_attention_backward, NsaAttentionBackwardParams) \
  X(decode, DecodeParams)

/// All: the others are made of these, or move bytes only.
#define NSA_OPERATIONS(X) \
  NSA_KERNEL_OPERATIONS(X) \
  X(native_sparse_attention, NativeSparseAttentionParams) \
  X(native_sparse_attention_backward, NativeSparseAttentionBackwardParams) \
  X(fork, ForkParams)
// clang-format on
