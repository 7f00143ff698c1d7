// How query-major kernels and unions cut a call into tiles, and what their warps share in shared memory. Overview:
// gather_pipeline.cuh.
#pragma once

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/common/head_packing.cuh"
#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/selected_attention/selected_attention.h"

namespace nsa::cuda::sm90::selected_attention {

inline constexpr int kBuilders = 96, kProducers = 128;  // threads
inline constexpr int kUnionWarpgroups = 3;              // computing warpgroups of selected_union
inline constexpr int kFullBarriers = 512, kMaxSlots = 32;
inline constexpr int kL2Bytes = 16 << 20;  // keys and values of all heads up to which L2 is taken to hold them
inline constexpr int kMaxEntries = 1024;   // of the lists of a tile, unless sixteen rows are one query

/// How a call is cut into tiles, and the layout of shared memory. A tile is `queries` neighbouring queries for the
/// heads of one group, or sixteen of them. A reader is a warp (query-major) or a warpgroup (unions).
struct GatherPlan {
  int block_size;       // l'
  int topk;             // entries of a row of indices
  int tiles_per_block;  // key tiles of a block
  HeadPacking packing;  // the heads of a query in a warp's sixteen rows; slices of a group
  int reader_queries;   // queries of a reader
  int queries;          // queries of a tile
  int tiles;            // tiles of a sequence and slice, an upper bound
  int total;            // tiles of the call
  bool longest_first;   // order of the tiles: see SelectedTile
  int inner;            // tiles that follow each other: of one head, or of all heads
  int entries;          // entries of the lists of a tile, rounded up to 32
  int table_bits;       // the builders' hash table has 2^table_bits slots, at least half of them empty
  int slots;            // slots of the ring
  int memory;           // bytes of dynamic shared memory
  FastDivmod by_queries, by_slots;
  LoopOrder loop_order;  // tiles of sequences and heads that take the other order are left out
  bool alternative;      // this kernel is the alternative of the two orders
};

/// Bookkeeping in shared memory, behind the ring and the kernel's own bytes. The arrays that follow it are listed
/// below.
struct SelectedControl {
  std::uint64_t full[kFullBarriers], empty[kMaxSlots], union_full[2], union_empty[2];
  int size[2];       // blocks of the union in each buffer
  unsigned head[2];  // the first fill of each reader, as links (below)
  unsigned issued;   // number of issued fills
  unsigned unused;
  // Then arrays of plan.entries:
  //   uint2 users[2]             bit q: query q of the tile uses the block. Where readers are warpgroups, which have
  //                              at most 24 queries, the second word is their links
  //   int block[2]               the block and, from bit kIdleShift on, how many warps do not use its fill
  //   int wanted                 what the lists say: block or -1; entry number = rank * queries + query
  //   unsigned first             (entries / 32) bit e: entry e is the first one of its block
  //   unsigned table             (2^table_bits) the first entry of a block, kNone: free

  static constexpr unsigned kNone = 0xffffffffu;
  static constexpr int kIdleShift = 26, kBlockMask = (1 << kIdleShift) - 1;  // blocks have 32 keys at least
  static constexpr int kNoBlock = kBlockMask;                                // half of a fill without a block
  // Links: for each reader the number of the next fill (of keys) that it uses, kLinkBits each.
  static constexpr int kLinkBits = 10;
  static constexpr unsigned kNoLink = (1u << kLinkBits) - 1;

  __device__ uint2* users(const GatherPlan& p, int buffer) {
    return reinterpret_cast<uint2*>(this + 1) + buffer * p.entries;
  }
  __device__ int* block(const GatherPlan& p, int buffer) {
    return reinterpret_cast<int*>(users(p, 2)) + buffer * p.entries;
  }
  __device__ int* wanted(const GatherPlan& p) { return block(p, 2); }
  __device__ unsigned* first(const GatherPlan& p) { return reinterpret_cast<unsigned*>(block(p, 3)); }
  __device__ unsigned* table(const GatherPlan& p) { return first(p) + p.entries / 32; }

