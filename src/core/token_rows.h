// Where the tokens of one sequence lie: in pages found through a table, in a ring, or one after the other; and in which
// type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "nsa/tensor.h"

namespace nsa {

struct TokenRows {
  std::byte* data = nullptr;
  std::int64_t row_stride = 0, head_stride = 0, page_stride = 0;  // bytes
  std::int64_t page_size = 1;                                     // rows of a page, of the ring, of the buffer
  const std::int32_t* table = nullptr;                            // page numbers; null: one page, used as a ring
  std::int64_t table_stride = 0;
  std::int64_t first = 0;  // the token in slot 0 of page 0
  DType dtype = DType::kFloat32;
  TensorView scale;  // float32 (Hkv) of e4m3: an element is stored as element / scale of its head; not given: 1

  float scale_of(std::int64_t head) const {
    return scale.defined() ? scale.as<const float>()[head * scale.stride[0]] : 1;
  }

  std::byte* at(std::int64_t token, std::int64_t head) const {
    const std::int64_t page = (token - first) / page_size, slot = (token - first) % page_size;
    return data + (table ? table[page * table_stride] * page_stride : 0) + slot * row_stride + head * head_stride;
  }
  /// Tokens from this one on that follow each other at row_stride.
  std::int64_t run(std::int64_t token) const { return page_size - (token - first) % page_size; }
};

/// Page p of sequence b in a table (B, max_pages); -1: none.
inline std::int32_t table_entry(const TensorView& table, std::int64_t b, std::int64_t p) {
  return table.as<const std::int32_t>()[b * table.stride[0] + p * table.stride[1]];
}

/// Sequence b of pages (num_pages, page_size, Hkv, D) with a table (B, max_pages).
TokenRows paged_rows(const TensorView& pages, const TensorView& table, std::int64_t b);
/// Sequence b of (B, rows, Hkv, D): a ring, or plain rows the first of which is token `first`. Packed (rows, Hkv, D) is
/// a batch of one.
TokenRows plain_rows(const TensorView& tensor, std::int64_t b, std::int64_t first = 0);

/// Rows begin ... begin + count - 1 of sequence b of a (B, rows, heads, D) tensor or of a packed one, as a batch of
/// one.
TensorView slice_rows(const TensorView& tensor, std::int64_t b, std::int64_t begin, std::int64_t count);

/// Copies `heads` rows of `dim` elements for each of the tokens begin ... end - 1. Between a type and e4m3 they are
/// converted: stored = x / scale in float32, rounded to nearest even, at most 448 in magnitude; x = stored * scale.
void copy_tokens(const TokenRows& from, const TokenRows& to, std::int64_t begin, std::int64_t end, std::int64_t heads,
                 std::int64_t dim);

/// A tensor (1, count, Hkv, D) of its own for the tokens from `first` on.
class TokenBuffer {
 public:
  /// Of the sizes of `like` (.., .., Hkv, D) and its type, or a type and scale of its own.
  TokenBuffer(const TensorView& like, std::int64_t first, std::int64_t count)
      : TokenBuffer(like, first, count, like.dtype, {}) {}
  TokenBuffer(const TensorView& like, std::int64_t first, std::int64_t count, DType dtype, const TensorView& scale);

  const TensorView& view() const { return view_; }
  const TokenRows& rows() const { return rows_; }
  /// Fills the tokens begin ... end - 1 from elsewhere.
  void take(const TokenRows& from, std::int64_t begin, std::int64_t end);

 private:
  std::vector<std::byte> storage_;
  TensorView view_;
  TokenRows rows_;
};

}  // namespace nsa
