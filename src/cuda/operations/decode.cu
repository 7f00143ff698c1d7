// decode and prefill: which kernels serve a step, and what all of them need.
#include "cuda/operations/decode_step.h"

namespace nsa::cuda {

DecodeStep::DecodeStep(const DecodeParams& params, const KVCacheView& given, Execution& execution)
    : p(params), e(execution), shares_window(given.shares_window()), shares_raw_values(given.shares_raw_values()) {
  const KVCacheView& cache = p.cache;
  k_c = compressed(cache.k_c, cache, p.cfg), v_c = compressed(cache.v_c, cache, p.cfg);
  k_slc = paged(cache.k_slc, cache.block_table), v_slc = paged(cache.v_slc, cache.block_table);
  scale = static_cast<float>(scale_of(p.softmax_scale, p.q));
  const std::int64_t longest = p.rotate ? std::min<std::int64_t>(positions(), kMaxTokens) : kMaxTokens;
  const std::int64_t capacity = std::min(cache.block_table.size(1) * cache.k_slc.size(1), longest);
  static_cast<Geometry&>(geometry) = geometry_of(p.q, kv_heads(), capacity, 0, {}, p.cfg);
  geometry.batches = to_int(batches()), geometry.q_len = to_int(tokens());
  geometry.counted = !cache.advance;
  if (packed()) geometry.starts = p.query_start_loc.as<const int>(), geometry.rows = to_int(p.q.size(1));
  plan = e.arena.take<StepPlan>(batches());
  geometry.plan = plan;
}

PlanArgs DecodeStep::plan_args() const {
  const KVCacheView& cache = p.cache;
  PlanArgs args{};
  args.geometry = geometry;
  args.plan = plan;
  args.lengths = cache.cache_seqlens.as<const int>();
  args.num_new = num_new();
  args.overflow = cache.overflow.as<int>();
  args.tables[kTokenTable] = page_table(cache.k_slc, cache.block_table);
  args.tables[kCompressedTable] = page_table(cache.k_c, cache.block_table_c);
  args.tables[kWindowTable] = page_table(cache.k_swa_ring, cache.block_table_swa);
  args.tables[kRawTable] = page_table(cache.k_cmp_ring, cache.block_table_cmp);
  args.window_size = window_size();
  args.positions = positions();
  return args;
}

namespace {

Status run_step(DecodeParams p, const KVCacheView& given, Execution& e) {
  if (Status s = rotate_tokens(p, e); !s.ok()) return s;
  const DecodeStep step(p, given, e);
  const sm90::StepKernels kernels = hopper_kernels(step);
  if (!kernels.append_compress) return run_portable(step, kernels);
  if (Status s = append_compress_on_hopper(step, kernels); !s.ok()) return s;
  return attend_on_hopper(step, kernels);
}

/// Packed rows as a batch of one.
DecodeParams in_batches(DecodeParams p) {
  if (!p.query_start_loc.defined()) return p;
  for (TensorView* t : {&p.q, &p.k_cmp, &p.v_cmp, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa, &p.gates, &p.block_indices,
                        &p.o, &p.indices}) {
    if (!t->defined()) continue;
    t->rank = 4;
    t->shape = {1, t->shape[0], t->shape[1], t->shape[2]};
    t->stride = {0, t->stride[0], t->stride[1], t->stride[2]};
  }
  return p;
}

}  // namespace

Status run(const DecodeParams& given, Execution& e) {
  DecodeParams p = in_batches(given);
  if (KVCacheView& cache = p.cache; cache.shares_window())
    cache.k_swa_ring = cache.k_slc, cache.v_swa_ring = cache.v_slc, cache.block_table_swa = cache.block_table;
  if (p.cache.shares_raw_values()) p.cache.v_cmp_ring = p.cache.v_slc;
  if (p.q.numel() == 0) return {};
  if (!e.arena.measuring()) {  // before anything is written
    Execution needed;
    if (Status s = run_step(p, given.cache, needed); !s.ok()) return s;
    Arena all = e.arena;
    all.take<char>(static_cast<std::int64_t>(needed.arena.used()));
    if (!all.enough()) return out_of_workspace(all);
  }
  return run_step(p, given.cache, e);
}

}  // namespace nsa::cuda
