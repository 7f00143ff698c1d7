// The six operations of Native Sparse Attention, forward and backward; nsa_attention, which is all of them but
// compress, and native_sparse_attention, which is all of them.
//
// Shapes. Batched: (B, S, heads, D). Packed (cu_seqlens given): (total, heads, D), the sequences one after the other.
// H query heads share Hkv key/value heads, G = H / Hkv; query head h belongs to KV head h / G. Any strides with a
// contiguous last dimension; inputs may have stride 0. q, k, v and gates of one call share a dtype; lse is float32.
// Query i of Sq has position t = i + Sk - Sq; Sq > Sk is an error.
//
// A row that sees no key gets o = 0, lse = -inf and zero gradients. Packed rows past cu_seqlens[-1] are never read;
// their outputs are o = 0, lse = -inf, indices = -1, gradients = 0.
//
// Every call is reentrant and bitwise repeatable, whatever the number of threads. Outputs are overwritten, gradients
// too (not accumulated). Outputs may not overlap inputs or each other. An output view that is not
// defined is not computed where the comment says "optional".
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "nsa/backend.h"
#include "nsa/config.h"
#include "nsa/status.h"
#include "nsa/tensor.h"

namespace nsa {

/// Bytes of device memory that the call needs in Context::workspace; 0 on the CPU, which
/// allocates. It depends on shapes, types and options only, not on what the tensors hold. `Params` is the parameter
/// struct of any operation of this header or of decode.h; the views must be such that the call would be accepted.
template <class Params>
Status workspace_size(const Params& params, std::size_t& bytes, const Context& context = {});

/// Offsets of the sequences of a packed call. All views undefined: the call is batched.
struct Packed {
  TensorView cu_seqlens_q;        // int32 (B + 1): 0 = first, not decreasing, last <= total
  TensorView cu_seqlens_k;        // int32 (B + 1), of raw key tokens; undefined: cu_seqlens_q
  std::int64_t max_seqlen_q = 0;  // upper bounds of the lengths; 0: the totals. The CPU reads the lengths themselves.
  std::int64_t max_seqlen_k = 0;

