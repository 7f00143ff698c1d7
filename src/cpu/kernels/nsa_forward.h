// All of NSA in one pass over the queries: the branches of a group of queries follow each other while their results are
// in the cache, and meet in float32. For nsa_attention and for decoding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/branch_index.h"
#include "cpu/kernels/block_selector.h"
#include "cpu/kernels/branches.h"

namespace nsa::cpu::NSA_ISA {

/// The keys and values of the branches: tensors, or what a cache holds.
template <class Tokens>
struct BranchTokens {
  Tokens k_c, v_c, k_slc, v_slc, k_swa, v_swa;
};

/// Of each KV head, what keys and values are to be multiplied by, float32 (Hkv); not given: 1. Elements are not
/// touched: the keys' belong to the softmax scale, the values' to the gates.
struct HeadScales {
  TensorView k, v;

  static float of(const TensorView& scales, std::int64_t head) {
    return scales.defined() ? scales.as<const float>()[head * scales.stride[0]] : 1;
  }
};

/// `Selected` is the SelectedBranch to use; keys and values are taken from the tokens given, never from the parameters.
template <class In, class Selected>
class NsaForward {
 public:
  template <class Tokens>
  NsaForward(const NsaAttentionParams& p, const std::vector<Sequence>& sequences, const BranchTokens<Tokens>& tokens,
             const Context& context, const HeadScales& scales = {})
      : p_(p),
        scales_(scales),
        queries_(p.q, tokens.k_slc.size(-2), sequences, p.softmax_scale),
        compressed_(queries_, tokens.k_c, tokens.v_c, p.cfg, context),
        selected_(queries_, tokens.k_slc, tokens.v_slc, p.cfg.block_size, context),
        window_(queries_, tokens.k_swa, tokens.v_swa, p.cfg.window_size, context),
        columns_(round_up(p.o.size(-1), kWidth)) {}

  void run(const Context& context) const {
    const int count = neighbours(queries_.heads());
    queries_.for_groups(
        count, context, [&] { return Worker(*this, count); },
        [&](Worker& worker, const QueryGroup& group) { attend(worker, group); });
    fill_unused(queries_, p_.o, {});
    fill_unused(queries_, p_.o_cmp, p_.lse_cmp);
    fill_unused(queries_, p_.o_slc, p_.lse_slc);
    fill_unused(queries_, p_.o_swa, p_.lse_swa);
    if (p_.indices.defined()) fill_unused_rows<std::int32_t>(p_.indices, rows_used(queries_.sequences()), -1);
  }

 private:
  using Rows = Attention<typename Queries<In>::Slots>;

  struct Worker {
    Worker(const NsaForward& f, int count)
        : rows(count * f.queries_.heads()),
          attention(rows, std::max({f.compressed_.tokens(), f.selected_.tokens(f.p_.cfg.topk), f.window_.tokens()}),
                    f.queries_.key_dim(), f.selected_.value_dim()),
          selector(f.p_.cfg, f.queries_.longest()),
          sum(static_cast<std::size_t>(rows * f.columns_)),
          own(static_cast<std::size_t>(count * f.p_.cfg.topk)),
          scratch(f.selected_.make_scratch(f.p_.cfg.topk)) {}

    std::int64_t rows;
    Rows attention;
    BlockSelector selector;
    Buffer<float> sum;              // [row][columns_]: the gated branches so far
    std::vector<std::int32_t> own;  // block numbers of each query
    typename Selected::Scratch scratch;
  };

  void attend(Worker& worker, const QueryGroup& group) const {
    Rows& attention = worker.attention;
    // A product of two small scales is taken as the smallest normal number, so that softmax() never has a scale of 0.
    const float scale =
        std::max(queries_.scale() * HeadScales::of(scales_.k, group.kv_head), std::numeric_limits<float>::min());
    std::fill_n(worker.sum.data(), worker.rows * columns_, 0.0f);

    queries_.load(group, attention);
    compressed_.list(group, attention);
    attention.compute_scores();
    attention.softmax(scale, /*keep=*/true);
    attention.compute_outputs();
    add(worker, group, 0, kCompressed, p_.o_cmp, p_.lse_cmp);
    choose_blocks(worker, group);

    window_.list(group, attention);
    attention.attend(scale);
    add(worker, group, 0, kWindow, p_.o_swa, p_.lse_swa);

    for (int a = 0; a < group.count; ++a) {
      const QueryGroup one{.sequence = group.sequence, .kv_head = group.kv_head, .first = group.first + a, .count = 1};
      selected_.list(group, a, blocks(worker, group, a), p_.cfg.topk, worker.scratch, attention);
      attention.attend(scale);
      add(worker, one, a, kSelected, p_.o_slc, p_.lse_slc);
    }

    const Sequence& s = queries_.sequence(group);
    const RowView<In> o = rows_of<In>(p_.o, s.batch, s.q_begin);
    const int heads = queries_.heads();
    for (int row = 0; row < group.count * heads; ++row)
      store_row(worker.sum.data() + row * columns_, static_cast<int>(p_.o.size(-1)),
                o.at(group.first + row / heads, group.kv_head * heads + row % heads));
  }

  /// Stores a branch's outputs where they are wanted and adds them, gated, to the sums of the group's queries from
  /// `query` on.
  void add(Worker& worker, const QueryGroup& group, int query, BranchIndex branch, const TensorView& o,
           const TensorView& lse) const {
    store_outputs(queries_, group, worker.attention, o, lse);
    const Sequence& s = queries_.sequence(group);
    const RowView<const In> gates = rows_of<const In>(p_.gates, s.batch, s.q_begin);
    const float v_scale = HeadScales::of(scales_.v, group.kv_head);
    const int heads = queries_.heads();
    for (int row = 0; row < group.count * heads; ++row) {
      const In* gate = gates.at(group.first + row / heads, group.kv_head * heads + row % heads);
      const Vec g = splat(to_float(gate[branch]) * v_scale);
      const float* x = worker.attention.output(row);
      float* sum = worker.sum.data() + (query * heads + row) * columns_;
      for (std::int64_t d = 0; d < columns_; d += kWidth) store(sum + d, fma(g, load(x + d), load(sum + d)));
    }
  }

  /// Selects blocks by the probabilities that compressed attention left, unless block_indices are given and the caller
  /// does not want the indices.
  void choose_blocks(Worker& worker, const QueryGroup& group) const {
    if (p_.block_indices.defined() && !p_.indices.defined()) return;
    const Sequence& s = queries_.sequence(group);
    for (int a = 0; a < group.count; ++a) {
      std::int32_t* own = worker.own.data() + a * p_.cfg.topk;
      worker.selector.select(worker.attention.probabilities(a), queries_.position(group, a),
                             {p_.noise, p_.seed, group.kv_head, s.index}, own);
      if (p_.indices.defined())
        std::copy_n(own, p_.cfg.topk,
                    rows_of<std::int32_t>(p_.indices, s.batch, s.q_begin).at(group.first + a, group.kv_head));
    }
  }

  const std::int32_t* blocks(const Worker& worker, const QueryGroup& group, int query) const {
    if (!p_.block_indices.defined()) return worker.own.data() + query * p_.cfg.topk;
    const Sequence& s = queries_.sequence(group);
    return rows_of<const std::int32_t>(p_.block_indices, s.batch, s.q_begin).at(group.first + query, group.kv_head);
  }

  const NsaAttentionParams& p_;
  HeadScales scales_;
  Queries<In> queries_;
  CompressedBranch<In> compressed_;
  Selected selected_;
  WindowBranch<In> window_;
  std::int64_t columns_;
};

}  // namespace nsa::cpu::NSA_ISA
