// A chunk of the prompt by the kernels of a forward pass: what a sequence's queries see of the cache, copied side by
// side in the type of the queries.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/cache.cuh"
#include "nsa/tensor.h"

namespace nsa::cuda::sm90::decode {

/// Rows that a forward kernel may read behind the last key that a query sees: they are zeros.
inline constexpr int kRowsBehind = 256;

/// One kind of tokens. Strides in bytes of what is stored.
struct Gather {
  enum Rows { kAll, kCompressed, kWindow };

  CachedTokens tokens;
  Rows rows;
  char* to;        // (rows, heads, 16 * vectors), and kRowsBehind more
  int vectors;     // of 16 bytes in a row of `to`
  bool is_finite;  // elements that are not are to be reported
  HeadScales scales;
};

/// Where the only sequence of a packed call begins and ends, on the device. No keys and no queries where the step adds
/// nothing to it.
struct ChunkOffsets {
  int q[2], k[2];
  int window[2];  // the keys from the first one on that the first query's window holds
  int nonfinite;  // 1: something is not that is to be
};

struct GatherChunkArgs {
  StepGeometry geometry;  // of the step
  int sequence;
  int window;             // tokens
  ChunkOffsets* offsets;  // zeros
  bool float8;            // stored in e4m3, otherwise in the type of the queries
  bool shares_window;     // its rows are those of all tokens, of which there are two kinds; else the last two kinds
  Gather kinds[6];
};

/// dtype: of the queries.
cudaError_t gather_chunk(DType dtype, const GatherChunkArgs& args, cudaStream_t stream);

}  // namespace nsa::cuda::sm90::decode
