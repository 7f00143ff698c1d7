// Rings of stages in shared memory that producers fill and consumers read, and how warpgroups start.
//
// A ring's barriers lie apart from what its stages hold. A thread that goes round a ring keeps a state: the stage it is
// at and the phase of its barriers. The ring of selected attention, whose readers skip stages, is another one
// (selected_attention/gather_pipeline.cuh); so is that of a selector warp, which fills its stages itself
// (select_blocks/importance.cuh).
#pragma once

#include "cuda/sm90/common/ptx.cuh"

namespace nsa::cuda::sm90 {

/// The position of a thread in a ring of kStages.
template <int kStages>
class PipelineState {
 public:
  PipelineState() = default;
  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ std::uint32_t phase() const { return phase_; }
  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) stage_ = 0, phase_ ^= 1;
  }
  __device__ __forceinline__ PipelineState before() const {
    return stage_ > 0 ? PipelineState(stage_ - 1, phase_) : PipelineState(kStages - 1, phase_ ^ 1);
  }

 private:
  __device__ PipelineState(int stage, std::uint32_t phase) : stage_(stage), phase_(phase) {}

  int stage_ = 0;
  std::uint32_t phase_ = 0;
};

/// The same in one register, with divisions by kStages.
template <int kStages>
struct PipelineCount {
  int count = 0;  // stages filled or read so far

  __device__ __forceinline__ int stage() const { return count % kStages; }
  __device__ __forceinline__ std::uint32_t phase() const { return count / kStages & 1; }
  __device__ __forceinline__ void advance() { ++count; }
  /// The stage that was current `stages` advances ago.
  __device__ __forceinline__ int before(int stages = 1) const { return (count - stages) % kStages; }
};

/// The barriers of a ring: `full` of each stage, then `empty` of each. State: one of the two above.
template <int kStages>
struct Pipeline {
  static constexpr int kBarriers = 2 * kStages;  // of 8 bytes

  std::uint32_t barriers;  // address in shared memory

  __device__ __forceinline__ std::uint32_t full(int stage) const { return barriers + stage * 8; }
  __device__ __forceinline__ std::uint32_t empty(int stage) const { return full(kStages + stage); }

  /// One thread; fence_mbarrier_init() is to follow. Arrivals that fill a stage (bytes count beside them), and that
  /// empty it.
  __device__ __forceinline__ void init(int producers, int consumers) const {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(full(i), producers);
      mbarrier_init(empty(i), consumers);
    }
  }
  /// Waits until the stage may be filled; _warp: all lanes.
  template <class State>
  __device__ __forceinline__ void acquire(const State& state) const {
    mbarrier_wait(empty(state.stage()), state.phase() ^ 1);
  }
  template <class State>
  __device__ __forceinline__ void acquire_warp(const State& state) const {
    mbarrier_wait_warp(empty(state.stage()), state.phase() ^ 1);
  }
  /// Waits until the stage is filled.
  template <class State>
  __device__ __forceinline__ void wait(const State& state) const {
    mbarrier_wait(full(state.stage()), state.phase());
  }
  template <class State>
  __device__ __forceinline__ void wait_warp(const State& state) const {
    mbarrier_wait_warp(full(state.stage()), state.phase());
  }
  /// The calling thread's arrival: it, or its warp, has read the stage.
  __device__ __forceinline__ void release(int stage) const { mbarrier_arrive(empty(stage)); }
};

/// Lets warpgroups start `cycles` apart: else all wait for their softmax at the same time, and the tensor cores idle.
__device__ __forceinline__ void stagger_warpgroups(int group, int cycles) {
  const long long start = clock64();
  while (clock64() - start < group * cycles) {
  }
}

}  // namespace nsa::cuda::sm90
