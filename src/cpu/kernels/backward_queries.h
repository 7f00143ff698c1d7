// The first half of the backward of attention: one query with the heads of one KV head against the keys it sees.
#pragma once

#include "cpu/kernels/attention_backward.h"
#include "cpu/kernels/queries.h"

namespace nsa::cpu::NSA_ISA {

/// Scratch of one thread.
template <class In>
class QueryWorker {
 public:
  using Slots = typename SlotsOf<In>::type;
  using Element = ElementOf<In>;

  explicit QueryWorker(const HeadGroup<In>& group)
      : group_(group),
        q_(slots(group.heads * group.key_steps)),
        d_o_(slots(group.heads * group.value_steps)),
        clean_(slots(std::int64_t{group.key_columns} * kBlockTokens)),
        scores_(zeros<float>(group.heads * kBlockTokens)),
        d_p_(zeros<float>(group.heads * kBlockTokens)),
        d_q_(zeros<float>(group.heads * group.key_columns)),
        p_(zeros<Element>(group.pairs * Slots::kElements * kBlockTokens)),
        d_s_(zeros<Element>(group.pairs * Slots::kElements * kBlockTokens)),
        rows_(static_cast<std::size_t>(group.heads)) {}

  void run(const BackwardCall& call, const std::vector<BackwardBranch<In>>& branches, const Chunk& chunk,
           std::int64_t number, BackwardWorkspace<In>& out) {
    const Item& item = chunk.items()[static_cast<std::size_t>(number)];
    load_queries(call, item, number, out);
    std::fill_n(d_q_.data(), group_.heads * group_.key_columns, 0.0f);
    for (std::size_t b = 0; b < branches.size(); ++b) {
      std::int64_t seen = 0;
      for (std::int64_t i = item.entries[b]; i < item.entries[b + 1]; ++i) {
        const Entry& entry = chunk.entries()[static_cast<std::size_t>(i)];
        seen += entry.end - entry.begin;
      }
      // The softmax of one key is constant: a difference of d_p and dot would be rounding alone.
      load_rows(call, branches[b].call, b, item, seen == 1 ? 0 : call.scale);
      for (std::int64_t i = item.entries[b]; i < item.entries[b + 1]; ++i)
        process_block(call, branches[b], item, chunk.entries()[static_cast<std::size_t>(i)], i, out);
    }
    if (!call.d_q.defined()) return;
    const Sequence& s = call.sequences[item.sequence];
    const RowView<In> d_q = rows_of<In>(call.d_q, s.batch, s.q_begin);
    for (int h = 0; h < group_.heads; ++h)
      store_row(d_q_.data() + h * group_.key_columns, group_.key_dim,
                d_q.at(item.row, item.kv_head * group_.heads + h));
  }

 private:
  /// What a head contributes to p and d_s: p = factor * exp2(score * scale - shift), d_s = scale * p * (d_p - dot).
  struct Row {
    float shift, factor, dot, scale;
    bool empty;  // lse = -inf: no probabilities
  };

  static Buffer<Slot> slots(std::int64_t n) { return Buffer<Slot>(static_cast<std::size_t>(n)); }

  /// q and d_o as rows for this pass and as sums over heads for the next.
  void load_queries(const BackwardCall& call, const Item& item, std::int64_t number, BackwardWorkspace<In>& out) {
    const Sequence& s = call.sequences[item.sequence];
    const auto load = [&](const TensorView& tensor, int dim, int columns, Slot* rows, Slot* pairs) {
      const RowView<const In> view = rows_of<const In>(tensor, s.batch, s.q_begin);
      const auto row = [&](std::int64_t h) { return view.at(item.row, item.kv_head * group_.heads + h); };
      const int steps = dim / Slots::kElements;
      for (int h = 0; h < group_.heads; ++h) pack_row<Slots>(row(h), dim, rows + h * steps);
      pack_over_rows<Slots>(row, group_.heads, 0, group_.pairs, 0, dim, pairs, columns);
      return any_nonfinite<Slots>(rows, std::int64_t{group_.heads} * steps);
    };
    const bool nonfinite_q = load(call.q, group_.key_dim, group_.key_columns, q_.data(), out.q(number));
    const bool nonfinite_d_o = load(call.d_o, group_.value_dim, group_.value_columns, d_o_.data(), out.d_o(number));
    out.nonfinite[static_cast<std::size_t>(number)] = nonfinite_q || nonfinite_d_o;
  }

