#include "core/token_rows.h"

#include <algorithm>

#include "core/element.h"

namespace nsa {
namespace {

std::int64_t byte_stride(const TensorView& tensor, int dim) {
  return tensor.stride[static_cast<std::size_t>(dim)] * static_cast<std::int64_t>(size_of(tensor.dtype));
}

/// A packed tensor (rows, heads, D) as a batch of one.
TensorView batched(TensorView tensor) {
  if (tensor.rank != 3) return tensor;
  tensor.rank = 4;
  tensor.shape = {1, tensor.shape[0], tensor.shape[1], tensor.shape[2]};
  tensor.stride = {0, tensor.stride[0], tensor.stride[1], tensor.stride[2]};
  return tensor;
}

TensorView row_of(const TokenRows& rows, std::int64_t token, std::int64_t head, std::int64_t dim) {
  return TensorView::contiguous(rows.at(token, head), rows.dtype, {dim});
}

}  // namespace

TokenRows paged_rows(const TensorView& pages, const TensorView& table, std::int64_t b) {
  TokenRows rows;
  rows.data = pages.as<std::byte>();
  rows.page_stride = byte_stride(pages, 0);
  rows.row_stride = byte_stride(pages, 1);
  rows.head_stride = byte_stride(pages, 2);
  rows.page_size = pages.size(1);
  rows.table = table.as<const std::int32_t>() + b * table.stride[0];
  rows.table_stride = table.stride[1];
  rows.dtype = pages.dtype;
  return rows;
}

TokenRows plain_rows(const TensorView& given, std::int64_t b, std::int64_t first) {
  const TensorView tensor = batched(given);
  TokenRows rows;
  rows.data = tensor.as<std::byte>() + b * byte_stride(tensor, 0);
  rows.row_stride = byte_stride(tensor, 1);
  rows.head_stride = byte_stride(tensor, 2);
  rows.page_size = std::max<std::int64_t>(tensor.size(1), 1);
  rows.first = first;
  rows.dtype = tensor.dtype;
  return rows;
}

TensorView slice_rows(const TensorView& tensor, std::int64_t b, std::int64_t begin, std::int64_t count) {
  TensorView slice = batched(tensor);
  if (!tensor.defined()) return slice;
  slice.data = slice.as<std::byte>() + b * byte_stride(slice, 0) + begin * byte_stride(slice, 1);
  slice.shape[0] = 1;
  slice.shape[1] = count;
  return slice;
}

void copy_tokens(const TokenRows& from, const TokenRows& to, std::int64_t begin, std::int64_t end, std::int64_t heads,
                 std::int64_t dim) {
  const std::size_t bytes = static_cast<std::size_t>(dim) * size_of(from.dtype);
  for (std::int64_t token = begin; token < end; ++token)
    for (std::int64_t head = 0; head < heads; ++head) {
      if (from.dtype == to.dtype) {
        std::memcpy(to.at(token, head), from.at(token, head), bytes);
        continue;
      }
      const TensorView x = row_of(from, token, head, dim), y = row_of(to, token, head, dim);
      const float stored = from.scale_of(head), scale = to.scale_of(head);
      for (std::int64_t d = 0; d < dim; ++d)
        if (to.dtype == DType::kFloat8E4M3) {
          y.as<Float8E4M3>()[d] = to_float8_e4m3(static_cast<float>(get_element(x, d)) / scale);
        } else {
          set_element(y, d, get_element(x, d) * static_cast<double>(stored));
        }
    }
}

TokenBuffer::TokenBuffer(const TensorView& like, std::int64_t first, std::int64_t count, DType dtype,
                         const TensorView& scale)
    : storage_(static_cast<std::size_t>(count * like.size(-2) * like.size(-1)) * size_of(dtype)),
      view_(TensorView::contiguous(storage_.data(), dtype, {1, count, like.size(-2), like.size(-1)})),
      rows_(plain_rows(view_, 0, first)) {
  rows_.scale = scale;
}

void TokenBuffer::take(const TokenRows& from, std::int64_t begin, std::int64_t end) {
  copy_tokens(from, rows_, begin, end, view_.size(2), view_.size(3));
}

}  // namespace nsa
