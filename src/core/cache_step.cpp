#include "core/cache_step.h"

#include <algorithm>

#include "core/rotate.h"
#include "core/validation/check.h"

namespace nsa {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Pages 0 ... of sequence b hold `tokens` tokens.
bool table_holds(const TensorView& table, std::int64_t b, std::int64_t page_size, std::int64_t tokens) {
  const std::int64_t pages = ceil_div(tokens, page_size);
  if (pages > table.size(1)) return false;
  for (std::int64_t p = 0; p < pages; ++p)
    if (table.as<const std::int32_t>()[b * table.stride[0] + p * table.stride[1]] < 0) return false;
  return true;
}

/// Sets the rows from `begin` on of sequence b to zero bytes or, for indices, to -1 (all ones).
void clear_rows(const TensorView& tensor, std::int64_t b, std::int64_t begin, int byte) {
  if (!tensor.defined()) return;
  const TokenRows rows = plain_rows(tensor, b);
  const std::size_t bytes = static_cast<std::size_t>(tensor.size(3)) * size_of(tensor.dtype);
  for (std::int64_t r = begin; r < tensor.size(1); ++r)
    for (std::int64_t head = 0; head < tensor.size(2); ++head) std::memset(rows.at(r, head), byte, bytes);
}

}  // namespace

CacheStep::CacheStep(const DecodeParams& params) : params_(params) {
  for (std::int64_t b = 0; b < params.q.size(0); ++b) {
    const std::int64_t length = int32_at(params.cache.cache_seqlens, b);
    std::int64_t num_new = params.num_new.defined() ? int32_at(params.num_new, b) : params.q.size(1);
    if (num_new > 0 && !has_room(b, length + num_new)) {
      *params.cache.overflow.as<std::int32_t>() = 1;
      num_new = 0;
    }
    clear_rows(params.o, b, num_new, 0);
    clear_rows(params.indices, b, num_new, 0xff);
    if (num_new > 0) add_sequence(b, length, num_new);
  }
}

bool CacheStep::has_room(std::int64_t batch, std::int64_t length) const {
  const KVCacheView& cache = params_.cache;
  return table_holds(cache.block_table, batch, cache.k_slc.size(1), length) &&
         table_holds(cache.block_table_c, batch, cache.k_c.size(1), params_.cfg.num_compressed(length));
}

void CacheStep::add_sequence(std::int64_t batch, std::int64_t length_before, std::int64_t num_new) {
  const KVCacheView& cache = params_.cache;
  StepSequence s;
  s.batch = batch;
  s.length_before = length_before;
  s.num_new = num_new;
  s.length = length_before + num_new;
  s.k_slc = paged_rows(cache.k_slc, cache.block_table, batch);
  s.v_slc = paged_rows(cache.v_slc, cache.block_table, batch);
  s.k_c = paged_rows(cache.k_c, cache.block_table_c, batch);
  s.v_c = paged_rows(cache.v_c, cache.block_table_c, batch);
  s.k_swa = plain_rows(cache.k_swa_ring, batch);
  s.v_swa = plain_rows(cache.v_swa_ring, batch);
  s.window_begin = std::max<std::int64_t>(0, length_before - params_.cfg.window_size + 1);
  if (num_new > kRollback) {  // the append will overwrite tokens that the first queries see: keep them beside the ring
    const auto window_of = [&](TokenRows& ring, const TensorView& fresh) {
      TokenBuffer& buffer = windows_.emplace_back(fresh, s.window_begin, s.length - s.window_begin);
      buffer.take(ring, s.window_begin, s.length_before);
      buffer.take(plain_rows(fresh, batch, s.length_before), s.length_before, s.length);
      ring = buffer.rows();
    };
    window_of(s.k_swa, params_.k_swa);
    window_of(s.v_swa, params_.v_swa);
  }
  sequences_.push_back(s);
}

