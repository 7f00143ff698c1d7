#include "cuda/operations/branch.h"

#include "cuda/operations/branch_backward.h"
#include "cuda/operations/branch_forward.h"

namespace nsa::cuda {

InverseArgs take_lists(const Branch& b, Arena& arena, bool entry_slots) {
  const Geometry& g = b.geometry;
  const RowPrefix all = end_prefix(g);
  InverseArgs args{};
  args.geometry = g;
  args.indices = strided(*b.indices);
  args.topk = to_int(b.indices->size(-1));
  InverseIndex& lists = args.lists;
  lists.block_size = b.block_size;
  lists.tiles_per_block = to_int(ceil_div(b.block_size, 64));
  lists.width = to_int(std::min<std::int64_t>(args.topk, ceil_div(g.k_len, b.block_size)));
  lists.entries = lists.entries_before(all);
  lists.slots = lists.slots_before(all);
  lists.list = arena.take<int>(g.kv_heads * lists.entries);
  lists.begin = arena.take<int>(g.kv_heads * lists.slots);
  lists.item_begin = arena.take<int>(g.kv_heads * lists.slots * lists.tiles_per_block);
  lists.chunks = to_int(std::clamp<std::int64_t>(ceil_div(g.q_len, InverseIndex::chunk(g.q_len)), 1, 128));
  lists.offsets = arena.take<int>(g.kv_heads * lists.chunks * lists.slots);
  if (entry_slots)
    lists.entry_slots = {.data = arena.take<int>(g.kv_heads * all.q * args.topk),
                         .batch = std::int64_t{g.q_len} * args.topk,
                         .row = args.topk,
                         .head = all.q * args.topk};
  return args;
}

Status run(const CompressedAttentionParams& p, Execution& e) { return forward(p, p.v_c, e); }

Status run(const CompressedAttentionBackwardParams& p, Execution& e) {
  return single_backward(p, p.d_k_c, p.d_v_c, &p.forward.cfg, e);
}

Status run(const SelectedAttentionParams& p, Execution& e) { return forward(p, p.v, e); }

Status run(const SelectedAttentionBackwardParams& p, Execution& e) {
  return single_backward(p, p.d_k, p.d_v, nullptr, e);
}

Status run(const SlidingWindowAttentionParams& p, Execution& e) { return forward(p, p.v, e); }

Status run(const SlidingWindowAttentionBackwardParams& p, Execution& e) {
  return single_backward(p, p.d_k, p.d_v, nullptr, e);
}

}  // namespace nsa::cuda
