// The operations of the portable backend: from the public parameters to the arguments of kernels, and their launches.
#include <algorithm>
#include <cmath>
#include <string>

#include "cuda/portable/inverse_index.cuh"
#include "cuda/portable/launch.cuh"
#include "cuda/portable/portable.h"

namespace nsa::cuda::portable {
namespace {

Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Status::internal(std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

Status out_of_workspace(const Arena& arena) {
  return Status::invalid_argument("workspace: too small, this call needs " + std::to_string(arena.used()) + " bytes");
}

Strided strided(const TensorView& t) {
  if (!t.defined()) return {};
  const bool batched = t.rank == 4;
  return {t.data, batched ? t.stride[0] : 0, t.stride[batched ? 1 : 0], t.stride[batched ? 2 : 1]};
}

PerRow per_row(const TensorView& t) {
  if (!t.defined()) return {};
  const bool batched = t.rank == 3;
  return {t.as<float>(), batched ? t.stride[0] : 0, t.stride[batched ? 1 : 0], t.stride[batched ? 2 : 1]};
}

int to_int(std::int64_t x) { return static_cast<int>(x); }

/// Batches and rows of a batch of a (B, S, ...) or (total, ...) tensor with `trailing` further dimensions.
struct Rows {
  int batches, rows;
};
Rows rows_of(const TensorView& t, int trailing) {
  return t.rank == trailing + 2 ? Rows{to_int(t.size(0)), to_int(t.size(1))} : Rows{1, to_int(t.size(0))};
}

Geometry geometry_of(const TensorView& q, std::int64_t kv_heads, std::int64_t k_len, std::int64_t total_k,
                     const Packed& packed, const NSAConfig& cfg) {
  Geometry g;
  g.heads = to_int(q.size(-2));
  g.kv_heads = to_int(kv_heads);
  g.group = g.kv_heads ? g.heads / g.kv_heads : 0;
  g.kernel_size = cfg.kernel_size;
  g.kernel_stride = cfg.kernel_stride;
  if (packed.packed()) {
    const TensorView& cu_k = packed.cu_seqlens_k.defined() ? packed.cu_seqlens_k : packed.cu_seqlens_q;
    g.cu_q = packed.cu_seqlens_q.as<const int>();
    g.cu_k = cu_k.as<const int>();
    g.batches = to_int(packed.cu_seqlens_q.size(0)) - 1;
    g.total_q = q.size(0);
    g.total_k = total_k;
    g.q_len = to_int(packed.max_seqlen_q ? packed.max_seqlen_q : q.size(0));
    g.k_len = to_int(packed.max_seqlen_k ? packed.max_seqlen_k : total_k);
  } else {
    g.batches = to_int(q.size(0));
    g.q_len = to_int(q.size(1));
    g.k_len = to_int(k_len);
  }
  return g;
}

double scale_of(const std::optional<double>& scale, const TensorView& q) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))));
}

const AttentionKernels& kernels_of(const TensorView& q, const TensorView& v) {
  return *attention_kernels(q.dtype, to_int(q.size(-1)), to_int(v.size(-1)));
}

/// Raw tokens behind compressed keys of packed sequences: only an upper bound is known, d per row and the last block.
std::int64_t raw_total(const TensorView& k_c, const NSAConfig& cfg) {
  return (k_c.size(0) + 1) * cfg.kernel_stride + cfg.kernel_size;
}

/// What the three branches have in common.
struct Branch {
  const TensorView &q, &k, &v;
  Geometry geometry;
  int window = 0;                       // 0: compressed, or selected if indices are given
  const TensorView* indices = nullptr;  // selected
  int block_size = 0;
  double scale = 0;
};

