// The producer warps of selected attention, builders and copier: see gather_pipeline.cuh.
#pragma once

#include "cuda/sm90/selected_attention/gather_plan.cuh"

namespace nsa::cuda::sm90::selected_attention {

// The builders.

enum class GatherBarrier {
  kUnion = 1,  // of the builders: a step of a union is complete
};

/// Where the hash table holds `block`, or would hold it.
__device__ inline unsigned* find_block(SelectedControl& c, const GatherPlan& p, int block, unsigned entry) {
  unsigned* table = c.table(p);
  const int* wanted = c.wanted(p);
  unsigned at = static_cast<unsigned>(block) * 2654435761u >> (32 - p.table_bits);
  for (;; at = (at + 1) & ((1u << p.table_bits) - 1)) {
    const unsigned found = atomicCAS(&table[at], SelectedControl::kNone, entry);
    if (found == SelectedControl::kNone || wanted[found] == block) return &table[at];
  }
}

/// The slot in the union of the block whose first entry is `entry`.
__device__ inline int slot_of(SelectedControl& c, const GatherPlan& p, unsigned entry) {
  const unsigned* first = c.first(p);
  int slot = __popc(first[entry / 32] & ((1u << (entry % 32)) - 1));
  for (unsigned i = 0; i < entry / 32; ++i) slot += __popc(first[i]);
  return slot;
}

/// Pairs the blocks of a union for tiles that hold two: blocks with the same readers, in the order of the union. What
/// is left over (a block for each set of readers at most) is paired at the end. One warp; the blocks are in `wanted`,
/// their users in `table`.
template <class Shape>
__device__ inline void pair_blocks(SelectedControl& c, const GatherPlan& p, int buffer) {
  static_assert(Shape::kReaders == kUnionWarpgroups);
  const int lane = threadIdx.x % 32, size = c.size[buffer];
  const unsigned below = (1u << lane) - 1;
  const auto put = [&](int to, int from) {
    c.block(p, buffer)[to] = from < 0 ? SelectedControl::kNoBlock : c.wanted(p)[from];
    c.users(p, buffer)[to] = make_uint2(from < 0 ? 0 : c.table(p)[from], 0);
  };
  // A set of readers has a number; sets of neighbouring numbers have a reader in common (Gray code).
  const auto set_of = [&](int i) {
    int set = 0;
#pragma unroll
    for (int r = 0; r < Shape::kReaders; ++r) set |= (users_of_reader(p, make_uint2(c.table(p)[i], 0), r) != 0) << r;
    return set ^ set >> 1 ^ set >> 2;
  };
  int pairs = 0, waiting = -1;  // so far; the block of set `lane` that has no partner yet
#pragma unroll 1
  for (int first = 0; first < size; first += 32) {
    const int i = first + lane, set = i < size ? set_of(i) : 8 + lane;
    const unsigned alike = __match_any_sync(0xffffffffu, set), before = alike & below;
    const int waits = __shfl_sync(0xffffffffu, waiting, set & 31);
    const bool second = i < size && ((__popc(before) + (waits >= 0)) & 1);
    const unsigned seconds = __ballot_sync(0xffffffffu, second);
    if (second) {
      const int to = 2 * (pairs + __popc(seconds & below));
      put(to, before ? first + 31 - __clz(before) : waits);
      put(to + 1, i);
    }
    pairs += __popc(seconds);
    // The last block of a set in these 32 waits if it is not a second one.
    const bool last = i < size && alike >> lane == 1;
#pragma unroll 1
    for (unsigned rest = __ballot_sync(0xffffffffu, last); rest; rest &= rest - 1) {
      const int from = __ffs(static_cast<int>(rest)) - 1;
      const int of = __shfl_sync(0xffffffffu, set, from), it = __shfl_sync(0xffffffffu, second ? -1 : i, from);
      if (lane == of) waiting = it;
    }
  }
  const unsigned left = __ballot_sync(0xffffffffu, waiting >= 0);
  const int count = 2 * pairs + __popc(left);
  if (waiting >= 0) put(2 * pairs + __popc(left & below), waiting);
  if (lane == 0 && count % 2 != 0) put(count, -1);
  __syncwarp();
  if (lane == 0) c.size[buffer] = count + count % 2;
}

/// The union of a tile's lists into a buffer that wait_empty() says is free; complete when all threads are back.
/// Entries of a list that do not count (-1, out of range, in the future) are left out here, and a duplicate meets its
/// twin in the table. Minimum and union do not depend on the order in which threads come.
template <class Shape, class WaitEmpty>
__device__ inline void build_union(SelectedControl& c, const GatherPlan& p, const Strided& indices,
                                   const SelectedTile& tile, int buffer, int thread, const WaitEmpty& wait_empty) {
  const auto sync = [] { named_barrier_sync(GatherBarrier::kUnion, kBuilders); };
  // Warpgroups take turns within a rank, so that each stretch of the ring has blocks of all of them.
  const auto query_of = [&](int number) {
    return Shape::kReaderWarps == 1 ? number : number % Shape::kReaders * p.reader_queries + number / Shape::kReaders;
  };
  int* wanted = c.wanted(p);
  unsigned* table = c.table(p);
#pragma unroll 1
  for (int i = thread; i < 1 << p.table_bits; i += kBuilders) table[i] = SelectedControl::kNone;
#pragma unroll 1
  for (int e = thread; e < p.entries; e += kBuilders) {
    const int rank = p.by_queries.divide(e), query = tile.first_query + query_of(e - rank * p.queries);
    int block = -1;
    if (rank < p.topk && query < tile.seq.q_len) {
      block = indices.at<int>(tile.seq.batch, tile.seq.q_begin + query, tile.kv_head)[rank];
      if (static_cast<std::int64_t>(block) * p.block_size > tile.seq.position(query)) block = -1;
    }
    wanted[e] = block;
  }
  sync();
#pragma unroll 1
  for (int e = thread; e < p.entries; e += kBuilders)
    if (wanted[e] >= 0) atomicMin(find_block(c, p, wanted[e], e), e);
  sync();
#pragma unroll 1
  for (int e = thread; e < p.entries; e += kBuilders) {  // whole warps: entries are a multiple of 32
    const unsigned first =
        __ballot_sync(0xffffffffu, wanted[e] >= 0 && *find_block(c, p, wanted[e], e) == static_cast<unsigned>(e));
    if (thread % 32 == 0) c.first(p)[e / 32] = first;
  }
  wait_empty();
  sync();
#pragma unroll 1
  for (int e = thread; e < p.entries; e += kBuilders)
    if (c.first(p)[e / 32] >> (e % 32) & 1) {
      const int slot = slot_of(c, p, e);
      c.block(p, buffer)[slot] = wanted[e];
      c.users(p, buffer)[slot] = make_uint2(0, 0);
    }
  if (thread == 0) c.size[buffer] = slot_of(c, p, p.entries - 1) + (c.first(p)[p.entries / 32 - 1] >> 31);
  sync();
#pragma unroll 1
  for (int e = thread; e < p.entries; e += kBuilders)
    if (wanted[e] >= 0) {
      const int query = query_of(e - p.by_queries.divide(e) * p.queries);
      unsigned* users = &c.users(p, buffer)[slot_of(c, p, *find_block(c, p, wanted[e], e))].x;
      atomicOr(users + query / 32, 1u << (query % 32));
    }
  sync();
  if constexpr (Shape::kTileBlocks == 2) {
#pragma unroll 1
    for (int i = thread; i < c.size[buffer]; i += kBuilders) {
      c.wanted(p)[i] = c.block(p, buffer)[i];
      c.table(p)[i] = c.users(p, buffer)[i].x;
    }
    sync();
    if (thread < 32) pair_blocks<Shape>(c, p, buffer);
    sync();
  }
  // For each fill the number of warps that skip it, and for warpgroups the next fill that each of them reads.
  constexpr int kBlocks = Shape::kTileBlocks;
  const auto used = [&](int fill, int reader) {
    const uint2* all = c.users(p, buffer) + fill * kBlocks;
    if constexpr (Shape::kReaderWarps == 1) return users_of_reader(p, all[0], reader) != 0;
    return users_of_reader(p, {all[0].x | all[kBlocks - 1].x, 0}, reader) != 0;
  };
  const int fills = c.size[buffer] / kBlocks;
#pragma unroll 1
  for (int i = thread; i < fills; i += kBuilders) {
    int idle = 0;
#pragma unroll 1
    for (int r = 0; r < Shape::kReaders; ++r) idle += !used(i, r);
    c.block(p, buffer)[i * kBlocks] |= idle * Shape::kReaderWarps << SelectedControl::kIdleShift;
  }
  if constexpr (Shape::kReaderWarps > 1) {
#pragma unroll 1
    for (int i = thread - 1; i < fills; i += kBuilders) {
      unsigned links = 0;
#pragma unroll 1
      for (int r = 0; r < Shape::kReaders; ++r) {
        int next = i + 1;
        while (next < fills && !used(next, r)) ++next;
        links |= (next < fills ? next : SelectedControl::kNoLink) << r * SelectedControl::kLinkBits;
      }
      (i < 0 ? c.head[buffer] : c.users(p, buffer)[i * kBlocks].y) = links;
    }
  }
}

/// Rows that consumers will soon read from global memory, on their way into L2.
template <class T, int D>
__device__ inline void prefetch_rows(const GatherPlan& p, const Geometry& g, const SelectedTile& tile, const Strided& t,
                                     int warps, int thread) {
#pragma unroll 1
  for (int r = thread; r < warps * 16; r += kBuilders) {
    const SelectedRow row(p, g, tile, r / 16, r % 16);
    if (!row.valid) continue;
    const T* from = t.at<T>(tile.seq.batch, tile.seq.q_begin + row.query, row.head);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(D * 2) : "memory");
  }
}

