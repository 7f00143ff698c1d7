// One plain parameter struct per kernel.
#pragma once

#include "cuda/common/geometry.cuh"

namespace nsa::cuda {

/// The branches in the order of the gates.
enum BranchIndex { kCompressed, kSelected, kWindow, kBranches };

// The forward kernels also attend to a cache: then Shape is a StepGeometry, Keys are CachedTokens, and the arguments
// have a member `splits` (step_params.h).

/// A decode step has few queries, so their keys are cut into splits for many thread blocks. Where a split begins does
/// not depend on lengths, and splits are merged in order: the bits of a query do not depend on its neighbours.
struct Splits {
  int count = 0;              // an upper bound; 0: keys are not cut
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

/// For a kernel that stands in for another one where inputs are not finite (nonfinite.h): it works only where
/// *flag is set, so it is mostly launched in vain, with few thread blocks that then share the work of a larger grid.
/// Without a flag it works always.
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
  Strided branch[3], gates, o;  // o may be one of the branches
  int rows, heads, dim;         // rows of a batch
  Fallback fallback;
};

struct CombineBackwardArgs {
  Strided d_o;
  int branches;         // 3; 1 for the backward of a single branch (no gates)
  Strided o[3];         // outputs of the branches
  Strided gates;        // null data: every gate is 1
  Strided d_branch[3];  // g_i * d_o; null data: not wanted
  Strided d_gates;      // rowsum(d_o * o_i); null data: not wanted
  PerRow delta[3];      // g_i * rowsum(d_o * o_i); null data: not wanted
  PerRow gate[3];       // g_i as float32; null data: not wanted
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

inline constexpr int kKeyTile = 64;  // keys of a thread block of d_kv

/// The queries that may see a key tile of a range are cut into items, short enough to fill the device, long enough to
/// make partial sums rare. The cut depends on the sequence alone, so that its bits do not depend on the others.
inline constexpr int kRangeChunk = 512, kMaxRangeChunks = 16;
__host__ __device__ inline int range_queries(int window, int q_len) {
  return window > 0 && window < q_len - 64 ? window + 64 : q_len;
}
__host__ __device__ inline int least_range_chunk(int window) { return window > 0 ? 2 * kRangeChunk : kRangeChunk; }
__host__ __device__ inline int range_chunk(int window, int q_len) {
  const int even = (range_queries(window, q_len) + kMaxRangeChunks * 256 - 1) / (kMaxRangeChunks * 256) * 256;
  const int least = least_range_chunk(window);
  return even > least ? even : least;
}
/// In 16-bit types the compressed branch's chunks are sums of smaller ones: they are items of their own where dS is
/// stored (DsBuffer), so that few queries at a time fill the device.
__host__ __device__ inline int small_chunk(int q_len) {
  return q_len <= 4096 ? kRangeChunk : q_len <= 16384 ? 128 : 256;
}
/// Of sequences with up to q_len queries.
__host__ __device__ inline int max_range_chunks(int window, int q_len) {
  const int least = least_range_chunk(window), chunks = (range_queries(window, q_len) + least - 1) / least;
  return chunks < 1 ? 1 : chunks < kMaxRangeChunks ? chunks : kMaxRangeChunks;
}

/// What lies before a sequence of a call, in rows of the tensors: where its share begins of an array that holds
/// something for every row. Before the end of the last sequence lies the whole call, so the same functions give sizes.
/// Shares begin at rounded down multiples of these numbers and are never shorter than what they hold, so no sum over
/// sequences is needed and memory follows the rows, however uneven the sequences are.
struct RowPrefix {
  std::int64_t q, k;
  int sequences;
};
__host__ __device__ inline RowPrefix end_prefix(const Geometry& g) {
  if (g.cu_q) return {g.total_q, g.total_k, g.batches};
  return {static_cast<std::int64_t>(g.batches) * g.q_len, static_cast<std::int64_t>(g.batches) * g.k_len, g.batches};
}
__host__ __device__ inline RowPrefix row_prefix(const Geometry& g, const DeviceSequence& seq) {
  // Of each two summands one is 0.
  return {seq.q_begin + static_cast<std::int64_t>(seq.batch) * g.q_len,
          seq.k_begin + static_cast<std::int64_t>(seq.batch) * g.k_len, seq.index};
}

/// The sequence in whose share element x lies: the last one before which there are first(before) <= x.
template <class First>
__device__ inline int sequence_at(const Geometry& g, std::int64_t x, const First& first) {
  int low = 0, high = g.batches;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first(row_prefix(g, sequence_of(g, middle))) <= x ? low : high) = middle;
  }
  return low;
}

/// Partial sums for ranges: a sequence of more than `least` queries, cut into at most `chunks` of at least so many, has
/// one for each chunk and `tile` raw tokens; the others have none.
__host__ __device__ inline std::int64_t range_partials(const RowPrefix& at, int tile, int least, int chunks) {
  const std::int64_t ends = 2 * at.q / least, most = static_cast<std::int64_t>(at.sequences) * chunks;
  return at.k * chunks / tile + (ends < most ? ends : most);
}

/// Queries of an item of a list (kept in shared memory).
inline constexpr int kListChunk = 1024;

