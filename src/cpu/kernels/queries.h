// The queries of a call: which sequences and heads there are, how threads share them, and how rows of q come in and
// rows of o and lse go out.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "core/layout.h"
#include "cpu/kernels/attention.h"
#include "cpu/threads.h"

namespace nsa::cpu::NSA_ISA {

/// Neighbouring queries of one sequence and KV head: what a thread takes at a time.
struct QueryRun {
  std::size_t sequence;
  std::int64_t kv_head, begin, end;
};

/// Of neighbouring queries, `count` from query `first` on are attended together.
struct QueryGroup {
  std::size_t sequence;
  std::int64_t kv_head, first;
  int count;
};

/// The factor of the scores. One below the smallest normal float counts as 0: processors may flush it to 0 anyway, and
/// -inf, the score of what is not visible, times 0 is NaN.
inline float scale_of(const std::optional<double>& softmax_scale, int key_dim) {
  const double scale = softmax_scale.value_or(1 / std::sqrt(static_cast<double>(key_dim)));
  return std::abs(scale) < std::numeric_limits<float>::min() ? 0 : static_cast<float>(scale);
}

/// The queries of a call, with everything the branches need to know of them.
template <class In>
class Queries {
 public:
  using Slots = typename SlotsOf<In>::type;

  Queries(const TensorView& q, std::int64_t kv_heads, std::vector<Sequence> sequences,
          const std::optional<double>& softmax_scale)
      : q_(q),
        sequences_(std::move(sequences)),
        kv_heads_(kv_heads),
        heads_(static_cast<int>(q.size(-2) / kv_heads)),
        key_dim_(static_cast<int>(q.size(-1))) {
    const float scale = scale_of(softmax_scale, key_dim_);
    negative_ = scale < 0;
    zero_ = scale == 0;
    scale_ = zero_ ? 1 : std::abs(scale);
  }

  const std::vector<Sequence>& sequences() const { return sequences_; }
  const Sequence& sequence(const QueryGroup& group) const { return sequences_[group.sequence]; }
  std::int64_t position(const QueryGroup& group, int query) const {
    return sequence(group).position(group.first + query);
  }
  std::int64_t kv_heads() const { return kv_heads_; }
  int heads() const { return heads_; }  // of a group
  int key_dim() const { return key_dim_; }
  float scale() const { return scale_; }  // > 0: load() negates q where the caller's is negative, and zeroes it for 0
  std::int64_t longest() const {
    std::int64_t n = 0;
    for (const Sequence& s : sequences_) n = std::max(n, s.q_len > 0 ? s.k_len : 0);
    return n;
  }

  /// Puts rows (query, head) of the group where `attention` wants them.
  void load(const QueryGroup& group, Attention<Slots>& attention) const {
    const Sequence& s = sequence(group);
    const RowView<const In> rows = rows_of<const In>(q_, s.batch, s.q_begin);
    for (int a = 0; a < group.count; ++a)
      for (int h = 0; h < heads_; ++h) {
        Slot* out = attention.query(a * heads_ + h);
        pack_row<Slots>(rows.at(group.first + a, group.kv_head * heads_ + h), key_dim_, out);
        if (zero_) std::fill_n(out, key_dim_ / Slots::kElements, Slot{0});
        if (negative_)
          for (int i = 0; i < key_dim_ / Slots::kElements; ++i)
            out[i] ^= Slots::kElements == 2 ? 0x80008000 : 0x80000000;
      }
  }

  /// f(worker, group) for every group of up to `count` neighbouring queries, on all threads, the queries that see most
  /// first. Workers are scratch, made by make_worker() before the threads start.
  template <class MakeWorker, class F>
  void for_groups(int count, const Context& context, const MakeWorker& make_worker, const F& f) const {
    const std::vector<QueryRun> runs = this->runs(threads_of(context));
    std::vector<decltype(make_worker())> workers;
    const std::size_t threads = std::min(static_cast<std::size_t>(threads_of(context)), runs.size());
    workers.reserve(threads);
    for (std::size_t i = 0; i < threads; ++i) workers.push_back(make_worker());
    if (runs.empty()) return;
    const FloatMode mode;
#pragma omp parallel num_threads(static_cast <int>(threads))
    {
      const FloatMode::Scope scope(mode);
#pragma omp for schedule(dynamic, 1)
      for (std::size_t i = 0; i < runs.size(); ++i) {
        const QueryRun& run = runs[i];
        for (std::int64_t q = run.begin; q < run.end; q += count)
          f(workers[static_cast<std::size_t>(omp_get_thread_num())],
            QueryGroup{.sequence = run.sequence,
                       .kv_head = run.kv_head,
                       .first = q,
                       .count = static_cast<int>(std::min<std::int64_t>(count, run.end - q))});
      }
    }
  }

