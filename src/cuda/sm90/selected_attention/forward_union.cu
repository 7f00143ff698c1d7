// Selected attention over unions of neighbouring queries' blocks: the forward. Faster than query-major where neighbours
// select alike (loop_order.h). How blocks reach the warpgroups: gather_pipeline.cuh.
//
// A computing warpgroup owns 64 query rows: the heads of a group for four or eight queries. It visits the blocks that
// one of these queries selected, by wgmma: S(i) = Q K(i)^T is issued, then O += P(i-1) V(i-1); both run while the
// softmax of S(i) waits only for the former. In a block that a query did not select its rows have P = 0. Three
// warpgroups share the ring, which is filled once per block of the union of their queries' lists. Blocks of 32 come in
// pairs.
#include "cuda/common/fallback.cuh"
#include "cuda/sm90/common/epilogue.cuh"
#include "cuda/sm90/common/forward_pipeline.cuh"
#include "cuda/sm90/selected_attention/gather_pipeline.cuh"

namespace nsa::cuda::sm90::selected_attention {
namespace {

constexpr int kWarpgroups = kUnionWarpgroups;
constexpr int kKeys = 64;  // of a tile

struct QueryBarriers {
  std::uint64_t full[kWarpgroups], empty[kWarpgroups], unused[2];
};

/// In front of the ring the queries of the warpgroups, behind it their barriers.
template <int Dk, int Dv, int kBlocks>
using Shape =
    SelectedShape<Dk, Dv, kKeys, 4 * kWarpgroups, kWarpgroups * kTileBytes<Dk> + sizeof(QueryBarriers), 4, kBlocks>;

/// A warpgroup's way through a union: the tiles of keys that one of its queries uses.
template <class Shape>
class UnionWalk {
 public:
  static constexpr unsigned kEnd = ~0u;

  __device__ __forceinline__ UnionWalk(SelectedControl& control, const GatherPlan& plan, int buffer, int warpgroup)
      : control_(control), plan_(plan), buffer_(buffer), warpgroup_(warpgroup), next_(link(control.head[buffer])) {}

  /// The number of the next tile in the union, and from bit 16 on its users: bit q the warpgroup's query q; where tiles
  /// have two blocks, from bit 24 on those of the second one. kEnd: there is none. The same in all its warps.
  __device__ __forceinline__ unsigned next() {
    if (kBlocks == 1 && plan_.tiles_per_block == 2 && (last_ & 1) == 0) return ++last_;
    if (next_ == SelectedControl::kNoLink) return last_ = kEnd;
    const uint2* all = control_.users(plan_, buffer_) + next_ * kBlocks;
    const uint2 first = all[0];
    unsigned users = users_of_reader(plan_, {first.x, 0}, warpgroup_);
    if constexpr (kBlocks == 2) users |= users_of_reader(plan_, {all[1].x, 0}, warpgroup_) << 8;
    last_ = warp_uniform(users << 16 | next_ * plan_.tiles_per_block);
    next_ = link(first.y);
    return last_;
  }
  /// Tiles of the union.
  __device__ __forceinline__ unsigned tiles() const {
    return warp_uniform(control_.size[buffer_] / kBlocks * plan_.tiles_per_block);
  }
  /// The first key of block i of a tile.
  __device__ __forceinline__ int first_key(unsigned tile, int i) const {
    const unsigned number = tile & 0xffff;
    if (kBlocks == 2)
      return (control_.block(plan_, buffer_)[2 * number + i] & SelectedControl::kBlockMask) * plan_.block_size;
    const unsigned in_block = plan_.tiles_per_block - 1;  // a bit of the number where blocks have two tiles
    const int block = control_.block(plan_, buffer_)[number >> in_block] & SelectedControl::kBlockMask;
    return block * plan_.block_size + static_cast<int>(number & in_block) * kKeys;
  }

 private:
  static constexpr int kBlocks = Shape::kTileBlocks;

  __device__ __forceinline__ unsigned link(unsigned links) const {
    return warp_uniform(links >> warpgroup_ * SelectedControl::kLinkBits & SelectedControl::kNoLink);
  }

