#include "core/cache_step.h"

#include <algorithm>

#include "core/rotate.h"
#include "core/validation/check.h"

namespace nsa {
namespace {

std::size_t row_bytes(const TensorView& tensor) {
  return static_cast<std::size_t>(tensor.size(-1)) * size_of(tensor.dtype);
}

/// Where the new tokens of a sequence are.
TokenRows new_rows(const TensorView& fresh, const StepSequence& s) {
  return plain_rows(fresh, s.q_batch, s.length_before - s.q_begin);
}

/// Sets rows begin ... end - 1 to zero bytes or, for indices, to -1 (all ones).
void clear_rows(const TensorView& tensor, std::int64_t batch, std::int64_t begin, std::int64_t end, int byte) {
  if (!tensor.defined()) return;
  const TokenRows rows = plain_rows(tensor, batch);
  const std::size_t bytes = row_bytes(tensor);
  for (std::int64_t r = begin; r < end; ++r)
    for (std::int64_t head = 0; head < tensor.size(-2); ++head) std::memset(rows.at(r, head), byte, bytes);
}

/// What sequence b appends, in full.
StepSequence new_tokens(const DecodeParams& params, std::int64_t b) {
  const TensorView& starts = params.query_start_loc;
  StepSequence s;
  s.batch = b;
  s.q_batch = starts.defined() ? 0 : b;
  s.q_begin = starts.defined() ? int32_at(starts, b) : 0;
  s.num_new = starts.defined()           ? int32_at(starts, b + 1) - s.q_begin
              : params.num_new.defined() ? int32_at(params.num_new, b)
                                         : params.q.size(1);
  s.length_before = int32_at(params.cache.cache_seqlens, b) - (params.cache.advance ? 0 : s.num_new);
  s.length = s.length_before + s.num_new;
  return s;
}

bool has_capacity(const KVCacheView& cache, const NSAConfig& cfg, const StepSequence& s) {
  const auto needed = pages_needed(cache, cfg, s.length_before, s.length);
  return std::all_of(needed.begin(), needed.end(), [&](const PagesNeeded& n) {
    for (std::int64_t p = n.first_page(); p < n.end_page(); ++p)
      if (p >= n.table.size(1) || table_entry(n.table, s.batch, p) < 0) return false;
    return true;
  });
}

}  // namespace

CachedRows::CachedRows(const KVCacheView& cache, const NSAConfig& cfg, std::int64_t b) {
  const auto rows = [&](const TensorView& tokens, const TensorView& table) {
    return table.defined() ? paged_rows(tokens, table, b) : plain_rows(tokens, b);
  };
  k_slc = rows(cache.k_slc, cache.block_table), v_slc = rows(cache.v_slc, cache.block_table);
  const bool with_tokens = !cache.block_table_c.defined();
  const TensorView& table_c = with_tokens ? cache.block_table : cache.block_table_c;
  k_c = rows(cache.k_c, table_c), v_c = rows(cache.v_c, table_c);
  if (with_tokens) k_c.first = v_c.first = 1 - cfg.kernel_size / cfg.kernel_stride;
  k_swa = cache.shares_window() ? k_slc : rows(cache.k_swa_ring, cache.block_table_swa);
  v_swa = cache.shares_window() ? v_slc : rows(cache.v_swa_ring, cache.block_table_swa);
  k_cmp = rows(cache.k_cmp_ring, cache.block_table_cmp);
  v_cmp = cache.shares_raw_values() ? v_slc : rows(cache.v_cmp_ring, cache.block_table_cmp);
  k_slc.scale = k_c.scale = k_swa.scale = cache.k_scale;
  v_slc.scale = v_c.scale = v_swa.scale = cache.v_scale;
}

std::vector<PagesNeeded> pages_needed(const KVCacheView& cache, const NSAConfig& cfg, std::int64_t before,
                                      std::int64_t after) {
  std::vector<PagesNeeded> needed;
  const auto add = [&](const char* name, const TensorView& table, const TensorView& pages, std::int64_t begin,
                       std::int64_t written, std::int64_t end) {
    if (table.defined()) needed.push_back({name, table, pages.size(1), begin, written, end});
  };
  add("block_table", cache.block_table, cache.k_slc, 0, before, after);
  add("block_table_c", cache.block_table_c, cache.k_c, 0, cfg.num_compressed(before), cfg.num_compressed(after));
  add("block_table_swa", cache.block_table_swa, cache.k_swa_ring, window_begin(cfg, before), before, after);
  add("block_table_cmp", cache.block_table_cmp, cache.k_cmp_ring, open_block_begin(cfg, before), before, after);
  return needed;
}

RotatedStep::RotatedStep(const DecodeParams& given) : params(given) {
  if (!given.rotate) return;
  const auto copy = [&](TensorView& tokens) {
    copies_.emplace_back(tokens, ContiguousCopy::zeros_like(tokens));
    tokens = copies_.back().second.view;
  };
  copy(params.q), copy(params.k_slc);
  if (same_view(given.k_swa, given.k_slc)) {
    params.k_swa = params.k_slc;
  } else {
    copy(params.k_swa);
  }
  params.rotate = false;
  for (std::int64_t b = 0; b < given.cache.cache_seqlens.size(0); ++b) {
    const StepSequence s = new_tokens(given, b);
    if (s.num_new == 0 || !has_capacity(given.cache, given.cfg, s)) continue;  // positions may be beyond the tables
    for (std::int64_t r = 0; r < s.num_new; ++r) tokens_.push_back({s.q_batch, s.q_begin + r, s.length_before + r});
  }
}

CacheStep::CacheStep(const DecodeParams& params) : params_(params) {
  const TensorView& starts = params.query_start_loc;
  const auto clear = [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
    clear_rows(params.o, batch, begin, end, 0);
    clear_rows(params.indices, batch, begin, end, 0xff);
  };
  const std::int64_t sequences = params.cache.cache_seqlens.size(0);
  for (std::int64_t b = 0; b < sequences; ++b) {
    StepSequence s = new_tokens(params, b);
    const std::int64_t rows = starts.defined() ? s.num_new : params.q.size(1);
    if (s.num_new > 0 && !has_capacity(params.cache, params.cfg, s)) {
      *params.cache.overflow.as<std::int32_t>() = 1;
      s.num_new = 0;
    }
    clear(s.q_batch, s.q_begin + s.num_new, s.q_begin + rows);
    if (s.num_new > 0) add_sequence(s);
  }
  if (starts.defined()) clear(0, int32_at(starts, sequences), params.q.size(0));
}

void CacheStep::add_sequence(StepSequence s) {
  static_cast<CachedRows&>(s) = CachedRows(params_.cache, params_.cfg, s.batch);
  s.window_begin = window_begin(params_.cfg, s.length_before);
  if (s.num_new > kRollback && !s.k_swa.table) {
    // The append will overwrite tokens that the first queries see: keep them beside the ring.
    const auto window_of = [&](TokenRows& ring, const TensorView& fresh) {
      TokenBuffer& buffer =
          windows_.emplace_back(fresh, s.window_begin, s.length - s.window_begin, ring.dtype, ring.scale);
      buffer.take(ring, s.window_begin, s.length_before);
      buffer.take(new_rows(fresh, s), s.length_before, s.length);
      ring = buffer.rows();
    };
    window_of(s.k_swa, params_.k_swa);
    window_of(s.v_swa, params_.v_swa);
  }
  sequences_.push_back(s);
}

Status CacheStep::append(Compress compress, const Context& context) {
  // Compression first: it needs tokens that the append may overwrite.
  if (Status s = compress_completed(params_.k_cmp, &StepSequence::k_cmp, &StepSequence::k_c, params_.weights_k,
                                    params_.rope_cos.defined(), compress, context);
      !s.ok())
    return s;
  if (Status s = compress_completed(params_.v_cmp, &StepSequence::v_cmp, &StepSequence::v_c, params_.weights_v, false,
                                    compress, context);
      !s.ok())
    return s;
  for (const StepSequence& s : sequences_) {
    const CachedRows to(params_.cache, params_.cfg, s.batch);  // those of s may be a copy outside the ring
    const auto write = [&](const TensorView& fresh, const TokenRows& rows) {
      const std::int64_t begin = rows.table ? s.length_before : std::max(s.length_before, s.length - rows.page_size);
      copy_tokens(new_rows(fresh, s), rows, begin, s.length, fresh.size(-2), fresh.size(-1));
    };
    write(params_.k_slc, to.k_slc);
    write(params_.v_slc, to.v_slc);
    write(params_.k_cmp, to.k_cmp);
    if (!params_.cache.shares_raw_values()) write(params_.v_cmp, to.v_cmp);
    if (params_.cache.shares_window()) continue;
    write(params_.k_swa, to.k_swa);
    write(params_.v_swa, to.v_swa);
  }
  return {};
}

Status CacheStep::compress_completed(const TensorView& fresh, TokenRows StepSequence::*raw_rows,
                                     TokenRows StepSequence::*compressed, const CompressionWeights& weights,
                                     bool rotated, Compress compress, const Context& context) const {
  // One packed call: of each sequence that completes blocks, the tokens from the start of the first of them on.
  const NSAConfig& cfg = params_.cfg;
  const std::int64_t stride = cfg.kernel_stride;
  const auto begin_of = [&](const StepSequence& s) { return open_block_begin(cfg, s.length_before); };
  std::vector<const StepSequence*> completing;
  std::vector<std::int32_t> offsets{0};
  for (const StepSequence& s : sequences_) {
    if (cfg.num_compressed(s.length) == cfg.num_compressed(s.length_before)) continue;
    completing.push_back(&s);
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(s.length - begin_of(s)));
  }
  if (completing.empty()) return {};