/// The queries that chose each block, ascending, block after block: the inverse index (inverse_index.cuh).
struct InverseIndex {
  int block_size = 0;
  int tiles_per_block = 0;    // key tiles of 64
  int width = 0;              // entries for a query, an upper bound
  int* list = nullptr;        // (KV head, entries)
  int* begin = nullptr;       // (KV head, slots)
  int* item_begin = nullptr;  // (KV head, slots, tiles_per_block)
  std::int64_t entries = 0, slots = 0;
  int chunks = 0;          // of queries, in which the lists are made: an upper bound per sequence
  int* offsets = nullptr;  // (KV head, chunks, slots): where in a block's list the part of a chunk ends

  /// Queries of a chunk.
  __host__ __device__ static int chunk(int q_len) { return q_len > 128 * 128 ? (q_len + 127) / 128 : 128; }
  /// A sequence has a slot for each block and one for the end.
  __host__ __device__ std::int64_t slots_before(const RowPrefix& at) const {
    return at.k / block_size + 2 * at.sequences;
  }
  __host__ __device__ std::int64_t entries_before(const RowPrefix& at) const { return at.q * width; }
};

/// The share of one sequence and KV head: block j was chosen by the queries list[begin[j]] ... list[begin[j + 1] - 1].
struct SequenceLists {
  int *list, *begin;
  int* item_begin;           // (blocks * tiles_per_block + 1): first item of a key tile
  int* offsets;              // of chunk 0 and block 0; of the next chunk: InverseIndex::slots further
  std::int64_t entry, slot;  // where they begin in the arrays of the KV head
  int blocks;
};
__device__ inline SequenceLists lists_of(const InverseIndex& all, const Geometry& g, const DeviceSequence& seq,
                                         int kv_head) {
  const RowPrefix at = row_prefix(g, seq);
  const std::int64_t entry = all.entries_before(at), slot = all.slots_before(at);
  return {all.list + kv_head * all.entries + entry,
          all.begin + kv_head * all.slots + slot,
          all.item_begin + (kv_head * all.slots + slot) * all.tiles_per_block,
          all.offsets + kv_head * all.chunks * all.slots + slot,
          entry,
          slot,
          (seq.k_len + all.block_size - 1) / all.block_size};
}

/// dS of the compressed branch in 16-bit types, which d_kv leaves for range_d_q: without it that would have to make the
/// scores and dP a second time. Tiles of 16 query rows and 16 keys, each as d_kv has it, the A operand of dS^T, a
/// lane's four registers next to each other; key tiles of a tile of rows follow each other.
struct DsBuffer {
  static constexpr int kTile = 512;  // bytes

  char* tiles = nullptr;  // (KV head, row tiles, key tiles); null: not wanted
  // A batched call makes dK and dV for a span of the queries at a time: so many small chunks. Per (KV head, sequence,
  // key, element) the sum of the chunks before the span, and that of its first chunk's small ones before the span.
  // Null: all queries at once.
  float *sums = nullptr, *chunk_sums = nullptr;
  std::int64_t sums_head = 0, sums_sequence = 0;  // elements
  int first = 0, q_len = 0;                       // the span's first query, and how many queries there are in all

  __host__ __device__ static std::int64_t rows_before(const Geometry& g, const RowPrefix& at) {
    return (at.q * g.group / 128 + at.sequences) * 8;
  }
  __host__ __device__ static int columns(const Geometry& g) { return key_tiles(g) * (kKeyTile / 16); }
  __host__ __device__ static int key_tiles(const Geometry& g) {
    return (num_compressed(g, g.k_len) + kKeyTile - 1) / kKeyTile;
  }
  static std::int64_t bytes(const Geometry& g) {
    return g.kv_heads * rows_before(g, end_prefix(g)) * columns(g) * kTile;
  }
  /// What a query row's tile and its first key's tile have in common for this lane.
  __device__ char* at(const Geometry& g, const DeviceSequence& seq, int kv_head, std::int64_t row, int key) const {
    const std::int64_t tile = kv_head * rows_before(g, end_prefix(g)) + rows_before(g, row_prefix(g, seq)) + row / 16;
    return tiles + (tile * columns(g) + key / 16) * kTile + threadIdx.x % 32 * 16;
  }
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
  DsBuffer stored;
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

/// What the selected branch of a sequence and KV head would take query by query and block by block
/// (sm90/selected_attention/loop_order.h).
struct alignas(8) LoopOrderCost {
  int query_major, block_major;
};

/// Which of the two orders a sequence and KV head takes. Without times all take the one that is asked for.
struct LoopOrder {
  LoopOrderCost* times = nullptr;  // (sequence, KV head)

  __device__ bool query_major(const Geometry& g, int sequence, int kv_head) const {
    return !times || !faster_by_block(times[sequence * g.kv_heads + kv_head]);
  }
  __device__ bool block_major(const Geometry& g, int sequence, int kv_head) const {
    return !times || faster_by_block(times[sequence * g.kv_heads + kv_head]);
  }

 private:
  __device__ static bool faster_by_block(const LoopOrderCost& t) { return t.block_major < t.query_major; }
};

struct InverseArgs {
  Geometry geometry;
  Strided indices;
  int topk;
  InverseIndex lists;
  LoopOrder loop_order{};  // lists of those that go block by block; the others' are empty
};

}  // namespace nsa::cuda