  static int bytes(const GatherPlan& p) {
    return static_cast<int>(sizeof(SelectedControl)) + p.entries * (2 * 8 + 3 * 4) + p.entries / 8 +
           (4 << p.table_bits);
  }
};

/// Compile-time sizes of a kernel.
///   Dk, Dv          head dims; Dv = 0: the ring has no values
///   kTileKeys       keys of a key tile
///   kConsumers      consumer warps
///   kOwn            bytes of shared memory that only this kernel uses, a multiple of 16
///   kWarpsOfReader  1 or 4: a reader is a warp or a warpgroup
///   kBlocksOfTile   2 where selected blocks are half as long as key tiles, else 1
template <int Dk, int Dv, int kTileKeys, int kConsumers, int kOwn = 0, int kWarpsOfReader = 1, int kBlocksOfTile = 1>
struct SelectedShape {
  static constexpr int kKeyDim = Dk, kValueDim = Dv, kKeys = kTileKeys;
  static constexpr int kTileBlocks = kBlocksOfTile, kBoxKeys = kKeys / kTileBlocks;  // of a block in a tile
  static constexpr int kReaderWarps = kWarpsOfReader, kReaders = kConsumers / kReaderWarps;
  static constexpr int kFills = Dv > 0 ? 2 : 1;  // of the ring for a tile
  // In the ring values follow the keys of the next tile: a warpgroup issues S of that tile before PV of this one.
  static constexpr bool kLateValues = kReaderWarps > 1;
  static constexpr int kWarps = kConsumers, kThreads = kWarps * 32 + kProducers;
  static constexpr int kSlotBytes = kKeys * (Dk > Dv ? Dk : Dv) * 2, kOwnBytes = kOwn;
  // Registers: together those that the threads have at the launch.
  static_assert(kWarps == 8 || kWarps == 12 || kWarps == 16);
  static constexpr int kConsumerRegisters = kReaderWarps > 1 ? 152 : kWarps == 16 ? 112 : kWarps == 12 ? 160 : 224;
  static constexpr int kProducerRegisters = kWarps == 8 || kReaderWarps > 1 ? 56 : 32;
};

/// Queries whose rows a warp has, of `warps` in a tile.
inline int queries_of_warp(const Geometry& g, int topk, int warps) {
  return std::clamp(kMaxEntries / (warps * topk), 1, std::min(16 / std::min(g.group, 16), 64 / warps));
}

template <class Shape>
GatherPlan make_gather_plan(const Geometry& g, int topk, int block_size) {
  constexpr int kWarps = Shape::kWarps;
  GatherPlan p{};
  p.block_size = block_size;
  p.topk = topk;
  p.tiles_per_block = block_size / Shape::kBoxKeys;
  p.packing = HeadPacking(g.group);
  p.reader_queries = Shape::kReaderWarps == 1 ? queries_of_warp(g, topk, kWarps) : p.packing.queries;
  p.queries = Shape::kReaders * p.reader_queries;
  p.tiles = static_cast<int>(ceil_div(g.q_len, p.queries));
  const int lines = g.kv_heads * p.packing.slices * g.batches;
  p.total = p.tiles * lines;
  const std::int64_t bytes = std::int64_t{g.k_len} * g.kv_heads * g.batches * (Shape::kKeyDim + Shape::kValueDim) * 2;
  p.longest_first = !g.cu_q && bytes <= kL2Bytes;
  p.inner = p.longest_first ? lines : p.tiles;
  p.entries = static_cast<int>(ceil_div(p.queries * topk, 32)) * 32;
  while ((1 << p.table_bits) < 2 * p.entries) ++p.table_bits;
  const int fixed = Shape::kOwnBytes + SelectedControl::bytes(p);
  p.slots = std::min((kSharedMemory - fixed) / Shape::kSlotBytes, kMaxSlots);
  p.memory = p.slots * Shape::kSlotBytes + fixed;
  p.by_queries = FastDivmod(p.queries);
  p.by_slots = FastDivmod(p.slots);
  return p;
}

/// A tile: queries first_query ... of a sequence, heads first_head ... of a group. The tiles of one head follow each
/// other, so that its keys and values stay in L2. Where those of all heads do, the tiles of all
/// heads go from the ends of the sequences to their starts: the last ones, of which not every thread block gets one,
/// are those with the fewest blocks.
struct SelectedTile {
  DeviceSequence seq;
  int kv_head, first_head, first_query;

