// Keys and values as the micro-kernel reads them: blocks of 64 tokens of one sequence and head, in one of two layouts,
// made once per call and then read by every query. Any strides come in; nothing outside the given rows is read.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/layout.h"
#include "cpu/kernels/buffer.h"
#include "cpu/kernels/simd.h"
#include "cpu/threads.h"

namespace nsa::cpu::NSA_ISA {

inline constexpr int kBlockTokens = 64;
static_assert(kBlockTokens % kWidth == 0);

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

enum class Layout {
  kColumns,  // [D / kElements][64]: tokens are the columns of a tile's B, its sum runs over D. For q * K^T, dO * V^T.
  kRows,     // [64 / kElements][D rounded up to kWidth]: the sum runs over tokens. For P * V, dS * K.
};

/// The packed blocks of one sequence and head.
struct TokenBlocks {
  const Slot* data = nullptr;               // of token 0; missing tokens and columns are zero
  std::ptrdiff_t block_stride = 0;          // slots of a block
  std::ptrdiff_t step_stride = 0;           // slots between the steps of a tile's sum
  const std::uint8_t* nonfinite = nullptr;  // per block: it holds a NaN or an infinity

  const Slot* block(std::int64_t b) const { return data + b * block_stride; }
};

/// The tokens of one sequence in a (B, S, heads, D) or (total, heads, D) tensor.
struct TokenSpan {
  std::int64_t batch = 0, begin = 0, length = 0;
  std::int64_t first = 0;  // tokens before this one are not needed; the blocks wholly before it are not packed
};

/// One float32, or a bf16 widened or paired with the next, as a slot.
template <class Slots>
Slot make_slot(float first, float) {
  static_assert(Slots::kElements == 1);
  Slot s;
  std::memcpy(&s, &first, 4);
  return s;
}
template <class Slots>
Slot make_slot(bf16 first, bf16 second) {
  if constexpr (Slots::kElements == 2) return first.bits | Slot{second.bits} << 16;
  return Slot{first.bits} << 16;
}

/// kElements-wise slots of `n` consecutive elements (a multiple of kElements).
template <class Slots, class In>
void pack_row(const In* x, std::int64_t n, Slot* out) {
  constexpr int e = Slots::kElements;
  for (std::int64_t i = 0; i < n / e; ++i) out[i] = make_slot<Slots>(x[i * e], x[i * e + e - 1]);
}

/// kWidth slots of consecutive elements.
template <class Slots, class In>
SlotVec slots_of(const In* x) {
  if constexpr (Slots::kElements * sizeof(In) == sizeof(Slot)) {
    SlotVec v;
    std::memcpy(&v, x, sizeof v);
    return v;
  } else {
    return (SlotVec)load_floats(x);
  }
}

/// Up to 64 tokens from x, `count` of them there: one block in the layout kColumns. Squares of slots are transposed in
/// registers: rows of one head lie so far apart that they share a few sets of the first cache.
template <class Slots, class In>
void pack_columns(const In* x, std::int64_t token_stride, int count, int dim, Slot* out) {
  constexpr int e = Slots::kElements;
  const int steps = dim / e, whole = steps / kWidth * kWidth;
  for (int t = 0; t < kBlockTokens; t += kWidth) {
    for (int d = 0; d < whole; d += kWidth) {
      SlotVec rows[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i)
        rows[i] = t + i < count ? slots_of<Slots>(x + (t + i) * token_stride + d * e) : SlotVec{};
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) store_slots(out + (d + i) * kBlockTokens + t, rows[i]);
    }
  }
  for (int d = whole; d < steps; ++d) {
    for (int t = 0; t < kBlockTokens; ++t) {
      const In* pair = x + t * token_stride + d * e;
      out[d * kBlockTokens + t] = t < count ? make_slot<Slots>(pair[0], pair[e - 1]) : 0;
    }
  }
}

/// The same in the layout kRows.
template <class Slots, class In>
void pack_rows(const In* x, std::int64_t token_stride, int count, int dim, Slot* out) {
  constexpr int e = Slots::kElements;
  const std::int64_t columns = round_up(dim, kWidth);
  for (int t = 0; t < kBlockTokens; t += e, out += columns) {
    const In *first = x + t * token_stride, *second = first + (e - 1) * token_stride;
    int d = 0;
    if (t + e <= count) {
      for (; d < dim; ++d) out[d] = make_slot<Slots>(first[d], second[d]);
    } else if (t < count) {
      for (; d < dim; ++d) out[d] = make_slot<Slots>(first[d], In{});
    }
    for (; d < columns; ++d) out[d] = 0;
  }
}

/// Whether a slot of n holds a NaN or an infinity: an exponent of all ones.
template <class Slots>
bool any_nonfinite(const Slot* slots, std::int64_t n) {
  constexpr Slot high = 0x7f800000, low = Slots::kElements == 2 ? 0x7f80 : 0x7f800000;
  Slot nonfinite = 0;
  for (std::int64_t i = 0; i < n; ++i) nonfinite |= ((slots[i] & high) == high) | ((slots[i] & low) == low);
  return nonfinite != 0;
}

