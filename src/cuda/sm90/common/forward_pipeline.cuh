// What the forward kernels over ranges of keys share: the rings of key and value tiles and the way of a computing
// warpgroup through them. Each writes its loop over the tiles out: as a function for both, with the softmax as its
// argument, ptxas spills 8 to 32 bytes in compressed_select, whose registers are all in use.
#pragma once

#include "cuda/common/softmax.cuh"
#include "cuda/sm90/common/pipeline.cuh"
#include "cuda/sm90/common/tile_scheduler.cuh"
#include "cuda/sm90/common/wgmma.cuh"

namespace nsa::cuda::sm90 {

/// In shared memory: barriers of the rings of keys and of values and of a slot for the queries of each warpgroup,
/// with the tile they belong to.
template <int kStages, int kGroups>
struct ForwardBarriers {
  std::uint64_t key_barriers[2 * kStages], value_barriers[2 * kStages], query_barriers[2 * kGroups];
  GroupTile tiles[kGroups][2];  // the one at work and the next one

  __device__ __forceinline__ Pipeline<kStages> keys() const { return {shared_address(key_barriers)}; }
  __device__ __forceinline__ Pipeline<kStages> values() const { return {shared_address(value_barriers)}; }
  /// Its stages are the slots of the warpgroups.
  __device__ __forceinline__ Pipeline<kGroups> queries() const { return {shared_address(query_barriers)}; }

  /// One thread; fence_mbarrier_init() is to follow.
  __device__ __forceinline__ void init() const {
    keys().init(1, kGroups * 4);
    values().init(1, kGroups * 4);
    queries().init(1, 128);  // every thread has read the tile's fields
  }
};

/// Maxima of the two rows of a lane over its kKeys / 4 scores each, scaled.
template <int kKeys>
__device__ __forceinline__ void row_maxima(const float (&s)[kKeys / 2], float scale, float (&maxima)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float even = fmaxf(s[2 * i], s[2 * i + 1]), odd = fmaxf(s[4 + 2 * i], s[4 + 2 * i + 1]);
#pragma unroll
    for (int n = 2; n < kKeys / 8; n += 2) {
      even = fmaxf(even, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
      odd = fmaxf(odd, fmaxf(s[4 * n + 4 + 2 * i], s[4 * n + 4 + 2 * i + 1]));
    }
    maxima[i] = fmaxf(even, odd) * scale;
  }
}

/// The softmax of the two rows of a lane, and their sums.
template <int kKeys>
struct RowSoftmax : SoftmaxReference {
  float sum[2] = {0, 0};  // this lane's shares

  /// s: raw scores, -inf where masked; become probabilities relative to the new reference. Returns whether what was
  /// summed before is to be scaled by `factor`. Each row's result depends on that row alone.
  __device__ __forceinline__ bool update(float (&s)[kKeys / 2], float scale) {
    float maxima[2];
    row_maxima<kKeys>(s, scale, maxima);
    const bool grown = raise(maxima);
    exponentiate<kKeys>(s, scale);
    return grown;
  }
  /// The two halves of update(): the reference follows the maxima, ...
  __device__ __forceinline__ bool raise(const float (&maxima)[2]) {
    return follow(maxima, [&](int i) { sum[i] *= factor[i]; });
  }
  /// ... and scores of some of the keys become probabilities.
  template <int kSome>
  __device__ __forceinline__ void exponentiate(float (&s)[kSome / 2], float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float even = 0, odd = 0;
#pragma unroll
      for (int n = 0; n < kSome / 8; ++n) {
        float &x = s[4 * n + 2 * i], &y = s[4 * n + 2 * i + 1];
        x = exp2_fast(fmaf(x, scale, shift(i)));
        y = exp2_fast(fmaf(y, scale, shift(i)));
        even += x, odd += y;
      }
      sum[i] += even + odd;
    }
  }
};

/// A computing warpgroup's way through the rings of keys and values, which have kStages stages, and barriers for
/// kBarrierStages.
template <int Dk, int Dv, int kKeys, int kStages, int kBarrierStages = kStages>
struct KeyValueRings {
  static constexpr int kKeyBytes = kKeys * Dk * 2, kValueBytes = kKeys * Dv * 2;  // of a stage

