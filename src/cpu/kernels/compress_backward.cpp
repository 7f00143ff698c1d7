// Gradients of compress. The hidden layer is recomputed; every gradient is summed in a fixed order by one thread:
// a row of d_w1 or d_w2 over all blocks, a token of d_k over the blocks that cover it.
#include "cpu/kernels/compress.h"
#include "cpu/kernels/for_dtype.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/queries.h"

namespace nsa::cpu::NSA_ISA {
namespace {

inline constexpr std::int64_t kGradientRows = 64;  // rows of d_w1 or d_w2 of one task
inline constexpr std::int64_t kTokenGroups = 96;   // groups of d tokens of one task of d_k

template <class In>
struct Backward {
  using Slots = typename SlotsOf<In>::type;
  using Element = ElementOf<In>;

  const CompressBackwardParams& p;
  const Context& context;
  const Phi<In> phi{p.forward};
  Buffer<Element> hidden{}, d_z{};  // [block][width_stride] of all blocks: silu(z) and the gradient of z
  Buffer<float> d_b1{};             // [set][width_stride]: sums of d_z

  const In* d_out(const BlockRun& run, std::int64_t block) const {
    return rows_of<const In>(p.d_out, run.s.batch, run.s.c_begin).at(block, run.head);
  }
  In* d_token(const BlockRun& run, std::int64_t t) const {
    return rows_of<In>(p.d_k, run.s.batch, run.s.k_begin).at(t, run.head);
  }
  In* gradient_row(const TensorView& d_weight, std::int64_t set, std::int64_t i) const {
    return d_weight.as<In>() + set * d_weight.stride[0] + i * d_weight.stride[1];
  }
  bool in_set(const BlockRun& run, std::int64_t set) const { return phi.set_of(run) == set; }

  /// Gradient of the first layer's output, and the hidden values for d_w2.
  void gradient_of_first_layer(const BlockRanges& ranges) {
    const std::int64_t set = phi.set_of(*ranges[0].run);
    const std::int64_t rows = blocks_of(ranges);
    Buffer<Element> d_y = zeros<Element>(rows * phi.dim_stride);
    Element* row = d_y.data();
    for (const BlockRange& range : ranges)
      for (std::int64_t i = 0; i < range.count; ++i, row += phi.dim_stride)
        Phi<In>::convert(d_out(*range.run, range.begin + i), phi.dim, row);
    Buffer<Element> h, dz;
    if (phi.mlp()) {
      const Buffer<float> z = phi.first_layer(ranges);
      Buffer<float> d_h = zeros<float>(rows * phi.width_stride);
      const RowsOfProduct product{
          .a = {reinterpret_cast<const Slot*>(d_y.data()), phi.dim_stride / Slots::kElements, 1},
          .rows = static_cast<int>(rows),
          .c = d_h.data(),
          .c_stride = phi.width_stride};
      gemm<Slots>({&product, 1}, phi.width, phi.dim / Slots::kElements,
                  columns_of_b<Slots>([&](std::int64_t e) { return phi.row(phi.w.w2, set, e); }, phi.dim));
      h = Buffer<Element>(rows * phi.width_stride), dz = Buffer<Element>(rows * phi.width_stride);
      phi.for_hidden(rows, [&](std::int64_t i, IVec valid) {
        const Vec x = load(&z[i]), s = sigmoid(x), derivative = s * fma(x, splat(1.0f) - s, splat(1.0f));
        store_floats(&h[i], select(valid, x * s, Vec{}));
        store_floats(&dz[i], select(valid, derivative * load(&d_h[i]), Vec{}));
      });
    } else {
      dz = std::move(d_y);
    }
    std::int64_t at = 0;
    for (const BlockRange& range : ranges) {
      const std::int64_t to = (range.run->first + range.begin) * phi.width_stride, n = range.count * phi.width_stride;
      std::copy_n(&dz[at], n, &d_z[to]);
      if (phi.mlp()) std::copy_n(&h[at], n, &hidden[to]);
      at += n;
    }
  }

