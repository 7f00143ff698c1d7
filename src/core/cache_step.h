// One step of decoding in host memory, as far as it is the same for every backend: who has room, appending the new
// tokens, folding the compression blocks they complete. Attending is the backend's.
#pragma once

#include <optional>
#include <vector>

#include "core/token_rows.h"
#include "nsa/decode.h"

namespace nsa {

/// A sequence that takes part in the step: its tokens after the append.
struct StepSequence {
  std::int64_t batch = 0;
  std::int64_t length_before = 0;  // L: query r stands at L + r
  std::int64_t num_new = 0;        // >= 1
  std::int64_t length = 0;         // L' = L + num_new
  TokenRows k_slc, v_slc;          // tokens 0 ... L' - 1
  TokenRows k_c, v_c;              // compressed tokens 0 ... N_c(L') - 1
  TokenRows k_swa, v_swa;          // tokens window_begin() ... L' - 1
  std::int64_t window_begin = 0;   // the first token that the first query's window holds
};

class CacheStep {
 public:
  using Compress = Status (*)(const CompressParams&, const Context&);

  /// Finds the sequences with new tokens and room for them. The others get o = 0 and indices = -1, as do rows past
  /// num_new; those without room set the overflow flag.
  explicit CacheStep(const DecodeParams& params);

  /// Writes the new tokens and the compressed tokens that they complete, rotated.
  Status append(Compress compress, const Context& context);

  const std::vector<StepSequence>& sequences() const { return sequences_; }

  /// Advances the lengths.
  void finish();

 private:
  bool has_room(std::int64_t batch, std::int64_t length) const;
  void add_sequence(std::int64_t batch, std::int64_t length_before, std::int64_t num_new);
  Status fold(const TensorView& fresh, const TensorView& ring, const CompressionWeights& weights,
              const TensorView& cache, bool rotate, Compress compress, const Context& context) const;

  const DecodeParams& params_;
  std::vector<StepSequence> sequences_;
  std::vector<TokenBuffer> windows_;  // of chunks that are too long for the ring
};

}  // namespace nsa
