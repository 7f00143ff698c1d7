// One step of decoding in host memory, as far as it is the same for every backend: capacity, appending the new
// tokens, compressing the blocks that they complete. Attending is the backend's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/strided.h"
#include "core/token_rows.h"
#include "nsa/decode.h"

namespace nsa {

/// Where a cache keeps the tokens of sequence b, in pages or in rings.
struct CachedRows {
  CachedRows() = default;
  CachedRows(const KVCacheView& cache, const NSAConfig& cfg, std::int64_t b);

  TokenRows k_slc, v_slc, k_c, v_c, k_swa, v_swa, k_cmp, v_cmp;
};

/// Rows of a table that must have pages for the tokens begin ... end - 1, of which those from `written` on are new.
struct PagesNeeded {
  const char* table_name;
  TensorView table;
  std::int64_t page_size, begin, written, end;

  std::int64_t first_page() const { return begin / page_size; }
  std::int64_t end_page() const { return (end + page_size - 1) / page_size; }
  bool writes(std::int64_t page) const { return written < end && (page + 1) * page_size > written; }
};
/// What a sequence of `before` tokens needs to get `after` tokens.
std::vector<PagesNeeded> pages_needed(const KVCacheView& cache, const NSAConfig& cfg, std::int64_t before,
                                      std::int64_t after);

/// The first token that the window of a query at position `length` holds, and the first whose block is not complete.
inline std::int64_t window_begin(const NSAConfig& cfg, std::int64_t length) {
  return std::max<std::int64_t>(0, length - cfg.window_size + 1);
}
inline std::int64_t open_block_begin(const NSAConfig& cfg, std::int64_t length) {
  return cfg.num_compressed(length) * cfg.kernel_stride;
}

/// A sequence that takes part in the step: its tokens after the append.
struct StepSequence : CachedRows {
  std::int64_t batch = 0;
  std::int64_t q_batch = 0, q_begin = 0;  // where its new tokens are: first index and row of q, k_cmp, o ...
  std::int64_t length_before = 0;         // L: query r is at position L + r
  std::int64_t num_new = 0;               // >= 1
  std::int64_t length = 0;                // L' = L + num_new
  std::int64_t window_begin = 0;          // the first token that the first query's window holds
};

/// A step's parameters with q, k_slc and k_swa rotated: copies where the call rotates them, else as they are given.
class RotatedStep {
 public:
  /// The copies are zeros until every token has been rotated.
  explicit RotatedStep(const DecodeParams& given);

  struct Token {
    std::int64_t batch, row;  // of q, k_slc and k_swa
    std::int64_t position;
  };
  const std::vector<Token>& tokens() const { return tokens_; }
  /// rotate_row(from, to) for each row of D channels of a token.
  template <class RotateRow>
  void rotate(const Token& token, const RotateRow& rotate_row) const {
    for (const auto& [from, copy] : copies_) {
      const TokenRows source = plain_rows(from, token.batch), target = plain_rows(copy.view, token.batch);
      for (std::int64_t head = 0; head < from.size(-2); ++head)
        rotate_row(source.at(token.row, head), target.at(token.row, head));
    }
  }

  DecodeParams params;

 private:
  std::vector<Token> tokens_;
  std::vector<std::pair<TensorView, ContiguousCopy>> copies_;
};

class CacheStep {
 public:
  using Compress = Status (*)(const CompressParams&, const Context&);

  /// Finds the sequences with new tokens and capacity for them. The others get o = 0 and indices = -1, as do rows past
  /// num_new; those without capacity set the overflow flag.
  explicit CacheStep(const DecodeParams& params);

  /// Writes the new tokens and the compressed tokens that they complete, rotated.
  Status append(Compress compress, const Context& context);

  const std::vector<StepSequence>& sequences() const { return sequences_; }

  /// Advances the lengths.
  void finish();

 private:
  void add_sequence(StepSequence sequence);
  Status compress_completed(const TensorView& fresh, TokenRows StepSequence::*raw, TokenRows StepSequence::*compressed,
                            const CompressionWeights& weights, bool rotate, Compress compress,
                            const Context& context) const;

  const DecodeParams& params_;
  std::vector<StepSequence> sequences_;
  std::vector<TokenBuffer> windows_;  // of chunks that are too long for the ring
};

}  // namespace nsa
