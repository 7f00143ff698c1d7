// Compressed attention, importance and block selection in one pass over the compressed keys. Made for compression
// blocks of l = d or 2d and selection blocks of l' = d, 2d, 4d or 8d tokens; of others see the end.
//
// The attention is that of range_attention/forward.cu: a warp has a warp tile of sixteen rows (WarpTiles). Keys of a
// tile lie spread (make_spread_tensor_map), so that a lane owns sixteen neighbouring keys of two rows. The importance
// of a block under one head is the sum over its strides of d tokens: each has the probability of the compression block
// that begins with it, and, if l = 2d, of the one before. For l' = 4d that is a weighted sum (1, 2, 2, 2, 1) of five
// probabilities. They are known up to a factor until the last key is seen. Data flow of the importances of a warp tile:
//
//   its warp (attention_warpgroup.cuh)
//       per key tile the weighted sums of its sixteen rows for up to four strides, a block or half of one, as fp16,
//       relative to the rows' references at that time, and the references -> a scratch of this thread block in global
//       memory; at the end -lse of the rows -> shared memory
//   a selector warp (selector_warp.cuh)
//       the scratch, by TMA, times 2^(reference - lse), summed over the heads of a query (importance.cuh),
//       of a large group over its warp tiles in order, too -> scores, in shared memory, or those of four queries in
//       global memory -> the blocks chosen (topk.cuh)
//
// For other l and l' the scratch has single keys, and selector warps add the sums over heads up to blocks (AnyBlocks).
//
// The computing warps go on with later queries meanwhile: the scratch has kBuffers slots per warp tile of a tile. fp16
// is enough: what it loses of a probability is 2^-11 of it or 2^-25.
//
// Here: the warp that loads, the kernel and its launch. shared_memory.cuh has what all of its warps share.
#include <algorithm>
#include <type_traits>

#include "cuda/common/device.h"
#include "cuda/common/fallback.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/common/tensor_map.h"
#include "cuda/sm90/select_blocks/attention_warpgroup.cuh"
#include "cuda/sm90/select_blocks/compressed_select.h"
#include "cuda/sm90/select_blocks/selector_warp.cuh"

