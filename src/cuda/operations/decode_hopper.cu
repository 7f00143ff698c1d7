// The arguments of Hopper's two kernels of a step.
#include "cuda/operations/decode_step.h"

namespace nsa::cuda {
namespace {

/// What Hopper's kernels find tokens by; no table: a ring.
sm90::decode::CachedTensor cached(const Slots& slots, const TensorView& pages, const TensorView& table) {
  return {in_bytes(slots, pages.dtype), to_int(pages.size(0)), table.defined() ? to_int(table.size(1)) : 0};
}

const TensorView& compressed_table(const KVCacheView& cache) {
  return cache.block_table_c.defined() ? cache.block_table_c : cache.block_table;
}

}  // namespace

sm90::StepKernels hopper_kernels(const DecodeStep& step) {
  const DecodeParams& p = step.p;
  if (!step.uses_splits()) return {};
  constexpr std::int64_t kMax = 1 << 30;  // bytes are counted in 32 bits
  const KVCacheView& cache = p.cache;
  sm90::StepDesc call{.dtype = p.q.dtype,
                      .key_dim = p.q.size(3),
                      .value_dim = p.o.size(3),
                      .group = step.geometry.group,
                      .capacity = step.geometry.k_len,
                      .cfg = p.cfg,
                      .float8 = step.float8()};
  for (const TensorView* t :
       {&p.q, &cache.k_c, &cache.v_c, &cache.k_slc, &cache.v_slc, &cache.k_swa_ring, &cache.v_swa_ring}) {
    const Strided rows = strided(*t);
    // Rows in e4m3 begin at multiples of 16 bytes (supports_layout).
    const bool compatible = t->dtype == DType::kFloat8E4M3 || sm90::tma_compatible(rows);
    call.tma_compatible &= compatible && rows.row < kMax && rows.head < kMax;
  }
  call.phi_k = p.weights_k.kind, call.phi_v = p.weights_v.kind;
  for (const CompressionWeights* w : {&p.weights_k, &p.weights_v}) {
    if (w->w1.defined()) (w == &p.weights_k ? call.hidden_k : call.hidden_v) = w->w1.size(2);
    for (const Weights& t : {weights_of(w->pe), weights_of(w->w1), weights_of(w->w2)})
      call.phi_compatible &= sm90::tma_compatible({t.data, t.head, t.row, 0});
  }
  for (const TensorView* t : {&p.k_cmp, &p.v_cmp, &cache.k_cmp_ring, &cache.v_cmp_ring}) {
    const Strided rows = strided(*t);
    call.phi_compatible &= sm90::tma_compatible(rows) && rows.row < kMax && rows.head < kMax;
  }
  call.queries = step.batches() * step.tokens() * step.kv_heads();
  call.tokens = step.tokens(), call.chooses = step.selects();
  return sm90::kernels_for(p.q.device.index, call);
}

Status append_compress_on_hopper(const DecodeStep& step, const sm90::StepKernels& kernels) {
  if (step.measuring()) return {};
  const DecodeParams& p = step.p;
  const KVCacheView& cache = p.cache;
  sm90::decode::AppendCompressArgs args{step.plan_args()};
  const HeadScales none, k_scales = scales_of(cache.k_scale), v_scales = scales_of(cache.v_scale);
  const auto append = [&](const TensorView& fresh, const Slots& slots, const TensorView& pages, const TensorView& table,
                          const HeadScales& scales) -> sm90::decode::Append {
    return {.fresh = in_bytes(strided(fresh), fresh.dtype),
            .to = cached(slots, pages, table),
            .vectors = vectors_of(fresh),
            .scales = scales};
  };
  args.appends[0] = append(p.k_slc, step.k_slc, cache.k_slc, cache.block_table, k_scales);
  args.appends[1] = append(p.v_slc, step.v_slc, cache.v_slc, cache.block_table, v_scales);
  args.appends[2] = append(p.k_swa, step.window(cache.k_swa_ring), cache.k_swa_ring, cache.block_table_swa, k_scales);
  args.appends[3] = append(p.v_swa, step.window(cache.v_swa_ring), cache.v_swa_ring, cache.block_table_swa, v_scales);
  args.appends[4] = append(p.k_cmp, step.raw_keys(), cache.k_cmp_ring, cache.block_table_cmp, none);
  args.appends[5] = append(p.v_cmp, step.raw_values(), cache.v_cmp_ring, step.raw_value_table(), none);
  if (step.shares_window) args.appends[2].vectors = args.appends[3].vectors = 0;
  if (step.shares_raw_values) args.appends[5].vectors = 0;
  const auto side = [&](const TensorView& fresh, const sm90::decode::CachedTensor& raw, const Slots& out,
                        const TensorView& pages, const CompressionWeights& w) {
    sm90::decode::CompressSide side{};
    side.fresh = strided(fresh), side.raw = raw, side.out = cached(out, pages, compressed_table(cache));
    side.pe = weights_of(w.pe), side.w1 = weights_of(w.w1), side.b1 = weights_of(w.b1);
    side.w2 = weights_of(w.w2), side.b2 = weights_of(w.b2);
    side.dim = to_int(fresh.size(3));
    side.mlp = w.kind == CompressionKind::kMlp;
    if (w.w1.defined()) side.hidden = to_int(w.w1.size(2)), side.clusters = to_int(w.w1.size(0));
    return side;
  };
  args.sides[0] = side(p.k_cmp, args.appends[4].to, step.k_c, cache.k_c, p.weights_k);
  args.sides[1] = side(p.v_cmp, args.appends[5].to, step.v_c, cache.v_c, p.weights_v);
  args.sides[0].scales = k_scales, args.sides[1].scales = v_scales;
  args.rotation = rotation_of(p.rope_cos, p.rope_sin);
  args.o = strided(p.o), args.indices = strided(p.indices);
  args.value_dim = to_int(p.o.size(3)), args.topk = p.cfg.topk;
  return status_of(kernels.append_compress(args, step.e.stream), "append_compress");
}

Status attend_on_hopper(const DecodeStep& step, const sm90::StepKernels& kernels) {
  if (step.measuring()) return {};
  const DecodeParams& p = step.p;
  const KVCacheView& cache = p.cache;
  const NSAConfig& cfg = p.cfg;
  sm90::decode::StepAttendArgs args{};
  args.geometry = step.geometry;
  args.q = strided(p.q), args.gates = strided(p.gates), args.o = strided(p.o);
  args.given = strided(p.block_indices), args.indices = strided(p.indices);
  const auto branch = [](const Slots& keys, const Slots& values, const TensorView& pages,
                         const TensorView& table) -> sm90::decode::CachedBranch {
    return {cached(keys, pages, table), cached(values, pages, table)};
  };
  args.cached[kCompressed] = branch(step.k_c, step.v_c, cache.k_c, compressed_table(cache));
  args.cached[kSelected] = branch(step.k_slc, step.v_slc, cache.k_slc, cache.block_table);
  args.cached[kWindow] =
      branch(step.window(cache.k_swa_ring), step.window(cache.v_swa_ring), cache.k_swa_ring, cache.block_table_swa);
  args.key_scales = scales_of(cache.k_scale), args.value_scales = scales_of(cache.v_scale);
  args.window = step.window_size();
  args.topk = cfg.topk;
  args.init_blocks = cfg.init_blocks, args.local_blocks = cfg.local_blocks;
  args.scale = step.scale;
  args.lengths = cache.cache_seqlens.as<int>();
  args.advance = cache.advance;
  args.num_new = step.num_new();
  args.positions = step.positions();
  args.plan = step.plan;
  args.block_keys = sm90::decode::BlockKeys(cfg);
  args.shape = kernels.shape;
  const std::int64_t sequences = args.geometry.batches;
  args.longest_first = kernels.longest_first && sequences > 1 && sequences <= sm90::decode::kMaxOrdered;
  return status_of(kernels.attend(args, step.e.stream), "step_attend");
}

}  // namespace nsa::cuda
