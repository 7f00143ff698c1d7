#include "cuda/operations/branch_forward.h"

#include "cuda/sm90/selected_attention/loop_order.h"

namespace nsa::cuda {

namespace {

/// args: of the portable kernel. Where there are others, fast() launches them, and the portable one comes later.
template <class Args, class Fast>
Status launch_with_fallback(const char* name, Args& args, bool any_fast, const Fast& fast,
                            cudaError_t (*portable)(const Args&, cudaStream_t), NonfiniteGuard& guard, Execution& e) {
  const auto run = [=, stream = e.stream](const Args& these) { return status_of(portable(these, stream), name); };
  if (!any_fast) {
    if (Status s = guard.launch_fallback(); !s.ok()) return s;
    return run(args);
  }
  args.fallback.flag = guard.flag();
  if (Status s = guard.scan(e); !s.ok()) return s;
  guard.defer([=] { return run(args); });
  return fast();
}

/// The loop orders of the selected branch on Hopper, and what they need (sm90/selected_attention:
/// forward_block_major.h, loop_order.h).
struct SelectedOrders {
  LoopOrder loop_order{};
  int union_key_dim = 0;  // 0: there is no kernel over unions
  InverseArgs inverse{};
  void* scratch = nullptr;

  SelectedOrders(const Branch& b, const sm90::Kernels& hopper, Arena& arena) {
    if (!b.indices) return;
    const Geometry& g = b.geometry;
    if (hopper.selected_union) union_key_dim = to_int(b.q.size(-1));
    if (hopper.selected_query_major && (hopper.selected_union || hopper.selected_block_major))
      loop_order.times = arena.take<LoopOrderCost>(std::int64_t{g.batches} * g.kv_heads);
    if (!hopper.selected_block_major) return;
    inverse = take_lists(b, arena);
    inverse.loop_order = loop_order;
    scratch =
        arena.take<char>(sm90::selected_attention::QueryBuffers(g, inverse.lists, inverse.topk, b.v.size(-1)).bytes());
  }
  Status run(const SelectedArgs& args, const sm90::Kernels& hopper, Execution& e) const {
    if (loop_order.times) {
      Status s = status_of(sm90::selected_attention::estimate_loop_order(args, loop_order, union_key_dim, e.stream),
                           "estimate_loop_order");
      if (!s.ok()) return s;
    }
    if (hopper.selected_union)
      if (Status s = status_of(hopper.selected_union(args, loop_order, e.stream), "selected_union"); !s.ok()) return s;
    if (hopper.selected_block_major) {
      if (Status s = status_of(build_inverse_index(inverse, e.stream), "build_inverse_index"); !s.ok()) return s;
      Status s = status_of(
          hopper.selected_block_major(
              {.selected = args, .lists = inverse.lists, .loop_order = loop_order, .scratch = scratch}, e.stream),
          "selected_block_major");
      if (!s.ok()) return s;
    }
    if (!hopper.selected_query_major) return {};
    return status_of(hopper.selected_query_major(args, loop_order, e.stream), "selected_query_major");
  }
};

}  // namespace

RangeArgs range_args(const Branch& b, const TensorView& o, const TensorView& lse) {
  return {.geometry = b.geometry,
          .q = strided(b.q),
          .k = strided(b.k),
          .v = strided(b.v),
          .o = strided(o),
          .lse = per_row(lse),
          .window = b.window,
          .scale = static_cast<float>(b.scale)};
}

template <class Params>
Status launch_forward(const Params& p, NonfiniteGuard& guard, Execution& e) {
  const Branch b = branch_of(p);
  const TensorView &o = p.o, &lse = p.lse;
  const sm90::Kernels hopper = hopper_kernels(b, o);
  const SelectedOrders orders(b, hopper, e.arena);
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  const portable::AttentionKernels& kernels = kernels_of(b.q, b.v);
  if (b.indices) {
    SelectedArgs args{.geometry = b.geometry,
                      .q = strided(b.q),
                      .k = strided(b.k),
                      .v = strided(b.v),
                      .o = strided(o),
                      .lse = per_row(lse),
                      .indices = strided(*b.indices),
                      .topk = to_int(b.indices->size(-1)),
                      .block_size = b.block_size,
                      .scale = static_cast<float>(b.scale)};
    return launch_with_fallback(
        "selected_forward", args, hopper.selected_query_major || hopper.selected_block_major,
        [&] { return orders.run(args, hopper, e); }, kernels.selected_forward, guard, e);
  }
  RangeArgs args = range_args(b, o, lse);
  return launch_with_fallback(
      "range_forward", args, hopper.range_forward != nullptr,
      [&] { return status_of(hopper.range_forward(args, e.stream), "range_forward"); }, kernels.range_forward, guard,
      e);
}

template Status launch_forward(const CompressedAttentionParams&, NonfiniteGuard&, Execution&);
template Status launch_forward(const SelectedAttentionParams&, NonfiniteGuard&, Execution&);
template Status launch_forward(const SlidingWindowAttentionParams&, NonfiniteGuard&, Execution&);

}  // namespace nsa::cuda