  /// Per head: lse, gate and d_o * o, which also is the gradient of the gate.
  void load_rows(const BackwardCall& call, const BranchCall& branch, std::size_t number, const Item& item,
                 float scale) {
    const Sequence& s = call.sequences[item.sequence];
    const LseView<const float> lse = lse_of<const float>(branch.lse, s.batch, s.q_begin);
    const auto row = [&](const TensorView& tensor, std::int64_t head) {
      return rows_of<const In>(tensor, s.batch, s.q_begin).at(item.row, head);
    };
    for (int h = 0; h < group_.heads; ++h) {
      const std::int64_t head = item.kv_head * group_.heads + h;
      const In *o = row(branch.o, head), *d_o = row(call.d_o, head);
      Vec sum{};
      int d = 0;
      for (; d + kWidth <= group_.value_dim; d += kWidth) sum = fma(load_floats(d_o + d), load_floats(o + d), sum);
      float dot = reduce_add(sum);
      for (; d < group_.value_dim; ++d) dot += to_float(d_o[d]) * to_float(o[d]);
      const float l = lse.at(item.row, head),
                  gate = call.gates.defined() ? to_float(row(call.gates, head)[number]) : 1.0f;
      rows_[static_cast<std::size_t>(h)] = {l * kLog2E, gate, dot, scale, l == -kInf};
      if (call.d_gates.defined())
        from_float(dot, rows_of<In>(call.d_gates, s.batch, s.q_begin).at(item.row, head)[number]);
    }
  }

  /// Computes p and d_s of one key block, which it leaves in the workspace, and the block's part of d_q.
  void process_block(const BackwardCall& call, const BackwardBranch<In>& branch, const Item& item, const Entry& entry,
                     std::int64_t number, BackwardWorkspace<In>& out) {
    const int first = entry.first(), count = entry.last() - first, heads = group_.heads;
    const auto zero = [](int, int) { return Vec{}; };
    const auto into = [&](Buffer<float>& buffer) {
      return [&, first](int r, int c, Vec sum) { store(buffer.data() + r * kBlockTokens + first + c, sum); };
    };
    const TokenBlocks keys = branch.key_columns.of(item.sequence, item.kv_head);
    TokenBlocks values, key_rows;
    if (branch.need_d_s) values = branch.value_columns.of(item.sequence, item.kv_head);
    if (call.d_q.defined()) key_rows = branch.key_rows.of(item.sequence, item.kv_head);
    const auto next = [&](const TokenBlocks& blocks) {
      return blocks.data ? Prefetch::of(blocks.block(entry.block), blocks.block_stride) : Prefetch{};
    };
    tiles<Slots>({q_.data(), group_.key_steps, 1}, heads, {keys.block(entry.block) + first, keys.step_stride}, count,
                 group_.key_steps, zero, into(scores_), next(values));
    if (branch.need_d_s)
      tiles<Slots>({d_o_.data(), group_.value_steps, 1}, heads, {values.block(entry.block) + first, values.step_stride},
                   count, group_.value_steps, zero, into(d_p_), next(key_rows));
    probabilities(call.scale, entry);
    hand_over(p_, out.p(number));
    if (!branch.need_d_s) return;
    hand_over(d_s_, out.d_s(number));
    if (!call.d_q.defined()) return;
    const OperandA d_s{reinterpret_cast<const Slot*>(d_s_.data() + first), kBlockTokens / Slots::kElements, 1};
    const auto at = [&](int r, int c) { return d_q_.data() + r * group_.key_columns + c; };
    tiles<Slots>(
        d_s, heads, visible_rows(key_rows, entry), group_.key_columns, count / Slots::kElements,
        [&](int r, int c) { return load(at(r, c)); }, [&](int r, int c, Vec sum) { store(at(r, c), sum); });
  }

