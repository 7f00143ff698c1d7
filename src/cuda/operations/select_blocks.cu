#include "cuda/operations/select_blocks.h"

#include "cuda/common/fill.h"

namespace nsa::cuda {

SelectArgs select_args(const SelectBlocksParams& p) {
  const bool packed = p.packed.packed();
  SelectArgs args{};
  args.geometry = geometry_of(p.q, p.k_c.size(-2), p.seqlen_k.value_or(packed ? 0 : p.q.size(1)),
                              packed ? raw_total(p.k_c, p.cfg) : 0, p.packed, p.cfg);
  args.q = strided(p.q);
  args.k = strided(p.k_c);
  args.lse = per_row(p.lse);
  args.indices = strided(p.indices);
  set_selection(args, p.cfg, scale_of(p.softmax_scale, p.q));
  args.noise = static_cast<float>(p.noise);
  args.seed = p.seed;
  return args;
}
std::int64_t scratch_floats(const SelectArgs& args, int thread_blocks) {
  return thread_blocks * args.queries * (args.scratch_keys + args.scratch_blocks);
}

Status run(const SelectBlocksParams& p, Execution& e) {
  SelectArgs args = select_args(p);
  const int count = selecting_blocks(args);
  args.scratch = e.arena.take<float>(scratch_floats(args, count));
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  if (Status s = fill({{p.indices, kNoBlock}}, p.packed.cu_seqlens_q, nullptr, e.stream); !s.ok()) return s;
  return status_of(portable::element_kernels(p.q.dtype)->select_blocks(args, to_int(p.q.size(-1)), count, e.stream),
                   "select_blocks");
}

}  // namespace nsa::cuda