namespace nsa::cuda::sm90::select_blocks {
namespace {

struct Maps {
  CUtensorMap q, k, v, k_row, v_row;
};

/// Here rows, heads and positions of a GroupTile are those of the thread block's tile, and so is the number of queries.
template <class Tiles, class Blocks>
__device__ __forceinline__ GroupTile tile_of(const CompressedSelectArgs& args, const TileScheduler& scheduler,
                                             int key_tiles, int group) {
  const Geometry& p = args.range.geometry;
  const Tiles& warp_tiles = warp_tiles_of<Tiles>(args);
  const int queries = min(warp_tiles.queries, scheduler.seq.q_len - scheduler.first_query);
  const int first = warp_tiles.first_query(4 * group),
            end = warp_tiles.first_query(4 * group + 3) + warp_tiles.together;
  GroupTile tile{.queries = queries,
                 .batch = scheduler.seq.batch,
                 .row = scheduler.seq.q_begin + scheduler.first_query,
                 .head = scheduler.kv_head * p.group,
                 .position = scheduler.seq.position(scheduler.first_query),
                 .first_key = 0,
                 .key_tiles = key_tiles,
                 .begin = 0,
                 .end = 0};
  if (first < queries) tile.end = key_tiles_of<Blocks>(p, tile.position + min(end, queries) - 1);
  return tile;
}

/// Neighbouring warp tiles whose rows follow each other as those of one box do.
template <class Tiles>
__host__ __device__ constexpr int warp_tiles_per_box(const Tiles& warp_tiles) {
  return warp_tiles.slices == 1 && warp_tiles.rows() == 16 ? 4 : 1;
}

/// 64 rows of keys or values, spread. All lanes of the warp.
template <int D>
__device__ __forceinline__ void load_tile(std::uint32_t to, const CUtensorMap& spread, const CUtensorMap& rows,
                                          bool all_known, int row, const TileScheduler& scheduler, std::uint32_t full,
                                          int lane) {
  if (lane == 0) mbarrier_arrive_expect_tx(full, kKeys * D * 2);  // before any byte can come
  __syncwarp();
#pragma unroll
  for (int column = 0; column < D; column += 64) {
    const std::uint32_t panel = to + column * kKeys * 2;
    if (all_known) {
      if (lane == 0) tma_load_spread(panel, spread, column, row, scheduler.kv_head, scheduler.seq.batch, full);
    } else {  // near the end of the tensor, row by row
#pragma unroll
      for (int i = lane; i < kKeys; i += 32)
        tma_load(panel + (i % 8 * 8 + i / 8) * 128, rows, column, scheduler.kv_head, row + i, scheduler.seq.batch,
                 full);
    }
  }
}

/// Warp 0 of the helping warpgroup.
template <int Dk, int Dv, class Tiles, class Blocks>
__device__ __forceinline__ void load_keys(const CompressedSelectArgs& args, const Maps& maps, SelectBarriers& barriers,
                                          std::uint32_t queries, std::uint32_t keys, std::uint32_t values) {
  using L = SelectLayout<Dk, Dv>;
  const Tiles& warp_tiles = warp_tiles_of<Tiles>(args);
  const int lane = threadIdx.x % 32;
  PipelineState<L::kStages> state;
  std::uint32_t phase = 0;
  TileScheduler scheduler = scheduler_of<Tiles>(args);
  for (bool more = true; more; phase ^= 1) {
    more = scheduler.next();
    int tiles = 0;
    if (more) {
      const int last_query = min(scheduler.first_query + warp_tiles.queries, scheduler.seq.q_len) - 1;
      tiles = key_tiles_of<Blocks>(args.range.geometry, scheduler.seq.position(last_query));
    }
    for (int group = 0; group < kGroups; ++group) {
      GroupTile& tile = barriers.tiles[group][phase];
      const std::uint32_t full = barriers.queries().full(group);
      mbarrier_wait_warp(barriers.queries().empty(group), phase ^ 1);
      if (lane != 0) continue;
      if (!more) {
        tile.queries = -1;
        mbarrier_arrive(full);
        continue;
      }
      tile = tile_of<Tiles, Blocks>(args, scheduler, tiles, group);
      mbarrier_arrive_expect_tx(full, 4 * warp_tiles.rows() * Dk * 2);
      const std::uint32_t to = queries + group * L::kQueryBytes;
      for (int warp_tile = 0; warp_tile < 4; warp_tile += warp_tiles_per_box(warp_tiles)) {
        const int head = tile.head + warp_tiles.first_head(4 * group + warp_tile);
        const int row = tile.row + warp_tiles.first_query(4 * group + warp_tile);
#pragma unroll
        for (int column = 0; column < Dk; column += 64)
          tma_load(to + column * 64 * 2 + warp_tile * 16 * 128, maps.q, column, head, row, tile.batch, full);
      }
    }
    __syncwarp();
    for (int i = 0; i < tiles; ++i) {
      const int row = scheduler.compressed_begin + i * kKeys;
      const bool all_known = row / 8 * 8 + kKeys <= args.spread_rows;
      barriers.keys().acquire_warp(state);
      load_tile<Dk>(keys + state.stage() * L::kKeyBytes, maps.k, maps.k_row, all_known, row, scheduler,
                    barriers.keys().full(state.stage()), lane);
      barriers.values().acquire_warp(state);
      load_tile<Dv>(values + state.stage() * L::kValueBytes, maps.v, maps.v_row, all_known, row, scheduler,
                    barriers.values().full(state.stage()), lane);
      state.advance();
    }
  }
}

/// How the selector warps choose: query by query, the same with the upper halves of scores in shared memory, or for
/// warp tiles of several queries.
enum class Choice { kQuery, kFiltered, kQuads };

/// Blocks: BlocksOfStrides, or DefaultBlocks.
template <class T, int Dk, int Dv, class Tiles, class Blocks, Choice kChoice>
__global__ void __launch_bounds__(kThreads, 1)
    compressed_select(const __grid_constant__ Maps maps, const __grid_constant__ CompressedSelectArgs args,
                      const __grid_constant__ FastDivmod by_stride) {
  using L = SelectLayout<Dk, Dv>;
  extern __shared__ __align__(1024) char memory[];
  __shared__ SelectBarriers barriers;
  if (block_should_fall_back(args.flag)) return;
  const std::uint32_t queries = (shared_address(memory) + 1023) & ~1023u;
  const std::uint32_t keys = queries + kGroups * L::kQueryBytes, values = keys + L::kStages * L::kKeyBytes;
  if (threadIdx.x == 0) {
    barriers.init();
    for (int i = 0; i < kBuffers * kWarpTiles; ++i) {
      mbarrier_init(shared_address(&barriers.scratch_full[0][0] + i), 8);    // the lanes that leave minus_lse
      mbarrier_init(shared_address(&barriers.scratch_empty[0][0] + i), 32);  // those that read them
    }
    for (int i = 0; i < kSelectorWarps * kMaxChunks; ++i)
      mbarrier_init(shared_address(&barriers.chunk_full[0][0] + i), 1);
    fence_mbarrier_init();
  }
  if (warp_tiles_of<Tiles>(args).rows() < 16) {  // rows without use stay zero: TMA does not touch them
    auto* vectors = reinterpret_cast<uint4*>(memory + (queries - shared_address(memory)));
    for (int i = threadIdx.x; i < kGroups * L::kQueryBytes / 16; i += kThreads) vectors[i] = uint4{};
    fence_async();
  }
  __syncthreads();

  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp < kGroups * 4) {
    warpgroup_reg_alloc<kComputeRegisters>();
    attend<T, Dk, Dv, Tiles, Blocks>(args, by_stride, barriers, queries, keys, values, warp / 4);
  } else {
    warpgroup_reg_dealloc<kHelperRegisters>();
    // Read again with keys of 192, where ptxas would spill it.
    const int helper = (Dk > 128 ? warp_uniform(threadIdx.x / 32) : warp) - kGroups * 4;
    if (helper == 0) {
      load_keys<Dk, Dv, Tiles, Blocks>(args, maps, barriers, queries, keys, values);
    } else {
      const int number = helper - 1;
      constexpr bool kUsesKeyRing = Blocks::kAddsKeysUp;
      char* own = memory + (values + L::kStages * L::kValueBytes - shared_address(memory)) +
                  number * L::selector_warp(args.warp_tiles, args.near_keys, args.chunks, kUsesKeyRing);
      char* key_ring = own + args.chunks * ChunkRing::kChunkBytes;
      unsigned* list = reinterpret_cast<unsigned*>(key_ring + (kUsesKeyRing ? L::key_ring(args.warp_tiles) : 0));
      SelectorWarp<Tiles, Blocks> selector(args, barriers, {own, barriers.chunk_full[number], args.chunks}, list,
                                           reinterpret_cast<float*>(key_ring), number);
      char* far = args.keys + (blockIdx.x * kSelectorWarps + number) * args.selector_keys;
      if constexpr (kChoice == Choice::kQuads) {
        selector.choose_by_quad(reinterpret_cast<uint4*>(far));
      } else if constexpr (kChoice == Choice::kFiltered) {
        selector.template choose_by_query<true>(reinterpret_cast<unsigned*>(far),
                                                reinterpret_cast<unsigned short*>(list + kListed));
      } else if (std::is_same_v<Tiles, WarpTilesOfSixteen> || !args.keys) {
        selector.template choose_by_query<false>(reinterpret_cast<unsigned*>(list + kListed));
      } else {
        selector.template choose_by_query<false>(reinterpret_cast<unsigned*>(far));
      }
    }
  }
}

using Kernel = void (*)(Maps, CompressedSelectArgs, FastDivmod);

bool groups_of_sixteen(const CompressedSelectArgs& args) { return args.range.geometry.group == 16 && !args.keys; }

template <class Tiles, class Blocks, Choice kChoice = Choice::kQuery>
constexpr Kernel kInstance = compressed_select<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM, Tiles, Blocks, kChoice>;

constexpr bool kFilters = NSA_KEY_DIM == 128;

/// Whether the upper halves of scores that lie in the scratch are in shared memory: with blocks of four strides.
bool filters(const CompressedSelectArgs& args) {
  const Geometry& g = args.range.geometry;
  return kFilters && args.keys && g.group == 16 && g.kernel_size <= 2 * g.kernel_stride &&
         args.block_size == 4 * g.kernel_stride &&
         selection_blocks(g, args.block_size) <= 2 * CompressedSelectScratch::most_blocks(NSA_KEY_DIM);
}

template <class Blocks>
Kernel instance_of(const CompressedSelectArgs& args) {
  if (args.warp_tiles.together > 1) return kInstance<WarpTiles, Blocks, Choice::kQuads>;
  return groups_of_sixteen(args) ? kInstance<WarpTilesOfSixteen, Blocks> : kInstance<WarpTiles, Blocks>;
}

Kernel instance_for(const CompressedSelectArgs& args) {
  const Geometry& g = args.range.geometry;
  const int strides = args.block_size / g.kernel_stride;
  if (adds_keys_up(g.kernel_size, g.kernel_stride, args.block_size))
    return args.warp_tiles.together > 1 ? kInstance<WarpTiles, AnyBlocks, Choice::kQuads>
                                        : kInstance<WarpTiles, AnyBlocks>;
  if (strides == 1) return instance_of<BlocksOfStrides<1>>(args);
  if (strides == 2) return instance_of<BlocksOfStrides<2>>(args);
  if (strides == 8) return instance_of<BlocksOfStrides<8>>(args);
  const bool overlap = args.weights.rest > 0;
  constexpr Choice kFar = kFilters ? Choice::kFiltered : Choice::kQuery;  // else an instance that nothing launches
  if (filters(args)) return kInstance<WarpTilesOfSixteen, BlocksOfStrides<4>, kFar>;
  return overlap && groups_of_sixteen(args) ? kInstance<WarpTilesOfSixteen, DefaultBlocks>
                                            : instance_of<BlocksOfStrides<4>>(args);
}

cudaError_t launch_heads(const CompressedSelectArgs& call, int num_sms, cudaStream_t stream) {
  constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;
  using L = SelectLayout<Dk, Dv>;
  constexpr int kDynamic = kSharedMemory - (static_cast<int>(sizeof(SelectBarriers)) + 1023) / 1024 * 1024;
  constexpr int kKeysOfQuery = L::keys(CompressedSelectScratch::most_blocks(Dk));
  static_assert(L::kFixed + kSelectorWarps * (ChunkRing::kChunkBytes + kListBytes + kKeysOfQuery) <= kDynamic);
  CompressedSelectArgs args = call;
  const Geometry& g = args.range.geometry;
  const CompressedSelectScratch scratch(g, Dk, args.block_size);
  args.warp_tiles = WarpTiles(g.group);
  args.by_block = FastDivmod(args.block_size);
  args.strides_of_key = g.kernel_size / g.kernel_stride;
  args.by_strides = FastDivmod(args.block_size / g.kernel_stride);
  const auto strides = static_cast<float>(args.strides_of_key);
  args.weights = {strides, strides - 1};
  args.keys = scratch.selector_keys > 0 ? static_cast<char*>(args.scratch) + scratch.sums : nullptr;
  args.selector_keys = scratch.selector_keys;
  if (query_rows(g) == 0 || g.batches == 0) return cudaSuccess;
  const int batches = tensor_batches(g);
  const std::int64_t rows = compressed_rows(g);
  args.spread_rows = static_cast<int>(spread_rows(rows));
  const int blocks = selection_blocks(g, args.block_size);
  args.near_keys = !args.keys ? blocks : filters(args) ? (blocks + 1) / 2 : 0;
  args.chunks = kMaxChunks;
  const bool key_rings = adds_keys_up(g.kernel_size, g.kernel_stride, args.block_size);
  while (args.chunks > 1 && L::memory(args.warp_tiles, args.near_keys, args.chunks, key_rings) > kDynamic)
    --args.chunks;
  // Without a key nothing is read through the maps of keys and values.
  const Strided &k = rows > 0 ? args.range.k : args.range.q, &v = rows > 0 ? args.range.v : args.range.q;
  Maps maps;
  cudaError_t error = make_tensor_map(maps.q, args.range.q, Dk, g.heads, query_rows(g), batches, args.warp_tiles.heads,
                                      args.warp_tiles.together * warp_tiles_per_box(args.warp_tiles));
  if (error == cudaSuccess) error = make_spread_tensor_map(maps.k, k, Dk, g.kv_heads, rows, batches);
  if (error == cudaSuccess) error = make_spread_tensor_map(maps.v, v, Dv, g.kv_heads, rows, batches);
  if (error == cudaSuccess) error = make_tensor_map(maps.k_row, k, Dk, g.kv_heads, rows, batches, 1, 1);
  if (error == cudaSuccess) error = make_tensor_map(maps.v_row, v, Dv, g.kv_heads, rows, batches, 1, 1);
  if (error != cudaSuccess) return error;
  return launch(instance_for(args), std::min(scratch.thread_blocks, num_sms), kThreads,
                L::memory(args.warp_tiles, args.near_keys, args.chunks, key_rings), stream, maps, args,
                FastDivmod(g.kernel_stride));
}

/// A call for one KV head of a call.
CompressedSelectArgs of_head(CompressedSelectArgs args, int kv_head) {
  Geometry& g = args.range.geometry;
  const auto skip = [](Strided& tensor, int head, std::int64_t bytes) {
    tensor.data = static_cast<char*>(tensor.data) + head * tensor.head * bytes;
  };
  skip(args.range.q, kv_head * g.group, sizeof(NSA_ELEMENT)),
      skip(args.range.o, kv_head * g.group, sizeof(NSA_ELEMENT));
  skip(args.range.k, kv_head, sizeof(NSA_ELEMENT)), skip(args.range.v, kv_head, sizeof(NSA_ELEMENT));
  skip(args.indices, kv_head, sizeof(int));
  args.range.lse.data += kv_head * g.group * args.range.lse.head;
  g.heads = g.group, g.kv_heads = 1;
  return args;
}

/// Whether KV heads are served one after the other: where their keys and values together leave no space for the scratch
/// in L2, and each has so many tiles that the last round of them, which few thread blocks have,
/// does not matter. The noise of a head depends on its number.
bool heads_in_turn(const CompressedSelectArgs& args, int num_sms) {
  constexpr std::int64_t kRowBytes = (NSA_KEY_DIM + NSA_VALUE_DIM) * sizeof(NSA_ELEMENT), kTogether = 16 << 20;
  constexpr int kRounds = 32;
  const Geometry& g = args.range.geometry;
  return g.kv_heads > 1 && g.batches == 1 && args.noise == 0 &&
         most_key_tiles(g) * kKeys * kRowBytes * g.kv_heads > kTogether &&
         query_rows(g) / WarpTiles(g.group).queries >= kRounds * num_sms;
}

}  // namespace

template <>
cudaError_t launch_compressed_select<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const CompressedSelectArgs& args,
                                                                              cudaStream_t stream) {
  int num_sms = 0;
  cudaError_t error = sm_count(num_sms);
  if (error != cudaSuccess) return error;
  if (!heads_in_turn(args, num_sms)) return launch_heads(args, num_sms, stream);
  for (int head = 0; head < args.range.geometry.kv_heads && error == cudaSuccess; ++head)
    error = launch_heads(of_head(args, head), num_sms, stream);
  return error;
}

}  // namespace nsa::cuda::sm90::select_blocks