Branch branch_of(const CompressedAttentionParams& p) {
  const bool packed = p.packed.packed();
  const std::int64_t k_len = p.seqlen_k.value_or(packed ? 0 : p.q.size(1));
  return {p.q,   p.k_c,
          p.v_c, geometry_of(p.q, p.k_c.size(-2), k_len, packed ? raw_total(p.k_c, p.cfg) : 0, p.packed, p.cfg),
          0,     nullptr,
          0,     scale_of(p.softmax_scale, p.q)};
}
template <class Params>
Geometry raw_geometry(const Params& p) {
  const bool packed = p.packed.packed();
  return geometry_of(p.q, p.k.size(-2), packed ? 0 : p.k.size(1), packed ? p.k.size(0) : 0, p.packed, {});
}
Branch branch_of(const SelectedAttentionParams& p) {
  return {p.q, p.k, p.v, raw_geometry(p), 0, &p.indices, p.block_size, scale_of(p.softmax_scale, p.q)};
}
Branch branch_of(const SlidingWindowAttentionParams& p) {
  return {p.q,
          p.k,
          p.v,
          raw_geometry(p),
          to_int(std::min<std::int64_t>(p.window_size, 1 << 30)),
          nullptr,
          0,
          scale_of(p.softmax_scale, p.q)};
}

/// Packed rows past the last sequence: o = 0, lse = -inf, indices = -1, gradients = 0. Also fills whole tensors.
struct FillArgs {
  const int* cu = nullptr;  // null: all rows
  int sequences = 0;
  bool compressed = false;  // the rows are compressed tokens of the sequences
  int kernel_size = 0, kernel_stride = 0;
  Strided rows;  // of 4-byte or 2-byte elements, (rows, heads, columns)
  int count = 0, heads = 0, columns = 0, element = 0;
  unsigned value = 0;
};

__global__ void __launch_bounds__(128) fill_tail(const __grid_constant__ FillArgs args) {
  __shared__ int begin;
  if (threadIdx.x == 0) begin = args.compressed ? 0 : args.cu[args.sequences];
  __syncthreads();
  if (args.compressed) {
    int mine = 0;
    for (int i = threadIdx.x; i < args.sequences; i += blockDim.x) {
      const int length = args.cu[i + 1] - args.cu[i];
      mine += length < args.kernel_size ? 0 : (length - args.kernel_size) / args.kernel_stride + 1;
    }
    if (mine) atomicAdd(&begin, mine);
    __syncthreads();
  }
  for (int row = max(begin, 0) + blockIdx.x; row < args.count; row += gridDim.x) {
    for (int i = threadIdx.x; i < args.heads * args.columns; i += blockDim.x) {
      const std::int64_t at = row * args.rows.row + i / args.columns * args.rows.head + i % args.columns;
      if (args.element == 4) {
        static_cast<unsigned*>(args.rows.data)[at] = args.value;
      } else {
        static_cast<unsigned short*>(args.rows.data)[at] = static_cast<unsigned short>(args.value);
      }
    }
  }
}

Status fill(const TensorView& t, const TensorView& cu, unsigned value, const NSAConfig* compressed,
            cudaStream_t stream) {
  if (!t.defined() || !cu.defined() || t.numel() == 0) return {};
  FillArgs args;
  args.cu = cu.as<const int>();
  args.sequences = to_int(cu.size(0)) - 1;
  if (compressed) {
    args.compressed = true;
    args.kernel_size = compressed->kernel_size;
    args.kernel_stride = compressed->kernel_stride;
  }
  args.element = to_int(static_cast<std::int64_t>(size_of(t.dtype)));
  args.value = value;
  if (t.rank == 2) {  // lse (H, total)
    args.rows = {t.data, 0, t.stride[1], t.stride[0]};
    args.count = to_int(t.size(1));
    args.heads = to_int(t.size(0));
    args.columns = 1;
  } else {
    args.rows = strided(t);
    args.count = to_int(t.size(0));
    args.heads = to_int(t.size(1));
    args.columns = to_int(t.size(2));
  }
  return status_of(launch(fill_tail, static_cast<unsigned>(std::min(args.count, 512)), 128, 0, stream, args),
                   "fill_tail");
}

constexpr unsigned kMinusInfinity = 0xff800000u;