  /// Sums over all blocks of a set: d_b1, d_b2.
  void gradient_of_biases(std::int64_t set) {
    float* sum = &d_b1[set * phi.width_stride];
    std::fill_n(sum, phi.width_stride, 0.0f);
    std::vector<float> sum_2(static_cast<std::size_t>(phi.dim));
    for (const BlockRun& run : phi.runs) {
      if (!in_set(run, set)) continue;
      for (std::int64_t i = 0; i < run.s.c_len; ++i) {
        const Element* x = &d_z[(run.first + i) * phi.width_stride];
        for (std::int64_t e = 0; e < phi.width; ++e) sum[e] += to_float(x[e]);
        if (!p.d_weights.b2.defined()) continue;
        const In* y = d_out(run, i);
        for (std::int64_t c = 0; c < phi.dim; ++c) sum_2[c] += to_float(y[c]);
      }
    }
    const auto write = [&](const TensorView& d_b, const float* values, std::int64_t count) {
      if (!d_b.defined()) return;
      for (std::int64_t i = 0; i < count; ++i) from_float(values[i], d_b.as<In>()[set * d_b.stride[0] + i]);
    };
    write(p.d_weights.b1, sum, phi.width);
    write(p.d_weights.b2, sum_2.data(), phi.dim);
  }

  /// d_w1 and d_pe of the channels [c, c + count) of the blocks' token r. With x + pe the input of the first layer:
  /// d_w1 = sum of x d_z + pe * sum of d_z, d_pe = w1 * sum of d_z.
  void gradient_of_w1(std::int64_t set, std::int64_t r, std::int64_t c, std::int64_t count) const {
    const float* total = &d_b1[set * phi.width_stride];
    if (p.d_weights.pe.defined()) {
      In* d_pe = gradient_row(p.d_weights.pe, set, r) + c;
      for (std::int64_t i = 0; i < count; ++i) {
        const In* w1 = phi.row(phi.w.w1, set, r * phi.dim + c + i);
        float sum = 0;
        for (std::int64_t e = 0; e < phi.width; ++e) sum += to_float(w1[e]) * total[e];
        from_float(sum, d_pe[i]);
      }
    }
    if (!p.d_weights.w1.defined()) return;
    Buffer<float> sum = zeros<float>(count * phi.width_stride);
    for (const BlockRun& run : phi.runs)
      if (in_set(run, set))
        sum_of_outer_products<Slots>([&](std::int64_t i) { return phi.token(run, i * phi.d + r) + c; }, count,
                                     [&](std::int64_t i) { return &d_z[(run.first + i) * phi.width_stride]; },
                                     phi.width, run.s.c_len, sum.data(), phi.width_stride);
    for (std::int64_t i = 0; i < count; ++i) {
      const float pe = phi.w.pe.defined() ? to_float(phi.row(phi.w.pe, set, r)[c + i]) : 0.0f;
      In* out = gradient_row(p.d_weights.w1, set, r * phi.dim + c + i);
      for (std::int64_t e = 0; e < phi.width; ++e) from_float(sum[i * phi.width_stride + e] + pe * total[e], out[e]);
    }
  }

  /// Rows [e, e + count) of d_w2.
  void gradient_of_w2(std::int64_t set, std::int64_t e, std::int64_t count) const {
    Buffer<float> sum = zeros<float>(count * phi.dim_stride);
    for (const BlockRun& run : phi.runs)
      if (in_set(run, set))
        sum_of_outer_products<Slots>([&](std::int64_t i) { return &hidden[(run.first + i) * phi.width_stride + e]; },
                                     count, [&](std::int64_t i) { return d_out(run, i); }, phi.dim, run.s.c_len,
                                     sum.data(), phi.dim_stride);
    for (std::int64_t i = 0; i < count; ++i)
      store_row(&sum[i * phi.dim_stride], static_cast<int>(phi.dim), gradient_row(p.d_weights.w2, set, e + i));
  }

