#include "arguments.h"

namespace nsa::python {

CompressionWeights PhiArguments::views() const {
  CompressionWeights weights;
  bool known = false;
  for (CompressionKind candidate : {CompressionKind::kMean, CompressionKind::kLinear, CompressionKind::kMlp}) {
    if (kind != name_of(candidate)) continue;
    weights.kind = candidate;
    known = true;
  }
  if (!known) refuse("weights.kind = '" + kind + "': must be mean, linear or mlp");
  weights.pe = input(pe, "weights.pe");
  weights.w1 = input(w1, "weights.w1");
  weights.b1 = input(b1, "weights.b1");
  weights.w2 = input(w2, "weights.w2");
  weights.b2 = input(b2, "weights.b2");
  return weights;
}

Packed PackedArguments::views() const {
  return {.cu_seqlens_q = input(cu_seqlens_q, "cu_seqlens_q"),
          .cu_seqlens_k = input(cu_seqlens_k, "cu_seqlens_k"),
          .max_seqlen_q = max_seqlen_q,
          .max_seqlen_k = max_seqlen_k};
}

KVCacheView CacheArguments::views() const {
  KVCacheView cache;
  cache.k_slc = output(k_slc, "cache.k_slc");
  cache.v_slc = output(v_slc, "cache.v_slc");
  cache.k_c = output(k_c, "cache.k_c");
  cache.v_c = output(v_c, "cache.v_c");
  cache.k_swa_ring = output(k_swa_ring, "cache.k_swa_ring");
  cache.v_swa_ring = output(v_swa_ring, "cache.v_swa_ring");
  cache.k_cmp_ring = output(k_cmp_ring, "cache.k_cmp_ring");
  cache.v_cmp_ring = output(v_cmp_ring, "cache.v_cmp_ring");
  cache.cache_seqlens = output(cache_seqlens, "cache.cache_seqlens");
  cache.overflow = output(overflow, "cache.overflow");
  cache.block_table = input(block_table, "cache.block_table");
  cache.block_table_c = input(block_table_c, "cache.block_table_c");
  return cache;
}

void ScaleArguments::give_to(KVCacheView& cache) const {
  cache.k_scale = input(k_scale, "cache.k_scale");
  cache.v_scale = input(v_scale, "cache.v_scale");
}

KVCacheView PagedCacheArguments::views() const {
  KVCacheView cache;
  cache.k_slc = output(k_slc, "cache.k_slc");
  cache.v_slc = output(v_slc, "cache.v_slc");
  cache.k_c = output(k_c, "cache.k_c");
  cache.v_c = output(v_c, "cache.v_c");
  cache.k_swa_ring = output(k_swa, "cache.k_swa_ring");
  cache.v_swa_ring = output(v_swa, "cache.v_swa_ring");
  cache.k_cmp_ring = output(k_cmp, "cache.k_cmp_ring");
  cache.v_cmp_ring = output(v_cmp, "cache.v_cmp_ring");
  cache.overflow = output(overflow, "cache.overflow");
  cache.cache_seqlens = input(seq_lens, "cache.cache_seqlens");
  cache.block_table = input(block_table, "cache.block_table");
  cache.block_table_c = input(block_table_c, "cache.block_table_c");
  cache.block_table_swa = input(block_table_swa, "cache.block_table_swa");
  cache.block_table_cmp = input(block_table_cmp, "cache.block_table_cmp");
  cache.advance = false;
  return cache;
}

}  // namespace nsa::python