  SelectedControl& control_;
  const GatherPlan& plan_;
  int buffer_, warpgroup_;
  unsigned next_, last_ = kEnd;
};

/// Scores of keys of a block that a lane's rows do not see become -inf. limit[i]: the last one that row i sees.
template <int kCount>
__device__ __forceinline__ void mask_scores(float (&s)[kCount / 2], const int (&limit)[2]) {
  if (min(limit[0], limit[1]) >= kCount - 1) return;
  const int lane = lane_id();
#pragma unroll
  for (int n = 0; n < kCount / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (n * 8 + 2 * (lane & 3) + i % 2 > limit[i / 2]) s[4 * n + i] = -INFINITY;
}

/// A computing warpgroup.
template <class T, int Dk, int Dv, class S>
__device__ __forceinline__ void attend(const SelectedArgs& args, const GatherPlan& plan, SelectedControl& control,
                                       QueryBarriers& query_barriers, std::uint32_t queries, std::uint32_t ring) {
  constexpr int kBlocks = S::kTileBlocks, kBoxKeys = S::kBoxKeys;
  const Geometry& g = args.geometry;
  const int warp = warp_uniform(threadIdx.x / 32), warpgroup = warp / 4, lane = threadIdx.x % 32;
  const float scale = positive_scale(args.scale);
  const std::uint32_t q = descriptor(queries + warpgroup * kTileBytes<Dk>, 16);
  // Which of the warpgroup's queries the two rows of a lane belong to.
  const auto query_of = [&](int i) { return (2 * (warp % 4) + i) * plan.reader_queries / 8; };
  SelectedReader<S> reader(control, ring, plan);

  for_tiles(plan, g, [&](const SelectedTile& tile, int index, int buffer, std::uint32_t phase) {
    const int position =
        warp_uniform(tile.seq.position(tile.first_query + warpgroup * plan.reader_queries));  // of the first one
    mbarrier_wait_warp(shared_address(&control.union_full[buffer]), phase);
    UnionWalk<S> walk(control, plan, buffer, warpgroup);
    RowSoftmax<kKeys> softmax;
    float o[Dv / 2];
#pragma unroll
    for (float& x : o) x = 0;
    std::uint32_t probabilities[kKeys / 4];
    const auto issue_scores = [&](float(&s)[kKeys / 2], const SelectedSlot& keys) {
      mbarrier_wait(keys.full, keys.phase);
      gemm_ss<T, Dk, kKeys>(s, q, 64, descriptor(keys.tile, 16), kKeys);
    };
    const auto issue_outputs = [&](const SelectedSlot& values) {
      mbarrier_wait(values.full, values.phase);
      gemm_rs<T, Dv, kKeys>(o, probabilities, descriptor(values.tile, kPanelBytes));
    };
    const auto release = [&](const SelectedSlot& slot) {
      if (lane == 0) mbarrier_arrive(slot.empty);
    };
    // The last key of each block of a tile that the two rows of a lane see; the same for the whole warp.
    int limit[kBlocks][2];
    const auto find_limits = [&](unsigned tile) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int key = warp_uniform(walk.first_key(tile, b));
#pragma unroll
        for (int i = 0; i < 2; ++i)
          limit[b][i] = tile >> (16 + 8 * b + query_of(i)) & 1 ? position + query_of(i) - key : -1;
      }
    };
    // body(scores of a block, its probabilities, its limits) for the blocks of a tile.
    const auto for_blocks = [&](float(&s)[kKeys / 2], const auto& body) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        body(reinterpret_cast<float(&)[kBoxKeys / 2]>(s[b * kBoxKeys / 2]),
             reinterpret_cast<std::uint32_t(&)[kBoxKeys / 4]>(probabilities[b * kBoxKeys / 4]), limit[b]);
    };
    // Scores to probabilities, of blocks that the warp sees; whether the outputs so far are to be scaled.
    const auto update = [&](float(&s)[kKeys / 2]) {
      if (args.scale < 0) {
#pragma unroll
        for (float& x : s) x = -x;
      }
      float maxima[2] = {-INFINITY, -INFINITY};
      for_blocks(s, [&](auto& scores, auto&, const int(&limit)[2]) {
        if (max(limit[0], limit[1]) < 0) return;
        mask_scores<kBoxKeys>(scores, limit);
        float own[2];
        row_maxima<kBoxKeys>(scores, scale, own);
        maxima[0] = fmaxf(maxima[0], own[0]), maxima[1] = fmaxf(maxima[1], own[1]);
      });
      const bool grown = softmax.raise(maxima);
      for_blocks(s, [&](auto& scores, auto&, const int(&limit)[2]) {
        if (max(limit[0], limit[1]) >= 0) softmax.template exponentiate<kBoxKeys>(scores, scale);
      });
      return grown;
    };
    const auto pack = [&](float(&s)[kKeys / 2]) {
      for_blocks(s, [&](auto& scores, auto& packed, const int(&limit)[2]) {
        if (max(limit[0], limit[1]) >= 0) {
          pack_rows<T, kBoxKeys>(packed, scores);
        } else {
#pragma unroll
          for (std::uint32_t& x : packed) x = 0;
        }
      });
    };
    const auto rescale = [&](bool grown) {
      if (!grown) return;
#pragma unroll
      for (int n = 0; n < Dv / 2; ++n) o[n] *= softmax.factor[n / 2 % 2];
    };

    const auto release_queries = [&] {
      if (lane == 0) mbarrier_arrive(shared_address(&query_barriers.empty[warpgroup]));
    };
    unsigned next = walk.next();
    const unsigned tiles = walk.tiles();
    mbarrier_wait_warp(shared_address(&query_barriers.full[warpgroup]), buffer);
    if (next == walk.kEnd) release_queries();
#pragma unroll 1
    while (next != walk.kEnd) {
      // Where the values of the keys at work are.
      unsigned values_at = reader.values_position(next & 0xffff, tiles);
      {
        const SelectedSlot keys = reader.at(reader.position(next & 0xffff));
        float s[kKeys / 2];
        issue_scores(s, keys);
        find_limits(next);
        wgmma_wait<0>();
        release(keys);
        rescale(update(s));
        pack(s);
      }
      SelectedSlot next_values = reader.slot(values_at), next_keys;
      const auto advance = [&] {
        next = walk.next();
        next_keys = reader.slot(reader.position(next & 0xffff));
      };
      advance();
      // The values at work keep their slot while the next keys are waited for, so these must not need it.
#pragma unroll 1
      while (next != walk.kEnd && static_cast<int>(reader.position(next & 0xffff) - values_at) < plan.slots) {
        const unsigned step = next;
        const SelectedSlot keys = next_keys, values = next_values;
        float s[kKeys / 2];
        issue_scores(s, keys);
        issue_outputs(values);
        // Under the products what the next ones need.
        values_at = reader.values_position(step & 0xffff, tiles);
        next_values = reader.slot(values_at);
        advance();
        find_limits(step);
        wgmma_wait<1>();
        release(keys);
        const bool grown = update(s);
        wgmma_wait<0>();
        release(values);
        rescale(grown);
        pack(s);
      }
      if (next == walk.kEnd) release_queries();
      issue_outputs(next_values);
      wgmma_wait<0>();
      release(next_values);
    }
    reader.leave(buffer, control.size[buffer]);

    const SelectedTile same(plan, g, again(index));  // computed again, as in forward_query_major.cu
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int number = query_of(i), query = same.first_query + warpgroup * plan.reader_queries + number;
      const int head =
          same.kv_head * g.group + same.first_head + (warp % 4 * 16 + lane / 4 + 8 * i) - number * plan.packing.heads;
      const float sum = row_sum(softmax.sum[i]);
      const bool seen = sum != 0, valid = query < same.seq.q_len;
      const int row = same.seq.q_begin + min(query, same.seq.q_len - 1);
      store_row<T>(args.o.at<T>(same.seq.batch, row, head), o, i, seen ? 1 / sum : 0, valid, lane);
      if (valid && lane % 4 == 0)
        args.lse.at(same.seq.batch, row, head) = seen ? (softmax.max[i] + log2f(sum)) * kLn2 : -INFINITY;
    }
  });
}