  /// d_k of the tokens [g*d, (g + count)*d). The s-th d tokens of a block are the g-th of the sequence for block g - s:
  /// going through s from the last to the first adds the blocks in ascending order.
  void gradient_of_tokens(const BlockRun& run, std::int64_t g, std::int64_t count) const {
    const std::int64_t columns = phi.d * phi.dim, stride = round_up(columns, kWidth);
    Buffer<float> sum = zeros<float>(count * stride);
    for (std::int64_t s = phi.l / phi.d - 1; s >= 0; --s) {
      const std::int64_t first = std::max<std::int64_t>(g - s, 0), last = std::min(g + count - s, run.s.c_len);
      if (first >= last) continue;
      float* rows = &sum[(first + s - g) * stride];
      const Element* a = &d_z[(run.first + first) * phi.width_stride];
      if (phi.w.kind == CompressionKind::kMean) {
        for (std::int64_t i = 0; i < last - first; ++i)
          for (std::int64_t c = 0; c < columns; ++c)
            rows[i * stride + c] += to_float(a[i * phi.width_stride + c % phi.dim]) / static_cast<float>(phi.l);
        continue;
      }
      const RowsOfProduct product{.a = {reinterpret_cast<const Slot*>(a), phi.width_stride / Slots::kElements, 1},
                                  .rows = static_cast<int>(last - first),
                                  .c = rows,
                                  .c_stride = stride};
      const std::int64_t set = phi.set_of(run);
      gemm<Slots>(
          {&product, 1}, columns, ceil_div(phi.width, Slots::kElements),
          columns_of_b<Slots>([&](std::int64_t c) { return phi.row(phi.w.w1, set, s * columns + c); }, phi.width));
    }
    for (std::int64_t i = 0; i < count; ++i)
      for (std::int64_t c = 0; c < columns; ++c)
        from_float(sum[i * stride + c], d_token(run, (g + i) * phi.d + c / phi.dim)[c % phi.dim]);
  }

  void gradient_of_k() const {
    struct Part {
      const BlockRun* run;
      std::int64_t group, count;
    };
    std::vector<Part> parts;
    for (const BlockRun& run : phi.runs) {
      const std::int64_t groups = run.s.c_len > 0 ? run.s.c_len - 1 + phi.l / phi.d : 0;
      for (std::int64_t g = 0; g < groups; g += kTokenGroups)
        parts.push_back({&run, g, std::min(kTokenGroups, groups - g)});
      for (std::int64_t t = groups * phi.d; t < run.s.k_len; ++t) std::fill_n(d_token(run, t), phi.dim, In{});
    }
    parallel_for(static_cast<std::int64_t>(parts.size()), context,
                 [&](std::int64_t i) { gradient_of_tokens(*parts[i].run, parts[i].group, parts[i].count); });
    fill_unused_rows<In>(p.d_k, phi.runs.empty() ? 0 : phi.runs.back().s.k_begin + phi.runs.back().s.k_len);
  }

  void run() {
    d_z = Buffer<Element>(phi.blocks * phi.width_stride);
    if (phi.mlp()) hidden = Buffer<Element>(phi.blocks * phi.width_stride);
    d_b1 = Buffer<float>(phi.sets * phi.width_stride);
    const std::vector<BlockRanges> tasks = phi.tasks(phi.blocks_per_task(context));
    parallel_for(static_cast<std::int64_t>(tasks.size()), context,
                 [&](std::int64_t i) { gradient_of_first_layer(tasks[i]); });
    if (phi.w.kind != CompressionKind::kMean) {
      parallel_for(phi.sets, context, [&](std::int64_t set) { gradient_of_biases(set); });
      const std::int64_t chunks = ceil_div(phi.dim, kGradientRows);
      parallel_for(phi.sets * phi.l * chunks, context, [&](std::int64_t i) {
        const std::int64_t c = i % chunks * kGradientRows;
        gradient_of_w1(i / chunks / phi.l, i / chunks % phi.l, c, std::min(kGradientRows, phi.dim - c));
      });
      if (p.d_weights.w2.defined()) {
        const std::int64_t parts = ceil_div(phi.width, kGradientRows);
        parallel_for(phi.sets * parts, context, [&](std::int64_t i) {
          const std::int64_t e = i % parts * kGradientRows;
          gradient_of_w2(i / parts, e, std::min(kGradientRows, phi.width - e));
        });
      }
    }
    if (p.d_k.defined()) gradient_of_k();
  }
};

}  // namespace

Status run(const CompressBackwardParams& p, const Context& context) {
  for_dtype(p.forward.k.dtype, [&]<class In>() { Backward<In>{p, context}.run(); });
  return {};
}

}  // namespace nsa::cpu::NSA_ISA
