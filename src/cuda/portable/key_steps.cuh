// Four warps that share out the keys of up to sixteen rows (query, head) of one KV head: what the kernels of selected
// attention and of decode steps have in common.
//
// Keys are cut into steps of the reduction (16 keys, 8 in float32); warp w takes the steps w, w + 4, ... through
// two stages of shared memory of its own, so that the warps never wait for each other. In the end their partial results
// are merged in a fixed order.
#pragma once

#include "cuda/common/block_list.cuh"
#include "cuda/common/geometry.cuh"
#include "cuda/common/softmax.cuh"

namespace nsa::cuda::portable {

/// kColumns: of the sixteen rows of sums that each warp has for the others in the end, in place of the stages.
template <class T, int Dk, int Dv, int kColumns>
struct KeySteps {
  static constexpr int kKeyDim = Dk, kValueDim = Dv;
  static constexpr int kStepKeys = kStep<T>;  // keys
  static constexpr int kValues = Tile<T, Dk>::bytes(kStepKeys);
  static constexpr int kStage = kValues + Tile<T, Dv>::bytes(kStepKeys);
  static constexpr int kStages = 2;
  static constexpr int kPartialPitch = kColumns + 4;  // floats
  static constexpr int kPartials = 4 * 16 * kPartialPitch * 4;
  static constexpr int kMemory = 4 * kStages * kStage > kPartials ? 4 * kStages* kStage : kPartials;
};

/// The steps of the blocks list[first] ... list[last - 1], from number `warp` on, four steps further each time.
template <int kStepKeys>
class ListedSteps {
 public:
  __device__ __forceinline__ ListedSteps(const int* list, int block_size, int first, int last, int warp)
      : list_(list), block_size_(block_size), last_(last), block_(first), step_(warp) {
    settle();
  }
  __device__ __forceinline__ bool any() const { return block_ < last_; }
  __device__ __forceinline__ int key() const { return list_[block_] * block_size_ + step_ * kStepKeys; }
  __device__ __forceinline__ void advance() {
    step_ += 4;
    settle();
  }

 private:
  __device__ __forceinline__ void settle() {
    const int steps = block_size_ / kStepKeys;
    while (step_ >= steps) step_ -= steps, ++block_;
  }

  const int* list_;
  int block_size_, last_, block_, step_;
};

/// Those that hold any of the keys [first, last); steps are counted from `begin` on, a multiple of kStepKeys.
template <int kStepKeys>
class RangeSteps {
 public:
  __device__ __forceinline__ RangeSteps(int begin, int first, int last, int warp)
      : key_(begin + warp * kStepKeys), last_(last) {
    if (first >= key_ + kStepKeys) key_ += ((first - key_ - kStepKeys) / (4 * kStepKeys) + 1) * 4 * kStepKeys;
  }
  __device__ __forceinline__ bool any() const { return key_ < last_; }
  __device__ __forceinline__ int key() const { return key_; }
  __device__ __forceinline__ void advance() { key_ += 4 * kStepKeys; }

