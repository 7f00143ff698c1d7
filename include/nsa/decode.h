// Decoding with a key/value cache: one step of m = 1 ... 16 new queries per sequence, and chunked prefill into it.
#pragma once

#include <cstdint>
#include <optional>

#include "nsa/operations.h"

namespace nsa {

/// Most tokens of a rollback: the rings keep this many more than attention needs.
inline constexpr int kRollback = 32;
/// The most new tokens of one decode step; more is prefill.
inline constexpr int kMaxDecodeTokens = 16;

/// The memory of a cache of B sequences. Lengths and tables are on the tensors' device, so that a step needs no host
/// synchronisation. Selection keys/values and compressed tokens are in pages; a contiguous cache has one page per
/// sequence. Window and not yet compressed tokens are in rings, token u in slot u mod ring size. In a serving engine's
/// memory they are in pages of their own. A page number is only read if the step needs a token of that page.
///
/// What attention reads (k_slc, k_c, k_swa_ring and their values) is in q's type, or all of it in kFloat8E4M3 with a
/// scale for the keys and one for the values of each KV head: stored = x / scale in float32, rounded to nearest even
/// and saturated to +-448, and read as stored * scale. A step attends to its own new tokens as stored. The raw tokens
/// of the compression (k_cmp_ring, v_cmp_ring) always are in q's type.
struct KVCacheView {
  TensorView k_slc, v_slc;  // (num_pages, page_size, Hkv, D), page_size a positive multiple of 16
  TensorView block_table;   // int32 (B, max_pages): page p of a sequence; -1: none. Only full pages can be shared
  TensorView k_c, v_c;      // (num_pages_c, page_size_c, Hkv, D): compressed tokens, keys rotated
  // int32 (B, max_pages_c). Without it compressed tokens are with the tokens, in pages of k_c and v_c by block_table,
  // (num_pages, page_size / d, Hkv, D): token i where its block's last token is, in slot i + l / d - 1 of the
  // sequence, so that a full page of tokens can be shared with its compressed tokens.
  TensorView block_table_c;
  TensorView k_swa_ring, v_swa_ring;  // (B, window_size + kRollback, Hkv, D)
  TensorView k_cmp_ring, v_cmp_ring;  // (B, kernel_size + kRollback, Hkv, D): raw tokens, keys not rotated
  // int32 (B, max_pages), optional: the rings are pages, (num_pages, page_size, Hkv, D) of any number and size. Pages
  // are needed from the first query's window on, or from the first token whose block is not complete. A page may
  // occur several times in a row in block_table_cmp: it keeps the last page_size raw tokens of these columns.
  TensorView block_table_swa, block_table_cmp;
  // A step that does not advance can do without some memory. Neither k_swa_ring nor v_swa_ring: the window reads k_slc
  // and v_slc, and the step's k_swa and v_swa are its k_slc and v_slc. No v_cmp_ring: raw values are v_slc, the same.
  bool shares_window() const { return !k_swa_ring.defined() && !v_swa_ring.defined(); }
  bool shares_raw_values() const { return !v_cmp_ring.defined(); }
  // float32 (Hkv), any stride, positive and finite: of a cache in kFloat8E4M3, else not given. `fork` copies
  // what is stored and does not read them.
  TensorView k_scale, v_scale;
  TensorView cache_seqlens;  // int32 (B): lengths before the step; the step adds num_new
  TensorView overflow;       // int32 (1): set to 1 by a step that exceeds a sequence's capacity
  /// False: cache_seqlens belongs to the caller. It holds the lengths with the new tokens, and no call writes to it.
  bool advance = true;
};

/// Appends the new tokens, compresses the blocks that they complete, attends, then advances cache_seqlens.
/// Query r of a sequence is at position cache_seqlens + r. A sequence without capacity writes nothing, keeps its
/// length, gets o = 0 and sets `overflow`. On a device that is also what happens where lengths or tables lead out of
/// bounds, or the rotation's angles do not reach.
struct DecodeParams {
  TensorView q;             // (B, m, H, Dk), rotated
  TensorView k_cmp, v_cmp;  // (B, m, Hkv, D): the new tokens' raw keys and values, not rotated
  TensorView k_slc, v_slc;  // (B, m, Hkv, D), rotated
  TensorView k_swa, v_swa;  // (B, m, Hkv, D), rotated
  TensorView gates;         // (B, m, H, 3)
  KVCacheView cache;
  CompressionWeights weights_k, weights_v;
  NSAConfig cfg;
  std::optional<double> softmax_scale;
  // float32 (max_positions, Dk / 2), optional: rotates compressed key i by position i * d.
  TensorView rope_cos, rope_sin;
  /// q, k_slc and k_swa are not rotated: the call rotates copies of them by the rows of rope_cos and rope_sin at their
  /// tokens' positions, which then bound a sequence's length on a device, too.
  bool rotate = false;
  TensorView num_new;  // int32 (B), 0 ... m, optional: default m; 0 is an idle slot, o = 0
  // int32 (B + 1), optional, in place of num_new: the new tokens are packed. All that is (B, m, ...) here is (T, ...)
  // then, sequence b in rows query_start_loc[b] ... query_start_loc[b + 1] - 1; o = 0 in rows behind the last.
  TensorView query_start_loc;
  std::int64_t max_query_len = 0;  // packed: at least the most new tokens of a sequence, m; 0: T
  TensorView block_indices;        // int32 (B, m, Hkv, topk), optional: attend to these blocks
  TensorView o;                    // (B, m, H, Dv)
  TensorView indices;              // int32 (B, m, Hkv, topk), optional
};
/// m = 1 ... kMaxDecodeTokens.
Status decode(const DecodeParams& params, const Context& context = {});
/// The same for any m >= 1: a chunk of the prompt against what the cache holds.
Status prefill(const DecodeParams& params, const Context& context = {});

/// Copies what a fork cannot share. The child continues the parent at `length` <= the parent's length; both views are
/// of one cache (rows `parent` and `child` of its tables). Full pages before `length` are shared by putting the same
/// page numbers into the child's tables (the caller does that); this call copies the rings, the partly filled last
/// pages and the compressed tokens that are not wholly inside the shared prefix, and sets the child's length. On a
/// device, whose lengths and tables the host does not read, a fork that these do not allow changes nothing and sets
/// `overflow`.
struct ForkParams {
  KVCacheView cache;
  NSAConfig cfg;
  std::int64_t parent = 0, child = 0;
  std::int64_t length = 0;
};
Status fork(const ForkParams& params, const Context& context = {});

}  // namespace nsa
