// A step with a cache but its arithmetic: who has room, and bytes that move. Lengths and tables lie on the device; a
// sequence that they would lead out of bounds has no room, and nothing else reads them.
#pragma once

#include "cuda/common/pages.cuh"

namespace nsa::cuda::portable {

/// Whether this thread's share of the pages exists that a possible wish needs.
__device__ inline bool own_room(const PlanArgs& args, const StepWish& wish, int b) {
  const auto has = [&](const PageTable& t, int begin, int end) {
    return !t.pages || own_pages(
                           t, end, [&](int page) { return has_page(t, b, page); }, begin);
  };
  return has(args.tokens, 0, wish.after()) && has(args.compressed, 0, wish.first + wish.completed) &&
         has(args.window, max(wish.before - args.window_size + 1, 0), wish.after()) &&
         has(args.raw, wish.first * args.geometry.kernel_stride, wish.after());
}

/// A thread block per sequence.
__global__ void __launch_bounds__(256) plan_step(const __grid_constant__ PlanArgs args) {
  const int b = blockIdx.x;
  const StepGeometry& p = args.geometry;
  const int q_begin = p.starts ? p.starts[b] : 0;
  const int added = p.starts       ? p.starts[b + 1] - q_begin
                    : args.num_new ? min(max(args.num_new[b], 0), p.q_len)
                                   : p.q_len;
  const StepWish wish(p, args.lengths[b] - (p.counted ? added : 0), added, args.positions);
  bool room = wish.possible && (!p.starts || (added <= p.q_len && q_begin >= 0 && q_begin <= p.rows - added));
  if (room) room = __syncthreads_and(own_room(args, wish, b));
  if (threadIdx.x > 0) return;
  args.plan[b] = {max(wish.before, 0), room ? wish.added : 0, b, room ? wish.completed : 0, 0, q_begin};
  if (wish.added > 0 && !room) *args.overflow = 1;
}

/// Grid y: kind of tokens, z: sequence.
__global__ void __launch_bounds__(128, 8) move_tokens(const __grid_constant__ MoveArgs args) {
  const StepGeometry& p = args.geometry;
  const TokenMove& move = args.moves[blockIdx.y];
  const DeviceSequence s = sequence_of(p, blockIdx.z);
  if (s.q_len == 0) return;
  const int before = s.k_len - s.q_len;
  if (move.gathered.data) {
    const int first = num_compressed(p, before), blocks = num_compressed(p, s.k_len) - first;
    const CachedTokens tokens{move.slots, move.fresh};
    copy_rows(
        blocks > 0 ? (blocks - 1) * p.kernel_stride + p.kernel_size : 0, p.kv_heads, move.pieces,
        [&](int token, int head) { return tokens.at<char>(s, first * p.kernel_stride + token, head); },
        [&](int token, int head) { return move.gathered.at<char>(s.index, token, head); });
  } else {
    // Of more tokens than a ring has slots the last ones.
    const int skipped = !move.slots.ring ? 0 : max(s.q_len - move.slots.size, 0);
    copy_rows(
        s.q_len - skipped, p.kv_heads, move.pieces,
        [&](int token, int head) { return move.fresh.at<char>(s.batch, s.q_begin + skipped + token, head); },
        [&](int token, int head) { return move.slots.at<char>(s.index, before + skipped + token, head); });
  }
  if (args.lengths && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) args.lengths[s.index] = s.k_len;
}

}  // namespace nsa::cuda::portable
