// Backward of attention, the same for all branches, alone or together. With s = scale * q k^T, p = exp(s - lse), gate
// g:
//   d_v = sum (g p) d_o      d_p = d_o v^T      d_s = g p (d_p - d_o o)      d_q = scale * d_s k      d_k = scale * d_s
//   q
// The queries are taken in chunks. In each, first every query (with the heads of one KV head) computes p and d_s once,
// finishes its d_q and leaves p and d_s behind; then every key block goes through the queries that see it, in ascending
// order, and adds to its d_k and d_v. Each sum belongs to one thread and has one order: nothing depends on the number
// of threads, on the chunks or on the other sequences.
#pragma once

#include <functional>
#include <vector>

#include "core/layout.h"
#include "cpu/kernels/backward_plan.h"
#include "cpu/kernels/gemm.h"
#include "cpu/threads.h"

namespace nsa::cpu::NSA_ISA {

struct BranchCall {
  TensorView k, v, o, lse;  // as the forward had and left them
  TensorView d_k, d_v;      // optional
  bool compressed;          // keys are the compressed tokens of a sequence
  /// Appends the positions that a query sees: ascending, disjoint.
  std::function<void(const Sequence&, std::int64_t kv_head, std::int64_t row, std::vector<Range>&)> visible;
};

struct BackwardCall {
  TensorView q, d_o;
  TensorView d_q;             // optional: the sum of all branches
  TensorView gates, d_gates;  // optional: one gate per branch; none are as good as ones
  std::vector<Sequence> sequences;
  std::int64_t kv_heads;
  float scale;
  std::vector<BranchCall> branches;
};

/// Sizes of a group of heads, and how its rows lie in packed operands.
template <class In>
struct HeadGroup {
  using Slots = typename SlotsOf<In>::type;

  int heads, key_dim, value_dim;
  int pairs = static_cast<int>(ceil_div(heads, Slots::kElements));  // steps of a sum over heads
  int key_steps = key_dim / Slots::kElements, value_steps = value_dim / Slots::kElements;
  int key_columns = static_cast<int>(round_up(key_dim, kWidth));
  int value_columns = static_cast<int>(round_up(value_dim, kWidth));
  std::int64_t block_slots = std::int64_t{pairs} * kBlockTokens;                  // p or d_s of a query and a key block
  std::int64_t item_slots = std::int64_t{pairs} * (key_columns + value_columns);  // q and d_o of a query
};

/// What the queries of a chunk leave for the key blocks, as operands of a sum over heads (and queries).
template <class In>
struct BackwardWorkspace {
  HeadGroup<In> group;
  Buffer<Slot> entries, items;
  std::int64_t entries_capacity = 0, items_capacity = 0;
  std::vector<std::uint8_t> nonfinite;  // per item: its q or d_o holds a NaN or an infinity

  void reserve(const Chunk& chunk) {
    const auto n = static_cast<std::int64_t>(chunk.entries().size()),
               m = static_cast<std::int64_t>(chunk.items().size());
    if (n > entries_capacity)
      entries = Buffer<Slot>(static_cast<std::size_t>((entries_capacity = n) * 2 * group.block_slots));
    if (m > items_capacity) items = Buffer<Slot>(static_cast<std::size_t>((items_capacity = m) * group.item_slots));
    nonfinite.resize(static_cast<std::size_t>(m));
  }

  Slot* p(std::int64_t entry) { return entries.data() + entry * 2 * group.block_slots; }  // [pair][64]
  Slot* d_s(std::int64_t entry) { return p(entry) + group.block_slots; }                  // [pair][64]
  Slot* q(std::int64_t item) { return items.data() + item * group.item_slots; }           // [pair][key_columns]
  Slot* d_o(std::int64_t item) {
    return q(item) + std::int64_t{group.pairs} * group.key_columns;
  }  // [pair][value_columns]
};

/// Keys and values of a branch as operands, and the sums of their gradients.
template <class In>
struct BackwardBranch {
  BackwardBranch(const BranchCall& call, const BackwardCall& all, std::int64_t first_key, const Context& context)
      : call(call) {
    std::int64_t key = first_key;
    for (const Sequence& s : all.sequences) {
      if (call.compressed)
        spans.push_back({.batch = s.batch, .begin = s.c_begin, .length = s.c_len});
      else
        spans.push_back({.batch = s.batch, .begin = s.k_begin, .length = s.k_len});
      first_keys.push_back(key);
      key += ceil_div(spans.back().length, kBlockTokens) * all.kv_heads;
    }
    this->first_key = first_key;
    keys = key - first_key;
    need_d_s = call.d_k.defined() || all.d_q.defined();
    if (!needed()) return;
    key_columns = PackedTokens<In>(call.k, Layout::kColumns, spans, context);
    if (need_d_s) value_columns = PackedTokens<In>(call.v, Layout::kColumns, spans, context);
    if (all.d_q.defined()) key_rows = PackedTokens<In>(call.k, Layout::kRows, spans, context);
    d_k = sums(call.d_k, context);
    d_v = sums(call.d_v, context);
  }

  bool needed() const { return need_d_s || call.d_v.defined(); }

  /// Number of block 0 of a sequence and KV head among all blocks of the call.
  std::int64_t key_of(std::size_t sequence, std::int64_t kv_head) const {
    return first_keys[sequence] + kv_head * ceil_div(spans[sequence].length, kBlockTokens);
  }

  const BranchCall& call;
  std::vector<TokenSpan> spans;
  std::vector<std::int64_t> first_keys;  // per sequence: number of block 0 of KV head 0
  std::int64_t first_key = 0, keys = 0;
  bool need_d_s = false;
  PackedTokens<In> key_columns, key_rows, value_columns;
  Buffer<float> d_k, d_v;  // [key block][64][columns]

 private:
  Buffer<float> sums(const TensorView& gradient, const Context& context) const {
    if (!gradient.defined()) return {};
    const std::int64_t block = kBlockTokens * round_up(gradient.size(-1), kWidth);
    Buffer<float> result(static_cast<std::size_t>(keys * block));
#pragma omp parallel for schedule(static) num_threads(threads_of(context))
    for (std::int64_t i = 0; i < keys; ++i) std::fill_n(result.data() + i * block, block, 0.0f);
    return result;
  }
};

/// Computes all gradients of the call.
template <class In>
void attention_backward(const BackwardCall& call, const Context& context);

extern template void attention_backward<float>(const BackwardCall& call, const Context& context);
extern template void attention_backward<bf16>(const BackwardCall& call, const Context& context);

}  // namespace nsa::cpu::NSA_ISA
