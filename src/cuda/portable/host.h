// From the public parameters to the arguments of kernels: what the operations of this folder share on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "core/backend.h"
#include "cuda/portable/launch.cuh"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/maps.h"
#include "cuda/sm90/nonfinite.h"

namespace nsa::cuda::portable {

inline Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Status::internal(std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

inline Status out_of_workspace(const Arena& arena) {
  return Status::invalid_argument("workspace: too small, this call needs " + std::to_string(arena.used()) + " bytes");
}

inline Strided strided(const TensorView& t) {
  if (!t.defined()) return {};
  const bool batched = t.rank == 4;
  return {t.data, batched ? t.stride[0] : 0, t.stride[batched ? 1 : 0], t.stride[batched ? 2 : 1]};
}

inline PerRow per_row(const TensorView& t) {
  if (!t.defined()) return {};
  const bool batched = t.rank == 3;
  return {t.as<float>(), batched ? t.stride[0] : 0, t.stride[batched ? 1 : 0], t.stride[batched ? 2 : 1]};
}

inline int to_int(std::int64_t x) { return static_cast<int>(x); }

/// Batches and rows of a batch of a (B, S, ...) or (total, ...) tensor with `trailing` further dimensions.
struct Rows {
  int batches, rows;
};
inline Rows rows_of(const TensorView& t, int trailing) {
  return t.rank == trailing + 2 ? Rows{to_int(t.size(0)), to_int(t.size(1))} : Rows{1, to_int(t.size(0))};
}

inline Geometry geometry_of(const TensorView& q, std::int64_t kv_heads, std::int64_t k_len, std::int64_t total_k,
                            const Packed& packed, const NSAConfig& cfg) {
  Geometry g;
  g.heads = to_int(q.size(-2));
  g.kv_heads = to_int(kv_heads);
  g.group = g.kv_heads ? g.heads / g.kv_heads : 0;
  g.by_group = Divider(g.group);
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

inline double scale_of(const std::optional<double>& scale, const TensorView& q) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))));
}

inline const AttentionKernels& kernels_of(const TensorView& q, const TensorView& v) {
  return *attention_kernels(q.dtype, q.size(-1), v.size(-1));
}

