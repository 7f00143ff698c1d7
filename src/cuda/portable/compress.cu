// compress and compress_backward of the portable backend: arguments of kernels, and their launches.
#include "cuda/portable/host.h"
#include "cuda/sm90/compress.h"

namespace nsa::cuda::portable {

namespace {

/// (P, rows, columns) or (P, columns); one set for all KV heads when P = 1.
Weights weights_of(const TensorView& t) {
  if (!t.defined()) return {};
  return {t.data, t.size(0) > 1 ? t.stride[0] : 0, t.rank == 3 ? t.stride[1] : 0};
}

/// All but the memory of the call.
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
    args.groups = g.batches * to_int(tiles(g.k_len, g.kernel_stride));
  }
  args.k = strided(p.k);
  args.out = strided(p.out);
  args.dim = to_int(p.k.size(-1));
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
/// What the kernels of this folder need.
void take_memory(CompressArgs& args, DType dtype, bool with_groups, Execution& e) {
  args.first_token = e.arena.take<std::int64_t>(args.rows + 1);
  if (with_groups) args.group = e.arena.take<int4>(args.groups);
  take_constants(args, e);
  if (args.mlp) args.h = e.arena.take<char>(hidden_values(args) * static_cast<std::int64_t>(size_of(dtype)));
}

/// The kernels of compute capability 9.0 that can serve this call here.
sm90::CompressKernels hopper_kernels(const CompressParams& p) {
  const CompressArgs args = compress_args(p);
  sm90::CompressCall call;
  call.dtype = p.k.dtype;
  call.kind = p.weights.kind;
  call.dim = args.dim;
  call.hidden = args.hidden;
  call.sequences = args.geometry.batches;
  call.rows = args.rows;
  for (const Strided& t : {args.k, args.out}) call.mappable &= sm90::mappable(t);
  for (const Weights& t : {args.w1, args.w2}) call.mappable &= sm90::mappable({t.data, t.head, t.row, 0});
  return sm90::kernels_on(p.k.device.index, call);
}

/// Of one or two tensors by one launch.
Status compress(const sm90::CompressKernels& hopper, const CompressParams& p, const CompressParams* second,
                Execution& e) {
  sm90::CompressWork work;
  for (const CompressParams* problem : {&p, second}) {
    if (!problem) break;
    work.problem[work.problems] = compress_args(*problem);
    take_constants(work.problem[work.problems++], e);
  }
  const CompressArgs& args = work.problem[0];
  work.tiles = e.arena.take<sm90::CompressTile>(work.max_tiles(args, work.kNarrowRows));
  work.totals = e.arena.take<int>(2);
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  int processors = 0;
  if (Status s = status_of(sm90::multiprocessors(processors), "compress"); !s.ok()) return s;
  const Geometry& g = args.geometry;
  work.tile_rows = sm90::compress_tile_rows(args.mlp, args.hidden, g.batches, tiles(args.rows, std::max(g.batches, 1)),
                                            g.kv_heads * work.problems, processors);
  return status_of(hopper.compress(work, e.stream), "compress");
}

bool same_shape(const TensorView& a, const TensorView& b) { return a.rank == b.rank && a.shape == b.shape; }

}  // namespace

Status compress(const CompressParams& p, Execution& e) { return compress(p, nullptr, e); }

Status compress(const CompressParams& p, const CompressParams* second, Execution& e) {
  const sm90::CompressKernels hopper = hopper_kernels(p);
  const bool together = second && same_shape(p.k, second->k) && same_shape(p.weights.w1, second->weights.w1) &&
                        p.weights.kind == second->weights.kind && hopper_kernels(*second).compress;
  if (hopper.compress) {
    if (Status s = compress(hopper, p, together ? second : nullptr, e); !s.ok()) return s;
  } else {
    if (Status s = compress(p, nullptr, 0, e); !s.ok()) return s;
  }
  return !second || (hopper.compress && together) ? Status{} : compress(*second, nullptr, e);
}

Status compress(const CompressParams& p, const int* completed, int step, Execution& e) {
  CompressArgs args = compress_args(p);
  take_memory(args, p.k.dtype, false, e);
  args.completed = completed;
  args.completed_step = step;
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  return status_of(element_kernels(p.k.dtype)->compress(args, e.stream), "compress");
}

Status compress_backward(const CompressBackwardParams& p, Execution& e) {
  CompressArgs args = compress_args(p.forward);
  take_memory(args, p.forward.k.dtype, true, e);
  args.d_out = strided(p.d_out);
  args.d_k = strided(p.d_k);
  args.d_pe = weights_of(p.d_weights.pe);
  args.d_w1 = weights_of(p.d_weights.w1);
  args.d_b1 = weights_of(p.d_weights.b1);
  args.d_w2 = weights_of(p.d_weights.w2);
  args.d_b2 = weights_of(p.d_weights.b2);
  if (args.w1.data) {
    const std::int64_t count = hidden_values(args);
    if (args.mlp) args.z = e.arena.take<float>(count);
    args.d_z = e.arena.take<char>(count * static_cast<std::int64_t>(size_of(p.d_out.dtype)));
    args.d_z_sum =
        e.arena.take<float>(static_cast<std::int64_t>(args.shared ? 1 : args.geometry.kv_heads) * args.hidden);
  }
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  if (Status s = fill(p.d_k, p.forward.cu_seqlens, 0, nullptr, e.stream); !s.ok()) return s;
  return status_of(element_kernels(p.d_out.dtype)->compress_backward(args, e.stream), "compress_backward");
}

}  // namespace nsa::cuda::portable
