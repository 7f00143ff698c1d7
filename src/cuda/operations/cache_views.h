// A cache's views as the arguments of kernels.
#pragma once

#include "cuda/operations/branch.h"
#include "cuda/portable/decode/step_params.h"

namespace nsa::cuda {

inline Slots paged(const TensorView& pages, const TensorView& table) {
  return {.rows = strided(pages),
          .size = to_int(pages.size(1)),
          .table = table.as<const int>(),
          .table_row = table.stride[0]};
}
/// numbers: the sequences' own, `step` ints apart.
inline Slots ring(const TensorView& tokens, const int* numbers, std::int64_t step) {
  return {.rows = strided(tokens), .size = to_int(tokens.size(1)), .ring = true, .table = numbers, .table_row = step};
}
/// The window or the raw tokens: a ring, or pages where there is a table.
inline Slots recent(const TensorView& tokens, const TensorView& table, const int* numbers, std::int64_t step) {
  return table.defined() ? paged(tokens, table) : ring(tokens, numbers, step);
}
/// Compressed tokens: in pages of their own, or each where its block's last token is.
inline Slots compressed(const TensorView& pages, const KVCacheView& cache, const NSAConfig& cfg) {
  if (cache.block_table_c.defined()) return paged(pages, cache.block_table_c);
  Slots slots = paged(pages, cache.block_table);
  slots.first = cfg.kernel_size / cfg.kernel_stride - 1;
  return slots;
}

/// Tokens that the window sees, few enough to be added to a position.
inline int window_size(const NSAConfig& cfg) { return std::min(cfg.window_size, 1 << 30); }

/// No table: null pages.
inline PageTable page_table(const TensorView& pages, const TensorView& table) {
  if (!table.defined()) return {};
  return {.pages = table.as<const int>(),
          .row = table.stride[0],
          .max_pages = to_int(table.size(1)),
          .page_size = to_int(pages.size(1)),
          .num_pages = to_int(pages.size(0))};
}

/// Undefined: 1.
inline HeadScales scales_of(const TensorView& scale) {
  return scale.defined() ? HeadScales{scale.as<const float>(), scale.stride[0]} : HeadScales{};
}

/// The same with strides in bytes.
inline Strided in_bytes(Strided t, DType dtype) {
  const auto item = static_cast<std::int64_t>(size_of(dtype));
  t.batch *= item, t.row *= item, t.head *= item;
  return t;
}
inline Slots in_bytes(Slots slots, DType dtype) {
  slots.rows = in_bytes(slots.rows, dtype);
  return slots;
}

/// 16-byte vectors of a row.
inline int vectors_of(const TensorView& t) {
  return to_int(t.size(-1) * static_cast<std::int64_t>(size_of(t.dtype)) / 16);
}

}  // namespace nsa::cuda
