// o = g_cmp * o_cmp + g_slc * o_slc + g_swa * o_swa and its gradients: one pass over memory each.
#include "core/branch_index.h"
#include "core/layout.h"
#include "cpu/kernels/for_dtype.h"
#include "cpu/kernels/kernels.h"
#include "cpu/threads.h"

namespace nsa::cpu::NSA_ISA {
namespace {

/// f(batch, row, head) for every row of a (B, S, H, D) or (total, H, D) tensor, each on one thread.
template <class F>
void for_rows(const TensorView& o, const Context& context, const F& f) {
  const std::int64_t batches = o.rank == 4 ? o.size(0) : 1, rows = o.size(o.rank - 3), heads = o.size(o.rank - 2);
  const FloatMode mode;
#pragma omp parallel num_threads(threads_of(context))
  {
    const FloatMode::Scope scope(mode);
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < batches * rows; ++i)
      for (std::int64_t h = 0; h < heads; ++h) f(i / rows, i % rows, h);
  }
}

template <class In>
void forward(const CombineParams& p, const Context& context) {
  const std::int64_t dim = p.o.size(-1);
  for_rows(p.o, context, [&](std::int64_t b, std::int64_t s, std::int64_t h) {
    const auto row = [&](const TensorView& t) { return rows_of<In>(t, b, 0).at(s, h); };
    const In *x = row(p.o_cmp), *y = row(p.o_slc), *z = row(p.o_swa), *g = row(p.gates);
    In* o = row(p.o);
    const float gx = to_float(g[0]), gy = to_float(g[1]), gz = to_float(g[2]);
    std::int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) {
      const Vec sum = fma(splat(gx), load_floats(x + d), splat(gy) * load_floats(y + d));
      store_floats(o + d, fma(splat(gz), load_floats(z + d), sum));
    }
    for (; d < dim; ++d) from_float(gx * to_float(x[d]) + gy * to_float(y[d]) + gz * to_float(z[d]), o[d]);
  });
}

template <class In>
void backward(const CombineBackwardParams& p, const Context& context) {
  const CombineParams& f = p.forward;
  const std::int64_t dim = p.d_o.size(-1);
  for_rows(p.d_o, context, [&](std::int64_t b, std::int64_t s, std::int64_t h) {
    const auto row = [&](const TensorView& t) { return t.defined() ? rows_of<In>(t, b, 0).at(s, h) : nullptr; };
    const In *d_o = row(p.d_o), *g = row(f.gates);
    In* d_gates = row(p.d_gates);
    const TensorView* branches[kBranches][2] = {{&f.o_cmp, &p.d_o_cmp}, {&f.o_slc, &p.d_o_slc}, {&f.o_swa, &p.d_o_swa}};
    for (int i = 0; i < kBranches; ++i) {
      const In* o = row(*branches[i][0]);
      In* d_branch = row(*branches[i][1]);
      const float gate = to_float(g[i]);
      Vec sum{};
      std::int64_t d = 0;
      for (; d + kWidth <= dim; d += kWidth) {
        const Vec x = load_floats(d_o + d);
        sum = fma(x, load_floats(o + d), sum);
        if (d_branch) store_floats(d_branch + d, splat(gate) * x);
      }
      float tail = 0;
      for (; d < dim; ++d) {
        tail += to_float(d_o[d]) * to_float(o[d]);
        if (d_branch) from_float(gate * to_float(d_o[d]), d_branch[d]);
      }
      if (d_gates) from_float(reduce_add(sum) + tail, d_gates[i]);
    }
  });
}

}  // namespace

Status run(const CombineParams& p, const Context& context) {
  for_dtype(p.o.dtype, [&]<class In>() { forward<In>(p, context); });
  return {};
}

Status run(const CombineBackwardParams& p, const Context& context) {
  for_dtype(p.d_o.dtype, [&]<class In>() { backward<In>(p, context); });
  return {};
}

}  // namespace nsa::cpu::NSA_ISA
