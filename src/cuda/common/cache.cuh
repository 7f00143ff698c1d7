// A key/value cache as kernels see it: what a step does to each sequence, and where tokens lie.
#pragma once

#include "cuda/common/float8.cuh"
#include "cuda/common/geometry.cuh"

namespace nsa::cuda {

/// What a step does to one sequence. Lengths lie on the device, so it is decided there (plan_step).
struct StepPlan {
  int before;     // length before the step: its first new token and query stand there
  int added;      // new tokens; 0: idle, or without capacity
  int sequence;   // its number, which is that of its page in a ring
  int completed;  // compression blocks that the new tokens complete
  int served;     // 0; counts clusters that have read the length (sm90/decode)
  int q_begin;    // row of its first new token
};

/// q_len and k_len are upper bounds that the host knows: new tokens, capacity.
struct StepGeometry : Geometry {
  const StepPlan* plan = nullptr;  // (batches)
  const int* starts = nullptr;     // packed new tokens: (batches + 1) rows where sequences begin; null: a batch
  int rows = 0;                    // of packed new tokens
  bool counted = false;            // lengths count the new tokens already
};

/// Everything that the plan lets through lies within the cache's tables.
__device__ inline DeviceSequence sequence_of(const StepGeometry& p, int b) {
  const StepPlan step = p.plan[b];
  return {b, p.starts ? 0 : b, step.q_begin, step.added, 0, step.before + step.added};
}

__device__ inline int compressed_begin(const StepGeometry&, int) { return 0; }

/// The page tables of a cache, checked before anything follows them.
struct PageTable {
  const int* pages = nullptr;
  std::int64_t row = 0;  // ints from one sequence's pages to the next one's
  int max_pages = 0, page_size = 1, num_pages = 0;
};

/// The tables of a cache: of all tokens, of compressed ones, of the window, of raw tokens.
enum TableIndex { kTokenTable, kCompressedTable, kWindowTable, kRawTable, kTables };

/// What the plan of a step is made from.
struct PlanArgs {
  StepGeometry geometry;
  StepPlan* plan;             // (B), for the kernels behind
  const int* lengths;         // (B), before the step
  const int* num_new;         // (B); null: m
  int* overflow;              // set to 1 if a sequence has no capacity
  PageTable tables[kTables];  // null pages: compressed tokens lie with the tokens; a ring
  int window_size;            // tokens
  int positions;              // that can be rotated
};

/// Storage of the tokens of sequences: pages found through a table. A ring is the only page of its sequence.
struct Slots {
  Strided rows;                // (pages, size, heads, D)
  int size = 1;                // slots of a page
  int first = 0;               // slot of token 0
  bool ring = false;           // every token is in page 0 of the table, in slot token % size
  const int* table = nullptr;  // page numbers
  std::int64_t table_row = 0;  // ints from one sequence's page numbers to the next one's

  template <class T>
  __device__ T* at(int b, int token, int head) const {
    const int at = token + first, page = at / size;
    return rows.at<T>(table[b * table_row + (ring ? 0 : page)], at - page * size, head);
  }

  /// Whether a later token before `end` has the token's slot: the table names a page several times in a row.
  __device__ bool is_overwritten(int b, int token, int end) const {
    if (ring || token + size >= end) return false;
    const int* const page = table + b * table_row + (token + first) / size;
    return page[0] == page[1];
  }
};

/// Keys or values that queries of a step see.
struct CachedTokens {
  template <class T>
  using Stored = T;

  Slots slots;
  Strided fresh;  // (B, m, heads, D): those of the step itself; null data: they are in the slots already

  template <class T>
  __device__ T* at(const DeviceSequence& s, int token, int head) const {
    const int before = s.k_len - s.q_len;
    if (fresh.data && token >= before) return fresh.at<T>(s.batch, s.q_begin + token - before, head);
    return slots.at<T>(s.index, token, head);
  }
};

/// The same in e4m3, those of the step too.
struct Float8Tokens : CachedTokens {
  template <class T>
  using Stored = Float8;

  HeadScales scales;
};

__device__ __forceinline__ float key_scale(const CachedTokens&, int) { return 1; }
__device__ __forceinline__ float key_scale(const Float8Tokens& keys, int head) { return keys.scales[head]; }

/// RowStream for them. e4m3 comes without its scale.
template <class T, int D, int kRows, int kThreads, class Tokens>
class CachedStream {
  using Element = typename Tokens::template Stored<T>;

 public:
  __device__ CachedStream(const Tokens& tokens, const DeviceSequence& s, int head, int thread)
      : tokens_(tokens),
        slots_(tokens.slots.rows.template at<Element>(0, 0, head)),
        fresh_(tokens.fresh.template at<Element>(s.batch, s.q_begin + s.q_len - s.k_len, head)),
        table_(tokens.slots.table + s.index * tokens.slots.table_row),
        before_(tokens.fresh.data ? s.k_len - s.q_len : s.k_len),
        page_mask_(tokens.slots.ring ? 0 : -1),
        thread_(thread) {}

  /// The tokens first ... first + kRows - 1; zeros from `end` on. Mostly they lie one after the other in one page.
  __device__ void load(std::uint32_t tile, int first, int end) const {
    const int last = min(first + kRows, end), at_first = first + tokens_.slots.first;
    const int page = at_first / tokens_.slots.size, slot = at_first - page * tokens_.slots.size;
    const bool one_page = last <= before_ && slot + last - first <= tokens_.slots.size;
    const Element* row0 = one_page ? in_page(page, slot) : nullptr;
#pragma unroll(sizeof(T) == 4 || sizeof(Element) == 1 ? 1 : kRows)  // neither has registers to spare
    for (int r = thread_ / 8; r < kRows; r += kThreads / 8) {
      const Element* const row = first + r >= end ? nullptr
                                 : one_page       ? row0 + r * tokens_.slots.rows.row
                                                  : at(first + r);
      if constexpr (sizeof(Element) == 1) {
        load_float8_row<T, D>(tile, r, thread_, row);
      } else {
        Tile<T, D>::load_row(tile, r, thread_, row);
      }
    }
  }

 private:
  __device__ const Element* at(int token) const {
    if (token >= before_) return fresh_ + token * tokens_.fresh.row;
    const int slot = token + tokens_.slots.first, page = slot / tokens_.slots.size;
    return in_page(page, slot - page * tokens_.slots.size);
  }
  __device__ const Element* in_page(int page, int slot) const {
    // Pages that no query sees may be gone, though a tile contains their tokens.
    return slots_ + max(table_[page & page_mask_], 0) * tokens_.slots.rows.batch + slot * tokens_.slots.rows.row;
  }

  const Tokens& tokens_;           // of the kernel's arguments
  const Element *slots_, *fresh_;  // of this head
  const int* table_;               // of this sequence
  int before_, page_mask_, thread_;
};

template <class T, int D, int kRows, int kThreads, class Tokens>
requires std::is_base_of_v<CachedTokens, Tokens> __device__ inline CachedStream<T, D, kRows, kThreads, Tokens>
key_stream(const Tokens& t, const DeviceSequence& s, int, int head, int thread) {
  return {t, s, head, thread};
}

}  // namespace nsa::cuda