  Pipeline<kBarrierStages> keys, values;
  std::uint32_t k, v;  // descriptors of the first stages
  PipelineState<kStages> state{};

  /// `key_tiles`, `value_tiles`: addresses of the first stages.
  template <int kGroups>
  __device__ __forceinline__ KeyValueRings(const ForwardBarriers<kBarrierStages, kGroups>& barriers,
                                           std::uint32_t key_tiles, std::uint32_t value_tiles)
      : keys(barriers.keys()),
        values(barriers.values()),
        k(descriptor(key_tiles, 16)),
        v(descriptor(value_tiles, kKeys * 128)) {}

  /// Descriptors of the tiles at a stage.
  __device__ __forceinline__ std::uint32_t key_tile(int stage) const { return k + stage * (kKeyBytes / 16); }
  __device__ __forceinline__ std::uint32_t value_tile(int stage) const { return v + stage * (kValueBytes / 16); }

  /// One arrival for the warp.
  __device__ __forceinline__ static void release(const Pipeline<kBarrierStages>& ring, int stage) {
    if (threadIdx.x % 32 == 0) ring.release(stage);
  }
  /// Tiles of which this warpgroup sees nothing.
  __device__ __forceinline__ void skip(int count) {
    for (int i = 0; i < count; ++i) {
      keys.wait(state);
      release(keys, state.stage());
      values.wait(state);
      release(values, state.stage());
      state.advance();
    }
  }
};

/// Adds softmax(Q K^T) V of the next `count` > 0 tiles of the rings to `o`. S(i) = Q K(i)^T is issued, then
/// O += P(i - 1) V(i - 1); both run while the softmax of S(i) waits only for the former. update(s): raw scores become
/// probabilities; whether what is summed so far is to be scaled by `factor`, of the two rows of a lane. scored(): all
/// scores are done, the last product is still to be added. s, probabilities: only of use here, but as variables of this
/// function they get other registers.
template <class T, int Dk, int Dv, int kKeys, int kStages, int kBarrierStages, class Update, class Scored>
__device__ __forceinline__ void attention_mainloop(KeyValueRings<Dk, Dv, kKeys, kStages, kBarrierStages>& rings,
                                                   std::uint32_t q, int count, float (&o)[Dv / 2],
                                                   const float (&factor)[2], float (&s)[kKeys / 2],
                                                   std::uint32_t (&probabilities)[kKeys / 4], const Update& update,
                                                   const Scored& scored) {
  rings.keys.wait(rings.state);
  gemm_ss<T, Dk, kKeys>(s, q, 64, rings.key_tile(rings.state.stage()), kKeys);
  wgmma_wait<0>();
  rings.release(rings.keys, rings.state.stage());
  update(s);
  pack_rows<T, kKeys>(probabilities, s);
  rings.state.advance();
#pragma unroll 1
  while (--count > 0) {
    rings.keys.wait(rings.state);
    gemm_ss<T, Dk, kKeys>(s, q, 64, rings.key_tile(rings.state.stage()), kKeys);
    const auto before = rings.state.before();  // of the values that go with `probabilities`
    rings.values.wait(before);
    gemm_rs<T, Dv, kKeys>(o, probabilities, rings.value_tile(before.stage()));
    wgmma_wait<1>();
    rings.release(rings.keys, rings.state.stage());
    const bool grown = update(s);
    wgmma_wait<0>();
    rings.release(rings.values, before.stage());
    if (grown) {
#pragma unroll
      for (int n = 0; n < Dv / 2; ++n) o[n] *= factor[n / 2 % 2];
    }
    pack_rows<T, kKeys>(probabilities, s);
    rings.state.advance();
  }
  scored();
  const auto before = rings.state.before();
  rings.values.wait(before);
  gemm_rs<T, Dv, kKeys>(o, probabilities, rings.value_tile(before.stage()));
  wgmma_wait<0>();
  rings.release(rings.values, before.stage());
}

}  // namespace nsa::cuda::sm90