  bool packed() const { return cu_seqlens_q.defined(); }
};

/// Weights of the compression function of keys or of values, in the dtype of what is compressed. P = Hkv, or 1: shared.
struct CompressionWeights {
  CompressionKind kind = CompressionKind::kMlp;
  TensorView pe;  // (P, l, D), optional: intra-block position encoding, added to the tokens
  TensorView w1;  // linear (P, l*D, D), mlp (P, l*D, E): row r*D + c weighs channel c of the block's token r
  TensorView b1;  // linear (P, D), mlp (P, E), optional
  TensorView w2;  // mlp (P, E, D)
  TensorView b2;  // mlp (P, D), optional
};

// ---------------------------------------------------------------------------------------------------- compress (eq. 7)

/// out[i] = phi(k[i*d : i*d + l] + pe), per sequence and KV head.
struct CompressParams {
  TensorView k;  // (B, S, Hkv, D) or (total, Hkv, D): keys or values
  CompressionWeights weights;
  NSAConfig cfg;
  TensorView cu_seqlens;  // int32 (B + 1), undefined: batched
  TensorView out;         // (B, N_c(S), Hkv, D) or (floor(total / d), Hkv, D): rows past the last block are zero
};
Status compress(const CompressParams& params, const Context& context = {});

struct CompressBackwardParams {
  CompressParams forward;        // as given to compress; `out` is not read and may be undefined
  TensorView d_out;              // like out
  TensorView d_k;                // like k, optional
  CompressionWeights d_weights;  // like weights (kind is not read); each defined view is computed
};
Status compress_backward(const CompressBackwardParams& params, const Context& context = {});

/// Offsets of the compressed tokens of each sequence: out[b + 1] = out[b] + N_c(length of b). int32 (B + 1) both, CPU.
Status compressed_cu_seqlens(const TensorView& cu_seqlens, const NSAConfig& cfg, const TensorView& out);

// ------------------------------------------------------------------------------------------------ compressed_attention

/// Query t attends to block i exactly if i*d + l - 1 <= t.
struct CompressedAttentionParams {
  TensorView q;    // (B, Sq, H, Dk) or (total_q, H, Dk)
  TensorView k_c;  // (B, N_c, Hkv, Dk) or (floor(total_k / d), Hkv, Dk), as compress lays them out
  TensorView v_c;  // (B, N_c, Hkv, Dv) or (floor(total_k / d), Hkv, Dv)
  NSAConfig cfg;
  std::optional<double> softmax_scale;   // default 1 / sqrt(Dk)
  std::optional<std::int64_t> seqlen_k;  // raw tokens behind k_c, batched only; default Sq
  Packed packed;
  TensorView o;    // (B, Sq, H, Dv) or (total_q, H, Dv)
  TensorView lse;  // float32 (B, H, Sq) or (H, total_q), natural logarithm, scale included
};
Status compressed_attention(const CompressedAttentionParams& params, const Context& context = {});

struct CompressedAttentionBackwardParams {
  CompressedAttentionParams forward;  // with o and lse as the forward wrote them
  TensorView d_o;                     // like o, any strides, 0 included
  TensorView d_q, d_k_c, d_v_c;       // like q, k_c, v_c, each optional
};
Status compressed_attention_backward(const CompressedAttentionBackwardParams& params, const Context& context = {});

// ---------------------------------------------------------------------------------------- select_blocks (eq. 8 to 12)

/// Importance of block j = sum over the group's heads and the compression blocks i of p_cmp[i] * overlap(i, j) / d.
/// The forced blocks and those of highest importance, a tie to the lower index; no gradient.
struct SelectBlocksParams {
  TensorView q;    // as in compressed_attention
  TensorView k_c;  // as in compressed_attention
  TensorView lse;  // of compressed_attention
  NSAConfig cfg;
  std::optional<double> softmax_scale;
  std::optional<std::int64_t> seqlen_k;
  double noise = 0;        // tau of the Gumbel noise on the log-importances, >= 0; 0: off
  std::uint64_t seed = 0;  // key of Philox4x32-10
  Packed packed;
  TensorView indices;  // int32 (B, Sq, Hkv, topk) or (total_q, Hkv, topk), ascending, padded with -1
};
Status select_blocks(const SelectBlocksParams& params, const Context& context = {});

// -------------------------------------------------------------------------------------------------- selected_attention

/// Query t attends to all tokens u <= t of its blocks. The indices of a row are a set: any order, duplicates count
/// once, -1 and blocks out of range or in the future are ignored and never read.
struct SelectedAttentionParams {
  TensorView q;         // (B, Sq, H, Dk) or (total_q, H, Dk)
  TensorView k;         // (B, Sk, Hkv, Dk) or (total_k, Hkv, Dk)
  TensorView v;         // (B, Sk, Hkv, Dv) or (total_k, Hkv, Dv)
  TensorView indices;   // int32 (B, Sq, Hkv, n) or (total_q, Hkv, n), any n >= 0
  int block_size = 64;  // a positive multiple of 16
  std::optional<double> softmax_scale;
  Packed packed;
  TensorView o;    // (B, Sq, H, Dv) or (total_q, H, Dv)
  TensorView lse;  // float32 (B, H, Sq) or (H, total_q)
};
Status selected_attention(const SelectedAttentionParams& params, const Context& context = {});

struct SelectedAttentionBackwardParams {
  SelectedAttentionParams forward;  // with o and lse as the forward wrote them
  TensorView d_o;                   // like o
  TensorView d_q, d_k, d_v;         // like q, k, v, each optional
};
Status selected_attention_backward(const SelectedAttentionBackwardParams& params, const Context& context = {});

// -------------------------------------------------------------------------------------------- sliding_window_attention

/// Query t attends to tokens max(0, t - window_size + 1) ... t.
struct SlidingWindowAttentionParams {
  TensorView q;  // (B, Sq, H, Dk) or (total_q, H, Dk)
  TensorView k;  // (B, Sk, Hkv, Dk) or (total_k, Hkv, Dk)
  TensorView v;  // (B, Sk, Hkv, Dv) or (total_k, Hkv, Dv)
  std::int64_t window_size = 512;
  std::optional<double> softmax_scale;
  Packed packed;
  TensorView o;    // (B, Sq, H, Dv) or (total_q, H, Dv)
  TensorView lse;  // float32 (B, H, Sq) or (H, total_q)
};
Status sliding_window_attention(const SlidingWindowAttentionParams& params, const Context& context = {});

struct SlidingWindowAttentionBackwardParams {
  SlidingWindowAttentionParams forward;  // with o and lse as the forward wrote them
  TensorView d_o;                        // like o
  TensorView d_q, d_k, d_v;              // like q, k, v, each optional
};
Status sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams& params,
                                         const Context& context = {});

