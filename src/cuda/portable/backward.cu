// The backward operations of the portable backend but compress_backward: arguments of kernels, and their launches.
#include "cuda/portable/host.h"
#include "cuda/portable/inverse_index.cuh"

namespace nsa::cuda::portable {

namespace {

/// The lists of queries that chose each block.
cudaError_t build_inverse_index(const InverseArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  const dim3 grid(static_cast<unsigned>(args.chunks), g.kv_heads, g.batches);
  cudaError_t error = launch(mark_queries<false>, grid, 256, 0, stream, args);
  if (error == cudaSuccess) error = launch(scan_queries, dim3(1, g.kv_heads, g.batches), 1024, 0, stream, args);
  if (error == cudaSuccess) error = launch(mark_queries<true>, grid, 256, 0, stream, args);
  return error;
}

/// A float32 array shaped like lse.
PerRow take_rows(Arena& arena, const TensorView& q) {
  const Rows r = q.rank == 4 ? Rows{to_int(q.size(0)), to_int(q.size(1))} : Rows{1, to_int(q.size(0))};
  const std::int64_t heads = q.size(-2);
  return {arena.take<float>(r.batches * heads * r.rows), heads * r.rows, r.rows, 1};
}

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
  const Before all = before_end(g);
  InverseArgs inverse{};
  if (b.indices) {
    args.indices = strided(*b.indices);
    args.topk = to_int(b.indices->size(-1));
  }
  if (keys && b.indices) {
    BlockLists& lists = args.lists;
    lists.block_size = b.block_size;
    lists.tiles_per_block = to_int(tiles(b.block_size, 64));
    lists.width = to_int(std::min<std::int64_t>(args.topk, tiles(g.k_len, b.block_size)));
    lists.entries = lists.entries_before(all);
    lists.slots = lists.slots_before(all);
    lists.list = e.arena.take<int>(g.kv_heads * lists.entries);
    lists.begin = e.arena.take<int>(g.kv_heads * lists.slots);
    lists.item_begin = e.arena.take<int>(g.kv_heads * lists.slots * lists.tiles_per_block);
    inverse.geometry = g;
    inverse.indices = args.indices;
    inverse.topk = args.topk;
    inverse.lists = lists;
    inverse.chunks = to_int(std::clamp<std::int64_t>(tiles(g.q_len, 128), 1, 128));
    inverse.offsets = e.arena.take<int>(g.kv_heads * inverse.chunks * lists.slots);
    args.partial_items = args.partials_before(lists.entries, lists.slots);
  } else if (keys) {
    args.chunks = max_range_chunks(b.window, g.q_len);
    if (args.chunks > 1) args.partial_items = args.partials_before(all);
  }
  args.items = keys ? args.items_before(all) : 0;
  args.partials = e.arena.take<float>(g.kv_heads * args.partial_items * 64 * (b.q.size(-1) + b.v.size(-1)));
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

Status compressed_attention_backward(const CompressedAttentionBackwardParams& p, Execution& e) {
  return single_backward(p, p.d_k_c, p.d_v_c, &p.forward.cfg, e);
}
Status selected_attention_backward(const SelectedAttentionBackwardParams& p, Execution& e) {
  return single_backward(p, p.d_k, p.d_v, nullptr, e);
}
Status sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams& p, Execution& e) {
  return single_backward(p, p.d_k, p.d_v, nullptr, e);
}

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

}  // namespace nsa::cuda::portable