Status forward(const Branch& b, const TensorView& o, const TensorView& lse, const Packed& packed, Execution& e) {
  if (e.arena.measuring()) return {};
  const AttentionKernels& kernels = kernels_of(b.q, b.v);
  if (Status s = fill(o, packed.cu_seqlens_q, 0, nullptr, e.stream); !s.ok()) return s;
  if (Status s = fill(lse, packed.cu_seqlens_q, kMinusInfinity, nullptr, e.stream); !s.ok()) return s;
  if (b.indices) {
    SelectedArgs args{b.geometry,          strided(b.q),
                      strided(b.k),        strided(b.v),
                      strided(o),          per_row(lse),
                      strided(*b.indices), to_int(b.indices->size(-1)),
                      b.block_size,        static_cast<float>(b.scale)};
    return status_of(kernels.selected_forward(args, e.stream), "selected_forward");
  }
  RangeArgs args{b.geometry, strided(b.q), strided(b.k), strided(b.v),
                 strided(o), per_row(lse), b.window,     static_cast<float>(b.scale)};
  return status_of(kernels.range_forward(args, e.stream), "range_forward");
}

/// A float32 array shaped like lse.
PerRow take_rows(Arena& arena, const TensorView& q) {
  const Rows r = q.rank == 4 ? Rows{to_int(q.size(0)), to_int(q.size(1))} : Rows{1, to_int(q.size(0))};
  const std::int64_t heads = q.size(-2);
  return {arena.take<float>(r.batches * heads * r.rows), heads * r.rows, r.rows, 1};
}

/// Queries of an item of the dK/dV kernel: long enough to make partial sums rare, short enough to fill the device.
constexpr int kRangeChunk = 8192, kListChunk = 1024;

struct BranchGradients {
  const TensorView &d_q, &d_k, &d_v;
  Strided sum_from, sum_to;  // float32 sums of dQ over branches
};

Status backward(const Branch& b, const TensorView& d_o, const TensorView& lse, PerRow delta, PerRow gate,
                const BranchGradients& out, const Packed& packed, const NSAConfig* compressed, Execution& e) {
  const Geometry& g = b.geometry;
  BackwardArgs args{};
  args.geometry = g;
  args.q = strided(b.q);
  args.k = strided(b.k);
  args.v = strided(b.v);
  args.d_o = strided(d_o);
  args.lse = per_row(lse);
  args.delta = delta;
  args.gate = gate;
  args.d_q = strided(out.d_q);
  args.d_k = strided(out.d_k);
  args.d_v = strided(out.d_v);
  args.sum_from = out.sum_from;
  args.sum_to = out.sum_to;
  args.window = b.window;
  args.scale = static_cast<float>(b.scale);
  args.block_size = b.block_size;
  const bool keys = out.d_k.defined() || out.d_v.defined();
  const std::int64_t width = b.q.size(-1) + b.v.size(-1), pairs = static_cast<std::int64_t>(g.batches) * g.kv_heads;
  InverseArgs inverse{};
  if (b.indices) {
    args.indices = strided(*b.indices);
    args.topk = to_int(b.indices->size(-1));
  }
  if (keys && b.indices) {
    inverse.geometry = g;
    inverse.indices = args.indices;
    inverse.topk = args.topk;
    inverse.block_size = b.block_size;
    inverse.blocks = to_int(tiles(g.k_len, b.block_size));
    inverse.chunks = to_int(std::clamp<std::int64_t>(tiles(g.q_len, 128), 1, 128));
    inverse.tiles_per_block = to_int(tiles(b.block_size, 64));
    inverse.item_queries = args.chunk = kListChunk;
    inverse.list_size = static_cast<std::int64_t>(g.q_len) * std::min(args.topk, inverse.blocks);
    args.blocks = inverse.blocks;
    args.key_tiles = inverse.blocks * inverse.tiles_per_block;
    args.items = args.key_tiles + inverse.list_size * inverse.tiles_per_block / kListChunk;
    args.list_size = inverse.list_size;
    inverse.offsets = e.arena.take<int>(pairs * inverse.chunks * inverse.blocks);
    args.list = inverse.list = e.arena.take<int>(pairs * inverse.list_size);
    args.list_begin = inverse.list_begin = e.arena.take<int>(pairs * (inverse.blocks + 1));
    args.item_begin = inverse.item_begin = e.arena.take<int>(pairs * (args.key_tiles + 1));
    args.partials = e.arena.take<float>(pairs * args.items * 64 * width);
  } else if (keys) {
    const std::int64_t key_rows =
        b.window ? g.k_len : (g.k_len >= g.kernel_size ? (g.k_len - g.kernel_size) / g.kernel_stride + 1 : 0);
    const std::int64_t queries =
        b.window ? std::min<std::int64_t>(g.q_len, static_cast<std::int64_t>(b.window) + 64) : g.q_len;
    args.chunk = kRangeChunk;
    args.chunks = to_int(std::max<std::int64_t>(tiles(queries, kRangeChunk), 1));
    args.items = tiles(key_rows, 64) * args.chunks;
    if (args.chunks > 1) args.partials = e.arena.take<float>(pairs * args.items * 64 * width);
  }
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  const AttentionKernels& kernels = kernels_of(b.q, b.v);
  if (out.d_q.defined() || out.sum_to.data) {
    const Status s = b.indices ? status_of(kernels.selected_d_q(args, e.stream), "selected_d_q")
                               : status_of(kernels.range_d_q(args, e.stream), "range_d_q");
    if (!s.ok()) return s;
  }
  if (Status s = fill(out.d_q, packed.cu_seqlens_q, 0, nullptr, e.stream); !s.ok()) return s;
  if (!keys) return {};
  const TensorView& cu_k = packed.cu_seqlens_k.defined() ? packed.cu_seqlens_k : packed.cu_seqlens_q;
  for (const TensorView* t : {&out.d_k, &out.d_v})
    if (Status s = fill(*t, cu_k, 0, compressed, e.stream); !s.ok()) return s;
  if (b.indices)
    if (Status s = status_of(build_inverse_index(inverse, e.stream), "build_inverse_index"); !s.ok()) return s;
  return status_of(kernels.d_kv(args, e.stream), "d_kv");
}

