// dQ of queries over the blocks selected for them. How blocks reach the warps: gather_pipeline.cuh; formulas:
// common/attention_backward.cuh.
//
// A warp keeps its sixteen rows of Q and dO as fragments in registers, beside their dQ. Per tile of keys: S from the K
// slot, dP from the V slot; dS, packed; dQ += dS K from the K slot again.
#include "cuda/common/attention_backward.cuh"
#include "cuda/common/fallback.cuh"
#include "cuda/sm90/selected_attention/gather_pipeline.cuh"

namespace nsa::cuda::sm90::selected_attention {
namespace {

constexpr int kStep = 32;  // keys whose S and dP exist at a time
/// Fragments and sums of sixteen rows take the registers of two warps per scheduler.
constexpr int warps(int key_dim) { return key_dim > 64 ? 8 : 12; }
/// The fragments of dO are kept in shared memory instead where registers do not suffice.
constexpr bool shares_d_o(int key_dim) { return key_dim > 128; }

template <int Dk, int Dv, int kKeys>
using Shape =
    SelectedShape<Dk, Dv, kKeys, warps(Dk), shares_d_o(Dk) ? warps(Dk) * SharedFragments<NSA_ELEMENT, Dv>::kBytes : 0>;

template <class T, int Dk, int Dv, int kKeys>
__global__ void __launch_bounds__(Shape<Dk, Dv, kKeys>::kThreads, 1)
    selected_d_q(const __grid_constant__ BackwardArgs args, const __grid_constant__ GatherPlan plan,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  using S = Shape<Dk, Dv, kKeys>;
  extern __shared__ __align__(1024) char memory[];
  if (should_fall_back(args.fallback)) return;
  const std::uint32_t ring = shared_address(memory);
  const std::uint32_t kept = ring + plan.slots * S::kSlotBytes;
  auto& control = *reinterpret_cast<SelectedControl*>(memory + plan.slots * S::kSlotBytes + S::kOwnBytes);
  const Geometry& g = args.geometry;
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  init_control<S>(control);

  if (warp >= S::kWarps) {
    warpgroup_reg_dealloc<S::kProducerRegisters>();
    produce<S>(control, ring, plan, g, args.indices, k_map, v_map, threadIdx.x - S::kWarps * 32,
               [&](const SelectedTile& tile, int thread) {
                 prefetch_rows<T, Dk>(plan, g, tile, args.q, S::kWarps, thread);
                 prefetch_rows<T, Dv>(plan, g, tile, args.d_o, S::kWarps, thread);
               });
    return;
  }

  warpgroup_reg_alloc<S::kConsumerRegisters>();
  SelectedReader<S> reader(control, ring, plan);
  const float scale = args.scale * kLog2e;
  for_tiles(plan, g, [&](const SelectedTile& tile, int index, int buffer, std::uint32_t phase) {
    QueryRows mine;
    const SelectedLimits limits(plan, tile, warp, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SelectedRow row(plan, g, tile, warp, lane / 4 + 8 * i);
      mine.valid[i] = row.valid;
      mine.head[i] = row.head;
      mine.row[i] = tile.seq.q_begin + row.query;
      mine.read(args, tile.seq.batch, i);
    }
    const int batch = tile.seq.batch;
    const RowFragments<T, Dk> q(mine.at<T>(args.q, batch, 0), mine.at<T>(args.q, batch, 1), lane);
    const auto d_o = keep_fragments<shares_d_o(Dk)>(
        RowFragments<T, Dv>(mine.at<T>(args.d_o, batch, 0), mine.at<T>(args.d_o, batch, 1), lane),
        kept + warp * SharedFragments<T, Dv>::kBytes, lane);
    float acc[Dk / 8][4] = {};
    reader.for_keys(buffer, phase, warp, lane, [&](int key, unsigned users, const auto& keys, const auto& values) {
      keys.wait();
#pragma unroll 1
      for (int first = 0; first < kKeys; first += kStep) {
        float s[kStep / 8][4], dp[kStep / 8][4];
        key_scores<T, Dk, kKeys>(s, q, keys.tile, first, lane);
        if (first == 0) values.wait();
        key_scores<T, Dv, kKeys>(dp, d_o, values.tile, first, lane);
        row_gradients(s, dp, scale, mine.lse, mine.delta, mine.gate);
        hide_keys<kStep / 8>(limits, users, key + first, lane, [&](int n, int i) { dp[n][i] = 0; });
        std::uint32_t ds[kStep / 16][4];
        pack_keys<T>(ds, dp);
        key_sums<T, Dk, kKeys>(acc, ds, keys.tile, first, lane);
      }
      consumer_release(lane, keys, values);
    });
    const SelectedTile same(plan, g, again(index));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SelectedRow row(plan, g, same, warp, lane / 4 + 8 * i);
      if (!row.valid) continue;
      store_d_q<T, Dk / 8>(args, same.seq.batch, same.seq.q_begin + row.query, row.head, 2 * (lane & 3), [&](int n) {
        return float2{acc[n][2 * i] * args.scale, acc[n][2 * i + 1] * args.scale};
      });
    }
  });
}

}  // namespace

template <>
cudaError_t launch_selected_d_q<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const BackwardArgs& args,
                                                                         cudaStream_t stream) {
  constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;
  if (args.block_size == 32)
    return launch_selected<Shape<Dk, Dv, 32>>(selected_d_q<NSA_ELEMENT, Dk, Dv, 32>, args, stream);
  return launch_selected<Shape<Dk, Dv, 64>>(selected_d_q<NSA_ELEMENT, Dk, Dv, 64>, args, stream);
}

}  // namespace nsa::cuda::sm90::selected_attention
