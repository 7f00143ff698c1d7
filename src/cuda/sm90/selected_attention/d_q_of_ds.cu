// dQ of queries over the blocks selected for them, from the dS that selected_d_kv has left: dQ += dS K. How blocks
// reach the warps: gather_pipeline.cuh; where dS lies: common/selected_ds.h.
//
// A lane's two rows are neighbours here, 2 * (lane / 4) and the next one: their dS are sixteen bytes for every sixteen
// keys, which become an A operand by exchange of halves of registers. They are on their way while the tile before is
// multiplied.
#include "cuda/common/attention_backward.cuh"
#include "cuda/common/fallback.cuh"
#include "cuda/sm90/selected_attention/gather_pipeline.cuh"
#include "cuda/sm90/selected_attention/own_entries.h"

namespace nsa::cuda::sm90::selected_attention {
namespace {

/// As many warps as registers allow.
template <int Dk, int kKeys>
using Shape = SelectedShape<Dk, 0, kKeys, (Dk > 64 ? 12 : 16)>;

/// The entries of a warp's queries: blocks, and where in the inverse index they are.
struct OwnEntries {
  EntryLanes lanes;
  int key[EntryLanes::kMax];  // the first one of the block; -1: no entry, or one that does not count
  int slot[EntryLanes::kMax];

