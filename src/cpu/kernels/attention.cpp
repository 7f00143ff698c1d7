#include "cpu/kernels/attention.h"

#include <algorithm>
#include <cmath>

namespace nsa::cpu::NSA_ISA {
namespace {

constexpr float kLog2e = 1.44269504f;

/// Segments for which a row of O is loaded and stored once. Their values, for the columns of one tile, fill L1.
template <class Slots>
constexpr std::size_t kSegmentsPerPass = 2 * Slots::kElements;

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
void Attention<Slots>::begin(int first, int queries, int heads, const Range* ranges) {
  first_row_ = first * heads;
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
void Attention<Slots>::compute_scores() {
  const OperandA q{q_.data() + first_row_ * key_steps_, key_steps_, 1};
  std::fill_n(max_.data(), rows_ * kWidth, -kInf);
  columns_ = 0;
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    const auto zero = [](int, int) { return Vec{}; };
    const auto keep = [max = max_.data(), scores = scores_.data() + columns_, stride = stride_]<int NV>(
                          int row, int column, Vec(&sums)[NV]) {
      Vec m = load(max + row * kWidth);
      for (int c = 0; c < NV; ++c) {
        m = larger(m, sums[c]);
        store(scores + row * stride + column + c * kWidth, sums[c]);
      }
      store(max + row * kWidth, m);
    };
    const auto keep_visible = [keep, ranges = ranges_.data(), position = segment.position]<int NV>(int row, int column,
                                                                                                   Vec(&sums)[NV]) {
      const Range& range = ranges[row];
      for (int c = 0; c < NV; ++c) {
        const std::int64_t first = position + column + c * kWidth;
        sums[c] = select(lanes(range.begin - first, range.end - first), sums[c], splat(-kInf));
      }
      keep(row, column, sums);
    };
    const OperandB keys{segment.keys, kBlockTokens};
    const int steps = static_cast<int>(key_steps_);
    const Prefetch next = i + 1 < segments_.size() ? Prefetch::of(segments_[i + 1].keys, key_steps_ * kBlockTokens)
                                                   : Prefetch::of(segments_[0].values, value_slots(segments_[0]));
    if (all_see(segment)) {
      tiles<Slots>(q, rows_, keys, segment.count, steps, zero, keep, next);
    } else {
      tiles<Slots>(q, rows_, keys, segment.count, steps, zero, keep_visible, next);
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
void Attention<Slots>::compute_outputs() {
  const Slot* p = p_.data();
  if constexpr (Slots::kElements == 1) p = reinterpret_cast<const Slot*>(scores_.data());
  std::fill_n(o_.data(), rows_ * value_columns_, 0.0f);
  for (std::size_t i = 0; i < segments_.size();) {
    if (segments_[i].nonfinite && !all_see(segments_[i])) {
      for (int row = 0; row < rows_; row += heads_) {
        Segment visible = segments_[i];
        visible.values = visible_values(visible, ranges_[static_cast<std::size_t>(row)]);
        add_values({&visible, 1}, p + row * p_stride_, row, heads_, {});
      }
      p += segments_[i++].count / Slots::kElements;
      continue;
    }
    std::size_t n = 1;
    while (n < kSegmentsPerPass<Slots> && i + n < segments_.size() && !segments_[i + n].nonfinite) ++n;
    const std::span<const Segment> part(&segments_[i], n);
    i += n;
    add_values(part, p, 0, rows_,
               i < segments_.size() ? Prefetch::of(segments_[i].values, value_slots(segments_[i])) : Prefetch{});
    for (const Segment& segment : part) p += segment.count / Slots::kElements;
  }
  for (int row = 0; row < rows_; ++row) {
    const Vec factor = splat(factor_[static_cast<std::size_t>(row)]);
    float* o = o_.data() + row * value_columns_;
    for (std::ptrdiff_t d = 0; d < value_columns_; d += kWidth) store(o + d, load(o + d) * factor);
  }
}

/// o += p * values for rows first_row ... first_row + rows - 1; p: of the first of these rows, at the first segment.
template <class Slots>
void Attention<Slots>::add_values(std::span<const Segment> segments, const Slot* p, int first_row, int rows,
                                  Prefetch prefetch) {
  float* const o = o_.data() + first_row * value_columns_;
  const std::ptrdiff_t stride = value_columns_, p_stride = p_stride_;
  for_tiles(rows, static_cast<int>(value_columns_), [&]<int R, int NV>(int row, int column) {
    float* const out = o + row * stride + column;
    accumulate<R, NV>([&](int r, int c) { return load(out + r * stride + c * kWidth); },
                      [&](Vec(&acc)[R][NV]) __attribute__((always_inline)) {
                        OperandA weights{p + row * p_stride, p_stride, 1};
                        for (const Segment& segment : segments) {
                          const int steps = segment.count / Slots::kElements;
                          multiply<Slots>(acc, weights, {segment.values + column, stride}, steps, prefetch);
                          weights.data += steps;
                        }
                      },
                      [&](int r, int c, Vec sum) { store(out + r * stride + c * kWidth, sum); });
  });
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
#if NSA_PAIRS
template class Attention<Pairs>;
#endif

}  // namespace nsa::cpu::NSA_ISA
