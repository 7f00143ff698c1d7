// How a thread block of four warps walks over the blocks selected for a query: what the kernels of selected attention
// share.
//
// The keys of the blocks are cut into units of one reduction step (16 keys, 8 in float32); warp w takes the units w,
// w + 4, ... through two stages of shared memory of its own, so that the warps never wait for each other.
#pragma once

#include "cuda/common/block_list.cuh"
#include "cuda/common/geometry.cuh"

namespace nsa::cuda::portable {

/// kColumns: of the sixteen rows of sums that each warp has for the others in the end, in place of the stages.
template <class T, int Dk, int Dv, int kColumns>
struct SelectedUnits {
  static constexpr int kKeyDim = Dk, kValueDim = Dv;
  static constexpr int kUnit = kStep<T>;  // keys
  static constexpr int kValues = Tile<T, Dk>::bytes(kUnit);
  static constexpr int kStage = kValues + Tile<T, Dv>::bytes(kUnit);
  static constexpr int kStages = 2;
  static constexpr int kPartialPitch = kColumns + 4;  // floats
  static constexpr int kPartials = 4 * 16 * kPartialPitch * 4;
  static constexpr int kMemory = 4 * kStages * kStage > kPartials ? 4 * kStages* kStage : kPartials;
};

/// body(first key, keys, values: in shared memory) for the warp's units of the blocks list[first] .. list[last - 1],
/// but for those that lie behind `position`.
template <class T, class Units, class Args, class Body>
__device__ __forceinline__ void for_units(const Args& args, const DeviceSequence& seq, int kv_head, int position,
                                          const int* list, int first, int last, char* memory, const Body& body) {
  constexpr int kUnit = Units::kUnit;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Unit `unit` of block `block` of the list, four units further each time.
  const int units = args.block_size / kUnit;
  struct Place {
    int block, unit;
  };
  const auto settle = [&](Place at) {
    while (at.unit >= units) at.unit -= units, ++at.block;
    return at;
  };
  const auto key_of = [&](const Place& at) { return list[at.block] * args.block_size + at.unit * kUnit; };

  char* stages = memory + warp * Units::kStages * Units::kStage;
  const auto k = key_stream<T, Units::kKeyDim, kUnit, 32>(args.k, seq, seq.k_begin, kv_head, lane);
  const auto v = key_stream<T, Units::kValueDim, kUnit, 32>(args.v, seq, seq.k_begin, kv_head, lane);
  const auto load = [&](int key, int stage) {
    const std::uint32_t to = shared_address(stages) + stage * Units::kStage;
    if (key <= position) {
      k.load(to, key, seq.k_len);
      v.load(to + Units::kValues, key, seq.k_len);
    }
    commit_copies();
  };

  Place at = settle({first, warp});
  int key = at.block < last ? key_of(at) : 0;
  if (at.block < last) load(key, 0);
  for (int stage = 0; at.block < last; stage ^= 1) {
    const Place next = settle({at.block, at.unit + 4});
    const int next_key = next.block < last ? key_of(next) : 0;
    if (next.block < last) {
      load(next_key, stage ^ 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncwarp();
    if (key <= position) {
      char* keys = stages + stage * Units::kStage;
      body(key, keys, keys + Units::kValues);
    }
    __syncwarp();  // the stage is free
    at = next;
    key = next_key;
  }
}

}  // namespace nsa::cuda::portable