 private:
  int key_, last_;
};

/// body(first key, keys, values: in shared memory) for the steps at.key(), but for those that begin behind `position`.
/// Of the sequence's keys those from number `count` on are not read.
template <class T, class Steps, class Args, class Walk, class Body>
__device__ __forceinline__ void for_key_steps(const Args& args, const DeviceSequence& seq, int kv_head, Walk at,
                                              int position, int count, char* memory, const Body& body) {
  constexpr int kStepKeys = Steps::kStepKeys;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  char* stages = memory + warp * Steps::kStages * Steps::kStage;
  const auto k = key_stream<T, Steps::kKeyDim, kStepKeys, 32>(args.k, seq, seq.k_begin, kv_head, lane);
  const auto v = key_stream<T, Steps::kValueDim, kStepKeys, 32>(args.v, seq, seq.k_begin, kv_head, lane);
  const auto load = [&](int key, int stage) {
    const std::uint32_t to = shared_address(stages) + stage * Steps::kStage;
    if (key <= position) {
      k.load(to, key, count);
      v.load(to + Steps::kValues, key, count);
    }
    commit_copies();
  };

  int key = at.any() ? at.key() : 0;
  if (at.any()) load(key, 0);
  for (int stage = 0; at.any(); stage ^= 1) {
    Walk next = at;
    next.advance();
    const int next_key = next.any() ? next.key() : 0;
    if (next.any()) {
      load(next_key, stage ^ 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncwarp();
    if (key <= position) {
      char* keys = stages + stage * Steps::kStage;
      body(key, keys, keys + Steps::kValues);
    }
    __syncwarp();  // the stage is free
    at = next;
    key = next_key;
  }
}

/// One step's share of a warp's softmax and output. partial: not all rows see all of its keys; visible(i, key): whether
/// row lane / 4 + 8 * i does. keep(scores) takes the raw scores first.
template <class T, int Dk, int Dv, class Q, class Visible, class Keep>
__device__ __forceinline__ void attend_key_step(OnlineSoftmax<Dv>& state, const Q& q, float scale, int key, char* keys,
                                                char* values, bool partial, const Visible& visible, const Keep& keep) {
  constexpr int kStepKeys = kStep<T>;
  const int lane = threadIdx.x % 32;
  float s[kStepKeys / 8][4];
  Ring<T> ring;
  const Scores<T, Dk, kStepKeys / 8, Q> scores{q, shared_address(keys), lane};
  const Outputs<T, Dv, kStepKeys / 8> outputs{shared_address(values), lane};
  start(scores, ring);
  scores.run(s, ring, outputs);
  keep(s);
  if (partial) {
#pragma unroll
    for (int n = 0; n < kStepKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!visible(i / 2, key + n * 8 + 2 * (lane & 3) + i % 2)) s[n][i] = -INFINITY;
    }
  }
  state.update(s, scale);
  if (partial && __any_sync(0xffffffffu, has_nonfinite<T, Dv>(values, kStepKeys, lane, 32))) {
    add_nonfinite<T, Dv>(state.acc, s, values, 0, lane, [&](int i, int j) { return visible(i, key + j); });
    __syncwarp();
    clear_nonfinite<T, Dv>(values, kStepKeys, lane, 32);
    __syncwarp();
    start(outputs, ring);
  }
  outputs.run(state.acc, s, ring);
}

/// Merges what the four warps have of the first `rows` of sixteen rows, in the stages' memory. write(row, column, x, y,
/// maximum, sum): elements `column`, `column` + 1 of a row's output, not yet divided by the sum.
template <class Steps, int Dv, class Write>
__device__ __forceinline__ void merge_warps(const OnlineSoftmax<Dv>& state, int rows, char* memory,
                                            const Write& write) {
  __shared__ float partial_max[4][16], partial_sum[4][16];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  float* partials = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = lane / 4 + 8 * i;
    const float sum = row_sum(state.sum[i]);
    if (lane % 4 == 0) partial_max[warp][r] = state.max[i], partial_sum[warp][r] = sum;
    float* acc = partials + (warp * 16 + r) * Steps::kPartialPitch + 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < Dv / 8; ++n)
      *reinterpret_cast<float2*>(acc + n * 8) = make_float2(state.acc[n][2 * i], state.acc[n][2 * i + 1]);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < 16 * (Dv / 2); e += 128) {
    const int r = e / (Dv / 2), column = e % (Dv / 2) * 2;
    if (r >= rows) continue;
    float m = -INFINITY;
#pragma unroll
    for (int w = 0; w < 4; ++w) m = fmaxf(m, partial_max[w][r]);
    const float base = m == -INFINITY ? 0 : m;
    float sum = 0, x = 0, y = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float factor = exp2_fast(partial_max[w][r] - base);
      const float2 acc = *reinterpret_cast<const float2*>(partials + (w * 16 + r) * Steps::kPartialPitch + column);
      // A warp that saw nothing has sum 0 and acc 0; skipping it keeps 0 * inf out.
      if (factor != 0 || partial_sum[w][r] != 0)
        sum += partial_sum[w][r] * factor, x += acc.x * factor, y += acc.y * factor;
    }
    write(r, column, x, y, m, sum);
  }
}

}  // namespace nsa::cuda::portable