/// Backward of one branch on its own: delta first.
template <class Params>
Status single_backward(const Params& p, const TensorView& d_k, const TensorView& d_v, const NSAConfig* compressed,
                       Execution& e) {
  const Branch b = branch_of(p.forward);
  const PerRow delta = take_rows(e.arena, b.q);
  if (!e.arena.measuring()) {
    if (!e.arena.enough()) return out_of_workspace(e.arena);
    const Rows r = rows_of(p.d_o, 2);
    CombineBackwardArgs args{};
    args.d_o = strided(p.d_o);
    args.branches = 1;
    args.o[0] = strided(p.forward.o);
    args.delta[0] = delta;
    args.rows = r.rows;
    args.heads = to_int(p.d_o.size(-2));
    args.dim = to_int(p.d_o.size(-1));
    if (Status s =
            status_of(element_kernels(b.q.dtype)->combine_backward(args, r.batches, e.stream), "combine_backward");
        !s.ok())
      return s;
  }
  return backward(b, p.d_o, p.forward.lse, delta, {}, {p.d_q, d_k, d_v, {}, {}}, p.forward.packed, compressed, e);
}

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
  args.first_token = e.arena.take<std::int64_t>(args.rows);
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

Status compress(const CompressParams& p, Execution& e) {
  const CompressArgs args = compress_args(p, e, false);
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  return status_of(element_kernels(p.k.dtype)->compress(args, e.stream), "compress");
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

Status compressed_attention(const CompressedAttentionParams& p, Execution& e) {
  return forward(branch_of(p), p.o, p.lse, p.packed, e);
}
Status selected_attention(const SelectedAttentionParams& p, Execution& e) {
  return forward(branch_of(p), p.o, p.lse, p.packed, e);
}
Status sliding_window_attention(const SlidingWindowAttentionParams& p, Execution& e) {
  return forward(branch_of(p), p.o, p.lse, p.packed, e);
}

Status compressed_attention_backward(const CompressedAttentionBackwardParams& p, Execution& e) {
  return single_backward(p, p.d_k_c, p.d_v_c, &p.forward.cfg, e);
}
Status selected_attention_backward(const SelectedAttentionBackwardParams& p, Execution& e) {
  return single_backward(p, p.d_k, p.d_v, nullptr, e);
}
Status sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams& p, Execution& e) {
  return single_backward(p, p.d_k, p.d_v, nullptr, e);
}

