// phi by kernels of compute capability 9.0 (compress.cu, compress_gradients.cu): what its host code and the kernels
// share.
#pragma once

#include <cuda_runtime.h>

#include "cuda/portable/arguments.h"
#include "nsa/config.h"
#include "nsa/tensor.h"

namespace nsa::cuda::sm90 {

/// Neighbouring compressed rows of one sequence.
struct CompressTile {
  int batch;  // of the tensors, 0 when packed
  int token;  // the first one of the first row
  int rows;
  int row;  // the first one in the output
};

/// Neighbouring groups of kernel_stride tokens of one sequence, the last of which may have fewer.
struct TokenTile {
  int batch, token;  // the first one
  int tokens;        // from there to the end of the sequence
  int group;         // the first one, counted from the start of the sequence
  int row, blocks;   // the sequence's first compressed row, and how many it has
};

struct CompressTotals {
  int tiles, rows;  // compressed
  int steps;        // of up to 64 rows of a tile
  int token_tiles;
};

struct CompressWork {
  static constexpr int kWideRows = 128, kNarrowRows = 64;  // of a tile, at most
  static constexpr int kWideHidden = 256, kNarrowHidden = 512;
  static constexpr int kGroups = 128;  // of a tile of tokens

  portable::CompressArgs problem[2];  // keys and values: alike but for tensors and weights
  int problems = 0;
  int tile_rows = kWideRows;
  CompressTotals* totals = nullptr;
  CompressTile* tiles = nullptr;  // of one KV head
  // Backward.
  TokenTile* token_tiles = nullptr;  // of one KV head
  int max_token_tiles = 0;
  float* column_parts = nullptr;  // (problems, KV heads, tiles, columns of d_z and of d_out): sums over a tile

  /// An upper bound of the tiles.
  static std::int64_t max_tiles(const portable::CompressArgs& args, int tile_rows) {
    if (args.geometry.cu_q) return args.rows / tile_rows + args.geometry.batches;
    return static_cast<std::int64_t>(args.geometry.batches) * ((args.compressed_per_batch + tile_rows - 1) / tile_rows);
  }
  static std::int64_t max_tiles_of_tokens(const Geometry& g) {
    const std::int64_t tokens = static_cast<std::int64_t>(kGroups) * g.kernel_stride;
    if (g.cu_q) return g.total_k / tokens + g.batches;
    return g.batches * ((g.k_len + tokens - 1) / tokens);
  }
};

/// d_z of a problem; for linear it is d_out.
inline Strided hidden_gradient(const portable::CompressArgs& args) {
  if (!args.mlp) return args.d_out;
  const std::int64_t row = args.hidden;
  return {args.d_z, row * args.compressed_per_batch, row, row * args.rows};
}

/// Rows of a tile, given how many sequences there are, their mean number of compressed rows, and how many heads (of all
/// tensors) share `processors` multiprocessors. Half the rows take more than half of the time.
inline int compress_tile_rows(bool mlp, std::int64_t hidden, std::int64_t sequences, std::int64_t rows,
                              std::int64_t heads, std::int64_t processors) {
  if (!mlp) return CompressWork::kWideRows;
  if (hidden > CompressWork::kWideHidden) return CompressWork::kNarrowRows;
  const auto rounds = [&](std::int64_t tile_rows) {
    return (sequences * ((rows + tile_rows - 1) / tile_rows) * heads + processors - 1) / processors;
  };
  const bool narrow = 10 * rounds(CompressWork::kWideRows) > 6 * rounds(CompressWork::kNarrowRows);
  return narrow ? CompressWork::kNarrowRows : CompressWork::kWideRows;
}

/// The output.
template <class T, int D>
[[gnu::weak]] cudaError_t launch_compress(const CompressWork&, cudaStream_t);
/// For the backward: the tiles, for mlp h and d_z.
template <class T, int D>
[[gnu::weak]] cudaError_t launch_compress_hidden(const CompressWork&, cudaStream_t);
/// Then the gradients that are wanted, from d_z.
template <class T, int D>
[[gnu::weak]] cudaError_t launch_compress_gradients(const CompressWork&, cudaStream_t);

/// What the choice looks at.
struct CompressCall {
  DType dtype = DType::kBFloat16;
  CompressionKind kind = CompressionKind::kMlp;
  std::int64_t dim = 0, hidden = 0;      // D; E, or D for linear
  std::int64_t sequences = 1, rows = 1;  // and all their compressed rows, or an upper bound
  bool mappable = true;
};

/// Null: there is none.
struct CompressKernels {
  cudaError_t (*compress)(const CompressWork&, cudaStream_t) = nullptr;
  cudaError_t (*hidden)(const CompressWork&, cudaStream_t) = nullptr;
  cudaError_t (*gradients)(const CompressWork&, cudaStream_t) = nullptr;
};

/// As choose() and kernels_on() of kernels.h.
CompressKernels choose(const CompressCall& call);
CompressKernels kernels_on(int index, const CompressCall& call);

}  // namespace nsa::cuda::sm90