/// Tokens of one head in memory: token i of them at data + i * stride.
template <class In>
struct TokenRun {
  const In* data;
  std::int64_t stride;
};

/// `count` tokens from `token` on, of a head of span s. Kinds of tokens that do not lie at one stride (cached_tokens.h)
/// copy them to `scratch`, which has the size of a block.
template <class In>
TokenRun<In> run_of(const TensorView& tokens, const std::vector<TokenSpan>& spans, std::size_t s, std::int64_t head,
                    std::int64_t token, int /*count*/, In* /*scratch*/) {
  const RowView<const In> rows = rows_of<const In>(tokens, spans[s].batch, spans[s].begin);
  return {rows.at(token, head), rows.row_stride};
}

inline void prefetch_run(const TensorView&, const std::vector<TokenSpan>&, std::size_t, std::int64_t, std::int64_t,
                         std::int64_t) {}  // as the hardware does

/// All sequences and heads of a tensor or of a cache, packed.
template <class In>
class PackedTokens {
 public:
  using Slots = typename SlotsOf<In>::type;

  PackedTokens() = default;
  template <class Tokens>
  PackedTokens(const Tokens& tokens, Layout layout, const std::vector<TokenSpan>& spans, const Context& context)
      : heads_(tokens.size(-2)), dim_(static_cast<int>(tokens.size(-1))), columns_(layout == Layout::kColumns) {
    std::int64_t blocks = 0;
    for (const TokenSpan& span : spans) {
      const std::int64_t skip = std::min(span.first, span.length) / kBlockTokens;
      const std::int64_t n = ceil_div(span.length, kBlockTokens) - skip;
      places_.push_back({blocks, n, skip});
      blocks += n * heads_;
    }
    block_stride_ = columns_ ? dim_ / Slots::kElements * std::ptrdiff_t{kBlockTokens}
                             : round_up(dim_, kWidth) * kBlockTokens / Slots::kElements;
    slots_ = Buffer<Slot>(static_cast<std::size_t>(blocks * block_stride_));
    nonfinite_ = Buffer<std::uint8_t>(static_cast<std::size_t>(blocks));
    std::vector<std::size_t> span_of(static_cast<std::size_t>(blocks));
    for (std::size_t s = 0; s < spans.size(); ++s)
      std::fill_n(span_of.begin() + places_[s].begin, places_[s].blocks * heads_, s);
    // Waking a thread takes about as long as packing a few blocks: a step of decoding packs no more than that.
    const int threads = static_cast<int>(std::clamp<std::int64_t>(blocks / 16, 1, threads_of(context)));
    Buffer<In> scratch(static_cast<std::size_t>(threads) * kBlockTokens * static_cast<std::size_t>(dim_));
    const FloatMode mode;
#pragma omp parallel num_threads(threads)
    {
      const FloatMode::Scope scope(mode);
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < blocks; ++i) {
        const std::size_t s = span_of[static_cast<std::size_t>(i)];
        const Place& place = places_[s];
        const std::int64_t head = (i - place.begin) / place.blocks;
        const std::int64_t token = ((i - place.begin) % place.blocks + place.skip) * kBlockTokens;
        const int count = static_cast<int>(std::min<std::int64_t>(spans[s].length - token, kBlockTokens));
        const TokenRun<In> run = run_of<In>(tokens, spans, s, head, token, count,
                                            scratch.data() + omp_get_thread_num() * kBlockTokens * dim_);
        Slot* out = slots_.data() + i * block_stride_;
        prefetch_run(tokens, spans, s, head, token + count,
                     std::min<std::int64_t>(spans[s].length - token - count, kBlockTokens));
        (columns_ ? pack_columns<Slots, In> : pack_rows<Slots, In>)(run.data, run.stride, count, dim_, out);
        nonfinite_[static_cast<std::size_t>(i)] = any_nonfinite<Slots>(out, block_stride_);
      }
    }
  }

  bool defined() const { return dim_ > 0; }
  int dim() const { return dim_; }

  TokenBlocks of(std::size_t span, std::int64_t head) const {
    const Place& place = places_[span];
    const std::int64_t first = place.begin + head * place.blocks - place.skip;
    return {
        .data = slots_.data() + first * block_stride_,
        .block_stride = block_stride_,
        .step_stride = columns_ ? std::ptrdiff_t{kBlockTokens} : static_cast<std::ptrdiff_t>(round_up(dim_, kWidth)),
        .nonfinite = nonfinite_.data() + first};
  }

 private:
  struct Place {
    std::int64_t begin;   // first block of the span's head 0
    std::int64_t blocks;  // per head
    std::int64_t skip;    // blocks of the span that are not there
  };

  std::vector<Place> places_;
  std::int64_t heads_ = 0;
  int dim_ = 0;
  bool columns_ = true;
  std::ptrdiff_t block_stride_ = 0;
  Buffer<Slot> slots_;
  Buffer<std::uint8_t> nonfinite_;
};

}  // namespace nsa::cpu::NSA_ISA
