// What a decode step does before it attends, on Hopper, by one kernel: checks capacity, appends the new tokens,
// and compresses the blocks that they complete. Design: docs/design/decode.md.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/params.h"
#include "cuda/sm90/decode/cached_tokens.h"

namespace nsa::cuda::sm90::decode {

inline constexpr int kCompressRanks = 16;      // thread blocks of a cluster
inline constexpr int kCompressWarps = 8;       // of a thread block
inline constexpr int kCompressTiles = 2;       // of sixteen rows at a time, at most; row 0 is the position encoding
inline constexpr int kCompressStageRows = 32;  // of the first layer's weights
inline constexpr int kCompressStages = 4;

/// φ of keys or of values, with weights as in CompressArgs. A cluster has one set of weights: that of a KV head, or the
/// one that all of them share.
struct CompressSide {
  Strided fresh;      // (B, m, Hkv, D): the step's raw tokens
  CachedTensor raw;   // those before
  CachedTensor out;   // compressed tokens
  HeadScales scales;  // given: these are in e4m3
  Weights pe, w1, b1, w2, b2;
  int dim;     // D
  int hidden;  // columns of w1: E of an MLP, D of a linear φ, 0: the mean
  bool mlp;
  int clusters;  // Hkv, 1 for shared weights, 0 for the mean
};

/// New tokens on their way to pages or a ring.
struct Append {
  Strided fresh;  // (B, m, Hkv, D), strides in bytes
  CachedTensor to;
  int vectors;        // of 16 bytes in a row
  HeadScales scales;  // given: they are stored in e4m3, half as many bytes
};

struct AppendCompressArgs : PlanArgs {
  Append appends[6];      // selection, window, compression; keys and values
  CompressSide sides[2];  // keys, values
  Rotation rotation;      // of the keys
  Strided o, indices;     // of packed queries: rows of no query are cleared; null indices: not wanted
  int value_dim, topk;
};

template <class T>
[[gnu::weak]] cudaError_t launch_append_compress(const AppendCompressArgs& args, cudaStream_t stream);

}  // namespace nsa::cuda::sm90::decode
