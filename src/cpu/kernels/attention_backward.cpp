#include "cpu/kernels/attention_backward.h"

#include <omp.h>

#include "cpu/kernels/backward_keys.h"
#include "cpu/kernels/backward_queries.h"
#include "cpu/kernels/queries.h"

namespace nsa::cpu::NSA_ISA {
namespace {

inline constexpr std::int64_t kWorkspaceBytes = std::int64_t{16} << 20;  // about a chunk: stays in the last-level cache

template <class In>
class Backward {
 public:
  using Slots = typename SlotsOf<In>::type;

  Backward(const BackwardCall& call, const Context& context)
      : call_(call),
        threads_(threads_of(context)),
        group_{static_cast<int>(call.q.size(-2) / call.kv_heads), static_cast<int>(call.q.size(-1)),
               static_cast<int>(call.d_o.size(-1))},
        out_{.group = group_} {
    branches_.reserve(call.branches.size());
    for (const BranchCall& branch : call.branches) {
      branches_.emplace_back(branch, call, keys_, context);
      keys_ += branches_.back().keys;
    }
    for (int i = 0; i < threads_; ++i) workers_.emplace_back(group_);
  }

  void run() {
    Chunk chunk(keys_);
    for (std::size_t sequence = 0; sequence < call_.sequences.size(); ++sequence)
      for (std::int64_t kv_head = 0; kv_head < call_.kv_heads; ++kv_head)
        for (std::int64_t row = 0; row < call_.sequences[sequence].q_len; ++row) {
          plan(chunk, sequence, kv_head, row);
          if (bytes_of(chunk) >= kWorkspaceBytes) finish(chunk);
        }
    finish(chunk);
    for (const BackwardBranch<In>& branch : branches_) {
      write(branch, branch.d_k, branch.call.d_k);
      write(branch, branch.d_v, branch.call.d_v);
    }
    fill_unused_rows<In>(call_.d_q, rows_used(call_.sequences));
    fill_unused_rows<In>(call_.d_gates, rows_used(call_.sequences));
  }

 private:
  std::int64_t bytes_of(const Chunk& chunk) const {
    return (static_cast<std::int64_t>(chunk.entries().size()) * 2 * group_.block_slots +
            static_cast<std::int64_t>(chunk.items().size()) * group_.item_slots) *
           static_cast<std::int64_t>(sizeof(Slot));
  }

  void plan(Chunk& chunk, std::size_t sequence, std::int64_t kv_head, std::int64_t row) {
    chunk.add_item(sequence, kv_head, row);
    for (std::size_t b = 0; b < branches_.size(); ++b) {
      if (!branches_[b].needed()) continue;
      ranges_.clear();
      branches_[b].call.visible(call_.sequences[sequence], kv_head, row, ranges_);
      for (const Range& range : ranges_)
        chunk.add_range(static_cast<int>(b), range, branches_[b].key_of(sequence, kv_head));
    }
  }

  void finish(Chunk& chunk) {
    const auto items = static_cast<std::int64_t>(chunk.items().size());
    out_.reserve(chunk);
    const FloatMode mode;
#pragma omp parallel num_threads(threads_)
    {
      const FloatMode::Scope scope(mode);
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t i = 0; i < items; ++i)
        workers_[static_cast<std::size_t>(omp_get_thread_num())].run(call_, branches_, chunk, i, out_);
    }

    const std::vector<Chunk::KeyList> lists = chunk.by_key();
    const auto tasks = static_cast<std::int64_t>(lists.size()) * 2;
#pragma omp parallel num_threads(threads_)
    {
      const FloatMode::Scope scope(mode);
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t i = 0; i < tasks; ++i) add_to_keys(chunk, lists[static_cast<std::size_t>(i / 2)], i % 2 == 0);
    }
    chunk.clear();
  }

  /// The queries of one list into d_k (d_s with q) or d_v (p with d_o) of its block.
  void add_to_keys(const Chunk& chunk, const Chunk::KeyList& list, bool keys) {
    BackwardBranch<In>* branch = branches_.data();
    while (list.key >= branch->first_key + branch->keys) ++branch;
    if (!(keys ? branch->call.d_k : branch->call.d_v).defined()) return;
    const int columns = keys ? group_.key_columns : group_.value_columns;
    float* sums = (keys ? branch->d_k : branch->d_v).data() + (list.key - branch->first_key) * kBlockTokens * columns;
    KeySum<Slots> sum(group_.pairs, columns, sums);
    for (const std::int64_t* i = list.begin; i != list.end; ++i) {
      const Entry& entry = chunk.entries()[static_cast<std::size_t>(*i)];
      sum.add(
          {keys ? out_.d_s(*i) : out_.p(*i), keys ? out_.q(entry.item) : out_.d_o(entry.item), entry.begin, entry.end},
          out_.nonfinite[static_cast<std::size_t>(entry.item)] != 0);
    }
  }

  /// The sums of a branch into the caller's tensor; rows of no sequence are zero.
  void write(const BackwardBranch<In>& branch, const Buffer<float>& sums, const TensorView& gradient) const {
    if (!gradient.defined()) return;
    const std::int64_t dim = gradient.size(-1), columns = round_up(dim, kWidth);
    std::int64_t used = 0;
    for (std::size_t s = 0; s < branch.spans.size(); ++s) {
      const TokenSpan& span = branch.spans[s];
      used = span.begin + span.length;
      const RowView<In> rows = rows_of<In>(gradient, span.batch, span.begin);
      const FloatMode mode;
#pragma omp parallel num_threads(threads_)
      {
        const FloatMode::Scope scope(mode);
#pragma omp for schedule(static) collapse(2)
        for (std::int64_t head = 0; head < call_.kv_heads; ++head)
          for (std::int64_t t = 0; t < span.length; ++t) {
            const float* x = sums.data() + ((branch.key_of(s, head) - branch.first_key) * kBlockTokens + t) * columns;
            store_row(x, static_cast<int>(dim), rows.at(t, head));
          }
      }
    }
    fill_unused_rows<In>(gradient, used);
  }

  const BackwardCall& call_;
  int threads_;
  HeadGroup<In> group_;
  std::int64_t keys_ = 0;  // key blocks of all branches
  std::vector<BackwardBranch<In>> branches_;
  std::vector<QueryWorker<In>> workers_;
  BackwardWorkspace<In> out_;
  std::vector<Range> ranges_;
};

}  // namespace

template <class In>
void attention_backward(const BackwardCall& call, const Context& context) {
  Backward<In>(call, context).run();
}

template void attention_backward<float>(const BackwardCall& call, const Context& context);
template void attention_backward<bf16>(const BackwardCall& call, const Context& context);

}  // namespace nsa::cpu::NSA_ISA
