// The attention of each branch by itself.
#include "cpu/kernels/branches.h"

#include "cpu/kernels/for_dtype.h"
#include "cpu/kernels/kernels.h"

namespace nsa::cpu::NSA_ISA {
namespace {

template <class In>
struct Worker {
  Attention<typename Queries<In>::Slots> attention;
  typename SelectedBranch<In>::Scratch scratch;
};

template <class In>
void attend_to_selected(const SelectedAttentionParams& p, const Context& context) {
  const Queries<In> queries(p.q, p.k.size(-2), sequences_of(p.q, p.k.size(1), p.packed, {}), p.softmax_scale);
  const SelectedBranch<In> branch(queries, p.k, p.v, p.block_size, context);
  const std::int64_t blocks = p.indices.size(-1);
  queries.for_groups(
      1, context,
      [&] {
        return Worker<In>{{queries.heads(), branch.tokens(blocks), queries.key_dim(), branch.value_dim()},
                          branch.make_scratch(blocks)};
      },
      [&](Worker<In>& worker, const QueryGroup& group) {
        const Sequence& s = queries.sequence(group);
        const auto indices = rows_of<const std::int32_t>(p.indices, s.batch, s.q_begin);
        queries.load(group, worker.attention);
        branch.list(group, 0, indices.at(group.first, group.kv_head), blocks, worker.scratch, worker.attention);
        worker.attention.attend(queries.scale());
        store_outputs(queries, group, worker.attention, p.o, p.lse);
      });
  fill_unused(queries, p.o, p.lse);
}

}  // namespace

Status run(const CompressedAttentionParams& p, const Context& context) {
  for_dtype(p.q.dtype, [&]<class In>() {
    const Queries<In> queries(p.q, p.k_c.size(-2), sequences_of(p.q, raw_length(p.q, p.seqlen_k), p.packed, p.cfg),
                              p.softmax_scale);
    attend_to_branch(queries, CompressedBranch<In>(queries, p.k_c, p.v_c, p.cfg, context), p.o, p.lse, context);
  });
  return {};
}

Status run(const SelectedAttentionParams& p, const Context& context) {
  for_dtype(p.q.dtype, [&]<class In>() { attend_to_selected<In>(p, context); });
  return {};
}

Status run(const SlidingWindowAttentionParams& p, const Context& context) {
  for_dtype(p.q.dtype, [&]<class In>() {
    const Queries<In> queries(p.q, p.k.size(-2), sequences_of(p.q, p.k.size(1), p.packed, {}), p.softmax_scale);
    attend_to_branch(queries, WindowBranch<In>(queries, p.k, p.v, p.window_size, context), p.o, p.lse, context);
  });
  return {};
}

}  // namespace nsa::cpu::NSA_ISA
