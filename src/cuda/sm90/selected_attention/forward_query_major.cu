// Selected attention, query-major: the forward. How blocks reach the warps: gather_pipeline.cuh.
//
// A warp keeps its sixteen query rows as fragments in registers, with the softmax state and the output of these rows.
// Per tile of 64 keys (32 where blocks have 32): scores from the K slot, which is then released; softmax; outputs from
// the V slot. The keys of a query come in the order of its tile's union.
#include "cuda/common/fallback.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sm90/selected_attention/gather_pipeline.cuh"

namespace nsa::cuda::sm90::selected_attention {
namespace {

/// As many warps as registers allow: more of them hide each other's latency and share more of what is loaded.
template <int Dk, int Dv, int kKeys>
using Shape = SelectedShape<Dk, Dv, kKeys,
                            (Dk > 128  ? 8
                             : Dk > 64 ? 12
                                       : 16)>;

template <class T, int Dv>
__device__ __forceinline__ void store_row(const SelectedArgs& args, const SelectedTile& tile, const SelectedRow& row,
                                          const OnlineSoftmax<Dv>& state, int i, int lane) {
  const float sum = row_sum(state.sum[i]);
  if (!row.valid) return;
  const std::int64_t at = tile.seq.q_begin + row.query;
  const bool seen = sum != 0;
  const float inverse = seen ? 1 / sum : 0;
  T* to = args.o.at<T>(tile.seq.batch, at, row.head) + 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < Dv / 8; ++n)
    store_pair(to + n * 8, state.acc[n][2 * i] * inverse, state.acc[n][2 * i + 1] * inverse);
  if (lane % 4 == 0) args.lse.at(tile.seq.batch, at, row.head) = seen ? (state.max[i] + log2f(sum)) * kLn2 : -INFINITY;
}

template <class T, int Dk, int Dv, int kKeys>
__global__ void __launch_bounds__(Shape<Dk, Dv, kKeys>::kThreads, 1)
    selected_forward(const __grid_constant__ SelectedArgs args, const __grid_constant__ GatherPlan plan,
                     const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  using S = Shape<Dk, Dv, kKeys>;
  extern __shared__ __align__(1024) char memory[];
  if (should_fall_back(args.fallback)) return;
  if (!any_takes(plan, args.geometry)) return;
  const std::uint32_t ring = shared_address(memory);
  auto& control = *reinterpret_cast<SelectedControl*>(memory + plan.slots * S::kSlotBytes);
  const Geometry& g = args.geometry;
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  init_control<S>(control);

  if (warp >= S::kWarps) {
    warpgroup_reg_dealloc<S::kProducerRegisters>();
    produce<S>(
        control, ring, plan, g, args.indices, k_map, v_map, threadIdx.x - S::kWarps * 32,
        [&](const SelectedTile& tile, int thread) { prefetch_rows<T, Dk>(plan, g, tile, args.q, S::kWarps, thread); });
    return;
  }

  warpgroup_reg_alloc<S::kConsumerRegisters>();
  SelectedReader<S> reader(control, ring, plan);
  const float scale = positive_scale(args.scale);
  for_tiles(plan, g, [&](const SelectedTile& tile, int index, int buffer, std::uint32_t phase) {
    const T* q_row[2];
    const SelectedLimits limits(plan, tile, warp, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SelectedRow row(plan, g, tile, warp, lane / 4 + 8 * i);
      q_row[i] = row.valid ? args.q.at<T>(tile.seq.batch, tile.seq.q_begin + row.query, row.head) : nullptr;
    }
    const RowFragments<T, Dk> q(q_row[0], q_row[1], lane, args.scale < 0);
    OnlineSoftmax<Dv> state;
    reader.for_keys(buffer, phase, warp, lane, [&](int key, unsigned users, const auto& keys, const auto& values) {
      float s[kKeys / 8][4];
      keys.wait();
      key_scores<T, Dk, kKeys>(s, q, keys.tile, 0, lane);
      consumer_release(lane, keys);
      hide_keys<kKeys / 8>(limits, users, key, lane, [&](int n, int i) { s[n][i] = -INFINITY; });
      state.update(s, scale);
      std::uint32_t p[kKeys / 16][4];
      pack_keys<T>(p, s);
      values.wait();
      key_sums<T, Dv, kKeys>(state.acc, p, values.tile, 0, lane);
      consumer_release(lane, values);
    });
    const SelectedTile same(plan, g, again(index));  // computed again: kept over the loop, it would spill
#pragma unroll
    for (int i = 0; i < 2; ++i)
      store_row<T>(args, same, SelectedRow(plan, g, same, warp, lane / 4 + 8 * i), state, i, lane);
  });
}

}  // namespace

template <>
cudaError_t launch_selected_query_major<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const SelectedArgs& args,
                                                                                 const LoopOrder& loop_order,
                                                                                 cudaStream_t stream) {
  constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;
  if (args.block_size == 32)
    return launch_selected<Shape<Dk, Dv, 32>>(selected_forward<NSA_ELEMENT, Dk, Dv, 32>, args, stream, loop_order);
  return launch_selected<Shape<Dk, Dv, 64>>(selected_forward<NSA_ELEMENT, Dk, Dv, 64>, args, stream, loop_order);
}

}  // namespace nsa::cuda::sm90::selected_attention
