// What the kernels for dK and dV work on.
#pragma once

namespace nsa::cuda::sm90 {

/// Keys and the query rows that give to them. A kernel of its own makes the schedule.
struct alignas(16) KeyItem {
  int batch;  // of the tensors
  int kv_head;
  int first_key;  // within the sequence
  int keys;       // 0: nothing to do
  int key_row;    // of the first key, in the tensors
  int query_row;  // of the sequence's first query, in the tensors
  int shift;      // position of the sequence's first query
  int from, to;   // queries of the sequence, or entries of its list
  int stages;
  int slot;            // for partial sums; -1: the result is complete
  int partials;        // of the key tile, if this is its first item and there are several
  int cut;             // of the selection: SelectedWindows::of the sequence
  const float* terms;  // of the sequence's first query and the KV head's first tile (RowTerms)
};

static_assert(sizeof(KeyItem) == 64);

}  // namespace nsa::cuda::sm90
