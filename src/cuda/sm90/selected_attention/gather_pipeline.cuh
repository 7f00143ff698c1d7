// Selected attention on Hopper, query-major and over unions: the overview, and how a consumer reads the ring. Read it
// with docs/design/selected_attention.md, then gather_plan.cuh (tiles, shared memory), gather_producers.cuh (builders
// and copier) and a kernel: forward_query_major.cu is the shortest. Below query-major is described; over unions a
// consumer is a warpgroup (forward_union.cu).
//
// A thread block (one per SM, persistent) works on tiles of neighbouring queries of one KV head. Each of its kWarps
// consumer warps owns sixteen rows: the heads of a query, or those of several queries where a group is small. It
// visits only blocks that one of its own queries selected, with mma.sync fed by ldmatrix, so no product is wasted. The
// lists of a tile's queries overlap, so all warps read from one ring of slots in shared memory. It is filled once per
// block of the union of the lists.
//
//   builders (3 warps)   indices of tile i + 1 -> union: blocks and their users     `union_full`, `union_empty`: two
//   copier (one thread)  union -> ring, by TMA: K, V, K, V, ...         `full`, `empty`: slots
//   consumers            ring -> products in registers; they never wait for each other
//
// A slot holds K or V of one key tile: 64 keys, or 32 where blocks have 32 (over unions two blocks of 32). A fill is
// one load of a slot.
//
// Order of the union: blocks appear by the lowest rank that one of their users gives them (its position in the row of
// indices). So each stretch of the ring holds work for every warp, and neighbours, whose lists are alike, stay close.
//
// Positions count the fills of all tiles of a thread block; position p lies in slot p % slots. A warp skips what it
// does not use, so it may be far behind or ahead of the copier, and phases of a slot would be ambiguous:
// - `full`: a barrier per position modulo kFullBarriers. A warp further ahead than that (its lists were empty) first
//   waits until the count of issued fills comes near.
// - `empty`: a barrier per slot with one arrival per warp. The copier arrives for the warps that skip the block, hence
//   a slot is free exactly when its users are done with it. They run fence_async before they say so: see ptx.cuh.
#pragma once

#include "cuda/common/softmax.cuh"
#include "cuda/sm90/common/tensor_map.h"
#include "cuda/sm90/selected_attention/gather_producers.cuh"

namespace nsa::cuda::sm90::selected_attention {

/// A fill that this warp uses: it waits, reads and releases.
struct SelectedSlot {
  std::uint32_t tile;  // address
  std::uint32_t full, phase, empty;

  __device__ __forceinline__ void wait() const { mbarrier_wait_warp(full, phase); }
};
template <class... Slots>
__device__ __forceinline__ void consumer_release(int lane, const Slots&... slots) {
  fence_async();
  __syncwarp();
  if (lane == 0) (mbarrier_arrive(slots.empty), ...);
}

/// One warp's way through the ring.
template <class Shape>
class SelectedReader {
 public:
  __device__ SelectedReader(SelectedControl& control, std::uint32_t ring, const GatherPlan& plan)
      : control_(control), ring_(ring), plan_(plan) {}

  /// Calls body(first key, users, slot of keys, slot of values) for each key tile that this warp uses. Bit q of users:
  /// the warp's query q selected the block. `buffer` holds the union, `phase` is that of its `union_full` barrier.
  template <class Body>
  __device__ __forceinline__ void for_keys(int buffer, std::uint32_t phase, int warp, int lane, const Body& body) {
    for_tiles_of_keys(buffer, phase, warp, lane, [&](int key, unsigned users, unsigned position) {
      const SelectedSlot keys = at(position), values = at(position + 1);
      body(key, users, keys, values);
    });
  }
  /// The same with the position of the tile's first fill in place of slots. Call at(position) only after the slots
  /// before it are released: the copier may be waiting for them.
  template <class Body>
  __device__ __forceinline__ void for_tiles_of_keys(int buffer, std::uint32_t phase, int warp, int lane,
                                                    const Body& body) {
    SelectedControl& c = control_;
    const GatherPlan& p = plan_;
    mbarrier_wait_warp(shared_address(&c.union_full[buffer]), phase);
    const int size = c.size[buffer];
#pragma unroll 1
    for (int first = 0; first < size; first += 32) {
      const unsigned mine = first + lane < size ? users_of_reader(p, c.users(p, buffer)[first + lane], warp) : 0;
#pragma unroll 1
      for (unsigned rest = __ballot_sync(0xffffffffu, mine != 0); rest; rest &= rest - 1) {
        const int i = __ffs(static_cast<int>(rest)) - 1;
        const int block = c.block(p, buffer)[first + i] & SelectedControl::kBlockMask;
        const unsigned users = __shfl_sync(0xffffffffu, mine, i);
        const unsigned position = base_ + Shape::kFills * p.tiles_per_block * static_cast<unsigned>(first + i);
#pragma unroll 1
        for (int key_tile = 0; key_tile < p.tiles_per_block; ++key_tile) {
          const int key = block * p.block_size + key_tile * Shape::kKeys;
          body(key, users, position + Shape::kFills * key_tile);
        }
      }
    }
    leave(buffer, size);
  }