// ----------------------------------------------------------------------------------------------------- combine (eq. 5)

/// o = g_cmp * o_cmp + g_slc * o_slc + g_swa * o_swa, gates already passed through the sigmoid.
struct CombineParams {
  TensorView o_cmp, o_slc, o_swa;  // (B, S, H, Dv) or (total, H, Dv)
  TensorView gates;                // (B, S, H, 3) or (total, H, 3), in the order cmp, slc, swa
  TensorView o;                    // like o_cmp
};
Status combine(const CombineParams& params, const Context& context = {});

struct CombineBackwardParams {
  CombineParams forward;                 // `o` is not read and may be undefined
  TensorView d_o;                        // like o
  TensorView d_o_cmp, d_o_slc, d_o_swa;  // like o, each optional
  TensorView d_gates;                    // like gates, optional
};
Status combine_backward(const CombineBackwardParams& params, const Context& context = {});

// ------------------------------------------------------------------------------------------------------- nsa_attention

/// compressed_attention, select_blocks, selected_attention, sliding_window_attention and combine in one call, fused
/// where it pays. The branches meet in float32, so the result is rounded once.
struct NsaAttentionParams {
  TensorView q;             // (B, Sq, H, Dk) or (total_q, H, Dk)
  TensorView k_c, v_c;      // compressed, as in compressed_attention
  TensorView k_slc, v_slc;  // (B, Sk, Hkv, D) or (total_k, Hkv, D)
  TensorView k_swa, v_swa;  // likewise
  TensorView gates;         // (B, Sq, H, 3) or (total_q, H, 3)
  NSAConfig cfg;
  std::optional<double> softmax_scale;
  double noise = 0;
  std::uint64_t seed = 0;
  Packed packed;
  TensorView block_indices;  // int32, like indices, optional: attend to these; the selected ones still go to `indices`
  TensorView o;              // (B, Sq, H, Dv) or (total_q, H, Dv)
  // What the backward needs, indices without block_indices only; each optional.
  TensorView indices;                    // int32 (B, Sq, Hkv, topk) or (total_q, Hkv, topk)
  TensorView o_cmp, o_slc, o_swa;        // like o
  TensorView lse_cmp, lse_slc, lse_swa;  // float32 (B, H, Sq) or (H, total_q)
};
Status nsa_attention(const NsaAttentionParams& params, const Context& context = {});

struct NsaAttentionBackwardParams {
  NsaAttentionParams forward;  // with every optional output as the forward wrote it; `o` is not read
  TensorView d_o;              // like o
  TensorView d_q;              // like q: the sum of the three branches, each gradient optional
  TensorView d_k_c, d_v_c, d_k_slc, d_v_slc, d_k_swa, d_v_swa;
  TensorView d_gates;  // like gates
};
Status nsa_attention_backward(const NsaAttentionBackwardParams& params, const Context& context = {});

// --------------------------------------------------------------------------------------------- native_sparse_attention

/// A layer's attention in one call: compress k_cmp and v_cmp, rotate the compressed keys, nsa_attention.
struct NativeSparseAttentionParams {
  TensorView k_cmp, v_cmp;  // (B, Sk, Hkv, D) or (total_k, Hkv, D); keys not rotated
  CompressionWeights weights_k, weights_v;
  // Cosines and sines, float32 (max_positions, Dk / 2): rotates compressed key i by position i*d, in pairs
  // (x[j], x[j + Dk/2]).
  TensorView rope_cos, rope_sin;  // undefined: no rotation
  // The other arguments. Here k_c (rotated) and v_c are outputs. Pass both or neither. If passed, the backward reuses
  // them.
  NsaAttentionParams attention;
};
Status native_sparse_attention(const NativeSparseAttentionParams& params, const Context& context = {});

struct NativeSparseAttentionBackwardParams {
  // With what the forward wrote, as in NsaAttentionBackwardParams. k_c and v_c may be undefined: they are computed
  // again.
  NativeSparseAttentionParams forward;
  TensorView d_o;  // like o
  TensorView d_q;  // like q, each gradient optional
  TensorView d_k_cmp, d_v_cmp, d_k_slc, d_v_slc, d_k_swa, d_v_swa;
  TensorView d_gates;                           // like gates
  CompressionWeights d_weights_k, d_weights_v;  // like weights_k and weights_v (kind is not read)
};
Status native_sparse_attention_backward(const NativeSparseAttentionBackwardParams& params, const Context& context = {});

}  // namespace nsa
