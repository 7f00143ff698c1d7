// compress and compress_backward of keys and values together, and in a step with a cache.
#pragma once

#include "core/backend.h"
#include "cuda/common/params.h"

namespace nsa::cuda {

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

}  // namespace nsa::cuda
