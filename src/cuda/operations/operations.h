// What the operations call of one another.
#pragma once

#include "core/backend.h"
#include "cuda/common/cache.cuh"
#include "cuda/common/params.h"
#include "cuda/common/views.h"
#include "cuda/operations/nonfinite_guard.h"

namespace nsa::cuda {

// compress and compress_backward of keys and values together, and in a step with a cache.

/// (P, rows, columns) or (P, columns); one set for all KV heads when P = 1.
inline Weights weights_of(const TensorView& t) {
  if (!t.defined()) return {};
  return {t.data, t.size(0) > 1 ? t.stride[0] : 0, t.rank == 3 ? t.stride[1] : 0};
}

/// Both, which have the same cfg and cu_seqlens, by one launch of each kernel where they have the same shapes, too.
/// second may be null.
Status compress(const CompressParams& p, const CompressParams* second, Execution& e);
Status compress_backward(const CompressBackwardParams& p, const CompressBackwardParams* second, Execution& e);
/// By the kernels of this folder; of batched tokens sequence b's first completed[b * step] blocks are wanted, the other
/// rows become 0. completed null: all.
Status compress(const CompressParams& p, const CompressParams* second, const int* completed, int step, Execution& e);

// combine and its backward, whose kernels nsa_attention launches too.

CombineArgs combine_args(const CombineParams& p);
CombineBackwardArgs combine_backward_args(const TensorView& d_o, const TensorView& o_cmp, const TensorView& o_slc,
                                          const TensorView& o_swa, const TensorView& gates, const TensorView& d_gates);

/// nsa_attention of packed tensors whose k_swa and v_swa begin behind the first tokens: `window` says where. guard: of
/// v_c, v_slc and v_swa.
Status attend_branches(const NsaAttentionParams& p, const Packed& window, NonfiniteGuard& guard, Execution& e);

/// q, k_slc and k_swa of a step whose call rotates become rotated copies; packed rows are a batch of one.
Status rotate_tokens(DecodeParams& p, Execution& e);

// A chunk of the prompt on Hopper: the kernels of a forward pass, over what the chunk sees of the cache side by side.

/// Whether the chunk is served so.
bool gathers_chunk(const DecodeParams& p, const StepGeometry& geometry);

/// Where a step finds keys and values. Selected and compressed ones of the step itself are in the cache already.
struct ChunkTokens {
  CachedTokens k_slc, v_slc, k_c, v_c, k_swa, v_swa;
  bool shares_window;  // k_swa and v_swa are k_slc and v_slc
};

/// The attention of all queries of the chunk. The plan has been made.
Status attend_chunk(const DecodeParams& p, const StepGeometry& geometry, const ChunkTokens& tokens, Execution& e);

}  // namespace nsa::cuda