Status CacheStep::append(Compress compress, const Context& context) {
  const KVCacheView& cache = params_.cache;
  // Folding first: it needs tokens that the append may overwrite.
  if (Status s = fold(params_.k_cmp, cache.k_cmp_ring, params_.weights_k, cache.k_c, params_.rope_cos.defined(),
                      compress, context);
      !s.ok())
    return s;
  if (Status s = fold(params_.v_cmp, cache.v_cmp_ring, params_.weights_v, cache.v_c, false, compress, context); !s.ok())
    return s;
  for (const StepSequence& s : sequences_) {
    const auto write = [&](const TensorView& fresh, const TokenRows& to, std::int64_t keep) {
      copy_tokens(plain_rows(fresh, s.batch, s.length_before), to, std::max(s.length_before, s.length - keep), s.length,
                  fresh.size(2), static_cast<std::size_t>(fresh.size(3)) * size_of(fresh.dtype));
    };
    const auto write_ring = [&](const TensorView& fresh, const TensorView& ring) {
      write(fresh, plain_rows(ring, s.batch), ring.size(1));
    };
    write(params_.k_slc, s.k_slc, s.num_new);
    write(params_.v_slc, s.v_slc, s.num_new);
    write_ring(params_.k_swa, cache.k_swa_ring);
    write_ring(params_.v_swa, cache.v_swa_ring);
    write_ring(params_.k_cmp, cache.k_cmp_ring);
    write_ring(params_.v_cmp, cache.v_cmp_ring);
  }
  return {};
}

Status CacheStep::fold(const TensorView& fresh, const TensorView& ring, const CompressionWeights& weights,
                       const TensorView& cache, bool rotated, Compress compress, const Context& context) const {
  // One packed call: of each sequence that completes blocks, the tokens from the start of the first of them on.
  const NSAConfig& cfg = params_.cfg;
  const std::int64_t stride = cfg.kernel_stride;
  const auto begin_of = [&](const StepSequence& s) { return cfg.num_compressed(s.length_before) * stride; };
  std::vector<const StepSequence*> folding;
  std::vector<std::int32_t> offsets{0};
  for (const StepSequence& s : sequences_) {
    if (cfg.num_compressed(s.length) == cfg.num_compressed(s.length_before)) continue;
    folding.push_back(&s);
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(s.length - begin_of(s)));
  }
  if (folding.empty()) return {};

  const std::int64_t total = offsets.back(), heads = fresh.size(2), dim = fresh.size(3);
  const TokenBuffer raw(fresh, 0, total), folded(fresh, 0, total / stride);
  const std::size_t bytes = static_cast<std::size_t>(dim) * size_of(fresh.dtype);
  for (std::size_t n = 0; n < folding.size(); ++n) {
    const StepSequence& s = *folding[n];
    const std::int64_t begin = begin_of(s);
    TokenRows to = raw.rows();
    to.first = begin - offsets[n];
    copy_tokens(plain_rows(ring, s.batch), to, begin, s.length_before, heads, bytes);
    copy_tokens(plain_rows(fresh, s.batch, s.length_before), to, std::max(begin, s.length_before), s.length, heads,
                bytes);
  }
  CompressParams call;
  call.k = TensorView::contiguous(raw.view().data, fresh.dtype, {total, heads, dim});
  call.weights = weights;
  call.cfg = cfg;
  call.cu_seqlens = TensorView::contiguous(offsets.data(), DType::kInt32, {static_cast<std::int64_t>(offsets.size())});
  call.out = TensorView::contiguous(folded.view().data, fresh.dtype, {total / stride, heads, dim});
  if (Status status = compress(call, context); !status.ok()) return status;

  const RotationTable table{params_.rope_cos, params_.rope_sin};
  std::int64_t row = 0;
  for (const StepSequence* s : folding) {
    const TokenRows pages = paged_rows(cache, params_.cache.block_table_c, s->batch);
    for (std::int64_t i = cfg.num_compressed(s->length_before); i < cfg.num_compressed(s->length); ++i, ++row)
      for (std::int64_t head = 0; head < heads; ++head) {
        std::byte* target = pages.at(i, head);
        std::memcpy(target, folded.rows().at(row, head), bytes);
        if (!rotated) continue;
        table.rotate(TensorView::contiguous(target, fresh.dtype, {dim}), i * stride);
      }
  }
  return {};
}

void CacheStep::finish() {
  for (const StepSequence& s : sequences_)
    params_.cache.cache_seqlens.as<std::int32_t>()[s.batch * params_.cache.cache_seqlens.stride[0]] =
        static_cast<std::int32_t>(s.length);
}

}  // namespace nsa