 private:
  /// Runs of 32 queries, which share key blocks in the cache; shorter where that leaves threads without work.
  std::vector<QueryRun> runs(int threads) const {
    std::int64_t queries = 0;
    for (const Sequence& s : sequences_) queries += s.q_len * kv_heads_;
    const std::int64_t length = std::clamp<std::int64_t>(queries / (4 * threads), 1, 32);
    std::vector<QueryRun> runs;
    for (std::size_t s = 0; s < sequences_.size(); ++s)
      for (std::int64_t head = 0; head < kv_heads_; ++head)
        for (std::int64_t q = 0; q < sequences_[s].q_len; q += length)
          runs.push_back(
              {.sequence = s, .kv_head = head, .begin = q, .end = std::min(q + length, sequences_[s].q_len)});
    std::stable_sort(runs.begin(), runs.end(), [&](const QueryRun& a, const QueryRun& b) {
      return sequences_[a.sequence].position(a.end) > sequences_[b.sequence].position(b.end);
    });
    return runs;
  }

  TensorView q_;
  std::vector<Sequence> sequences_;
  std::int64_t kv_heads_;
  int heads_, key_dim_;
  float scale_;
  bool zero_;
  bool negative_;
};

/// A row of float32 values into a tensor; x is padded up to the next multiple of kWidth.
template <class In>
void store_row(const float* x, int n, In* out) {
  int d = 0;
  for (; d + kWidth <= n; d += kWidth) store_floats(out + d, load(x + d));
  for (; d < n; ++d) from_float(x[d], out[d]);
}

/// o and lse of a group; either may be undefined.
template <class In>
void store_outputs(const Queries<In>& queries, const QueryGroup& group,
                   const Attention<typename Queries<In>::Slots>& attention, const TensorView& o,
                   const TensorView& lse) {
  const Sequence& s = queries.sequence(group);
  const int heads = queries.heads();
  const RowView<In> out = rows_of<In>(o, s.batch, s.q_begin);
  const LseView<float> out_lse = lse_of<float>(lse, s.batch, s.q_begin);
  for (int row = 0; row < group.count * heads; ++row) {
    const std::int64_t query = group.first + row / heads, head = group.kv_head * heads + row % heads;
    if (o.defined()) store_row(attention.output(row), static_cast<int>(o.size(-1)), out.at(query, head));
    if (lse.defined()) out_lse.at(query, head) = attention.lse(row);
  }
}

/// The first row of a packed call that belongs to no sequence.
inline std::int64_t rows_used(const std::vector<Sequence>& sequences) {
  return sequences.empty() ? 0 : sequences.back().q_begin + sequences.back().q_len;
}

/// Fills the rows of a packed (total, heads, D) tensor from row `used` on.
template <class T>
void fill_unused_rows(const TensorView& view, std::int64_t used, T value = {}) {
  if (!view.defined() || view.rank == 4) return;
  const RowView<T> rows = rows_of<T>(view, 0, 0);
  for (std::int64_t row = used; row < view.size(0); ++row)
    for (std::int64_t head = 0; head < view.size(1); ++head) std::fill_n(rows.at(row, head), view.size(2), value);
}

/// What a packed call leaves in the rows of no sequence: o = 0, lse = -inf. Either may be undefined.
template <class In>
void fill_unused(const Queries<In>& queries, const TensorView& o, const TensorView& lse) {
  const std::int64_t used = rows_used(queries.sequences());
  fill_unused_rows<In>(o, used);
  if (!lse.defined() || lse.rank == 3) return;
  const LseView<float> view = lse_of<float>(lse, 0, 0);
  for (std::int64_t head = 0; head < lse.size(0); ++head)
    for (std::int64_t row = used; row < lse.size(1); ++row) view.at(row, head) = -kInf;
}

}  // namespace nsa::cpu::NSA_ISA
