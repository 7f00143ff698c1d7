#include "cpu/kernels/attend.h"

#include <algorithm>
#include <cmath>

#include "cpu/kernels/tile.h"

namespace nsa::cpu::NSA_ISA {
namespace {

constexpr float kLog2e = 1.44269504f;

const char* bytes(const Slot* p) { return reinterpret_cast<const char*>(p); }

}  // namespace

template <class Slots>
Attention<Slots>::Attention(std::int64_t rows, std::int64_t tokens, int key_dim, int value_dim)
    : key_steps_(key_dim / Slots::kElements),
      value_columns_(round_up(value_dim, kWidth)),
      // not a multiple of 4 KB, so that the rows of a tile do not fall onto each other in the cache
      stride_(round_up(tokens, kBlockTokens) + 16),
      p_stride_(Slots::kElements == 1 ? stride_ : stride_ / Slots::kElements + 16),
      q_(static_cast<std::size_t>(rows * key_steps_)),
      p_(static_cast<std::size_t>(Slots::kElements == 1 ? 0 : rows * p_stride_)),
      clean_(static_cast<std::size_t>(kBlockTokens / Slots::kElements * value_columns_)),
      scores_(static_cast<std::size_t>(rows * stride_)),
      max_(static_cast<std::size_t>(rows * kWidth)),
      factor_(static_cast<std::size_t>(rows)),
      lse_(static_cast<std::size_t>(rows)),
      o_(static_cast<std::size_t>(rows * value_columns_)),
      ranges_(static_cast<std::size_t>(rows)) {
  segments_.reserve(static_cast<std::size_t>(stride_ / kSegmentTokens));
}

template <class Slots>
void Attention<Slots>::begin(int queries, int heads, const Range* ranges) {
  queries_ = queries;
  heads_ = heads;
  rows_ = queries * heads;
  for (int row = 0; row < rows_; ++row) ranges_[static_cast<std::size_t>(row)] = ranges[row / heads];
  segments_.clear();
}

template <class Slots>
bool Attention<Slots>::all_see(const Segment& segment) const {
  for (int row = 0; row < rows_; row += heads_)
    if (!ranges_[static_cast<std::size_t>(row)].contains(segment)) return false;
  return true;
}

template <class Slots>
void Attention<Slots>::score() {
  const OperandA q{q_.data(), key_steps_, 1};
  std::fill_n(max_.data(), rows_ * kWidth, -kInf);
  columns_ = 0;
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    const OperandB keys{segment.keys, kBlockTokens};
    const Slot* next = i + 1 < segments_.size() ? segments_[i + 1].keys : segments_[0].values;
    float* scores = scores_.data() + columns_;
    const auto zero = [](int, int) { return Vec{}; };
    const auto keep = [&](int row, int column, Vec x) {
      float* m = max_.data() + row * kWidth;
      store(m, max(load(m), x));
      store(scores + row * stride_ + column, x);
    };
    const auto keep_visible = [&](int row, int column, Vec x) {
      const Range& range = ranges_[static_cast<std::size_t>(row)];
      const std::int64_t first = segment.position + column;
      keep(row, column, select(lanes(range.begin - first, range.end - first), x, splat(-kInf)));
    };
    const int steps = static_cast<int>(key_steps_);
    if (all_see(segment)) {
      tiles<Slots>(q, rows_, keys, segment.count, steps, zero, keep, bytes(next));
    } else {
      tiles<Slots>(q, rows_, keys, segment.count, steps, zero, keep_visible, bytes(next));
    }
    columns_ += segment.count;
  }
}

