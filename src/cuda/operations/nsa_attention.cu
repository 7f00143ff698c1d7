// The three branches and their gated sum.
#include <iterator>

#include "cuda/common/fill.h"
#include "cuda/operations/branch_backward.h"
#include "cuda/operations/branch_forward.h"
#include "cuda/operations/operations.h"
#include "cuda/operations/select_blocks.h"
#include "cuda/operations/stored_selection.h"

namespace nsa::cuda {

namespace {

/// Block selection, where its indices are wanted, together with the compressed attention `cmp`: by one kernel where
/// there is one.
Status compressed_and_select(const CompressedAttentionParams& cmp, const SelectBlocksParams& p, NonfiniteGuard& guard,
                             Execution& e) {
  if (!p.indices.defined()) return launch_forward(cmp, guard, e);
  const Branch b = branch_of(cmp);
  const sm90::Kernels hopper = hopper_kernels(b, cmp.o, p.cfg);
  if (!hopper.compressed_select) {
    if (Status s = launch_forward(cmp, guard, e); !s.ok()) return s;
    if (Status s = guard.launch_fallback(); !s.ok()) return s;
    return run(p, e);
  }
  SelectArgs select = select_args(p);
  const int count = selecting_blocks(select);
  // The fallback kernels come later and can share the scratch. Until then the indices are undefined.
  const std::int64_t bytes =
      std::max(sm90::select_blocks::CompressedSelectScratch(b.geometry, b.q.size(-1), select.block_size).bytes(),
               scratch_floats(select, count) * 4);
  void* scratch = e.arena.take<char>(bytes);
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  if (Status s = guard.scan(e); !s.ok()) return s;
  int* flag = guard.flag();
  RangeArgs range = range_args(b, cmp.o, cmp.lse);
  range.fallback.flag = select.fallback.flag = flag;
  select.scratch = static_cast<float*>(scratch);
  sm90::select_blocks::CompressedSelectArgs args{};
  args.range = range;
  args.indices = select.indices;
  args.topk = select.topk;
  args.block_size = select.block_size;
  args.init_blocks = select.init_blocks;
  args.local_blocks = select.local_blocks;
  args.noise = select.noise;
  args.share = select.share;
  args.seed = select.seed;
  args.flag = flag;
  args.scratch = scratch;
  guard.defer([=, attend = kernels_of(b.q, b.v).range_forward, stream = e.stream] {
    return status_of(attend(range, stream), "range_forward");
  });
  guard.defer([=, choose = portable::element_kernels(p.q.dtype)->select_blocks, key_dim = to_int(p.q.size(-1)),
               stream = e.stream] { return status_of(choose(select, key_dim, count, stream), "select_blocks"); });
  return status_of(hopper.compressed_select(args, e.stream), "compressed_select");
}

/// The sliding window and the sum of the branches by one kernel. swa.o may be undefined.
Status window_and_combine(const SlidingWindowAttentionParams& swa, CombineParams sum, const sm90::Kernels& hopper,
                          NonfiniteGuard& guard, Execution& e) {
  const Branch b = branch_of(swa);
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  if (Status s = guard.scan(e); !s.ok()) return s;
  RangeArgs range = range_args(b, swa.o, swa.lse);
  range.fallback.flag = guard.flag();
  const sm90::range_attention::WindowCombineArgs args{.range = range,
                                                      .o_cmp = strided(sum.o_cmp),
                                                      .o_slc = strided(sum.o_slc),
                                                      .gates = strided(sum.gates),
                                                      .o = strided(sum.o)};
  // The fallback takes two kernels; the intermediate result may lie in o itself.
  sum.o_swa = swa.o.defined() ? swa.o : sum.o;
  range.o = strided(sum.o_swa);
  CombineArgs combine = combine_args(sum);
  combine.fallback.flag = guard.flag();
  guard.defer([=, attend = kernels_of(b.q, b.v).range_forward, stream = e.stream] {
    return status_of(attend(range, stream), "range_forward");
  });
  guard.defer([=, add = portable::element_kernels(sum.o.dtype)->combine, batches = rows_of(sum.o, 2).batches,
               stream = e.stream] { return status_of(add(combine, batches, stream), "combine"); });
  return status_of(hopper.window_combine(args, e.stream), "window_combine");
}

}  // namespace

Status run(const NsaAttentionParams& p, Execution& e) {
  NonfiniteGuard guard({p.v_c, p.v_slc, p.v_swa}, e);
  return attend_branches(p, p.packed, guard, e);
}

Status attend_branches(const NsaAttentionParams& p, const Packed& window, NonfiniteGuard& guard, Execution& e) {
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
  const sm90::Kernels hopper = hopper_kernels(branch_of(branches_of(kept).swa), p.o);
  for (auto t : {&NsaAttentionParams::o_cmp, &NsaAttentionParams::o_slc, &NsaAttentionParams::o_swa}) {
    const bool passes_by = t == &NsaAttentionParams::o_swa && hopper.window_combine;
    if (!(kept.*t).defined() && !passes_by) kept.*t = take_like(e.arena, p.o, p.o.dtype);
  }
  for (auto t : {&NsaAttentionParams::lse_cmp, &NsaAttentionParams::lse_slc, &NsaAttentionParams::lse_swa})
    if (!(kept.*t).defined()) kept.*t = take_like(e.arena, lse, DType::kFloat32);
  if (!kept.indices.defined() && !kept.block_indices.defined()) {
    TensorView indices = p.q;
    indices.shape[static_cast<std::size_t>(p.q.rank - 2)] = p.k_c.size(-2);
    indices.shape[static_cast<std::size_t>(p.q.rank - 1)] = p.cfg.topk;
    kept.indices = take_like(e.arena, indices, DType::kInt32);
  }
  Branches b = branches_of(kept);
  b.swa.packed = window;
  const SelectBlocksParams select{.q = kept.q,
                                  .k_c = kept.k_c,
                                  .lse = kept.lse_cmp,
                                  .cfg = kept.cfg,
                                  .softmax_scale = kept.softmax_scale,
                                  .seqlen_k = b.cmp.seqlen_k,
                                  .noise = kept.noise,
                                  .seed = kept.seed,
                                  .packed = kept.packed,
                                  .indices = kept.indices};
  const CombineParams sum{
      .o_cmp = kept.o_cmp, .o_slc = kept.o_slc, .o_swa = kept.o_swa, .gates = kept.gates, .o = kept.o};
  if (!e.arena.measuring() && e.arena.enough()) {
    const std::initializer_list<Filled> outputs{{kept.o_cmp, 0},
                                                {kept.o_slc, 0},
                                                {kept.o_swa, 0},
                                                {kept.lse_cmp, kMinusInfinity},
                                                {kept.lse_slc, kMinusInfinity},
                                                {kept.lse_swa, kMinusInfinity},
                                                {kept.indices, kNoBlock}};
    if (Status s = fill(outputs, p.packed.cu_seqlens_q, nullptr, e.stream); !s.ok()) return s;
  }
  if (Status s = compressed_and_select(b.cmp, select, guard, e); !s.ok()) return s;
  e.stage_done("compressed attention, selection");
  // Causal attention is the faster one there. Not by the portable kernels: a sequence has the same bits packed or
  // alone.
  const bool causal = b.all_selected && hopper_kernels(branch_of(b.causal), p.o).range_forward;
  if (Status s = causal ? launch_forward(b.causal, guard, e) : launch_forward(b.slc, guard, e); !s.ok()) return s;
  e.stage_done("selected attention");
  if (hopper.window_combine) {
    if (Status s = window_and_combine(b.swa, sum, hopper, guard, e); !s.ok()) return s;
    if (Status s = guard.launch_fallback(); !s.ok()) return s;
  } else {
    if (Status s = launch_forward(b.swa, guard, e); !s.ok()) return s;
    if (Status s = guard.launch_fallback(); !s.ok()) return s;
    if (Status s = run(sum, e); !s.ok()) return s;
  }
  e.stage_done("sliding window, combine");
  if (e.arena.measuring()) return {};
  return fill({{p.o, 0}}, p.packed.cu_seqlens_q, nullptr, e.stream);  // rows past the end: the gates there may be NaN
}

Status run(const NsaAttentionBackwardParams& p, Execution& e) {
  const NsaAttentionParams& f = p.forward;
  PerRow delta[kBranches], gate[kBranches];
  for (int i = 0; i < kBranches; ++i) delta[i] = take_rows(e.arena, f.q), gate[i] = take_rows(e.arena, f.q);
  const Branches b = branches_of(f);
  if (!e.arena.measuring()) {
    if (!e.arena.enough()) return out_of_workspace(e.arena);
    CombineBackwardArgs args = combine_backward_args(p.d_o, f.o_cmp, f.o_slc, f.o_swa, f.gates, p.d_gates);
    for (int i = 0; i < kBranches; ++i) args.delta[i] = delta[i], args.gate[i] = gate[i];
    if (Status s =
            status_of(portable::element_kernels(f.q.dtype)->combine_backward(args, rows_of(p.d_o, 2).batches, e.stream),
                      "combine_backward");
        !s.ok())
      return s;
    if (Status s = fill({{p.d_gates, 0}}, f.packed.cu_seqlens_q, nullptr, e.stream); !s.ok()) return s;
  }
  const sm90::Kernels for_causal = hopper_kernels(branch_of(b.causal), p.d_o);
  const bool causal = b.all_selected && for_causal.range_d_q && for_causal.range_d_kv;
  const Branch branches[kBranches] = {branch_of(b.cmp), causal ? branch_of(b.causal) : branch_of(b.slc),
                                      branch_of(b.swa)};
  const TensorView* lse[kBranches] = {&f.lse_cmp, &f.lse_slc, &f.lse_swa};
  int* flag = e.arena.take<int>(1);
  const bool queries = p.d_q.defined();
  // dQ is summed over the branches in float32, some queries at a time.
  const auto ds_budget = ds_budget_for(branches[kCompressed], p.d_o, queries, p.d_k_c, p.d_v_c);
  StoredSelection stored;
  if (!ds_budget) stored = StoredSelection(branches[kSelected], p.d_o, queries, p.d_k_slc, p.d_v_slc);
  stored.take_sums(e.arena);
  const bool packed = f.packed.packed();
  const Geometry& geometry = branches[kCompressed].geometry;
  const auto spans_in = [&](const QuerySpan& window) {  // of a batched call
    std::vector<QuerySpan> spans = spans_of(span_of(geometry, window), std::nullopt);
    for (QuerySpan& span : spans) span.sequence += window.sequence, span.first += window.first;
    return spans;
  };
  std::vector<QuerySpan> spans;
  if (stored && !packed) {
    for (const QuerySpan& window : stored.windows()) std::ranges::copy(spans_in(window), std::back_inserter(spans));
  } else {
    spans = spans_of(geometry, ds_budget);
  }
  Strided sum;
  if (queries) {
    TensorView view = f.q;
    if (!packed) {
      view.shape[0] = view.shape[1] = 0;
      for (const QuerySpan& span : spans) {
        view.shape[0] = std::max<std::int64_t>(view.shape[0], span.sequences);
        view.shape[1] = std::max<std::int64_t>(view.shape[1], span.count);
      }
    }
    sum = strided(take_like(e.arena, view, DType::kFloat32));
  }
  // dK and dV of the branches are made one after the other, so they can share the rest of the workspace.
  const Arena rest = e.arena;
  std::size_t most = rest.used();
  if (!e.arena.measuring()) {
    NonfiniteArgs inputs{};
    for (int i = 0; i < kBranches; ++i) {
      inputs.tensors[2 * i] = checked(branches[i].k);
      inputs.tensors[2 * i + 1] = checked(branches[i].v);
      inputs.lse[i] = per_row(*lse[i]);
      inputs.delta[i] = delta[i];
    }
    inputs.queries = checked(f.q);
    inputs.flag = flag;
    if (any(hopper_kernels(branches[kWindow], p.d_o)))
      if (Status s = status_of(find_nonfinite(f.q.dtype, inputs, e.stream), "find_nonfinite"); !s.ok()) return s;
    e.stage_done("gates, row terms");
  }
  constexpr const char* kKeys[] = {"compressed attention: dK, dV", "selected attention: dK, dV",
                                   "sliding window: dK, dV"};
  constexpr const char* kSelectedQueries = "selected attention: dQ";
  const TensorView none;
  Prepared prepared[kBranches];
  const BranchGradients out[kBranches] = {{.d_q = none, .d_k = p.d_k_c, .d_v = p.d_v_c, .sum_from = sum, .sum_to = sum},
                                          {.d_q = none, .d_k = p.d_k_slc, .d_v = p.d_v_slc, .sum_to = sum},
                                          {.d_q = p.d_q, .d_k = p.d_k_swa, .d_v = p.d_v_swa, .sum_from = sum}};
  for (int i = 0; i < kBranches; ++i) {
    e.arena = rest;
    const Prepared& x = prepared[i] =
        prepare(branches[i], p.d_o, *lse[i], delta[i], gate[i], out[i], i == kCompressed ? ds_budget : std::nullopt,
                i == kSelected && stored, flag, e);
    if (i == kSelected) stored.take_windows(x, rest, e.arena);
    most = std::max(most, e.arena.used());
    if (e.arena.measuring()) continue;
    if (!e.arena.enough()) return out_of_workspace(e.arena);
    if (x.ds_budget || (i == kSelected && stored)) continue;  // they go with dQ
    if (Status s = run_keys(x, f.packed, i == kCompressed ? &f.cfg : nullptr, e); !s.ok()) return s;
    e.stage_done(kKeys[i]);
  }
  if (e.arena.measuring()) {
    e.arena.take<char>(static_cast<std::int64_t>(most - std::min(most, e.arena.used())));
    return {};
  }
  if (!queries) return {};
  // dQ: the selection first, the two ranges behind it.
  const Prepared& selected = prepared[kSelected];
  const auto sum_span = [&](const QuerySpan& span, const auto& run_selected) -> Status {
    const Prepared compressed = span_of(prepared[kCompressed], span);
    if (ds_budget) {
      if (Status s = run_keys(compressed, f.packed, &f.cfg, e); !s.ok()) return s;
      e.stage_done(kKeys[kCompressed]);
    }
    if (Status s = run_selected(); !s.ok()) return s;
    e.stage_done(kSelectedQueries);
    if (Status s = run_both(compressed, span_of(prepared[kWindow], span), e); !s.ok()) return s;
    e.stage_done("compressed and window: dQ");
    return {};
  };
  if (Status s = begin_spans(prepared[kCompressed], e); !s.ok()) return s;
  if (Status s = stored.begin(e); !s.ok()) return s;
  for (const QuerySpan& part : stored.windows()) {
    Arena memory = rest;
    const Prepared window = stored.window(selected, part, memory);
    if (Status s = stored.run_keys(window, e); !s.ok()) return s;
    e.stage_done(kKeys[kSelected]);
    if (packed) {  // the ranges take all rows at once
      if (Status s = stored.run_queries(window, e); !s.ok()) return s;
      e.stage_done(kSelectedQueries);
      continue;
    }
    for (const QuerySpan& span : spans_in(part)) {
      const auto run_selected = [&]() -> Status {
        if (Status s = stored.run_queries(span_of(window, span.from(part)), e); !s.ok()) return s;
        return launch_queries_fallback(span_of(selected, span), e);
      };
      if (Status s = sum_span(span, run_selected); !s.ok()) return s;
    }
  }
  if (!stored || packed)
    for (const QuerySpan& span : spans) {
      const Prepared x = span_of(selected, span);
      if (Status s = sum_span(span, [&] { return stored ? launch_queries_fallback(x, e) : run_queries(x, e); });
          !s.ok())
        return s;
    }
  if (stored)
    if (Status s = launch_keys_fallback(selected, f.packed, e); !s.ok()) return s;
  return fill({{p.d_q, 0}}, f.packed.cu_seqlens_q, nullptr, e.stream);
}

}  // namespace nsa::cuda