  __device__ OwnEntries(const BackwardArgs& args, const GatherPlan& p, const SelectedTile& tile, int warp, int lane)
      : lanes(p.reader_queries) {
    const int number = lanes.query(lane), query = tile.first_query + warp * p.reader_queries + number;
    const bool valid = number < p.reader_queries && query < tile.seq.q_len;
    const int row = tile.seq.q_begin + query;
#pragma unroll
    for (int i = 0; i < EntryLanes::kMax; ++i) {
      const int rank = lanes.rank(lane, i);
      key[i] = -1;
      if (!valid || rank >= p.topk) continue;
      const int block = args.indices.at<int>(tile.seq.batch, row, tile.kv_head)[rank];
      slot[i] = args.lists.entry_slots.at<int>(tile.seq.batch, row, tile.kv_head)[rank];
      if (block >= 0 && static_cast<std::int64_t>(block) * p.block_size <= tile.seq.position(query))
        key[i] = block * p.block_size;
    }
  }
  /// Where the query with these lanes has the block that begins at `first`; -1: it did not choose it. All lanes call
  /// it.
  __device__ __forceinline__ int find(int first, unsigned of_query, int topk) const {
    int found = -1;
#pragma unroll
    for (int i = 0; i < EntryLanes::kMax; ++i) {
      if (i << lanes.log2 >= topk) break;
      const unsigned holders = __ballot_sync(0xffffffffu, key[i] == first) & of_query;
      const int there = __shfl_sync(0xffffffffu, slot[i], __ffs(static_cast<int>(holders)) - 1);
      if (holders) found = there;
    }
    return found;
  }
};

/// What two rows and sixteen keys have, as the A operand with the first row at lane / 4, the second one at lane / 4
/// + 8.
__device__ __forceinline__ void operand(std::uint32_t (&a)[4], const uint4& pair) {
  a[0] = __byte_perm(pair.x, pair.z, 0x5410);
  a[1] = __byte_perm(pair.x, pair.z, 0x7632);
  a[2] = __byte_perm(pair.y, pair.w, 0x5410);
  a[3] = __byte_perm(pair.y, pair.w, 0x7632);
}

template <class T, int Dk, int kKeys>
__global__ void __launch_bounds__(Shape<Dk, kKeys>::kThreads, 1)
    selected_d_q_of_ds(const __grid_constant__ BackwardArgs args, const __grid_constant__ GatherPlan plan,
                       const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  using S = Shape<Dk, kKeys>;
  constexpr int kPlanes = kKeys / SelectedDs::kPlaneKeys;
  extern __shared__ __align__(1024) char memory[];
  if (should_fall_back(args.fallback)) return;
  const std::uint32_t ring = shared_address(memory);
  auto& control = *reinterpret_cast<SelectedControl*>(memory + plan.slots * S::kSlotBytes);
  const Geometry& g = args.geometry;
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  init_control<S>(control);

  if (warp >= S::kWarps) {
    warpgroup_reg_dealloc<S::kProducerRegisters>();
    produce<S>(control, ring, plan, g, args.indices, k_map, v_map, threadIdx.x - S::kWarps * 32,
               [](const SelectedTile&, int) {});
    return;
  }

  warpgroup_reg_alloc<S::kConsumerRegisters>();
  SelectedReader<S> reader(control, ring, plan);
  const SelectedDs& stored = args.selected_ds;
  const std::int64_t plane = stored.plane();
  for_tiles(plan, g, [&](const SelectedTile& tile, int index, int buffer, std::uint32_t phase) {
    const OwnEntries own(args, plan, tile, warp, lane);
    // The pair's first row, its query of the warp's; made here, so that no register holds them between tiles.
    const int pair = 2 * (again(lane) / 4), number = plan.packing.by_heads.divide(pair);
    const unsigned of_query = number < plan.reader_queries ? own.lanes.mask(number) : 0;
    const int slice = tile.first_head / plan.packing.heads;
    const char* first_entry = stored.data +
                              stored.offset(plan.packing.heads, slice, 0, pair - number * plan.packing.heads) +
                              SelectedDs::loaded_vector(lane);
    float acc[Dk / 8][4] = {};
    uint4 ds[kPlanes];  // of the tile at `position`
    unsigned position = 0;
    bool any = false;
    const auto multiply = [&] {
      std::uint32_t a[kPlanes][4];
#pragma unroll
      for (int i = 0; i < kPlanes; ++i) operand(a[i], ds[i]);
      const SelectedSlot keys = reader.at(position);
      keys.wait();
      key_sums<T, Dk, kKeys>(acc, a, keys.tile, 0, lane);
      consumer_release(lane, keys);
    };
    reader.for_tiles_of_keys(buffer, phase, warp, lane, [&](int key, unsigned, unsigned next_position) {
      const int first = key & -plan.block_size, entry = own.find(first, of_query, plan.topk);
      // Of a key tile behind the sequence's end there is no dS: d_kv has no item for it.
      const bool stored_here = entry >= 0 && key < tile.seq.k_len;
      const char* from = first_entry + static_cast<std::int64_t>(entry) * (plan.packing.heads * SelectedDs::kRow) +
                         (key - first) / SelectedDs::kPlaneKeys * plane;
      uint4 next[kPlanes];
#pragma unroll
      for (int i = 0; i < kPlanes; ++i)
        next[i] = stored_here ? __ldcs(reinterpret_cast<const uint4*>(from + i * plane)) : uint4{0, 0, 0, 0};
      if (any) multiply();
#pragma unroll
      for (int i = 0; i < kPlanes; ++i) ds[i] = next[i];
      position = next_position;
      any = true;
    });
    if (any) multiply();
    const SelectedTile same(plan, g, again(index));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SelectedRow row(plan, g, same, warp, pair + i);
      if (!row.valid) continue;
      store_d_q<T, Dk / 8>(args, same.seq.batch, same.seq.q_begin + row.query, row.head, 2 * (lane & 3), [&](int n) {
        return float2{acc[n][2 * i] * args.scale, acc[n][2 * i + 1] * args.scale};
      });
    }
  });
}

}  // namespace

template <>
cudaError_t launch_selected_d_q_of_ds<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const BackwardArgs& args,
                                                                               cudaStream_t stream) {
  constexpr int Dk = NSA_KEY_DIM;
  if (args.block_size == 32)
    return launch_selected<Shape<Dk, 32>>(selected_d_q_of_ds<NSA_ELEMENT, Dk, 32>, args, stream);
  return launch_selected<Shape<Dk, 64>>(selected_d_q_of_ds<NSA_ELEMENT, Dk, 64>, args, stream);
}

}  // namespace nsa::cuda::sm90::selected_attention