  // Fills of a union: K0 V0 K1 V1 ...; with kLateValues K0 K1 V0 K2 V1 ... K(n-1) V(n-2) V(n-1).

  /// Position of the keys of a key tile of the current union.
  __device__ __forceinline__ unsigned position(unsigned tile) const {
    if (!Shape::kLateValues) return base_ + Shape::kFills * tile;
    return base_ + 2 * tile - (tile > 0);
  }
  /// Position of its values; `tiles`: n.
  __device__ __forceinline__ unsigned values_position(unsigned tile, unsigned tiles) const {
    if (!Shape::kLateValues) return base_ + 2 * tile + 1;
    return base_ + 2 * tile + 1 + (tile + 1 < tiles);
  }
  /// Releases the current union, which has `size` blocks. Every lane has read it.
  __device__ __forceinline__ void leave(int buffer, int size) {
    mbarrier_arrive(shared_address(&control_.union_empty[buffer]));
    base_ += Shape::kFills * plan_.tiles_per_block * static_cast<unsigned>(size / Shape::kTileBlocks);
  }

  /// The slot of a fill that may not have been issued yet.
  __device__ __forceinline__ SelectedSlot at(unsigned position) {
    // The earlier fill with the same barrier must be over: a fill that reuses its slot has been issued.
    while (static_cast<int>(position - issued_) > kFullBarriers - plan_.slots - 1)
      issued_ = published(&control_.issued);
    return slot(position);
  }
  /// The same of a fill that is known to be issued.
  __device__ __forceinline__ SelectedSlot slot(unsigned position) const {
    const unsigned slot = position - plan_.by_slots.divide(static_cast<int>(position)) * plan_.by_slots.divisor;
    return {.tile = ring_ + slot * Shape::kSlotBytes,
            .full = shared_address(&control_.full[position % kFullBarriers]),
            .phase = position / kFullBarriers & 1,
            .empty = shared_address(&control_.empty[slot])};
  }

 private:
  SelectedControl& control_;
  std::uint32_t ring_;
  const GatherPlan& plan_;
  unsigned base_ = 0;    // position of the current union's first fill
  unsigned issued_ = 0;  // number of fills that are known to be issued
};

// Products of a warp with tiles as TMA leaves them: kKeys rows in panels of 64 columns, 128 bytes a row,
// 16-byte vectors permuted by the swizzle. The eight rows of an ldmatrix lie in different banks.

/// s = a * tile^T: sixteen rows (fragments by load_a(a, k)) against keys `first` ... + 8 * N - 1 of the tile. In steps
/// of 32 keys, so that registers are left for fragments of keys on their way.
template <class T, int D, int kKeys, int N, class LoadA>
__device__ __forceinline__ void key_scores(float (&s)[N][4], const LoadA& load_a, std::uint32_t tile, int first,
                                           int lane) {
  const std::uint32_t mine = tile + (first + (lane & 16) / 2 + (lane & 7)) * 128 + (((lane & 8) / 8) ^ (lane & 7)) * 16;
#pragma unroll
  for (int n0 = 0; n0 < N; n0 += 4) {
#pragma unroll
    for (int n = n0; n < n0 + 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = 0;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      std::uint32_t a[4], b[4];
      load_a(a, k);
#pragma unroll
      for (int n = n0; n < n0 + 4; n += 2) {
        ldmatrix4(b, ((mine + n0 * 1024) ^ (k % 4 * 32)) + k / 4 * (kKeys * 128) + (n - n0) * 1024);
        mma(T{}, s[n], a, b[0], b[1]);
        mma(T{}, s[n + 1], a, b[2], b[3]);
      }
    }
  }
}

/// acc += p * tile: p sixteen rows x keys `first` ... + 16 * N - 1, packed.
template <class T, int D, int kKeys, int N>
__device__ __forceinline__ void key_sums(float (&acc)[D / 8][4], const std::uint32_t (&p)[N][4], std::uint32_t tile,
                                         int first, int lane) {
  const std::uint32_t mine = tile + (first + (lane & 15)) * 128 + ((lane >> 4) ^ (lane & 7)) * 16;
#pragma unroll
  for (int k = 0; k < N; ++k)
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      std::uint32_t b[4];
      ldmatrix4_transposed(b, (mine ^ (n % 4 * 32)) + n / 4 * (kKeys * 128) + k * 2048);
      mma(T{}, acc[2 * n], p[k], b[0], b[1]);
      mma(T{}, acc[2 * n + 1], p[k], b[2], b[3]);
    }
}