Status select_blocks(const SelectBlocksParams& p, Execution& e) {
  const bool packed = p.packed.packed();
  SelectArgs args{};
  args.geometry = geometry_of(p.q, p.k_c.size(-2), p.seqlen_k.value_or(packed ? 0 : p.q.size(1)),
                              packed ? raw_total(p.k_c, p.cfg) : 0, p.packed, p.cfg);
  const Geometry& g = args.geometry;
  args.q = strided(p.q);
  args.k = strided(p.k_c);
  args.lse = per_row(p.lse);
  args.indices = strided(p.indices);
  args.topk = p.cfg.topk;
  args.block_size = p.cfg.block_size;
  args.init_blocks = p.cfg.init_blocks;
  args.local_blocks = p.cfg.local_blocks;
  args.scale = static_cast<float>(scale_of(p.softmax_scale, p.q));
  args.noise = static_cast<float>(p.noise);
  args.seed = p.seed;
  args.inverse_stride = 1.0f / static_cast<float>(p.cfg.kernel_stride);
  args.share =
      static_cast<float>(p.cfg.kernel_stride) / (static_cast<float>(g.group) * static_cast<float>(p.cfg.kernel_size));
  args.queries = std::clamp(64 / std::max(g.group, 1), 1, 16);
  args.tiles = to_int(tiles(g.q_len, args.queries));
  args.scratch_keys = tiles(p.cfg.num_compressed(g.k_len), 64) * 64;
  args.scratch_blocks = tiles(g.k_len, p.cfg.block_size);
  // As many thread blocks as keep the device busy, fewer where their scratch would pass 256 MiB.
  const std::int64_t bytes = args.queries * (args.scratch_keys + args.scratch_blocks) * 4;
  const std::int64_t work = static_cast<std::int64_t>(args.tiles) * g.kv_heads * g.batches;
  const std::int64_t blocks =
      std::clamp<std::int64_t>((std::int64_t{256} << 20) / std::max<std::int64_t>(bytes, 1), 16, 512);
  const int count = to_int(std::min(blocks, work));
  args.scratch = e.arena.take<float>(count * bytes / 4);
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  if (Status s = fill(p.indices, p.packed.cu_seqlens_q, 0xffffffffu, nullptr, e.stream); !s.ok()) return s;
  return status_of(element_kernels(p.q.dtype)->select_blocks(args, to_int(p.q.size(-1)), count, e.stream),
                   "select_blocks");
}

Status combine(const CombineParams& p, Execution& e) {
  if (e.arena.measuring()) return {};
  const Rows r = rows_of(p.o, 2);
  CombineArgs args{{strided(p.o_cmp), strided(p.o_slc), strided(p.o_swa)},
                   strided(p.gates),
                   strided(p.o),
                   r.rows,
                   to_int(p.o.size(-2)),
                   to_int(p.o.size(-1))};
  return status_of(element_kernels(p.o.dtype)->combine(args, r.batches, e.stream), "combine");
}

namespace {
CombineBackwardArgs combine_backward_args(const TensorView& d_o, const TensorView& o_cmp, const TensorView& o_slc,
                                          const TensorView& o_swa, const TensorView& gates, const TensorView& d_gates) {
  CombineBackwardArgs args{};
  args.d_o = strided(d_o);
  args.branches = 3;
  args.o[0] = strided(o_cmp);
  args.o[1] = strided(o_slc);
  args.o[2] = strided(o_swa);
  args.gates = strided(gates);
  args.d_gates = strided(d_gates);
  args.rows = rows_of(d_o, 2).rows;
  args.heads = to_int(d_o.size(-2));
  args.dim = to_int(d_o.size(-1));
  return args;
}
}  // namespace

Status combine_backward(const CombineBackwardParams& p, Execution& e) {
  if (e.arena.measuring()) return {};
  CombineBackwardArgs args =
      combine_backward_args(p.d_o, p.forward.o_cmp, p.forward.o_slc, p.forward.o_swa, p.forward.gates, p.d_gates);
  args.d_branch[0] = strided(p.d_o_cmp);
  args.d_branch[1] = strided(p.d_o_slc);
  args.d_branch[2] = strided(p.d_o_swa);
  return status_of(element_kernels(p.d_o.dtype)->combine_backward(args, rows_of(p.d_o, 2).batches, e.stream),
                   "combine_backward");
}