/// Raw tokens behind compressed keys of packed sequences: only an upper bound is known, d per row and the last block.
inline std::int64_t raw_total(const TensorView& k_c, const NSAConfig& cfg) {
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

inline Branch branch_of(const CompressedAttentionParams& p) {
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
inline Branch branch_of(const SelectedAttentionParams& p) {
  return {p.q, p.k, p.v, raw_geometry(p), 0, &p.indices, p.block_size, scale_of(p.softmax_scale, p.q)};
}
inline Branch branch_of(const SlidingWindowAttentionParams& p) {
  return {p.q,
          p.k,
          p.v,
          raw_geometry(p),
          to_int(std::min<std::int64_t>(p.window_size, 1 << 30)),
          nullptr,
          0,
          scale_of(p.softmax_scale, p.q)};
}

/// The kernels of compute capability 9.0 that can serve this branch here.
inline sm90::Kernels hopper_kernels(const Branch& b, const TensorView& rows,
                                    const std::optional<NSAConfig>& selection = {}) {
  sm90::Call call;
  call.dtype = b.q.dtype;
  call.key_dim = b.q.size(-1);
  call.value_dim = b.v.size(-1);
  call.group = b.geometry.group;
  call.block_size = b.indices ? b.block_size : 0;
  call.topk = b.indices ? to_int(b.indices->size(-1)) : 0;
  for (const TensorView* t : {&b.q, &b.k, &b.v, &rows}) call.mappable &= sm90::mappable(strided(*t));
  call.selection = selection;
  return sm90::kernels_on(b.q.device.index, call);
}

/// The lists of queries that chose each block (inverse_index.cu), in memory of the arena; and their making.
InverseArgs take_lists(const Branch& b, Arena& arena);
cudaError_t build_inverse_index(const InverseArgs& args, cudaStream_t stream);

inline sm90::Checked checked(const TensorView& t) {
  const Rows r = rows_of(t, 2);
  return {strided(t), static_cast<std::int64_t>(r.batches) * r.rows, std::max(r.rows, 1), to_int(t.size(-2)),
          to_int(t.size(-1))};
}

/// Packed rows from cu's last offset on (with `compressed`: from the last compressed token of the sequences on) get
/// `value`. Nothing without offsets.
Status fill(const TensorView& t, const TensorView& cu, unsigned value, const NSAConfig* compressed,
            cudaStream_t stream);

/// Both, which have the same cfg and cu_seqlens, by one launch of each kernel where they have the same shapes, too.
/// second may be null.
Status compress(const CompressParams& p, const CompressParams* second, Execution& e);
Status compress_backward(const CompressBackwardParams& p, const CompressBackwardParams* second, Execution& e);
/// By the kernels of this folder; of batched tokens sequence b's first completed[b * step] blocks are wanted, the other
/// rows become 0. completed null: all.
Status compress(const CompressParams& p, const CompressParams* second, const int* completed, int step, Execution& e);

inline Rotation rotation_of(const TensorView& cos, const TensorView& sin) {
  if (!cos.defined()) return {};
  return {cos.as<const float>(), sin.as<const float>(), cos.stride[0], sin.stride[0], to_int(cos.size(0))};
}

/// Floats of a row of sums over compressed keys.
inline std::int64_t scratch_keys_of(const NSAConfig& cfg, const Geometry& g) {
  return tiles(cfg.num_compressed(g.k_len), 64) * 64;
}

/// What the selection of blocks takes from the configuration and from the shapes in args.geometry; no noise.
template <class Args>
void set_selection(Args& args, const NSAConfig& cfg, double scale) {
  const Geometry& g = args.geometry;
  args.topk = cfg.topk;
  args.block_size = cfg.block_size;
  args.init_blocks = cfg.init_blocks;
  args.local_blocks = cfg.local_blocks;
  args.scale = static_cast<float>(scale);
  args.inverse_stride = 1.0f / static_cast<float>(cfg.kernel_stride);
  args.share =
      static_cast<float>(cfg.kernel_stride) / (static_cast<float>(g.group) * static_cast<float>(cfg.kernel_size));
  args.queries = std::clamp(64 / std::max(g.group, 1), 1, 16);
  args.tiles = to_int(tiles(g.q_len, args.queries));
  args.scratch_keys = scratch_keys_of(cfg, g);
  args.scratch_blocks = tiles(g.k_len, cfg.block_size);
}

/// Thread blocks that select: as many as keep the device busy, fewer where their scratch would pass 256 MiB.
template <class Args>
int selecting_blocks(const Args& args) {
  const Geometry& g = args.geometry;
  const std::int64_t bytes = args.queries * (args.scratch_keys + args.scratch_blocks) * 4;
  const std::int64_t work = static_cast<std::int64_t>(args.tiles) * g.kv_heads * g.batches;
  const std::int64_t blocks =
      std::clamp<std::int64_t>((std::int64_t{256} << 20) / std::max<std::int64_t>(bytes, 1), 16, 512);
  return to_int(std::min(blocks, work));
}

/// A view like `t` on memory of the arena.
inline TensorView take_like(Arena& arena, const TensorView& t, DType dtype) {
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
  SlidingWindowAttentionParams causal;  // what slc is where every block is selected: a window as long as the sequences
  bool all_selected;                    // they fit into the selection
};

inline Branches branches_of(const NsaAttentionParams& p) {
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
  const std::int64_t longest = raw_geometry(b.slc).k_len;
  b.causal = {p.q, p.k_slc, p.v_slc, std::max<std::int64_t>(longest, 1), p.softmax_scale, p.packed, p.o_slc, p.lse_slc};
  b.all_selected = !p.imposed_indices.defined() && longest <= std::int64_t{p.cfg.topk} * p.cfg.block_size;
  return b;
}

}  // namespace nsa::cuda::portable
