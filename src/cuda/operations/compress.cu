// compress and compress_backward of the portable backend: arguments of kernels, and their launches.
#include "cuda/operations/operations.h"

#include "cuda/common/device.h"
#include "cuda/common/fill.h"
#include "cuda/operations/branch.h"
#include "cuda/sm90/compress/compress.h"

namespace nsa::cuda {

namespace {

/// Everything except the memory that the call works in.
CompressArgs compress_args(const CompressParams& p) {
  CompressArgs args{};
  const bool packed = p.cu_seqlens.defined();
  Geometry& g = args.geometry;
  g.heads = g.kv_heads = to_int(p.k.size(-2));
  g.group = 1;
  g.kernel_size = p.cfg.kernel_size;
  g.kernel_stride = p.cfg.kernel_stride;
  if (packed) {
    g.cu_q = g.cu_k = p.cu_seqlens.as<const int>();
    g.batches = to_int(p.cu_seqlens.size(0)) - 1;
    g.total_q = g.total_k = p.k.size(0);
    g.q_len = g.k_len = to_int(p.k.size(0));
    args.rows = args.compressed_per_batch = to_int(p.k.size(0) / p.cfg.kernel_stride);
    args.groups = args.rows + g.batches + 1;
  } else {
    g.batches = to_int(p.k.size(0));
    g.q_len = g.k_len = to_int(p.k.size(1));
    args.compressed_per_batch = to_int(p.cfg.num_compressed(p.k.size(1)));
    args.rows = g.batches * args.compressed_per_batch;
    args.groups = g.batches * to_int(ceil_div(g.k_len, g.kernel_stride));
  }
  args.k = strided(p.k);
  args.out = strided(p.out);
  args.dim = to_int(p.k.size(-1));
  args.by_dim = FastDivmod(args.dim);
  args.mlp = p.weights.kind == CompressionKind::kMlp;
  const CompressionWeights& from = p.weights;
  args.pe = weights_of(from.pe);
  args.w1 = weights_of(from.w1);
  args.b1 = weights_of(from.b1);
  args.w2 = weights_of(from.w2);
  args.b2 = weights_of(from.b2);
  if (from.w1.defined()) {
    args.hidden = to_int(from.w1.size(2));
    args.shared = from.w1.size(0) == 1;
  }
  return args;
}

void take_constants(CompressArgs& args, Execution& e) {
  if (args.hidden) args.constant = e.arena.take<float>((args.shared ? 1 : args.geometry.kv_heads) * args.hidden);
}
std::int64_t hidden_values(const CompressArgs& args) {
  return static_cast<std::int64_t>(args.geometry.kv_heads) * args.rows * args.hidden;
}
/// What the layers of the kernels of this folder need.
void take_layers(CompressArgs& args, DType dtype, Execution& e) {
  take_constants(args, e);
  if (args.mlp) args.h = e.arena.take<char>(hidden_values(args) * static_cast<std::int64_t>(size_of(dtype)));
}

/// The kernels of compute capability 9.0 that can serve this call here.
sm90::CompressKernels hopper_kernels(const CompressArgs& args, const CompressParams& p) {
  sm90::CompressDesc call;
  call.dtype = p.k.dtype;
  call.kind = p.weights.kind;
  call.dim = args.dim;
  call.hidden = args.hidden;
  call.rows = args.rows;
  for (const Strided& t : {args.k, args.out, args.d_out, args.d_k}) call.tma_compatible &= sm90::tma_compatible(t);
  for (const Weights& t : {args.w1, args.w2, args.d_w1})
    call.tma_compatible &= sm90::tma_compatible({t.data, t.head, t.row, 0});
  return sm90::kernels_for(p.k.device.index, call);
}

bool same_shapes(const CompressParams& a, const CompressParams& b) {
  const auto same = [](const TensorView& x, const TensorView& y) { return x.rank == y.rank && x.shape == y.shape; };
  return same(a.k, b.k) && a.weights.kind == b.weights.kind && same(a.weights.w1, b.weights.w1);
}

void take_segments(sm90::compress::CompressWork& work, Execution& e) {
  work.totals = e.arena.take<sm90::compress::CompressTotals>(1);
  work.segments = e.arena.take<sm90::compress::CompressSegment>(work.max_segments(work.problem[0]) + work.kMaxSegments);
}
Status choose_tiles(sm90::compress::CompressWork& work) {
  const CompressArgs& args = work.problem[0];
  int num_sms = 0;
  if (Status s = status_of(sm_count(num_sms), "compress"); !s.ok()) return s;
  work.tile_rows = sm90::compress::compress_tile_rows(args.mlp, args.dim, args.hidden, work.max_segments(args),
                                                      args.geometry.kv_heads * work.problems, num_sms);
  return {};
}

Status compress_on_hopper(const sm90::CompressKernels& hopper, sm90::compress::CompressWork& work, Execution& e) {
  for (int i = 0; i < work.problems; ++i) take_constants(work.problem[i], e);
  take_segments(work, e);
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  if (Status s = choose_tiles(work); !s.ok()) return s;
  return status_of(hopper.compress(work, e.stream), "compress");
}

Status compress_backward_on_hopper(const sm90::CompressKernels& hopper, sm90::compress::CompressWork& work, DType dtype,
                                   Execution& e) {
  const CompressArgs& first = work.problem[0];
  for (int i = 0; i < work.problems; ++i) {
    CompressArgs& args = work.problem[i];
    take_constants(args, e);
    args.d_z_sum = e.arena.take<float>((args.shared ? 1 : args.geometry.kv_heads) * args.hidden);
    if (!args.mlp) continue;
    args.h = e.arena.take<char>(hidden_values(args) * static_cast<std::int64_t>(size_of(dtype)));
    args.d_z = e.arena.take<char>(hidden_values(args) * static_cast<std::int64_t>(size_of(dtype)));
  }
  take_segments(work, e);
  work.max_token_segments = to_int(work.max_segments_of_tokens(first.geometry));
  work.token_segments = e.arena.take<sm90::compress::TokenSegment>(work.max_token_segments + work.kMaxSegments);
  work.column_partials = e.arena.take<float>(ceil_div(work.max_segments(first), work.kMaxSegments) * work.problems *
                                             first.geometry.kv_heads * (first.hidden + first.dim));
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  if (Status s = choose_tiles(work); !s.ok()) return s;
  if (Status s = status_of(hopper.hidden(work, e.stream), "compress_backward"); !s.ok()) return s;
  return status_of(hopper.gradients(work, e.stream), "compress_backward");
}

CompressArgs backward_args(const CompressBackwardParams& p) {
  CompressArgs args = compress_args(p.forward);
  args.out = {};
  args.d_out = strided(p.d_out);
  args.d_k = strided(p.d_k);
  args.d_pe = weights_of(p.d_weights.pe);
  args.d_w1 = weights_of(p.d_weights.w1);
  args.d_b1 = weights_of(p.d_weights.b1);
  args.d_w2 = weights_of(p.d_weights.w2);
  args.d_b2 = weights_of(p.d_weights.b2);
  return args;
}

Status compress_backward_portably(CompressArgs& args, DType dtype, Execution& e) {
  args.first_token = e.arena.take<std::int64_t>(args.rows + 1);
  args.group = e.arena.take<int4>(args.groups);
  take_layers(args, dtype, e);
  if (args.hidden) {
    const std::int64_t count = hidden_values(args);
    if (args.mlp) args.z = e.arena.take<float>(count);
    args.d_z = e.arena.take<char>(count * static_cast<std::int64_t>(size_of(dtype)));
    args.d_z_sum =
        e.arena.take<float>(static_cast<std::int64_t>(args.shared ? 1 : args.geometry.kv_heads) * args.hidden);
  }
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  return status_of(portable::element_kernels(dtype)->compress_backward(args, e.stream), "compress_backward");
}

/// One or two problems, together if both have kernels of compute capability 9.0 and the same shapes.
/// together(kernels, work), alone(params, args).
template <class Params, class MakeArgs, class Together, class Alone>
Status run_pair(const Params& p, const Params* second, const MakeArgs& make_args, const Together& together,
                const Alone& alone) {
  const auto forward = [](const Params& x) -> const CompressParams& {
    if constexpr (requires { x.forward; }) {
      return x.forward;
    } else {
      return x;
    }
  };
  sm90::compress::CompressWork work;
  work.problem[work.problems++] = make_args(p);
  const sm90::CompressKernels hopper = hopper_kernels(work.problem[0], forward(p));
  if (second && hopper.compress && same_shapes(forward(p), forward(*second))) {
    work.problem[work.problems] = make_args(*second);
    if (hopper_kernels(work.problem[work.problems], forward(*second)).compress) ++work.problems;
  }
  if (Status s = hopper.compress ? together(hopper, work) : alone(p, work.problem[0]); !s.ok()) return s;
  return second && work.problems == 1 ? run_pair<Params>(*second, nullptr, make_args, together, alone) : Status{};
}

}  // namespace

Status run(const CompressParams& p, Execution& e) { return compress(p, nullptr, e); }

Status compress(const CompressParams& p, const CompressParams* second, Execution& e) {
  if (second && p.weights.kind == CompressionKind::kMean && same_shapes(p, *second) &&
      p.cu_seqlens.data == second->cu_seqlens.data)
    return compress(p, second, nullptr, 0, e);
  return run_pair(
      p, second, compress_args,
      [&](const sm90::CompressKernels& hopper, sm90::compress::CompressWork& work) {
        return compress_on_hopper(hopper, work, e);
      },
      [&](const CompressParams& x, CompressArgs&) { return compress(x, nullptr, nullptr, 0, e); });
}

Status compress(const CompressParams& p, const CompressParams* second, const int* completed, int step, Execution& e) {
  if (second && second->weights.kind != p.weights.kind) {
    if (Status s = compress(p, nullptr, completed, step, e); !s.ok()) return s;
    return compress(*second, nullptr, completed, step, e);
  }
  CompressPair pair{{compress_args(p)}, 1};
  if (second) pair.problem[pair.problems++] = compress_args(*second);
  const int rows = pair.problem[0].rows + 1;
  std::int64_t* tables = e.arena.take<std::int64_t>(static_cast<std::int64_t>(pair.problems) * rows);
  for (int i = 0; i < pair.problems; ++i) {
    CompressArgs& args = pair.problem[i];
    args.first_token = tables + static_cast<std::int64_t>(i) * rows;
    take_layers(args, p.k.dtype, e);
    args.completed = completed;
    args.completed_step = step;
  }
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  return status_of(portable::element_kernels(p.k.dtype)->compress(pair, e.stream), "compress");
}

Status run(const CompressBackwardParams& p, Execution& e) { return compress_backward(p, nullptr, e); }

Status compress_backward(const CompressBackwardParams& p, const CompressBackwardParams* second, Execution& e) {
  const Status status = run_pair(
      p, second, backward_args,
      [&](const sm90::CompressKernels& hopper, sm90::compress::CompressWork& work) {
        return compress_backward_on_hopper(hopper, work, p.d_out.dtype, e);
      },
      [&](const CompressBackwardParams& x, CompressArgs& args) {
        return compress_backward_portably(args, x.d_out.dtype, e);
      });
  if (!status.ok() || e.arena.measuring()) return status;
  for (const CompressBackwardParams* x : {&p, second})
    if (x)
      if (Status s = fill({{x->d_k, 0}}, x->forward.cu_seqlens, nullptr, e.stream); !s.ok()) return s;
  return {};
}

}  // namespace nsa::cuda