template <class Slots>
void Attention<Slots>::softmax(float scale, bool keep) {
  const Vec c = splat(scale * kLog2e);
  for (int row = 0; row < rows_; ++row) {
    const Range& range = ranges_[static_cast<std::size_t>(row)];
    // Nothing visible is a matter of positions; a maximum of -inf may also come from infinite inputs.
    const bool none = std::none_of(segments_.begin(), segments_.end(), [&](const Segment& s) {
      return s.position < range.end && range.begin < s.position + s.count && range.begin < range.end;
    });
    const float m = none ? 0 : reduce_max(load(max_.data() + row * kWidth));
    const Vec offset = splat(-m * scale * kLog2e);
    float* s = scores_.data() + row * stride_;
    Vec sum{};
    for (std::int64_t i = 0; i < columns_; i += kWidth) {
      const Vec x = exp2(fma(load(s + i), c, offset));
      sum += x;
      if constexpr (Slots::kElements == 1) {
        store(s + i, x);
      } else {
        if (keep) store(s + i, x);
        store_floats(reinterpret_cast<bf16*>(p_.data() + row * p_stride_) + i, x);
      }
    }
    const float z = reduce_add(sum);
    factor_[static_cast<std::size_t>(row)] = none ? 0 : 1 / z;
    lse_[static_cast<std::size_t>(row)] = none ? -kInf : m * scale + std::log(z);
  }
}

template <class Slots>
void Attention<Slots>::exponentials_of_row(int row, float scale, float lse) {
  const Vec c = splat(scale * kLog2e), offset = splat(lse == -kInf ? 0 : -lse * kLog2e);
  float* s = scores_.data() + row * stride_;
  for (std::int64_t i = 0; i < columns_; i += kWidth) store(s + i, exp2(fma(load(s + i), c, offset)));
  factor_[static_cast<std::size_t>(row)] = 1;
}

template <class Slots>
void Attention<Slots>::weigh() {
  const Slot* p = p_.data();
  if constexpr (Slots::kElements == 1) p = reinterpret_cast<const Slot*>(scores_.data());
  std::fill_n(o_.data(), rows_ * value_columns_, 0.0f);
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    const int columns = static_cast<int>(value_columns_), steps = segment.count / Slots::kElements;
    const Slot* next = i + 1 < segments_.size() ? segments_[i + 1].values : nullptr;
    const auto add = [&](int first_row, int rows, const Slot* values) {
      float* o = o_.data() + first_row * value_columns_;
      tiles<Slots>(
          {p + first_row * p_stride_, p_stride_, 1}, rows, {values, value_columns_}, columns, steps,
          [&](int row, int column) { return load(o + row * value_columns_ + column); },
          [&](int row, int column, Vec x) { store(o + row * value_columns_ + column, x); }, bytes(next));
    };
    if (!segment.odd || all_see(segment)) {
      add(0, rows_, segment.values);
    } else {
      for (int row = 0; row < rows_; row += heads_)
        add(row, heads_, visible_values(segment, ranges_[static_cast<std::size_t>(row)]));
    }
    p += steps;
  }
  for (int row = 0; row < rows_; ++row) {
    const Vec factor = splat(factor_[static_cast<std::size_t>(row)]);
    float* o = o_.data() + row * value_columns_;
    for (std::ptrdiff_t d = 0; d < value_columns_; d += kWidth) store(o + d, load(o + d) * factor);
  }
}

/// A copy of the segment's values with zeros where the range does not reach: their probability is zero, but zero times
/// NaN is NaN.
template <class Slots>
const Slot* Attention<Slots>::visible_values(const Segment& segment, const Range& range) {
  Slot* out = clean_.data();
  for (int step = 0; step < segment.count / Slots::kElements; ++step) {
    Slot mask = 0;
    for (int e = 0; e < Slots::kElements; ++e) {
      const std::int64_t token = segment.position + step * Slots::kElements + e;
      if (range.begin <= token && token < range.end) mask |= (~Slot{0} >> (32 - 32 / Slots::kElements)) << (16 * e);
    }
    for (std::ptrdiff_t d = 0; d < value_columns_; ++d, ++out) *out = segment.values[step * value_columns_ + d] & mask;
  }
  return clean_.data();
}

template class Attention<Floats>;
#if defined(__AVX512BF16__)
template class Attention<Pairs>;
#endif

}  // namespace nsa::cpu::NSA_ISA