  /// Computes p and d_s from scores and d_p. They are zero for the tokens that are not seen.
  void probabilities(float scale, const Entry& entry) {
    if (entry.last() - entry.first() < kBlockTokens) {
      std::fill_n(p_.data(), group_.heads * kBlockTokens, Element{});
      std::fill_n(d_s_.data(), group_.heads * kBlockTokens, Element{});
    }
    const bool partly = entry.partly();
    for (int h = 0; h < group_.heads; ++h) {
      const Row& row = rows_[static_cast<std::size_t>(h)];
      const Vec factor = splat(row.factor), shift = splat(-row.shift), dot = splat(row.dot);
      const Vec d_s_scale = splat(row.scale);
      for (int c = entry.first(); c < entry.last(); c += kWidth) {
        const std::size_t at = static_cast<std::size_t>(h * kBlockTokens + c);
        Vec p = factor * exp2(fma(load(&scores_[at]), splat(scale * kLog2E), shift));
        Vec d_s = d_s_scale * (p * (load(&d_p_[at]) - dot));
        if (partly || row.empty) {
          const IVec seen = row.empty ? IVec{} : lanes(entry.begin - c, entry.end - c);
          p = select(seen, p, Vec{});
          d_s = select(seen, d_s, Vec{});
        }
        store_floats(&p_[at], p);
        store_floats(&d_s_[at], d_s);
      }
    }
  }

  /// Copies rows [head][64] to the workspace as [pair][64], two heads interleaved.
  void hand_over(const Buffer<Element>& rows, Slot* out) const {
    for (int pair = 0; pair < group_.pairs; ++pair) {
      const Element* row = rows.data() + pair * Slots::kElements * kBlockTokens;
      const Element* pair_rows[Slots::kElements];
      for (int e = 0; e < Slots::kElements; ++e) pair_rows[e] = row + e * kBlockTokens;
      interleave<Slots>(pair_rows, kBlockTokens, kBlockTokens, out + pair * kBlockTokens);
    }
  }

  /// The keys of an entry as rows; where unseen ones hold a NaN or an infinity, a copy with zeros in their place.
  OperandB visible_rows(const TokenBlocks& rows, const Entry& entry) {
    const int step = entry.first() / Slots::kElements;
    const Slot* block = rows.block(entry.block) + step * rows.step_stride;
    if (!entry.partly() || !rows.nonfinite[entry.block]) return {block, rows.step_stride};
    for (int t = entry.first(); t < entry.last(); t += Slots::kElements) {
      Slot mask = 0;
      for (int e = 0; e < Slots::kElements; ++e)
        if (t + e >= entry.begin && t + e < entry.end)
          mask |= Slots::kElements == 2 ? Slot{0xffff} << (16 * e) : ~Slot{0};
      const std::ptrdiff_t at = (t / Slots::kElements - step) * rows.step_stride;
      for (std::ptrdiff_t i = at; i < at + rows.step_stride; ++i) clean_[static_cast<std::size_t>(i)] = block[i] & mask;
    }
    return {clean_.data(), rows.step_stride};
  }

  static constexpr float kLog2E = 1.44269504f;

  HeadGroup<In> group_;
  Buffer<Slot> q_, d_o_, clean_;      // [head][steps]; a block of key rows
  Buffer<float> scores_, d_p_, d_q_;  // [head][64], [head][64], [head][key_columns]
  Buffer<Element> p_, d_s_;           // [head][64], heads rounded up to pairs with zeros
  std::vector<Row> rows_;
};

}  // namespace nsa::cpu::NSA_ISA
