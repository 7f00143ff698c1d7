// A cache's views as the arguments of kernels.
#pragma once

#include "cuda/operations/branch.h"
#include "cuda/portable/decode/step_params.h"

namespace nsa::cuda {

inline Slots paged(const TensorView& pages, const TensorView& table) {
  return {strided(pages), to_int(pages.size(1)), false, table.as<const int>(), table.stride[0]};
}
/// numbers: the sequences' own, `step` ints apart.
inline Slots ring(const TensorView& tokens, const int* numbers, std::int64_t step) {
  return {strided(tokens), to_int(tokens.size(1)), true, numbers, step};
}

inline PageTable page_table(const TensorView& pages, const TensorView& table) {
  return {table.as<const int>(), table.stride[0], to_int(table.size(1)), to_int(pages.size(1)), to_int(pages.size(0))};
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

/// Pieces of sixteen bytes in a row.
inline int pieces_of(const TensorView& t) {
  return to_int(t.size(-1) * static_cast<std::int64_t>(size_of(t.dtype)) / 16);
}

}  // namespace nsa::cuda
