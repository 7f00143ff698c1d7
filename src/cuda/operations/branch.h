// From the public parameters to what the three branches of attention have in common.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/backend.h"
#include "cuda/common/inverse_index.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/views.h"
#include "cuda/portable/instances.h"
#include "cuda/sm90/common/tensor_map.h"
#include "cuda/sm90/heuristics.h"

namespace nsa::cuda {

inline Geometry geometry_of(const TensorView& q, std::int64_t kv_heads, std::int64_t k_len, std::int64_t total_k,
                            const Packed& packed, const NSAConfig& cfg) {
  Geometry g;
  g.heads = to_int(q.size(-2));
  g.kv_heads = to_int(kv_heads);
  g.group = g.kv_heads ? g.heads / g.kv_heads : 0;
  g.by_group = FastDivmod(g.group);
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

inline const portable::AttentionKernels& kernels_of(const TensorView& q, const TensorView& v) {
  return *portable::attention_kernels(q.dtype, q.size(-1), v.size(-1));
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
  return {.q = p.q,
          .k = p.k_c,
          .v = p.v_c,
          .geometry = geometry_of(p.q, p.k_c.size(-2), k_len, packed ? raw_total(p.k_c, p.cfg) : 0, p.packed, p.cfg),
          .scale = scale_of(p.softmax_scale, p.q)};
}
template <class Params>
Geometry raw_geometry(const Params& p) {
  const bool packed = p.packed.packed();
  return geometry_of(p.q, p.k.size(-2), packed ? 0 : p.k.size(1), packed ? p.k.size(0) : 0, p.packed, {});
}
inline Branch branch_of(const SelectedAttentionParams& p) {
  return {.q = p.q,
          .k = p.k,
          .v = p.v,
          .geometry = raw_geometry(p),
          .indices = &p.indices,
          .block_size = p.block_size,
          .scale = scale_of(p.softmax_scale, p.q)};
}
inline Branch branch_of(const SlidingWindowAttentionParams& p) {
  return {.q = p.q,
          .k = p.k,
          .v = p.v,
          .geometry = raw_geometry(p),
          .window = to_int(std::min<std::int64_t>(p.window_size, 1 << 30)),
          .scale = scale_of(p.softmax_scale, p.q)};
}

/// The kernels of compute capability 9.0 that can serve this branch here.
inline sm90::Kernels hopper_kernels(const Branch& b, const TensorView& rows,
                                    const std::optional<NSAConfig>& selection = {}) {
  sm90::AttentionDesc call;
  call.dtype = b.q.dtype;
  call.key_dim = b.q.size(-1);
  call.value_dim = b.v.size(-1);
  call.group = b.geometry.group;
  call.block_size = b.indices ? b.block_size : 0;
  call.topk = b.indices ? to_int(b.indices->size(-1)) : 0;
  for (const TensorView* t : {&b.q, &b.k, &b.v, &rows}) call.tma_compatible &= sm90::tma_compatible(strided(*t));
  call.selection = selection;
  return sm90::kernels_for(b.q.device.index, call);
}

/// The lists of queries that chose each block in memory of the arena. `entry_slots`: also where each entry is in them.
InverseArgs take_lists(const Branch& b, Arena& arena, bool entry_slots = false);

inline Rotation rotation_of(const TensorView& cos, const TensorView& sin) {
  if (!cos.defined()) return {};
  return {.cos = cos.as<const float>(),
          .sin = sin.as<const float>(),
          .cos_row = cos.stride[0],
          .sin_row = sin.stride[0],
          .positions = to_int(cos.size(0))};
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
           p.block_indices.defined() ? p.block_indices : p.indices,
           p.cfg.block_size,
           p.softmax_scale,
           p.packed,
           p.o_slc,
           p.lse_slc};
  b.swa = {p.q, p.k_swa, p.v_swa, p.cfg.window_size, p.softmax_scale, p.packed, p.o_swa, p.lse_swa};
  const std::int64_t longest = raw_geometry(b.slc).k_len;
  b.causal = {p.q, p.k_slc, p.v_slc, std::max<std::int64_t>(longest, 1), p.softmax_scale, p.packed, p.o_slc, p.lse_slc};
  b.all_selected = !p.block_indices.defined() && longest <= std::int64_t{p.cfg.topk} * p.cfg.block_size;
  return b;
}

}  // namespace nsa::cuda