/// C fragments as A operands.
template <class T, int N>
__device__ __forceinline__ void pack_keys(std::uint32_t (&p)[N / 2][4], const float (&s)[N][4]) {
#pragma unroll
  for (int k = 0; k < N / 2; ++k) operand_a<T>(p[k], s, k);
}

/// The last visible key of each of a lane's two rows.
class SelectedLimits {
 public:
  __device__ SelectedLimits(const GatherPlan& p, const SelectedTile& tile, int warp, int lane)
      : position_(tile.seq.position(tile.first_query + warp * p.reader_queries)),
        low_(min(p.packing.by_heads.divide(lane / 4), p.reader_queries - 1)),
        high_(min(p.packing.by_heads.divide(lane / 4 + 8), p.reader_queries - 1)) {}

  /// Keys key ... key + limit of a block that `users` of the warp's queries use are visible to row i.
  __device__ int limit(int i, unsigned users, int key) const {
    const int warp_query = i == 0 ? low_ : high_;
    return users >> warp_query & 1 ? position_ + warp_query - key : -1;
  }

 private:
  int position_;    // of the warp's first query
  int low_, high_;  // which of its queries the rows are; any value for rows without a query
};

/// f(n, i) for the elements of C fragments (8 * N keys) that are not visible, if there are any.
template <int N, class Hide>
__device__ __forceinline__ void hide_keys(const SelectedLimits& limits, unsigned users, int key, int lane,
                                          const Hide& hide) {
  const int limit[2] = {limits.limit(0, users, key), limits.limit(1, users, key)};
  if (!__any_sync(0xffffffffu, min(limit[0], limit[1]) < 8 * N - 1)) return;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (n * 8 + 2 * (lane & 3) + i % 2 > limit[i / 2]) hide(n, i);
}

/// Tensor maps of keys and values, and a launch on as many thread blocks as there are SMs. `more`: further arguments
/// of the kernel.
template <class Shape, class Args, class... More>
cudaError_t launch_selected(void (*kernel)(Args, GatherPlan, CUtensorMap, CUtensorMap, More...), const Args& args,
                            cudaStream_t stream, const LoopOrder& loop_order = {}, bool alternative = false,
                            const More&... more) {
  const Geometry& g = args.geometry;
  GatherPlan plan = make_gather_plan<Shape>(g, args.topk, args.block_size);
  plan.loop_order = loop_order;
  plan.alternative = alternative;
  if (plan.total == 0) return cudaSuccess;
  const auto map = [&](CUtensorMap& to, const Strided& t, int dim) {
    return make_tensor_map(to, t, dim, g.kv_heads, key_rows(g, false), tensor_batches(g), 1, Shape::kBoxKeys);
  };
  CUtensorMap k_map, v_map{};
  int num_sms = 0;
  cudaError_t error = map(k_map, args.k, Shape::kKeyDim);
  if (error == cudaSuccess && Shape::kFills == 2) error = map(v_map, args.v, Shape::kValueDim);
  if (error == cudaSuccess) error = sm_count(num_sms);
  if (error != cudaSuccess) return error;
  return launch(kernel, std::min(plan.total, num_sms), Shape::kThreads, plan.memory, stream, args, plan, k_map, v_map,
                more...);
}

}  // namespace nsa::cuda::sm90::selected_attention