namespace {

/// A view like `t` on memory of the arena.
TensorView take_like(Arena& arena, const TensorView& t, DType dtype) {
  TensorView view = t;
  view.dtype = dtype;
  view.data = arena.take<char>(t.numel() * static_cast<std::int64_t>(size_of(dtype)));
  std::int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    view.stride[static_cast<std::size_t>(i)] = stride;
    stride *= t.size(i);
  }
  return view;
}

/// The three branches of a whole call.
struct Branches {
  CompressedAttentionParams cmp;
  SelectedAttentionParams slc;
  SlidingWindowAttentionParams swa;
};

Branches branches_of(const NsaAttentionParams& p) {
  Branches b;
  const std::optional<std::int64_t> k_len =
      p.packed.packed() ? std::nullopt : std::optional<std::int64_t>(p.k_slc.size(1));
  b.cmp = {p.q, p.k_c, p.v_c, p.cfg, p.softmax_scale, k_len, p.packed, p.o_cmp, p.lse_cmp};
  b.slc = {p.q,
           p.k_slc,
           p.v_slc,
           p.imposed_indices.defined() ? p.imposed_indices : p.indices,
           p.cfg.block_size,
           p.softmax_scale,
           p.packed,
           p.o_slc,
           p.lse_slc};
  b.swa = {p.q, p.k_swa, p.v_swa, p.cfg.window_size, p.softmax_scale, p.packed, p.o_swa, p.lse_swa};
  return b;
}

}  // namespace

Status nsa_attention(const NsaAttentionParams& p, Execution& e) {
  // What the caller does not want to keep lives in the workspace.
  NsaAttentionParams kept = p;
  TensorView lse;
  lse.dtype = DType::kFloat32;
  lse.device = p.q.device;
  lse.rank = p.q.rank - 1;
  if (p.q.rank == 4) {
    lse.shape = {p.q.size(0), p.q.size(2), p.q.size(1)};
  } else {
    lse.shape = {p.q.size(1), p.q.size(0)};
  }
  for (TensorView NsaAttentionParams::*t :
       {&NsaAttentionParams::o_cmp, &NsaAttentionParams::o_slc, &NsaAttentionParams::o_swa})
    if (!(kept.*t).defined()) kept.*t = take_like(e.arena, p.o, p.o.dtype);
  for (TensorView NsaAttentionParams::*t :
       {&NsaAttentionParams::lse_cmp, &NsaAttentionParams::lse_slc, &NsaAttentionParams::lse_swa})
    if (!(kept.*t).defined()) kept.*t = take_like(e.arena, lse, DType::kFloat32);
  if (!kept.indices.defined()) {
    TensorView indices = p.q;
    indices.shape[static_cast<std::size_t>(p.q.rank - 2)] = p.k_c.size(-2);
    indices.shape[static_cast<std::size_t>(p.q.rank - 1)] = p.cfg.topk;
    kept.indices = take_like(e.arena, indices, DType::kInt32);
  }
  const Branches b = branches_of(kept);
  const SelectBlocksParams select{kept.q,         kept.k_c,   kept.lse_cmp, kept.cfg,    kept.softmax_scale,
                                  b.cmp.seqlen_k, kept.noise, kept.seed,    kept.packed, kept.indices};
  const CombineParams sum{kept.o_cmp, kept.o_slc, kept.o_swa, kept.gates, kept.o};
  if (Status s = compressed_attention(b.cmp, e); !s.ok()) return s;
  if (Status s = select_blocks(select, e); !s.ok()) return s;
  if (Status s = selected_attention(b.slc, e); !s.ok()) return s;
  if (Status s = sliding_window_attention(b.swa, e); !s.ok()) return s;
  if (Status s = combine(sum, e); !s.ok() || e.arena.measuring()) return s;
  return fill(p.o, p.packed.cu_seqlens_q, 0, nullptr, e.stream);  // rows past the end: the gates there may be NaN
}

