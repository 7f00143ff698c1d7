#include "core/rotate.h"

#include "core/element.h"

namespace nsa {

void RotationTable::rotate(const TensorView& row, std::int64_t position, bool back) const {
  const float* const cosines = cos.as<const float>() + position * cos.stride[0];
  const float* const sines = sin.as<const float>() + position * sin.stride[0];
  const std::int64_t half = row.size(0) / 2;
  for (std::int64_t j = 0; j < half; ++j) {
    const double x = get_element(row, j), y = get_element(row, j + half);
    const double c = cosines[j], s = back ? -sines[j] : sines[j];
    set_element(row, j, x * c - y * s);
    set_element(row, j + half, y * c + x * s);
  }
}

void rotate_compressed(const TensorView& k_c, const std::vector<Sequence>& sequences, const NSAConfig& cfg,
                       const RotationTable& table, bool back) {
  if (!table.defined()) return;
  const auto bytes = static_cast<std::int64_t>(size_of(k_c.dtype));
  const int heads = k_c.rank - 2;
  for (const Sequence& s : sequences)
    for (std::int64_t i = 0; i < s.c_len; ++i)
      for (std::int64_t head = 0; head < k_c.size(heads); ++head) {
        const std::int64_t at = row_offset(k_c, s.batch, s.c_begin + i) + head * k_c.stride[heads];
        table.rotate(TensorView::contiguous(k_c.as<std::byte>() + at * bytes, k_c.dtype, {k_c.size(-1)}),
                     i * cfg.kernel_stride, back);
      }
}

}  // namespace nsa
