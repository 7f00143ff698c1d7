// A step with a cache (decode and prefill): what its launches share.
#pragma once

#include "cuda/operations/cache_views.h"
#include "cuda/operations/operations.h"
#include "cuda/portable/decode/step_kernels.h"
#include "cuda/sm90/heuristics.h"

namespace nsa::cuda {

/// One step, and what all ways of it need. Its memory is taken first; nothing is launched while that is only measured.
struct DecodeStep {
  const DecodeParams& p;
  Execution& e;
  bool shares_window, shares_raw_values;  // nothing is appended to the memory that another branch has
  StepGeometry geometry;
  StepPlan* plan;  // written by the first kernel
  Slots k_c, v_c, k_slc, v_slc;
  float scale;

  /// given: the cache that params' cache is, without what it does not have.
  DecodeStep(const DecodeParams& params, const KVCacheView& given, Execution& execution);

  bool packed() const { return p.query_start_loc.defined(); }
  std::int64_t batches() const { return p.cache.cache_seqlens.size(0); }
  /// The most new tokens of a sequence.
  std::int64_t tokens() const {
    return packed() && p.max_query_len > 0 ? std::min(p.max_query_len, p.q.size(1)) : p.q.size(1);
  }
  std::int64_t heads() const { return p.q.size(2); }
  std::int64_t kv_heads() const { return p.k_cmp.size(2); }
  int window_size() const { return cuda::window_size(p.cfg); }
  int positions() const { return to_int(p.rope_cos.defined() ? p.rope_cos.size(0) : kMaxTokens); }
  const int* num_new() const { return p.num_new.defined() ? p.num_new.as<const int>() : nullptr; }
  bool float8() const { return p.cache.k_slc.dtype == DType::kFloat8E4M3; }
  bool measuring() const { return e.arena.measuring(); }
  bool uses_splits() const { return tokens() <= kMaxDecodeTokens; }
  /// True if blocks are chosen: none are given, or the caller wants the indices.
  bool selects() const { return !p.block_indices.defined() || p.indices.defined(); }

  /// A ring finds its sequences' numbers in the plan.
  Slots recent(const TensorView& pages, const TensorView& table) const {
    const int* numbers = geometry.plan ? &geometry.plan->sequence : nullptr;
    return cuda::recent(pages, table, numbers, sizeof(StepPlan) / sizeof(int));
  }
  Slots window(const TensorView& pages) const { return recent(pages, p.cache.block_table_swa); }
  Slots raw_keys() const { return recent(p.cache.k_cmp_ring, p.cache.block_table_cmp); }
  Slots raw_values() const { return recent(p.cache.v_cmp_ring, raw_value_table()); }
  const TensorView& raw_value_table() const {
    return shares_raw_values ? p.cache.block_table : p.cache.block_table_cmp;
  }
  PlanArgs plan_args() const;

 private:
  static constexpr std::int64_t kMaxTokens = 1 << 30;  // of a sequence
};

/// The step by portable kernels, but for its attention where Hopper's kernels can: kernels.attend.
Status run_portable(const DecodeStep& step, const sm90::StepKernels& kernels);

/// The kernels of compute capability 9.0 that can serve this step here.
sm90::StepKernels hopper_kernels(const DecodeStep& step);
Status append_compress_on_hopper(const DecodeStep& step, const sm90::StepKernels& kernels);
/// Reads the new tokens where they are appended.
Status attend_on_hopper(const DecodeStep& step, const sm90::StepKernels& kernels);

}  // namespace nsa::cuda