  const std::int64_t total = offsets.back(), heads = fresh.size(-2), dim = fresh.size(-1);
  const TokenBuffer raw(fresh, 0, total), outputs(fresh, 0, total / stride);
  for (std::size_t n = 0; n < completing.size(); ++n) {
    const StepSequence& s = *completing[n];
    const std::int64_t begin = begin_of(s);
    TokenRows to = raw.rows();
    to.first = begin - offsets[n];
    copy_tokens(s.*raw_rows, to, begin, s.length_before, heads, dim);
    copy_tokens(new_rows(fresh, s), to, std::max(begin, s.length_before), s.length, heads, dim);
  }
  CompressParams call;
  call.k = TensorView::contiguous(raw.view().data, fresh.dtype, {total, heads, dim});
  call.weights = weights;
  call.cfg = cfg;
  call.cu_seqlens = TensorView::contiguous(offsets.data(), DType::kInt32, {static_cast<std::int64_t>(offsets.size())});
  call.out = TensorView::contiguous(outputs.view().data, fresh.dtype, {total / stride, heads, dim});
  if (Status status = compress(call, context); !status.ok()) return status;

  const RotationTable table{params_.rope_cos, params_.rope_sin};
  std::int64_t row = 0;
  for (const StepSequence* s : completing) {
    const std::int64_t begin = cfg.num_compressed(s->length_before), end = cfg.num_compressed(s->length);
    TokenRows made = outputs.rows();
    made.first = begin - row;
    for (std::int64_t i = begin; rotated && i < end; ++i)
      for (std::int64_t head = 0; head < heads; ++head)
        table.rotate(TensorView::contiguous(made.at(i, head), fresh.dtype, {dim}), i * stride);
    copy_tokens(made, s->*compressed, begin, end, heads, dim);
    row += end - begin;
  }
  return {};
}

void CacheStep::finish() {
  if (!params_.cache.advance) return;
  for (const StepSequence& s : sequences_)
    params_.cache.cache_seqlens.as<std::int32_t>()[s.batch * params_.cache.cache_seqlens.stride[0]] =
        static_cast<std::int32_t>(s.length);
}

}  // namespace nsa
