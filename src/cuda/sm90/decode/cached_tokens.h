// Where a token of a cache lies, of the library's own or in memory of an engine: a table gives its page, and strides do
// the rest. Compressed tokens in the pages of their tokens and rings are of this kind, too.
#pragma once

#include <bit>

#include "cuda/common/cache.cuh"

namespace nsa::cuda::sm90::decode {

/// Division of a token's number, below 2^31, by the size of a page.
struct PageDivmod {
  unsigned factor = 0;
  int shift = -1;  // -1: pages of one slot

  PageDivmod() = default;
  explicit PageDivmod(int size) {
    if (size <= 1) return;
    shift = std::bit_width(static_cast<unsigned>(size - 1)) - 1;  // 2^shift < size <= 2^(shift + 1)
    factor = static_cast<unsigned>(((std::uint64_t{1} << (32 + shift)) + size - 1) / size);
  }
  __device__ int divide(int x) const {
    return shift < 0 ? x : static_cast<int>(__umulhi(static_cast<unsigned>(x), factor) >> shift);
  }
};

/// Rows of pages. Strides in bytes, of 32 bits within a page; a row is a slot of a page.
struct CachedRows {
  char* data = nullptr;
  std::int64_t page = 0;
  int row = 0, head = 0;

  CachedRows() = default;
  explicit CachedRows(const Slots& slots)
      : data(static_cast<char*>(slots.rows.data)),
        page(slots.rows.batch),
        row(static_cast<int>(slots.rows.row)),
        head(static_cast<int>(slots.rows.head)) {}
};

/// Pages of tokens. A ring has no table: its page is its sequence's number.
struct TokenPages {
  const int* table = nullptr;
  int table_row = 0, table_pages = 0;  // of a sequence
  int pages = 0, size = 1, first = 0;  // slots of a page; slot of token 0
  PageDivmod by_size;

  TokenPages() = default;
  /// table_columns: of a table, else of no matter.
  TokenPages(const Slots& slots, int num_pages, int table_columns)
      : table(slots.ring ? nullptr : slots.table),
        table_row(static_cast<int>(slots.table_row)),
        table_pages(table_columns),
        pages(num_pages),
        size(slots.size),
        first(slots.first),
        by_size(slots.size) {}

  /// A page by its number in the table, and a row in it.
  struct Slot {
    int number, row;
  };
  __device__ Slot slot_of(int token) const {
    const int slot = token + first, number = by_size.divide(slot);
    return {number, slot - number * size};
  }
  /// A page of sequence b; 0 where there is none, as may be while the capacity is not known. Written out:
  /// as calls of the two below it is more instructions of every kernel.
  __device__ int page_of(int b, int number) const {
    if (!table) return b;
    const int page = listed_page(b, number);
    return static_cast<unsigned>(page) < static_cast<unsigned>(pages) ? page : 0;
  }
  /// The same in two steps, where the page is not to be waited for yet.
  __device__ int listed_page(int b, int number) const {
    return table ? table[static_cast<std::int64_t>(b) * table_row + min(number, table_pages - 1)] : b;
  }
  __device__ int checked(int page) const {
    return !table || static_cast<unsigned>(page) < static_cast<unsigned>(pages) ? page : 0;
  }
};

/// Keys or values.
struct CachedTensor : TokenPages {
  CachedRows rows;

  CachedTensor() = default;
  /// Strides of the slots in bytes.
  CachedTensor(const Slots& slots, int num_pages, int table_columns)
      : TokenPages(slots, num_pages, table_columns), rows(slots) {}

  __device__ char* at(int b, int token, int head) const {
    const Slot slot = slot_of(token);
    return rows.data + page_of(b, slot.number) * rows.page + static_cast<std::int64_t>(slot.row) * rows.row +
           head * rows.head;
  }
};

/// The keys and values of a branch, which have one table and as many pages.
struct CachedBranch : TokenPages {
  CachedRows k, v;

  CachedBranch() = default;
  CachedBranch(const CachedTensor& keys, const CachedTensor& values) : TokenPages(keys), k(keys.rows), v(values.rows) {}
};

}  // namespace nsa::cuda::sm90::decode
