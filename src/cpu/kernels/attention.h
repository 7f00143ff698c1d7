// Attention of a few query rows over a list of key segments: the routine behind every branch and decoding.
//
// A thread owns one Attention and uses it query by query (or a few neighbouring queries at a time):
//   begin(...)      how many queries of how many heads, and what each sees
//   query(row)      put the rows of q there (pack_row), row = query * heads + head
//   segments()      list the keys
//   compute_scores()         S = q K^T with what is not visible at -inf, and the row maxima
//   softmax(scale)  probabilities, their sums and the log-sum-exp
//   compute_outputs()         O = P V
// A row's result depends on its own q and visible keys only: never on the other rows or on threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/kernels/buffer.h"
#include "cpu/kernels/microkernel.h"
#include "cpu/kernels/segments.h"
#include "cpu/kernels/simd.h"

namespace nsa::cpu::NSA_ISA {

/// Probabilities of one query's heads: that of segment column i under head h is data[h * stride + i] * factor[h].
struct Probabilities {
  const float* data;
  std::ptrdiff_t stride;
  const float* factor;
  int heads;
  std::int64_t columns;
};

template <class Slots>
class Attention {
 public:
  /// Room for `rows` (queries * heads) over `tokens` listed keys (segment ends included). Throws std::bad_alloc;
  /// nothing below does. value_dim = 0: scores only.
  Attention(std::int64_t rows, std::int64_t tokens, int key_dim, int value_dim);

  /// From query `first` on; row 0 of the results is its first head. Clears the list of segments. ranges: one per query,
  /// copied.
  void begin(int first, int queries, int heads, const Range* ranges);
  Slot* query(int row) { return q_.data() + row * key_steps_; }
  std::vector<Segment>& segments() { return segments_; }

  void compute_scores();
  /// keep: leave the probabilities where probabilities() finds them.
  void softmax(float scale, bool keep = false);
  /// Probabilities from a known log-sum-exp of each row instead of softmax(): exp(scale * s - lse(row)).
  template <class Lse>
  void exponentials(float scale, const Lse& lse) {
    for (int row = 0; row < rows_; ++row) exponentials_of_row(row, scale, lse(row));
  }
  void compute_outputs();
  /// All of it, for callers that need no probabilities.
  void attend(float scale) {
    compute_scores();
    softmax(scale);
    compute_outputs();
  }

  /// After compute_outputs(): value_dim values, padded up to the next multiple of kWidth.
  const float* output(int row) const { return o_.data() + row * value_columns_; }
  /// After softmax(): natural logarithm of the sum of exp(scale * score); -inf without visible keys.
  float lse(int row) const { return lse_[static_cast<std::size_t>(row)]; }
  /// After softmax(scale, true) or exponentials().
  Probabilities probabilities(int query) const {
    return {.data = scores_.data() + query * heads_ * stride_,
            .stride = stride_,
            .factor = factor_.data() + query * heads_,
            .heads = heads_,
            .columns = columns_};
  }

 private:
  bool all_see(const Segment& segment) const;
  std::ptrdiff_t value_slots(const Segment& segment) const { return segment.count / Slots::kElements * value_columns_; }
  void exponentials_of_row(int row, float scale, float lse);
  void add_values(std::span<const Segment> segments, const Slot* p, int first_row, int rows, Prefetch prefetch);
  const Slot* visible_values(const Segment& segment, const Range& range);

  std::ptrdiff_t key_steps_, value_columns_, stride_, p_stride_;
  Buffer<Slot> q_, p_, clean_;  // [row][key_steps], [row][p_stride] probabilities, one block of values
  Buffer<float> scores_, max_;  // [row][stride], [row][kWidth]
  Buffer<float> factor_, lse_;  // [row]: 1 / sum
  Buffer<float> o_;             // [row][value_columns]
  Buffer<Range> ranges_;        // [row]
  std::vector<Segment> segments_;
  int first_row_ = 0, heads_ = 0, rows_ = 0;  // first_row_: in q_
  std::int64_t columns_ = 0;                  // of the listed segments
};

}  // namespace nsa::cpu::NSA_ISA