// The copier.

/// True in one thread of the warp. With elect.sync ptxas emits a copy without a loop over the active lanes.
__device__ __forceinline__ bool elect_one() {
  std::uint32_t mine;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(mine));
  return mine != 0;
}

/// Fills slots in turn by TMA. One thread.
template <class Shape>
struct SelectedCopier {
  SelectedControl& control;
  std::uint32_t ring;
  int slots;
  int slot = 0;
  std::uint32_t phase = 1;  // of the slot's `empty` phase before this fill: a fresh barrier lets it pass
  unsigned position = 0;

  /// Loads a key tile (its keys, or its values) of a head into the next slot: block i from row rows[i] on. `idle` warps
  /// do not use this fill; the copier arrives on `empty` in their place.
  template <int D>
  __device__ __forceinline__ void fill(const CUtensorMap& map, int head, const int (&rows)[Shape::kTileBlocks],
                                       int batch, int idle) {
    const std::uint32_t empty = shared_address(&control.empty[slot]);
    const std::uint32_t full = shared_address(&control.full[position % kFullBarriers]);
    mbarrier_wait(empty, phase);
    if (idle) mbarrier_arrive(empty, idle);
    mbarrier_arrive_expect_tx(full, Shape::kKeys * D * 2);
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel)
#pragma unroll
      for (int i = 0; i < Shape::kTileBlocks; ++i)
        tma_load(ring + slot * Shape::kSlotBytes + (panel * Shape::kKeys + i * Shape::kBoxKeys) * 128, map, panel * 64,
                 head, rows[i], batch, full);
    ++position;
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

struct NoLoad {
  __device__ void operator()(const SelectedTile&, int, int) const {}
};

/// The four producer warps. prefetch(tile, thread): called by the builders before they build the union of a tile,
/// load(tile, thread, buffer): afterwards.
template <class Shape, class Prefetch, class Load = NoLoad>
__device__ __forceinline__ void produce(SelectedControl& c, std::uint32_t ring, const GatherPlan& p, const Geometry& g,
                                        const Strided& indices, const CUtensorMap& k_map, const CUtensorMap& v_map,
                                        int thread, const Prefetch& prefetch, const Load& load = {}) {
  if (thread >= 32) {
    const int builder = thread - 32;
    for_tiles(p, g, [&](const SelectedTile& tile, int, int buffer, std::uint32_t phase) {
      prefetch(tile, builder);
      build_union<Shape>(c, p, indices, tile, buffer, builder, [&] {
        while (!mbarrier_try_wait(shared_address(&c.union_empty[buffer]), phase ^ 1)) __nanosleep(500);
      });
      mbarrier_arrive(shared_address(&c.union_full[buffer]));
      load(tile, builder, buffer);
    });
    return;
  }
  if (!elect_one()) return;
  SelectedCopier<Shape> copier{c, ring, p.slots};
  for_tiles(p, g, [&](const SelectedTile& tile, int, int buffer, std::uint32_t phase) {
    mbarrier_wait(shared_address(&c.union_full[buffer]), phase);
    const int size = c.size[buffer];
    int value_rows[Shape::kTileBlocks], value_idle = -1;
    const auto fill_values = [&] {
      if (value_idle >= 0)
        copier.template fill<Shape::kValueDim>(v_map, tile.kv_head, value_rows, tile.seq.batch, value_idle);
    };
#pragma unroll 1
    for (int i = 0; i < size; i += Shape::kTileBlocks) {
      const int entry = c.block(p, buffer)[i], idle = entry >> SelectedControl::kIdleShift;
      int rows[Shape::kTileBlocks] = {tile.seq.k_begin + (entry & SelectedControl::kBlockMask) * p.block_size};
      if constexpr (Shape::kTileBlocks == 2) {
        const int other = c.block(p, buffer)[i + 1];
        // Rows before the tensor become zeros.
        rows[1] = other == SelectedControl::kNoBlock ? -Shape::kKeys : tile.seq.k_begin + other * p.block_size;
      }
#pragma unroll 1
      for (int key_tile = 0; key_tile < p.tiles_per_block; ++key_tile, rows[0] += Shape::kKeys) {
        copier.template fill<Shape::kKeyDim>(k_map, tile.kv_head, rows, tile.seq.batch, idle);
        if constexpr (Shape::kLateValues) {
          fill_values();
#pragma unroll
          for (int b = 0; b < Shape::kTileBlocks; ++b) value_rows[b] = rows[b];
          value_idle = idle;
          if (i + Shape::kTileBlocks >= size && key_tile + 1 == p.tiles_per_block) fill_values();
        } else if constexpr (Shape::kFills == 2) {
          copier.template fill<Shape::kValueDim>(v_map, tile.kv_head, rows, tile.seq.batch, idle);
        }
      }
      // Rarely, as it takes as long as a fill. The unpublished fills must stay far below kFullBarriers.
      if (i % 32 >= 32 - Shape::kTileBlocks || i + Shape::kTileBlocks >= size) publish(&c.issued, copier.position);
    }
    mbarrier_arrive(shared_address(&c.union_empty[buffer]));
  });
}

}  // namespace nsa::cuda::sm90::selected_attention
