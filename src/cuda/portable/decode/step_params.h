// Parameter structs of the kernels of a step with a cache.
#pragma once

#include "cuda/common/cache.cuh"
#include "cuda/common/params.h"

namespace nsa::cuda::portable {

// Tokens: CachedTokens or Float8Tokens.

template <class Tokens>
struct StepRangeArgs : RangeArgsOf<StepGeometry, Tokens> {
  Splits splits;
};

/// Both ranges of a decode step, in splits. A thread block has kStepRows rows (query, head) of a KV head.
inline constexpr int kStepRows = 16;
template <class Tokens>
struct StepRangesArgs {
  StepRangeArgs<Tokens> compressed, window;
  int row_tiles;            // of kStepRows for a KV head
  float* scores;            // raw ones of the compressed keys, (B, kv_heads, m * G, scores_row); null: not wanted
  std::int64_t scores_row;  // floats
};
/// The most rows for a KV head that keep their scores for block selection: those of more would take too much
/// memory.
inline constexpr int kScoredRows = 32;

template <class Tokens>
struct StepSelectedArgs : SelectedArgsOf<StepGeometry, Tokens> {
  Splits splits;
};

/// lse is read where `splits`, those of the compressed branch, are none. With splits, scratch holds the sums of every
/// (sequence, KV head, query), then the importances.
template <class Tokens>
struct StepSelectArgs : SelectArgsOf<StepGeometry, Tokens> {
  Splits splits;
  const float*
      scores;  // those that the compressed branch has stored (StepRangesArgs), rows of scratch_keys; null: none
};

/// One kind of tokens of a step. Strides in bytes.
struct TokenMove {
  Strided fresh;     // (B, m, heads, D)
  Slots slots;       // where tokens are appended, or were
  Strided gathered;  // given: there go instead the tokens of the blocks that the step completes, (B, tokens, heads, D)
  int vectors;       // of 16 bytes in a row
};

/// New tokens in e4m3. Strides in elements.
struct QuantiseArgs {
  Geometry geometry;
  int kinds;
  struct {
    Strided from, to;  // (B, m, heads, D)
    int dim;
    HeadScales scales;
  } tokens[4];
};

struct MoveArgs {
  StepGeometry geometry;
  TokenMove moves[4];
  int* lengths;  // given: they are advanced
};

/// Compressed tokens that the step completes, to their pages.
struct StoreArgs {
  StepGeometry geometry;
  Strided keys, values;  // (B, blocks, heads, D)
  Slots key_slots, value_slots;
  int key_dim, value_dim;
  Rotation rotation;
  bool float8;  // pages in e4m3
  HeadScales key_scales, value_scales;
};

struct StepCombineArgs {
  StepGeometry geometry;
  CombineArgs rows;
  Splits splits[kBranches];  // none: the branch's rows are there
  HeadScales value_scales;
  int window;
  Strided indices;  // int32, null: not wanted; rows without a query get -1
  int topk;
};

/// A fork, decided on the device: the lengths lie there.
struct ForkArgs {
  int kv_heads;
  int parent, child;
  int length, blocks;  // tokens and compressed tokens that the child begins with
  int* lengths;
  int* overflow;
  bool advance;                               // the child's length is set
  bool rings;                                 // hold no older tokens than kRollback before the parent's length
  PageTable tokens, compressed, window, raw;  // null pages: not in pages of their own
  int window_begin, raw_begin;                // the first tokens that the child needs of them
  int* parent_length;                         // -1: refused
  int* numbers;                               // (sequences): their own, which are those of their rings
  int sequences;
};

/// One kind of tokens of a cache. Strides in bytes.
struct ForkCopy {
  Slots slots;
  int begin, tokens;  // of the child: begin ... tokens - 1
  int vectors;        // of 16 bytes in a row
};

struct ForkCopyArgs {
  ForkArgs fork;
  ForkCopy copies[8];
};

}  // namespace nsa::cuda::portable
