// compress and compress_backward of the portable backend: arguments of kernels, and their launches.
#include "cuda/portable/host.h"

namespace nsa::cuda::portable {

namespace {

/// (P, rows, columns) or (P, columns); one set for all KV heads when P = 1.
Weights weights_of(const TensorView& t) {
  if (!t.defined()) return {};
  return {t.data, t.size(0) > 1 ? t.stride[0] : 0, t.rank == 3 ? t.stride[1] : 0};
}

CompressArgs compress_args(const CompressParams& p, Execution& e, bool with_groups) {
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
  args.first_token = e.arena.take<std::int64_t>(args.rows + 1);
  if (with_groups) args.group = e.arena.take<int4>(args.groups);
  if (from.w1.defined()) {
    args.hidden = to_int(from.w1.size(2));
    args.shared = from.w1.size(0) == 1;
    args.constant = e.arena.take<float>(from.w1.size(0) * args.hidden);
    const std::int64_t count = static_cast<std::int64_t>(g.kv_heads) * args.rows * args.hidden;
    if (args.mlp) args.h = e.arena.take<char>(count * static_cast<std::int64_t>(size_of(p.k.dtype)));
  }
  return args;
}

}  // namespace

Status compress(const CompressParams& p, Execution& e) { return compress(p, nullptr, 0, e); }

Status compress(const CompressParams& p, const int* completed, int step, Execution& e) {
  CompressArgs args = compress_args(p, e, false);
  args.completed = completed;
  args.completed_step = step;
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  return status_of(element_kernels(p.k.dtype)->compress(args, e.stream), "compress");
}

Status compress(const CompressParams& keys, const CompressParams& values, Execution& e) {
  if (Status s = compress(keys, e); !s.ok()) return s;
  return compress(values, e);
}

Status compress_backward(const CompressBackwardParams& p, Execution& e) {
  CompressArgs args = compress_args(p.forward, e, true);
  args.d_out = strided(p.d_out);
  args.d_k = strided(p.d_k);
  args.d_pe = weights_of(p.d_weights.pe);
  args.d_w1 = weights_of(p.d_weights.w1);
  args.d_b1 = weights_of(p.d_weights.b1);
  args.d_w2 = weights_of(p.d_weights.w2);
  args.d_b2 = weights_of(p.d_weights.b2);
  if (args.w1.data) {
    const std::int64_t count = static_cast<std::int64_t>(args.geometry.kv_heads) * args.rows * args.hidden;
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
