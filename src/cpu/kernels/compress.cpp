// out[i] = phi(k[i*d : i*d + l] + pe). Each block is computed by itself in a fixed order: the same bits alone, in a
// batch, packed, or by a decode step.
#include "cpu/kernels/compress.h"

#include "cpu/kernels/for_dtype.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/queries.h"

namespace nsa::cpu::NSA_ISA {
namespace {

template <class In>
void mean(const Phi<In>& phi, const BlockRun& run, std::int64_t block, Buffer<float>& sum, In* out) {
  std::fill_n(sum.data(), phi.dim, 0.0f);
  for (std::int64_t t = 0; t < phi.l; ++t) {
    const In* x = phi.token(run, block * phi.d + t);
    for (std::int64_t c = 0; c < phi.dim; ++c) sum[c] += to_float(x[c]);
  }
  for (std::int64_t c = 0; c < phi.dim; ++c) from_float(sum[c] / static_cast<float>(phi.l), out[c]);
}

/// y = silu(z) * w2 as float32 [block][dim_stride].
template <class In>
Buffer<float> second_layer(const Phi<In>& phi, std::int64_t set, std::int64_t rows, const Buffer<float>& z) {
  using Slots = typename Phi<In>::Slots;
  Buffer<typename Phi<In>::Element> hidden(rows * phi.width_stride);
  phi.for_hidden(rows, [&](std::int64_t i, IVec valid) {
    const Vec x = load(&z[i]);
    store_floats(&hidden[i], select(valid, x * sigmoid(x), Vec{}));
  });
  Buffer<float> y = zeros<float>(rows * phi.dim_stride);
  const RowsOfProduct product{
      .a = {reinterpret_cast<const Slot*>(hidden.data()), phi.width_stride / Slots::kElements, 1},
      .rows = static_cast<int>(rows),
      .c = y.data(),
      .c_stride = phi.dim_stride};
  gemm<Slots>({&product, 1}, phi.dim, ceil_div(phi.width, Slots::kElements),
              rows_of_b<Slots>([&](std::int64_t e) { return phi.row(phi.w.w2, set, e); }, phi.width));
  return y;
}

template <class In>
void forward(const CompressParams& p, const Context& context) {
  const Phi<In> phi(p);
  const std::vector<BlockRanges> tasks = phi.tasks(phi.blocks_per_task(context));
  const auto out = [&](const BlockRun& run, std::int64_t block) {
    return rows_of<In>(p.out, run.s.batch, run.s.c_begin).at(block, run.head);
  };
  parallel_for(static_cast<std::int64_t>(tasks.size()), context, [&](std::int64_t task) {
    const BlockRanges& ranges = tasks[static_cast<std::size_t>(task)];
    if (p.weights.kind == CompressionKind::kMean) {
      Buffer<float> sum(phi.dim);
      for (const BlockRange& range : ranges)
        for (std::int64_t i = range.begin; i < range.begin + range.count; ++i)
          mean(phi, *range.run, i, sum, out(*range.run, i));
      return;
    }
    const std::int64_t set = phi.set_of(*ranges[0].run);
    Buffer<float> y = phi.first_layer(ranges);
    if (phi.mlp()) y = second_layer(phi, set, blocks_of(ranges), y);
    const In* b2 = phi.bias(phi.w.b2, set);
    const float* row = y.data();
    for (const BlockRange& range : ranges)
      for (std::int64_t i = range.begin; i < range.begin + range.count; ++i, row += phi.dim_stride)
        for (std::int64_t c = 0; c < phi.dim; ++c)
          from_float(row[c] + (b2 ? to_float(b2[c]) : 0.0f), out(*range.run, i)[c]);
  });
  fill_unused_rows<In>(p.out, phi.runs.empty() ? 0 : phi.runs.back().s.c_begin + phi.runs.back().s.c_len);
}

}  // namespace

Status run(const CompressParams& p, const Context& context) {
  for_dtype(p.k.dtype, [&]<class In>() { forward<In>(p, context); });
  return {};
}

}  // namespace nsa::cpu::NSA_ISA
