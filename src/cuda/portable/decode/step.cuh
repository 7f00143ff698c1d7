// A step with a cache without its arithmetic: capacity, and bytes that move. Lengths and tables lie on the device. A
// sequence that they would lead out of bounds has no capacity, and nothing else reads them.
#pragma once

#include "cuda/common/pages.cuh"

namespace nsa::cuda::portable {

/// A thread block per sequence.
__global__ void __launch_bounds__(256) plan_step(const __grid_constant__ PlanArgs args) {
  const int b = blockIdx.x;
  const StepRequest request(args.geometry, args.lengths, args.num_new, args.positions, b);
  const bool fits = request.possible && __syncthreads_and(own_capacity(args, request, b));
  if (threadIdx.x == 0) write_plan(args, request, b, fits);
}

/// Grid y: kind of tokens, z: sequence.
__global__ void __launch_bounds__(128, 6) move_tokens(const __grid_constant__ MoveArgs args) {
  const StepGeometry& p = args.geometry;
  const TokenMove& move = args.moves[blockIdx.y];
  const DeviceSequence s = sequence_of(p, blockIdx.z);
  if (s.q_len == 0) return;
  const int before = s.k_len - s.q_len;
  if (move.gathered.data) {
    const int first = num_compressed(p, before), blocks = num_compressed(p, s.k_len) - first;
    const CachedTokens tokens{move.slots, move.fresh};
    copy_rows(
        blocks > 0 ? (blocks - 1) * p.kernel_stride + p.kernel_size : 0, p.kv_heads, move.vectors,
        [&](int token, int head) { return tokens.at<char>(s, first * p.kernel_stride + token, head); },
        [&](int token, int head) { return move.gathered.at<char>(s.index, token, head); });
  } else {
    // Of more tokens than a ring has slots the last ones.
    const int skipped = !move.slots.ring ? 0 : max(s.q_len - move.slots.size, 0);
    copy_rows(
        s.q_len - skipped, p.kv_heads, move.vectors,
        [&](int token, int head) { return move.fresh.at<char>(s.batch, s.q_begin + skipped + token, head); },
        [&](int token, int head) {
          const int to = before + skipped + token;
          return move.slots.is_overwritten(s.index, to, s.k_len) ? nullptr : move.slots.at<char>(s.index, to, head);
        });
  }
  if (args.lengths && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) args.lengths[s.index] = s.k_len;
}

}  // namespace nsa::cuda::portable
