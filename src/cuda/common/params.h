// One plain parameter struct per kernel.
#pragma once

#include "core/branch_index.h"
#include "cuda/common/ds_buffer.h"
#include "cuda/common/geometry.cuh"
#include "cuda/common/inverse_index.h"
#include "cuda/common/selected_ds.h"

namespace nsa::cuda {

// The forward kernels also attend to a cache: then Shape is a StepGeometry, Keys are CachedTokens, and the arguments
// have a member `splits` (step_params.h).

/// A decode step has few queries, so their keys are cut into splits for many thread blocks. Where a split begins does
/// not depend on lengths, and splits are merged in order: the bits of a query do not depend on its neighbours.
struct Splits {
  int num_splits = 0;         // an upper bound; 0: keys are not cut
  int size = 0;               // keys; blocks of the list for the selected branch
  float2* softmax = nullptr;  // (count, B, m, H): maximum in base-2 units and sum; a negative sum: no keys
  float* o_accum = nullptr;   // (count, B, m, H, Dv): sums of values, relative to the maximum

  __device__ std::int64_t at(const Geometry& p, int split, int b, int query, int head) const {
    return ((static_cast<std::int64_t>(split) * p.batches + b) * p.q_len + query) * p.heads + head;
  }
};

template <class Args>
inline constexpr bool kHasSplits = requires(const Args& args) {
  args.splits;
};

/// Of a fallback kernel, for inputs that are not finite (nonfinite.h). It works only where *flag is set, so most
/// launches do nothing: they have few thread blocks, which share the work of a larger grid. Without a flag it always
/// works.
struct Fallback {
  const int* flag = nullptr;
  unsigned x = 0, y = 0, z = 0;  // the larger grid
};

template <class Shape, class Keys>
struct RangeArgsOf {
  Shape geometry;
  Strided q;
  Keys k, v;
  Strided o;
  PerRow lse;
  int window;   // tokens; 0: compressed keys
  float scale;  // softmax scale
  Fallback fallback;
};
using RangeArgs = RangeArgsOf<Geometry, Strided>;

template <class Shape, class Keys>
struct SelectedArgsOf {
  Shape geometry;
  Strided q;
  Keys k, v;
  Strided o;
  PerRow lse;
  Strided indices;  // int32
  int topk;         // entries of a row of indices
  int block_size;
  float scale;
  Fallback fallback;
};
using SelectedArgs = SelectedArgsOf<Geometry, Strided>;

template <class Shape, class Keys>
struct SelectArgsOf {
  Shape geometry;
  Strided q;
  Keys k;
  PerRow lse;
  Strided indices;  // int32
  int topk, block_size, init_blocks, local_blocks;
  float scale, noise;
  float inverse_stride;  // 1 / d
  float share;           // d / (G * l): makes importances shares of 1
  unsigned long long seed;
  float* scratch;               // per thread block: queries x (keys + blocks) floats
  std::int64_t scratch_keys;    // floats per query for the sums
  std::int64_t scratch_blocks;  // floats per query for the importances
  int queries;                  // per tile
  int tiles;                    // per sequence and KV head, an upper bound
  Fallback fallback;
};
using SelectArgs = SelectArgsOf<Geometry, Strided>;

struct CombineArgs {
  Strided branch[kBranches], gates, o;  // o may be one of the branches
  int rows, heads, dim;                 // rows of a batch
  Fallback fallback;
};

struct CombineBackwardArgs {
  Strided d_o;
  int branches;                 // kBranches; 1 for the backward of a single branch (no gates)
  Strided o[kBranches];         // outputs of the branches
  Strided gates;                // null data: every gate is 1
  Strided d_branch[kBranches];  // g_i * d_o; null data: not wanted
  Strided d_gates;              // rowsum(d_o * o_i); null data: not wanted
  PerRow delta[kBranches];      // g_i * rowsum(d_o * o_i); null data: not wanted
  PerRow gate[kBranches];       // g_i as float32; null data: not wanted
  int rows, heads, dim;
};

/// One KV head's share of weights, (P, rows, columns) contiguous in the last dimension.
struct Weights {
  void* data = nullptr;
  std::int64_t head = 0, row = 0;  // elements; head = 0: shared

