// A backend: the same functions in every backend's namespace, called only with arguments that validate.h accepted.
#pragma once

#include "nsa/cache.h"
#include "nsa/operations.h"

#define NSA_BACKEND_OPERATIONS(X) /* the one list of operations: (function, parameters) */ \
  X(compress, CompressParams)                                                              \
  X(compress_backward, CompressBackwardParams)                                             \
  X(compressed_attention, CompressedAttentionParams)                                       \
  X(compressed_attention_backward, CompressedAttentionBackwardParams)                      \
  X(select_blocks, SelectBlocksParams)                                                     \
  X(selected_attention, SelectedAttentionParams)                                           \
  X(selected_attention_backward, SelectedAttentionBackwardParams)                          \
  X(sliding_window_attention, SlidingWindowAttentionParams)                                \
  X(sliding_window_attention_backward, SlidingWindowAttentionBackwardParams)               \
  X(combine, CombineParams)                                                                \
  X(combine_backward, CombineBackwardParams)                                               \
  X(nsa_attention, NsaAttentionParams)                                                     \
  X(nsa_attention_backward, NsaAttentionBackwardParams)                                    \
  X(decode, DecodeParams)                                                                  \
  X(fork, ForkParams)

#define NSA_DECLARE(name, Params) Status name(const Params& params, const Context& context);
namespace nsa::reference {
NSA_BACKEND_OPERATIONS(NSA_DECLARE)
}
namespace nsa::cpu {
NSA_BACKEND_OPERATIONS(NSA_DECLARE)
}
#undef NSA_DECLARE
