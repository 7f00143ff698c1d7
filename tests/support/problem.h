// A problem: a point of the grid of shapes and options, and all tensors of one NSA call made for it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/layout.h"
#include "nsa/operations.h"
#include "support/tensor.h"

namespace nsa::test {

struct Case {
  std::string name = {};
  DType dtype = DType::kFloat32;
  bool packed = false;
  std::vector<std::int64_t> q_lens = {96, 96};  // per sequence; all equal when batched
  std::vector<std::int64_t> k_lens = {};        // empty: q_lens
  std::int64_t slack = 0;                       // rows of packed tensors past the last sequence, always poisoned
  std::int64_t kv_heads = 2, group = 2;
  std::int64_t dk = 64, dv = 64;
  NSAConfig cfg = {};
  CompressionKind kind = CompressionKind::kMean;
  bool shared_weights = false;   // by all KV heads
  bool optional_weights = true;  // pe and biases given
  std::int64_t hidden = 0;       // E of the MLP; 0: 2 * D
  bool rope = false;             // compressed keys are rotated
  std::optional<double> softmax_scale = {};
  double noise = 0;
  std::uint64_t seed = 0;
  Layout layout = Layout::kContiguous;  // of inputs and outputs

  std::int64_t heads() const { return kv_heads * group; }
  std::int64_t total_q() const;
  std::int64_t total_k() const;
  const std::vector<std::int64_t>& key_lengths() const { return k_lens.empty() ? q_lens : k_lens; }
};

std::ostream& operator<<(std::ostream& out, const Case& c);

/// The sequences of a case, with or without the tensors.
std::vector<Sequence> sequences_of(const Case& c);

/// A small configuration in which all branches and edges matter at lengths of about a hundred tokens.
NSAConfig small_config();

/// The inputs of a case, random, k_c and v_c too; lse and indices are the oracle's. Every row that no sequence owns
/// holds NaN. Parameters come with their outputs undefined.
struct Problem {
  explicit Problem(const Case& c, unsigned seed = 1);

  /// The same inputs, of sequence b alone, batched.
  Problem alone(std::size_t b) const;
  /// Sets k_c and v_c to what the CPU backend compresses k_cmp and v_cmp to; lse and indices stay.
  void compress();

  CompressParams compress_keys() const;
  CompressParams compress_values() const;
  CompressedAttentionParams compressed() const;
  SelectBlocksParams selection() const;
  SelectedAttentionParams selected() const;
  SlidingWindowAttentionParams window() const;
  CombineParams combination() const;
  NsaAttentionParams whole() const;
  /// native_sparse_attention: k_cmp and v_cmp instead of k_c and v_c.
  NativeSparseAttentionParams layer() const;

  /// A tensor for rows of queries, of raw keys or of compressed keys: batched or packed, poisoned.
  Tensor query_rows(std::int64_t heads, std::int64_t width, DType dtype) const;
  Tensor key_rows(std::int64_t width, DType dtype) const;
  Tensor compressed_rows(std::int64_t width, DType dtype) const;
  Tensor lse_rows(DType dtype) const;
  /// Random values in the rows that sequences own.
  Tensor random_query_rows(std::int64_t heads, std::int64_t width, unsigned seed) const;
  Tensor random_key_rows(std::int64_t width, unsigned seed) const;
  Tensor random_compressed_rows(std::int64_t width, unsigned seed) const;

  Case c;
  unsigned seed;
  Tensor cu_q, cu_k;  // packed only
  Packed packed;
  Tensor q, k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa, gates;
  Tensor o_cmp, o_slc, o_swa;  // random, inputs of combine
  Tensor d_o, d_k_c, d_v_c;    // incoming gradients: of the attention's o, and of what compress returns
  struct Weights {
    Tensor pe, w1, b1, w2, b2;
    CompressionWeights view(CompressionKind kind) const;
  } weights_k, weights_v;
  Tensor rope_cos, rope_sin;  // undefined without rope
  Tensor k_c, v_c;
  Tensor lse;      // float32, of compressed attention
  Tensor indices;  // of select_blocks

 private:
  Weights make_weights(std::int64_t width, unsigned seed) const;
};

}  // namespace nsa::test