  template <class T>
  __device__ T* at(int h, std::int64_t r, int c) const {
    return static_cast<T*>(data) + h * head + r * row + c;
  }
};

struct CompressArgs {
  Geometry geometry;         // kv_heads, kernel_size, kernel_stride, lengths of keys
  Strided k, out;            // tokens; compressed rows
  int compressed_per_batch;  // batched: N_c; packed: all rows
  int rows;                  // compressed rows of all batches
  int groups;                // groups of d tokens of all sequences, an upper bound
  int dim, hidden;           // D; E, or D for linear
  FastDivmod by_dim;
  bool mlp;
  Weights pe, w1, b1, w2, b2;
  // (rows): element offset of a row's first token from k.data, -1: none; then one more, not -1 if any row has a block
  std::int64_t* first_token;
  const int* completed;  // a sequence's blocks, the first of its tokens; null: as many as its length makes
  int completed_step;    // ints from one sequence's to the next one's
  int4* group;           // (groups): {sequence, first token, tokens, first compressed row}, tokens 0: none
  float* constant;       // (P, hidden): pe W1 + b1
  float* z;              // (kv_heads, rows, hidden), backward of mlp
  void* h;               // (kv_heads, rows, hidden), T
  // Backward.
  Strided d_out, d_k;
  void* d_z;  // (kv_heads, rows, hidden), T; linear: a copy of d_out with zeros past the last block
  Weights d_pe, d_w1, d_b1, d_w2, d_b2;
  float* d_z_sum;  // (P, hidden): column sums of d_z
  bool shared;     // P == 1

  __device__ std::int64_t buffer(int head, int m) const {
    return (static_cast<std::int64_t>(head) * rows + m) * hidden;
  }
  __device__ int batch_of(int m) const { return geometry.cu_q ? 0 : m / compressed_per_batch; }
  __device__ int row_of(int m) const { return geometry.cu_q ? m : m % compressed_per_batch; }
  /// Of element i of a block of tokens: its token and its channel.
  __device__ int token_of(int i) const { return by_dim.divide(i); }
  __device__ int channel_of(int i) const { return i - token_of(i) * dim; }
};

/// k and v of a layer, alike but for their head dims and hidden units; or one problem alone.
struct CompressPair {
  CompressArgs problem[2];
  int problems;
};

/// Angles by position, float32 (positions, Dk / 2) each; null: no rotation. Positions past the table take its last row.
struct Rotation {
  const float *cos = nullptr, *sin = nullptr;
  std::int64_t cos_row = 0, sin_row = 0;
  int positions = 0;
};

/// Compressed keys, turned where they lie.
struct RotateArgs {
  Geometry geometry;  // kv_heads, kernel_size, kernel_stride, lengths of keys
  Strided keys;       // compressed rows
  int key_dim;
  Rotation rotation;
  bool back;  // by the opposite angles
};

struct BackwardArgs {
  Geometry geometry;
  Strided q, k, v, d_o;
  PerRow lse, delta, gate;   // gate.data == nullptr: 1
  Strided d_q, d_k, d_v;     // d_q is written unless sum_to is set
  Strided sum_from, sum_to;  // float32, like q: what other branches gave to dQ (null: nothing), where the sum goes
  int window;                // tokens; 0: compressed keys, or selected blocks if indices are given
  Strided indices;           // int32; null data: a range
  int topk, block_size;
  float scale;
  // dK and dV. A thread block works on an item: a key tile and some of the queries that see it. Key tiles with several
  // items have a partial sum for each.
  InverseIndex lists;          // of the selection
  int chunks;                  // items per key tile of a range, an upper bound
  float* partials;             // (KV head, partial_items, kKeyTile, Dk + Dv)
  std::int64_t items;          // per KV head, an upper bound
  std::int64_t partial_items;  // the same of key tiles with several items
  void* schedule;              // for kernels of sm90: their items, and what they need per row (row_terms.h)
  float* row_terms;
  DsBuffer ds_buffer;
  SelectedDs selected_ds;  // of the selection
  SelectedWindows windows;
  Fallback fallback;

  __host__ __device__ bool compressed() const { return window == 0 && !indices.data; }

  /// Items of the sequences before; some of them are empty.
  __host__ __device__ std::int64_t items_before(const RowPrefix& at) const {
    if (!indices.data) return (at.k / range_tile() + at.sequences) * chunks;
    return (at.k / block_size + at.sequences + lists.entries_before(at) / kListChunk) * lists.tiles_per_block;
  }
  /// Partial sums of a range.
  __host__ __device__ std::int64_t partials_before(const RowPrefix& at) const {
    return range_partials(at, range_tile(), least_range_chunk(window), chunks);
  }
  /// Partial sums of the blocks of the selection whose lists begin before: only lists longer than a chunk have them.
  __host__ __device__ std::int64_t partials_before(std::int64_t entry, std::int64_t slot) const {
    const std::int64_t whole = entry / kListChunk;
    return (whole + (slot < whole ? slot : whole)) * lists.tiles_per_block;
  }
  /// Raw tokens from one key tile of a range to the next.
  __host__ __device__ int range_tile() const { return kKeyTile * (window > 0 ? 1 : geometry.kernel_stride); }
};

}  // namespace nsa::cuda
