#include "cpu/kernels/block_selector.h"
#include "cpu/kernels/branches.h"
#include "cpu/kernels/for_dtype.h"
#include "cpu/kernels/kernels.h"

namespace nsa::cpu::NSA_ISA {
namespace {

template <class In>
struct Worker {
  Attention<typename Queries<In>::Slots> attention;
  BlockSelector selector;
};

template <class In>
void forward(const SelectBlocksParams& p, const Context& context) {
  const Queries<In> queries(p.q, p.k_c.size(-2), sequences_of(p.q, raw_length(p.q, p.seqlen_k), p.packed, p.cfg),
                            p.softmax_scale);
  const CompressedBranch<In> branch(queries, p.k_c, {}, p.cfg, context);
  const int count = neighbours(queries.heads()), heads = queries.heads();
  queries.for_groups(
      count, context,
      [&] {
        return Worker<In>{{count * heads, branch.tokens(), queries.key_dim(), 0},
                          BlockSelector(p.cfg, queries.longest())};
      },
      [&](Worker<In>& worker, const QueryGroup& group) {
        const Sequence& s = queries.sequence(group);
        const auto lse = lse_of<const float>(p.lse, s.batch, s.q_begin);
        const auto indices = rows_of<std::int32_t>(p.indices, s.batch, s.q_begin);
        if (worker.selector.chooses(queries.position(group, group.count - 1))) {
          queries.load(group, worker.attention);
          branch.list(group, worker.attention);
          worker.attention.compute_scores();
          worker.attention.exponentials(queries.scale(), [&](int row) {
            return lse.at(group.first + row / heads, group.kv_head * heads + row % heads);
          });
        }
        for (int a = 0; a < group.count; ++a)
          worker.selector.select(worker.attention.probabilities(a), queries.position(group, a),
                                 {p.noise, p.seed, group.kv_head, s.index}, indices.at(group.first + a, group.kv_head));
      });
  fill_unused_rows<std::int32_t>(p.indices, rows_used(queries.sequences()), -1);
}

}  // namespace

Status run(const SelectBlocksParams& p, const Context& context) {
  for_dtype(p.q.dtype, [&]<class In>() { forward<In>(p, context); });
  return {};
}

}  // namespace nsa::cpu::NSA_ISA
