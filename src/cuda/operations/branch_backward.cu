#include "cuda/operations/branch_backward.h"

#include "cuda/common/fill.h"
#include "cuda/operations/stored_selection.h"
#include "cuda/sm90/common/d_kv_item.h"
#include "cuda/sm90/common/row_terms.h"
#include "cuda/sm90/range_attention/d_kv_chunks.h"
#include "cuda/sm90/selected_attention/d_kv_schedule.h"

namespace nsa::cuda {

namespace {

/// A portable kernel, alone or as the fallback behind another one.
template <class Kernel>
Status run_portable(const Kernel& kernel, const Prepared& x, bool is_fallback, const char* name, Execution& e) {
  BackwardArgs args = x.args;
  if (!is_fallback) args.fallback = {};
  return status_of(kernel(args, e.stream), name);
}

/// The kernel of sm90, if there is one.
template <class Kernel>
Status run_hopper(const Kernel& kernel, const Prepared& x, const char* name, Execution& e) {
  return kernel ? status_of(kernel(x.args, e.stream), name) : Status();
}

/// dQ of a range, or of two of the same queries at once.
Status run_ranges(const Prepared& x, const Prepared* more, Execution& e) {
  const BackwardArgs* second = more ? &more->args : nullptr;
  const auto hopper = x.hopper.range_d_q;
  const auto portable = kernels_of(x.branch->q, x.branch->v).range_d_q;
  if (hopper)
    if (Status s = status_of(hopper(x.args, second, e.stream), "range_d_q"); !s.ok()) return s;
  const auto kernel = [&](const BackwardArgs& args, cudaStream_t stream) { return portable(args, second, stream); };
  return run_portable(kernel, x, hopper, "range_d_q", e);
}

}  // namespace

PerRow take_rows(Arena& arena, const TensorView& q) {
  const Rows r = q.rank == 4 ? Rows{to_int(q.size(0)), to_int(q.size(1))} : Rows{1, to_int(q.size(0))};
  const std::int64_t heads = q.size(-2);
  return {.data = arena.take<float>(r.batches * heads * r.rows), .batch = heads * r.rows, .head = r.rows, .row = 1};
}

std::optional<std::int64_t> ds_budget_for(const Branch& b, const TensorView& d_o, bool queries, const TensorView& d_k,
                                          const TensorView& d_v) {
  const sm90::Kernels hopper = hopper_kernels(b, d_o);
  const bool compressed = !b.indices && b.window == 0, keys = d_k.defined() || d_v.defined();
  if (!compressed || !keys || !queries || hopper.range_d_kv || hopper.range_d_q) return {};
  return ds_budget_of(b.geometry, b.q.dtype, b.q.size(-1));
}

Prepared prepare(const Branch& b, const TensorView& d_o, const TensorView& lse, PerRow delta, PerRow gate,
                 const BranchGradients& out, std::optional<std::int64_t> ds_budget, bool stored, int* flag,
                 Execution& e) {
  const Geometry& g = b.geometry;
  Prepared x;
  x.branch = &b;
  x.out = &out;
  x.keys = out.d_k.defined() || out.d_v.defined();
  x.selected = b.indices != nullptr;
  x.hopper = hopper_kernels(b, d_o);
  BackwardArgs& args = x.args;
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
  args.fallback.flag = flag;
  x.ds_budget = ds_budget;
  if (b.indices) {
    args.indices = strided(*b.indices);
    args.topk = to_int(b.indices->size(-1));
  }
  if (x.keys) take_key_memory(x, !stored, e.arena);
  return x;
}

void take_key_memory(Prepared& x, bool hopper, Arena& arena) {
  Branch b = *x.branch;
  BackwardArgs& args = x.args;
  const Geometry& g = b.geometry = args.geometry;
  const std::int64_t width = b.q.size(-1) + b.v.size(-1);
  const RowPrefix all = end_prefix(g);
  std::int64_t schedule_bytes = 0;  // bytes for the kernels of sm90
  if (b.indices) {
    x.inverse = take_lists(b, arena, args.windows.stored);
    x.inverse.indices = args.indices;
    const InverseIndex& lists = args.lists = x.inverse.lists;
    args.items = args.items_before(all);
    args.partial_items = args.partials_before(lists.entries, lists.slots);
    std::int64_t partials = args.windows.stored ? 0 : g.kv_heads * args.partial_items;
    if (hopper && x.hopper.selected_d_kv) {
      const sm90::selected_attention::ListWork work(g, lists, args.windows.several);
      schedule_bytes = work.bytes();
      partials = std::max(partials, work.partials);
    }
    args.partials = arena.take<float>(partials * kKeyTile * width);
  } else {
    args.chunks = max_range_chunks(b.window, g.q_len);
    args.items = args.items_before(all);
    if (args.chunks > 1) args.partial_items = args.partials_before(all);
    if (x.ds_budget) take_ds_buffer(args, width, *x.ds_budget, arena);
    std::int64_t partials = g.kv_heads * args.partial_items * kKeyTile * width;
    if (hopper && x.hopper.range_d_kv) {
      const sm90::range_attention::RangeWork work(g, b.window);
      schedule_bytes = work.items * static_cast<std::int64_t>(sizeof(sm90::KeyItem));
      partials = std::max(partials, g.kv_heads * work.partials * sm90::range_attention::kRangeKeys * width);
    }
    args.partials = arena.take<float>(partials);
  }
  if (schedule_bytes > 0) {
    args.schedule = arena.take<char>(schedule_bytes);
    args.row_terms = arena.take<float>(sm90::RowTerms(g, nullptr).floats());
  }
}

Prepared span_of(Prepared x, const QuerySpan& span) {
  BackwardArgs& args = x.args;
  args.geometry = span_of(args.geometry, span);
  const std::int64_t size = static_cast<std::int64_t>(size_of(x.branch->q.dtype));
  const auto move = [&](Strided& t, int first, std::int64_t bytes) {
    if (t.data) t.data = static_cast<char*>(t.data) + (span.sequence * t.batch + first * t.row) * bytes;
  };
  for (Strided* t : {&args.q, &args.d_o, &args.d_q}) move(*t, span.first, size);
  for (Strided* t : {&args.k, &args.v, &args.d_k, &args.d_v}) move(*t, 0, size);
  for (Strided* t : {&args.indices, &args.lists.entry_slots}) move(*t, span.first, sizeof(int));
  for (PerRow* t : {&args.lse, &args.delta, &args.gate})
    if (t->data) t->data += span.sequence * t->batch + span.first * t->row;
  if (DsBuffer& stored = args.ds_buffer; stored.sums) {
    stored.sums += span.sequence * stored.sums_sequence;
    stored.chunk_sums += span.sequence * stored.sums_sequence;
    stored.first = span.first;
    cut(args);
  }
  return x;
}

Status run_queries(const Prepared& x, Execution& e) {
  if (!x.selected) return run_ranges(x, nullptr, e);
  const auto hopper = x.hopper.selected_d_q;
  if (Status s = run_hopper(hopper, x, "selected_d_q", e); !s.ok()) return s;
  return run_portable(kernels_of(x.branch->q, x.branch->v).selected_d_q, x, hopper, "selected_d_q", e);
}

Status launch_queries_fallback(const Prepared& x, Execution& e) {
  return run_portable(kernels_of(x.branch->q, x.branch->v).selected_d_q, x, true, "selected_d_q", e);
}

Status launch_keys_fallback(const Prepared& x, const Packed& packed, Execution& e) {
  const portable::AttentionKernels& kernels = kernels_of(x.branch->q, x.branch->v);
  const TensorView& cu_k = packed.cu_seqlens_k.defined() ? packed.cu_seqlens_k : packed.cu_seqlens_q;
  if (Status s = fill({{x.out->d_k, 0}, {x.out->d_v, 0}}, cu_k, nullptr, e.stream); !s.ok()) return s;
  InverseArgs inverse = x.inverse;
  inverse.wanted = x.args.fallback.flag;
  if (Status s = status_of(build_inverse_index(inverse, e.stream), "build_inverse_index"); !s.ok()) return s;
  if (Status s = run_portable(kernels.d_kv, x, true, "d_kv", e); !s.ok()) return s;
  return run_portable(kernels.sum_partials, x, true, "sum_partials", e);
}

Status run_both(const Prepared& compressed, const Prepared& window, Execution& e) {
  if (!compressed.hopper.range_d_q == !window.hopper.range_d_q) return run_ranges(compressed, &window, e);
  if (Status s = run_queries(compressed, e); !s.ok()) return s;
  return run_queries(window, e);
}

Status run_keys(const Prepared& x, const Packed& packed, const NSAConfig* compressed, Execution& e) {
  if (!x.keys) return {};
  const TensorView& cu_k = packed.cu_seqlens_k.defined() ? packed.cu_seqlens_k : packed.cu_seqlens_q;
  const portable::AttentionKernels& kernels = kernels_of(x.branch->q, x.branch->v);
  const auto hopper = x.selected ? x.hopper.selected_d_kv : x.hopper.range_d_kv;
  if (Status s = fill({{x.out->d_k, 0}, {x.out->d_v, 0}}, cu_k, compressed, e.stream); !s.ok()) return s;
  if (x.selected)
    if (Status s = status_of(build_inverse_index(x.inverse, e.stream), "build_inverse_index"); !s.ok()) return s;
  if (Status s = run_hopper(hopper, x, "d_kv", e); !s.ok()) return s;
  if (Status s = run_portable(kernels.d_kv, x, hopper, "d_kv", e); !s.ok()) return s;
  return run_portable(kernels.sum_partials, x, hopper, "sum_partials", e);
}

Status begin_spans(const Prepared& x, Execution& e) {
  const DsBuffer& stored = x.args.ds_buffer;
  if (!stored.sums) return {};
  const std::int64_t floats = 2 * stored.sums_head * x.args.geometry.kv_heads;
  return status_of(cudaMemsetAsync(stored.sums, 0, static_cast<std::size_t>(floats) * sizeof(float), e.stream),
                   "cudaMemsetAsync");
}

template <class Params>
Status single_backward(const Params& p, const TensorView& d_k, const TensorView& d_v, const NSAConfig* compressed,
                       Execution& e) {
  const Branch b = branch_of(p.forward);
  const PerRow delta = take_rows(e.arena, b.q);
  int* flag = e.arena.take<int>(1);
  const BranchGradients out{.d_q = p.d_q, .d_k = d_k, .d_v = d_v};
  const bool queries = p.d_q.defined();
  StoredSelection stored(b, p.d_o, queries, d_k, d_v);
  stored.take_sums(e.arena);
  const Arena rest = e.arena;
  const Prepared x = prepare(b, p.d_o, p.forward.lse, delta, {}, out, ds_budget_for(b, p.d_o, queries, d_k, d_v),
                             static_cast<bool>(stored), flag, e);
  stored.take_windows(x, rest, e.arena);
  if (e.arena.measuring()) return {};
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
  const NonfiniteArgs inputs{.tensors = {checked(b.k), checked(b.v)},
                             .queries = checked(b.q),
                             .lse = {x.args.lse},
                             .delta = {delta},
                             .flag = flag};
  const Packed& packed = p.forward.packed;
  const auto row_terms = portable::element_kernels(b.q.dtype)->combine_backward;
  if (Status s = status_of(row_terms(args, r.batches, e.stream), "combine_backward"); !s.ok()) return s;
  if (any(x.hopper))
    if (Status s = status_of(find_nonfinite(b.q.dtype, inputs, e.stream), "find_nonfinite"); !s.ok()) return s;
  if (stored) {
    if (Status s = stored.begin(e); !s.ok()) return s;
    for (const QuerySpan& span : stored.windows()) {
      Arena arena = rest;
      const Prepared window = stored.window(x, span, arena);
      if (Status s = stored.run_keys(window, e); !s.ok()) return s;
      if (Status s = stored.run_queries(window, e); !s.ok()) return s;
    }
    if (Status s = launch_queries_fallback(x, e); !s.ok()) return s;
    if (Status s = launch_keys_fallback(x, packed, e); !s.ok()) return s;
  } else if (x.ds_budget) {
    if (Status s = begin_spans(x, e); !s.ok()) return s;
    for (const QuerySpan& span : spans_of(x.args.geometry, x.ds_budget)) {
      const Prepared some = span_of(x, span);
      if (Status s = run_keys(some, packed, compressed, e); !s.ok()) return s;
      if (Status s = run_queries(some, e); !s.ok()) return s;
    }
  } else {
    if (queries)
      if (Status s = run_queries(x, e); !s.ok()) return s;
    if (Status s = run_keys(x, packed, compressed, e); !s.ok()) return s;
  }
  return fill({{p.d_q, 0}}, packed.cu_seqlens_q, nullptr, e.stream);
}

template Status single_backward(const CompressedAttentionBackwardParams&, const TensorView&, const TensorView&,
                                const NSAConfig*, Execution&);
template Status single_backward(const SelectedAttentionBackwardParams&, const TensorView&, const TensorView&,
                                const NSAConfig*, Execution&);
template Status single_backward(const SlidingWindowAttentionBackwardParams&, const TensorView&, const TensorView&,
                                const NSAConfig*, Execution&);

}  // namespace nsa::cuda