  __device__ SelectedTile(const GatherPlan& p, const Geometry& g, int index) {
    const int outer = index / p.inner, inner = index - outer * p.inner;
    const int rest = p.longest_first ? inner : outer;
    first_query = (p.longest_first ? p.tiles - 1 - outer : inner) * p.queries;
    const int lines = g.kv_heads * p.packing.slices, line = rest % lines;
    seq = sequence_of(g, rest / lines);
    kv_head = line / p.packing.slices;
    first_head = (line - kv_head * p.packing.slices) * p.packing.heads;
  }
  __device__ bool empty() const { return first_query >= seq.q_len; }
};

/// Row 0 ... 15 of a warp's share of a tile.
struct SelectedRow {
  int warp_query;  // which of the warp's queries
  int query;       // of the sequence
  int head;        // of all
  bool valid;

  __device__ SelectedRow(const GatherPlan& p, const Geometry& g, const SelectedTile& tile, int warp, int row) {
    warp_query = p.packing.by_heads.divide(row);
    query = tile.first_query + warp * p.reader_queries + warp_query;
    head = tile.kv_head * g.group + tile.first_head + row - warp_query * p.packing.heads;
    valid = warp_query < p.reader_queries && query < tile.seq.q_len;
  }
};

/// The queries of a reader among the users of a block.
__device__ __forceinline__ unsigned users_of_reader(const GatherPlan& p, uint2 users, int reader) {
  const std::uint64_t all = static_cast<std::uint64_t>(users.y) << 32 | users.x;
  return static_cast<unsigned>(all >> (reader * p.reader_queries)) & ((1u << p.reader_queries) - 1);
}

/// The number of issued fills, from the copier to the consumers. A store and loads would do, but racecheck takes them
/// for a race.
__device__ __forceinline__ void publish(unsigned* count, unsigned x) {
  asm volatile("atom.release.cta.shared::cta.exch.b32 _, [%0], %1;" ::"r"(shared_address(count)), "r"(x) : "memory");
}
__device__ __forceinline__ unsigned published(unsigned* count) {
  unsigned x;
  asm volatile("atom.acquire.cta.shared::cta.or.b32 %0, [%1], 0;" : "=r"(x) : "r"(shared_address(count)) : "memory");
  return warp_uniform(x);  // without it ptxas takes the number for one that differs by lane, and spills
}

/// Whether any sequence and KV head takes the order of this kernel. All threads of the thread block.
__device__ inline bool any_takes(const GatherPlan& p, const Geometry& g) {
  if (!p.loop_order.times) return true;
  int any = 0;
  for (int i = threadIdx.x; i < g.batches * g.kv_heads; i += blockDim.x)
    any |= p.loop_order.takes(p.alternative, g, i / g.kv_heads, i % g.kv_heads);
  return __syncthreads_or(any);
}

/// Walks the tiles of this thread block: body(tile, its number, buffer, phase of its `union_full`).
template <class Body>
__device__ __forceinline__ void for_tiles(const GatherPlan& p, const Geometry& g, const Body& body) {
  unsigned turn = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < p.total; index += gridDim.x) {
    const SelectedTile tile(p, g, index);
    if (tile.empty() || !p.loop_order.takes(p.alternative, g, tile.seq.index, tile.kv_head)) continue;
    body(tile, index, static_cast<int>(turn & 1), turn >> 1 & 1);
    ++turn;
  }
}

template <class Shape>
__device__ inline void init_control(SelectedControl& c) {
  constexpr int kWarps = Shape::kWarps;
  for (int i = threadIdx.x; i < kFullBarriers; i += Shape::kThreads) mbarrier_init(shared_address(&c.full[i]), 1);
  if (threadIdx.x < kMaxSlots) mbarrier_init(shared_address(&c.empty[threadIdx.x]), kWarps);
  if (threadIdx.x < 2) {
    mbarrier_init(shared_address(&c.union_full[threadIdx.x]), kBuilders);
    mbarrier_init(shared_address(&c.union_empty[threadIdx.x]), kWarps * 32 + 1);
  }
  if (threadIdx.x == 0) c.issued = 0;
  fence_mbarrier_init();
  __syncthreads();
}

}  // namespace nsa::cuda::sm90::selected_attention
