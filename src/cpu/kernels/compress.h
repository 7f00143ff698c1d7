// The compression function phi: what its forward and its backward share.
#pragma once

#include <vector>

#include "core/layout.h"
#include "cpu/kernels/gemm.h"
#include "cpu/threads.h"

namespace nsa::cpu::NSA_ISA {

/// The compression blocks of one sequence and KV head.
struct BlockRun {
  Sequence s;
  std::int64_t head = 0;
  std::int64_t first = 0;  // number of its first block among all blocks of the call
};

/// Some of the blocks of a run; and a task, which one thread takes at a time: ranges with the same weights.
struct BlockRange {
  const BlockRun* run;
  std::int64_t begin, count;
};
using BlockRanges = std::vector<BlockRange>;

inline std::int64_t blocks_of(const BlockRanges& ranges) {
  std::int64_t sum = 0;
  for (const BlockRange& range : ranges) sum += range.count;
  return sum;
}

/// Sizes and weights of a call.
template <class In>
struct Phi {
  using Slots = typename SlotsOf<In>::type;
  using Element = ElementOf<In>;

  const CompressParams& params;
  const CompressionWeights& w;
  std::int64_t l, d, dim, heads, sets;    // sets: P, how many sets of weights
  std::int64_t width;                     // columns of w1: E or D
  std::int64_t width_stride, dim_stride;  // padded to vectors
  std::vector<BlockRun> runs;
  std::int64_t blocks = 0;  // of all runs

  explicit Phi(const CompressParams& p)
      : params(p),
        w(p.weights),
        l(p.cfg.kernel_size),
        d(p.cfg.kernel_stride),
        dim(p.k.size(-1)),
        heads(p.k.size(-2)),
        sets(w.w1.defined() ? w.w1.size(0) : 1),
        width(w.w1.defined() ? w.w1.size(2) : dim),
        width_stride(round_up(width, kWidth)),
        dim_stride(round_up(dim, kWidth)) {
    Packed packed;
    packed.cu_seqlens_q = p.cu_seqlens;
    for (const Sequence& s : sequences_of(p.k, p.k.rank == 4 ? p.k.size(1) : 0, packed, p.cfg))
      for (std::int64_t h = 0; h < heads; ++h) {
        runs.push_back({s, h, blocks});
        blocks += s.c_len;
      }
  }

  bool mlp() const { return w.kind == CompressionKind::kMlp; }
  std::int64_t set_of(const BlockRun& run) const { return sets == 1 ? 0 : run.head; }

  const In* row(const TensorView& weight, std::int64_t set, std::int64_t i) const {
    return weight.as<const In>() + set * weight.stride[0] + i * weight.stride[1];
  }
  /// b1 or b2.
  const In* bias(const TensorView& b, std::int64_t set) const {
    return b.defined() ? b.as<const In>() + set * b.stride[0] : nullptr;
  }
  const In* token(const BlockRun& run, std::int64_t t) const {
    return rows_of<const In>(params.k, run.s.batch, run.s.k_begin).at(t, run.head);
  }

  /// All blocks, in tasks of at most `most` blocks.
  std::vector<BlockRanges> tasks(std::int64_t most) const {
    std::vector<BlockRanges> result;
    for (std::int64_t set = 0; set < sets; ++set) {
      std::int64_t room = 0;
      for (const BlockRun& run : runs) {
        if (set_of(run) != set) continue;
        for (std::int64_t i = 0; i < run.s.c_len;) {
          if (room == 0) result.emplace_back(), room = most;
          const std::int64_t count = std::min(room, run.s.c_len - i);
          result.back().push_back({&run, i, count});
          i += count, room -= count;
        }
      }
    }
    return result;
  }

  /// Blocks per task: enough to use each panel of the weights for many rows, few enough for all threads to have work.
  std::int64_t blocks_per_task(const Context& context) const {
    return std::clamp<std::int64_t>(round_up(ceil_div(blocks, 2 * threads_of(context)), kTileRows), kTileRows, 96);
  }

  /// The first layer of the blocks of a task: z = (x + pe) * w1 + b1 as float32 [block][width_stride].
  /// pe is one more row of the product, so that x itself can be read where the blocks overlap.
  Buffer<float> first_layer(const BlockRanges& ranges) const {
    const std::int64_t set = set_of(*ranges[0].run);
    const std::int64_t rows = blocks_of(ranges);
    std::int64_t tokens = 0;
    for (const BlockRange& range : ranges) tokens += (range.count - 1) * d + l;
    Buffer<Element> x((tokens + l) * dim);
    Buffer<float> z = zeros<float>((rows + 1) * width_stride);
    std::vector<RowsOfProduct> products;
    Element* dst = x.data();
    float* c = z.data();
    const auto add = [&](std::int64_t count, std::int64_t length, const auto& source) {
      products.push_back({{reinterpret_cast<const Slot*>(dst), d * dim / Slots::kElements, 1},
                          static_cast<int>(count),
                          c,
                          width_stride});
      for (std::int64_t t = 0; t < length; ++t, dst += dim) convert(source(t), dim, dst);
      c += count * width_stride;
    };
    for (const BlockRange& range : ranges)
      add(range.count, (range.count - 1) * d + l,
          [&](std::int64_t t) { return token(*range.run, range.begin * d + t); });
    const float* bias_row = c;
    if (w.pe.defined()) add(1, l, [&](std::int64_t t) { return row(w.pe, set, t); });
    gemm<Slots>(products, width, l * dim / Slots::kElements,
                rows_of_b<Slots>([&](std::int64_t i) { return row(w.w1, set, i); }, l * dim));
    const In* b1 = bias(w.b1, set);
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t e = 0; e < width; ++e) z[i * width_stride + e] += bias_row[e] + (b1 ? to_float(b1[e]) : 0.0f);
    return z;
  }

  /// f(offset, mask of the lanes within `width`) for every vector of `rows` rows [row][width_stride].
  template <class F>
  void for_hidden(std::int64_t rows, const F& f) const {
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t e = 0; e < width; e += kWidth) f(i * width_stride + e, lanes(0, width - e));
  }

  /// Elements of a packed operand.
  static void convert(const In* src, std::int64_t count, Element* dst) {
    if constexpr (std::is_same_v<In, Element>) {
      std::copy_n(src, count, dst);
    } else {
      for (std::int64_t i = 0; i < count; ++i) dst[i] = to_float(src[i]);
    }
  }
};

inline Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exp2(x * splat(-1.44269504f))); }

}  // namespace nsa::cpu::NSA_ISA