template <class T, int Dk, int Dv, int kBlocks>
__global__ void __launch_bounds__(Shape<Dk, Dv, kBlocks>::kThreads, 1)
    selected_union(const __grid_constant__ SelectedArgs args, const __grid_constant__ GatherPlan plan,
                   const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                   const __grid_constant__ CUtensorMap q_map) {
  using S = Shape<Dk, Dv, kBlocks>;
  extern __shared__ __align__(1024) char memory[];
  if (should_fall_back(args.fallback)) return;
  if (!any_takes(plan, args.geometry)) return;
  constexpr int kRing = kWarpgroups * kTileBytes<Dk>;
  const std::uint32_t queries = shared_address(memory), ring = queries + kRing;
  auto& barriers = *reinterpret_cast<QueryBarriers*>(memory + kRing + plan.slots * S::kSlotBytes);
  auto& control = *reinterpret_cast<SelectedControl*>(&barriers + 1);
  const Geometry& g = args.geometry;
  if (threadIdx.x < kWarpgroups) {
    mbarrier_init(shared_address(&barriers.full[threadIdx.x]), 1);
    mbarrier_init(shared_address(&barriers.empty[threadIdx.x]), 4);
  }
  init_control<S>(control);

  if (threadIdx.x < S::kWarps * 32) {
    warpgroup_reg_alloc<S::kConsumerRegisters>();
    attend<T, Dk, Dv, S>(args, plan, control, barriers, queries, ring);
    return;
  }
  warpgroup_reg_dealloc<S::kProducerRegisters>();
  const auto for_boxes = [&](const SelectedTile& tile, const auto& body) {
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup)
      body(warpgroup, tile.kv_head * g.group + tile.first_head,
           tile.seq.q_begin + tile.first_query + warpgroup * plan.reader_queries, tile.seq.batch);
  };
  produce<S>(
      control, ring, plan, g, args.indices, k_map, v_map, threadIdx.x - S::kWarps * 32,
      [&](const SelectedTile& tile, int thread) {
        if (thread != 0) return;
        for_boxes(tile, [&](int, int head, int row, int batch) {
#pragma unroll
          for (int column = 0; column < Dk; column += 64) tma_prefetch(q_map, column, head, row, batch);
        });
      },
      [&](const SelectedTile& tile, int thread, int buffer) {
        if (thread >= 32) return;
        __syncwarp();
        if (elect_one())
          for_boxes(tile, [&](int warpgroup, int head, int row, int batch) {
            const std::uint32_t full = shared_address(&barriers.full[warpgroup]);
            mbarrier_wait(shared_address(&barriers.empty[warpgroup]), buffer ^ 1);
            mbarrier_arrive_expect_tx(full, kTileBytes<Dk>);
#pragma unroll
            for (int column = 0; column < Dk; column += 64)
              tma_load(queries + warpgroup * kTileBytes<Dk> + column * 128, q_map, column, head, row, batch, full);
          });
        __syncwarp();
      });
}

}  // namespace

template <>
cudaError_t launch_selected_union<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const SelectedArgs& args,
                                                                           const LoopOrder& loop_order,
                                                                           cudaStream_t stream) {
  constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;
  const Geometry& g = args.geometry;
  CUtensorMap q_map;
  if (query_rows(g) == 0 || g.batches == 0) return cudaSuccess;
  if (const cudaError_t error = HeadPacking(g.group).make_tensor_map(q_map, args.q, g, Dk); error != cudaSuccess)
    return error;
  const auto run = [&]<int kBlocks>(std::integral_constant<int, kBlocks>) {
    return launch_selected<Shape<Dk, Dv, kBlocks>>(selected_union<NSA_ELEMENT, Dk, Dv, kBlocks>, args, stream,
                                                   loop_order, true, q_map);
  };
  return args.block_size == 32 ? run(std::integral_constant<int, 2>{}) : run(std::integral_constant<int, 1>{});
}

}  // namespace nsa::cuda::sm90::selected_attention