Status nsa_attention_backward(const NsaAttentionBackwardParams& p, Execution& e) {
  const NsaAttentionParams& f = p.forward;
  PerRow delta[3], gate[3];
  for (int i = 0; i < 3; ++i) delta[i] = take_rows(e.arena, f.q), gate[i] = take_rows(e.arena, f.q);
  const TensorView sum = p.d_q.defined() ? take_like(e.arena, f.q, DType::kFloat32) : TensorView{};
  if (!e.arena.measuring()) {
    if (!e.arena.enough()) return out_of_workspace(e.arena);
    CombineBackwardArgs args = combine_backward_args(p.d_o, f.o_cmp, f.o_slc, f.o_swa, f.gates, p.d_gates);
    for (int i = 0; i < 3; ++i) args.delta[i] = delta[i], args.gate[i] = gate[i];
    if (Status s = status_of(element_kernels(f.q.dtype)->combine_backward(args, rows_of(p.d_o, 2).batches, e.stream),
                             "combine_backward");
        !s.ok())
      return s;
    if (Status s = fill(p.d_gates, f.packed.cu_seqlens_q, 0, nullptr, e.stream); !s.ok()) return s;
  }
  const Branches b = branches_of(f);
  // The branches run one after the other, so they can share the rest of the workspace.
  const Arena rest = e.arena;
  std::size_t most = rest.used();
  const auto run = [&](const Branch& branch, int i, const TensorView& lse, const TensorView& d_k,
                       const TensorView& d_v) {
    e.arena = rest;
    const NSAConfig* compressed = i == 0 ? &f.cfg : nullptr;
    const Strided float_sum = strided(sum);
    const Status s = backward(
        branch, p.d_o, lse, delta[i], gate[i],
        {i == 2 ? p.d_q : TensorView{}, d_k, d_v, i > 0 ? float_sum : Strided{}, i < 2 ? float_sum : Strided{}},
        f.packed, compressed, e);
    most = std::max(most, e.arena.used());
    return s;
  };
  if (Status s = run(branch_of(b.cmp), 0, f.lse_cmp, p.d_k_c, p.d_v_c); !s.ok()) return s;
  if (Status s = run(branch_of(b.slc), 1, f.lse_slc, p.d_k_slc, p.d_v_slc); !s.ok()) return s;
  if (Status s = run(branch_of(b.swa), 2, f.lse_swa, p.d_k_swa, p.d_v_swa); !s.ok()) return s;
  if (e.arena.measuring()) e.arena.take<char>(static_cast<std::int64_t>(most - std::min(most, e.arena.used())));
  return {};
}

cudaError_t build_inverse_index(const InverseArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  const dim3 grid(static_cast<unsigned>(args.chunks), g.kv_heads, g.batches);
  cudaError_t error = launch(mark_queries<false>, grid, 256, 0, stream, args);
  if (error == cudaSuccess) error = launch(scan_queries, dim3(1, g.kv_heads, g.batches), 1024, 0, stream, args);
  if (error == cudaSuccess) error = launch(mark_queries<true>, grid, 256, 0, stream, args);
  return error;
}

const AttentionKernels* attention_kernels(DType dtype, int key_dim, int value_dim) {
  const auto of = [&]<class T>() -> const AttentionKernels* {
    if (key_dim == 64 && value_dim == 64) return &attention_instance<T, 64, 64>();
    if (key_dim == 128 && value_dim == 128) return &attention_instance<T, 128, 128>();
    if (key_dim == 192 && value_dim == 128) return &attention_instance<T, 192, 128>();
    return nullptr;
  };
  if (dtype == DType::kBFloat16) return of.operator()<Bf16>();
  if (dtype == DType::kFloat16) return of.operator()<Half>();
  if (dtype == DType::kFloat32) return of.operator()<float>();
  return nullptr;
}

const ElementKernels* element_kernels(DType dtype) {
  if (dtype == DType::kBFloat16) return &element_instance<Bf16>();
  if (dtype == DType::kFloat16) return &element_instance<Half>();
  if (dtype == DType::kFloat32) return &element_instance<float>();
  return nullptr;
}

}  // namespace nsa::cuda::portable
