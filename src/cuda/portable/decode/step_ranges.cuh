// Attention of a decode step to the compressed keys and to the window, both in one launch. A step has few rows (query,
// head): a thread block takes sixteen of them, one tensor-core tile, and a split of the keys, which its four warps
// share out (key_steps.cuh).
#pragma once

#include "cuda/portable/decode/step_params.h"
#include "cuda/portable/key_steps.cuh"

namespace nsa::cuda::portable {

/// Grid x: splits of the compressed keys, then splits of the window, each for `row_tiles` times sixteen rows; y: KV
/// head, z: sequence. A row's bits do not depend on the step's other queries: keys lie in steps, steps in warps and
/// splits by their numbers alone.
template <class T, int Dk, int Dv, class Tokens>
__global__ void __launch_bounds__(128, sizeof(T) == 4 || Dk > 128 || (!kHopper && Dk == 128) ? 2 : 3)
    step_ranges(const __grid_constant__ StepRangesArgs<Tokens> branches) {
  using Steps = KeySteps<T, Dk, Dv, Dv>;
  constexpr int kStepKeys = Steps::kStepKeys;
  extern __shared__ __align__(128) char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y;
  const int compressed = branches.compressed.splits.num_splits * branches.row_tiles;
  const bool in_window = static_cast<int>(blockIdx.x) >= compressed;
  const StepRangeArgs<Tokens>& args = in_window ? branches.window : branches.compressed;
  const int item = blockIdx.x - (in_window ? compressed : 0);
  const int split = item / branches.row_tiles, first_row = item % branches.row_tiles * kStepRows;
  const StepGeometry& p = args.geometry;
  const DeviceSequence seq = sequence_of(p, blockIdx.z);
  const int rows = min(seq.q_len * p.group - first_row, kStepRows);
  if (rows <= 0) return;
  // Keys of the block's queries, from the first one's to the last one's, and the split of them.
  const KeyRange head = visible_keys(p, args.window, seq.position(first_row / p.group));
  const KeyRange tail = visible_keys(p, args.window, seq.position((first_row + rows - 1) / p.group));
  const int begin = (visible_keys(p, args.window, seq.position(0)).first / args.splits.size + split) * args.splits.size;
  const int first_key = max(begin, head.first), last_key = min(begin + args.splits.size, tail.last);
  if (first_key >= last_key) return;

  bool valid[2];
  KeyRange range[2];
  const T* q_row[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = first_row + lane / 4 + 8 * i;
    const int query = r / p.group;
    valid[i] = r < first_row + rows;
    range[i] = valid[i] ? visible_keys(p, args.window, seq.position(query)) : KeyRange{0, 0};
    q_row[i] =
        valid[i] ? args.q.template at<T>(seq.batch, seq.q_begin + query, kv_head * p.group + r % p.group) : nullptr;
  }
  const RowFragments<T, Dk> q(q_row[0], q_row[1], lane, args.scale < 0);
  float* scores = nullptr;  // of row lane / 4
  if (!in_window && branches.scores) {
    const std::int64_t before = (static_cast<std::int64_t>(seq.index) * p.kv_heads + kv_head) * p.q_len * p.group;
    scores = branches.scores + (before + first_row + lane / 4) * branches.scores_row + 2 * (lane & 3);
  }

  OnlineSoftmax<Dv> state;
  const float scale = positive_scale(args.scale * key_scale(args.k, kv_head));
  const auto visible = [&](int i, int key) { return key >= range[i].first && key < range[i].last; };
  for_key_steps<T, Steps>(args, seq, kv_head, RangeSteps<kStepKeys>(begin, first_key, last_key, warp), last_key,
                          tail.last, memory, [&](int key, char* keys, char* values) {
                            const auto keep = [&](const auto& s) {
                              if (!scores) return;
#pragma unroll
                              for (int n = 0; n < kStepKeys / 8; ++n) {
#pragma unroll
                                for (int i = 0; i < 2; ++i)
                                  if (valid[i])
                                    *reinterpret_cast<float2*>(scores + 8 * i * branches.scores_row + key + n * 8) =
                                        make_float2(s[n][2 * i], s[n][2 * i + 1]);
                              }
                            };
                            attend_key_step<T, Dk, Dv>(state, q, scale, key, keys, values,
                                                       key < tail.first || key + kStepKeys > head.last, visible, keep);
                          });
  merge_warps<Steps>(state, rows, memory, [&](int r, int column, float x, float y, float max, float sum) {
    const int at = first_row + r;
    const std::int64_t to = args.splits.at(p, split, seq.index, at / p.group, kv_head * p.group + at % p.group);
    *reinterpret_cast<float2*>(args.splits.o_accum + to * Dv + column) = make_float2(x, y);
    if (column == 0) args.splits.softmax[to] = make_float2(max, sum);
  });
}

}  // namespace nsa::cuda::portable
