
#include "cuda/operations/cache_views.h"
#include "cuda/operations/operations.h"
#include "cuda/sm90/decode/gather_chunk.h"

namespace nsa::cuda {
namespace {

using sm90::decode::ChunkOffsets;
using sm90::decode::Gather;

/// Row b of (B, m, heads, D) as packed (m, heads, D).
TensorView sequence_of(const TensorView& t, std::int64_t b) {
  if (!t.defined()) return {};
  TensorView rows = t;
  rows.rank = 3;
  rows.shape = {t.size(1), t.size(2), t.size(3)};
  rows.stride = {t.stride[1], t.stride[2], t.stride[3]};
  if (t.data) rows.data = t.as<char>() + b * t.stride[0] * static_cast<std::int64_t>(size_of(t.dtype));
  return rows;
}

Gather gather(const KVCacheView& cache, const CachedTokens& tokens, Gather::Rows rows, const TensorView& to,
              bool are_values) {
  const DType stored = cache.k_slc.dtype;
  return {.tokens = {in_bytes(tokens.slots, stored), in_bytes(tokens.fresh, stored)},
          .rows = rows,
          .to = to.as<char>(),
          .vectors = vectors_of(to),
          .is_finite = are_values,
          .scales = scales_of(are_values ? cache.v_scale : cache.k_scale)};
}

/// Packed attention of one sequence. `offsets` are zeros.
Status attend_sequence(const DecodeParams& p, const StepGeometry& g, const ChunkTokens& tokens, std::int64_t b,
                       ChunkOffsets* offsets, Execution& e) {
  const int window = window_size(p.cfg);
  const std::int64_t seen = std::min<std::int64_t>(std::int64_t{window} + g.q_len - 1, g.k_len);
  const std::int64_t blocks = p.cfg.num_compressed(g.k_len);
  // With the same tiles whatever the capacity is: the bits shall not depend on it.
  const auto take = [&](std::int64_t rows, const TensorView& like) {
    rows += sm90::decode::kRowsBehind;
    return take_like(e.arena,
                     TensorView::contiguous(nullptr, like.dtype, {rows, g.kv_heads, like.size(3)}, like.device),
                     like.dtype);
  };
  NsaAttentionParams a;
  const std::int64_t row = g.starts ? 0 : b;  // of all tensors of the step: packed ones are a batch of one
  a.q = sequence_of(p.q, row), a.gates = sequence_of(p.gates, row);
  a.k_slc = take(g.k_len, p.k_slc), a.v_slc = take(g.k_len, p.v_slc);
  a.k_c = take(blocks, p.k_cmp), a.v_c = take(blocks, p.v_cmp);
  a.k_swa = tokens.shares_window ? a.k_slc : take(seen, p.k_swa);
  a.v_swa = tokens.shares_window ? a.v_slc : take(seen, p.v_swa);
  a.cfg = p.cfg;
  a.softmax_scale = p.softmax_scale;
  a.block_indices = sequence_of(p.block_indices, row);
  a.o = sequence_of(p.o, row), a.indices = sequence_of(p.indices, row);
  if (!e.arena.measuring()) {
    const sm90::decode::GatherChunkArgs args{.geometry = g,
                                             .sequence = to_int(b),
                                             .window = window,
                                             .offsets = offsets,
                                             .float8 = p.cache.k_slc.dtype == DType::kFloat8E4M3,
                                             .shares_window = tokens.shares_window,
                                             .kinds = {gather(p.cache, tokens.k_slc, Gather::kAll, a.k_slc, false),
                                                       gather(p.cache, tokens.v_slc, Gather::kAll, a.v_slc, true),
                                                       gather(p.cache, tokens.k_c, Gather::kCompressed, a.k_c, false),
                                                       gather(p.cache, tokens.v_c, Gather::kCompressed, a.v_c, true),
                                                       gather(p.cache, tokens.k_swa, Gather::kWindow, a.k_swa, false),
                                                       gather(p.cache, tokens.v_swa, Gather::kWindow, a.v_swa, true)}};
    if (Status s = status_of(sm90::decode::gather_chunk(p.q.dtype, args, e.stream), "gather_chunk"); !s.ok()) return s;
    e.stage_done("gather");
  }
  const auto view = [&](int* ends) { return TensorView::contiguous(ends, DType::kInt32, {2}, p.q.device); };
  a.packed = {view(offsets->q), view(offsets->k), g.q_len, g.k_len};
  NonfiniteGuard guard(&offsets->nonfinite);
  return attend_branches(a, {a.packed.cu_seqlens_q, view(offsets->window), g.q_len, seen}, guard, e);
}

}  // namespace

bool gathers_chunk(const DecodeParams& p, const StepGeometry& geometry) {
  sm90::ChunkDesc call;
  sm90::AttentionDesc& attention = call.attention;
  attention.dtype = p.q.dtype;
  attention.key_dim = p.q.size(3), attention.value_dim = p.o.size(3);
  attention.group = geometry.group;
  attention.block_size = p.cfg.block_size, attention.topk = p.cfg.topk;
  for (const TensorView* t : {&p.q, &p.o}) attention.tma_compatible &= sm90::tma_compatible(strided(*t));
  attention.selection = p.cfg;
  call.tokens = geometry.q_len;
  call.sequences = geometry.batches;
  call.packed_rows = geometry.rows;
  return sm90::serves(p.q.device.index, call);
}

Status attend_chunk(const DecodeParams& p, const StepGeometry& geometry, const ChunkTokens& tokens, Execution& e) {
  auto* const offsets = e.arena.take<ChunkOffsets>(geometry.batches);
  if (e.arena.measuring()) {  // all sequences need as much
    ChunkOffsets none;
    return attend_sequence(p, geometry, tokens, 0, &none, e);
  }
  const std::size_t bytes = static_cast<std::size_t>(geometry.batches) * sizeof(ChunkOffsets);
  if (Status s = status_of(cudaMemsetAsync(offsets, 0, bytes, e.stream), "cudaMemsetAsync"); !s.ok()) return s;
  const Arena rest = e.arena;
  // In order: a call fills the packed rows behind its sequence's.
  for (int b = 0; b < geometry.batches; ++b) {
    e.arena = rest;
    if (Status s = attend_sequence(p, geometry, tokens, b, offsets + b, e); !s.ok()) return s;
  }
  return {};
}

}  // namespace nsa::cuda
