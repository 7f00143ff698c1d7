// phi by kernels of compute capability 9.0 (forward.cu, backward.cu): what its host code and the kernels
// share.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/params.h"
#include "nsa/config.h"
#include "nsa/tensor.h"

namespace nsa::cuda::sm90::compress {

/// Tiles are made of segments of sixteen rows, a warp's share: neighbouring compressed rows of one sequence, of whose
/// last segment some do not exist. Segments of all sequences follow each other, then empty ones up to a whole tile.
struct CompressSegment {
  int batch;  // of the tensors, 0 when packed
  int token;  // the first one of the first row
  int rows;
  int row;  // the first one in the output
};

/// The same for groups of kernel_stride tokens.
struct TokenSegment {
  int batch, token;  // the first one
  int tokens;        // from there to the end of the sequence
  int group;         // the first one, counted from the start of the sequence
  int row, blocks;   // the sequence's first compressed row, and how many it has
};

struct CompressTotals {
  int segments, rows;  // compressed
  int token_segments;
};

struct CompressWork {
  static constexpr int kSegment = 16;                      // rows
  static constexpr int kWideRows = 128, kNarrowRows = 64;  // of a tile
  static constexpr int kMaxSegments = kWideRows / kSegment;
  static constexpr int kNarrowHidden = 512;  // hidden units, at most
  /// Of wide tiles: more accumulators and outputs do not fit the registers.
  static constexpr __host__ __device__ int wide_hidden(int dim) { return dim <= 128 ? 256 : 128; }

  CompressArgs problem[2];  // keys and values: alike but for tensors and weights
  int problems = 0;
  int tile_rows = kWideRows;
  CompressTotals* totals = nullptr;
  CompressSegment* segments = nullptr;  // of one KV head
  // Backward.
  TokenSegment* token_segments = nullptr;  // of one KV head
  int max_token_segments = 0;
  float* column_partials =
      nullptr;  // (problems, KV heads, tiles of 128 rows, columns of d_z and d_out): sums over a tile

  /// Upper bounds, without the empty ones.
  static std::int64_t max_segments(const CompressArgs& args) {
    return segments_of(args.geometry, args.rows, args.compressed_per_batch);
  }
  static std::int64_t max_segments_of_tokens(const Geometry& g) {
    const auto groups = [&](std::int64_t tokens) { return (tokens + g.kernel_stride - 1) / g.kernel_stride; };
    return segments_of(g, groups(g.total_k), groups(g.k_len));
  }

 private:
  static std::int64_t segments_of(const Geometry& g, std::int64_t packed_rows, std::int64_t rows) {
    if (g.cu_q) return packed_rows / kSegment + g.batches;
    return g.batches * ((rows + kSegment - 1) / kSegment);
  }
};

/// d_z of a problem; for linear it is d_out.
inline Strided hidden_gradient(const CompressArgs& args) {
  if (!args.mlp) return args.d_out;
  const std::int64_t row = args.hidden;
  return {.data = args.d_z, .batch = row * args.compressed_per_batch, .row = row, .head = row * args.rows};
}

/// Rows of a tile, given how many segments there are and how many heads (of all tensors), for a number of
/// SMs. Half the rows take more than half of the time.
inline int compress_tile_rows(bool mlp, int dim, std::int64_t hidden, std::int64_t segments, std::int64_t heads,
                              std::int64_t num_sms) {
  if (!mlp) return CompressWork::kWideRows;
  if (hidden > CompressWork::wide_hidden(dim)) return CompressWork::kNarrowRows;
  const auto rounds = [&](std::int64_t tile_rows) {
    const std::int64_t tiles = (segments * CompressWork::kSegment + tile_rows - 1) / tile_rows;
    return (tiles * heads + num_sms - 1) / num_sms;
  };
  const bool narrow = 10 * rounds(CompressWork::kWideRows) > 6 * rounds(CompressWork::kNarrowRows);
  return narrow ? CompressWork::kNarrowRows : CompressWork::kWideRows;
}

/// The output.
template <class T, int D>
[[gnu::weak]] cudaError_t launch_compress(const CompressWork&, cudaStream_t);
/// For the backward: the segments, for mlp h and d_z.
template <class T, int D>
[[gnu::weak]] cudaError_t launch_compress_hidden(const CompressWork&, cudaStream_t);
/// Then the gradients that are wanted, from d_z.
template <class T, int D>
[[gnu::weak]] cudaError_t launch_compress_gradients(const CompressWork&, cudaStream_t);

}  // namespace nsa::cuda::sm90::compress
