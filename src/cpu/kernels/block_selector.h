// From the probabilities of the compressed keys to the selected blocks of one query (eq. 8 to 12).
#pragma once

#include <cstdint>

#include "cpu/kernels/attention.h"
#include "cpu/kernels/buffer.h"
#include "nsa/config.h"

namespace nsa::cpu::NSA_ISA {

/// Exploration noise of one query: tau = 0 is off.
struct Noise {
  double tau = 0;
  std::uint64_t seed = 0;
  std::int64_t kv_head = 0, sequence = 0;
};

/// Scratch of one thread.
class BlockSelector {
 public:
  /// Serves sequences of up to `length` tokens. Throws std::bad_alloc; select() does not.
  BlockSelector(const NSAConfig& cfg, std::int64_t length);

  /// Writes the blocks of the query at position t: topk numbers, ascending, padded with -1.
  void select(const Probabilities& p, std::int64_t t, const Noise& noise, std::int32_t* indices);

  /// True if there are more blocks than the query at position t may select, so that probabilities decide.
  bool chooses(std::int64_t t) const { return t / cfg_.block_size + 1 > cfg_.topk; }

 private:
  void importance(const Probabilities& p, std::int64_t first, std::int64_t last);
  void rank(std::int64_t first, std::int64_t last, std::int64_t t, const Noise& noise, int heads);
  std::int32_t* top_k(std::int64_t first, std::int64_t last, std::int64_t need, std::int32_t* indices) const;

  NSAConfig cfg_;
  std::int64_t per_key_;        // strides of a compression block, at most as many as there are probabilities
  std::int64_t margin_;         // zeros before the first compressed key
  Buffer<float> sums_;          // [margin + compressed keys]: probabilities summed over the heads
  Buffer<float> strides_;       // [strides of the unforced blocks]: summed over the compression blocks around each
  Buffer<float> importance_;    // [unforced blocks], with capacity for the values of strides_
  Buffer<std::int32_t> ranks_;  // [unforced blocks]: integers that order like the importances; NaN lowest
};

}  // namespace nsa::cpu::NSA_ISA
