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

/// The union of a tile's lists into a buffer that wait_empty() says is free; complete when all threads are back.
/// Entries of a list that do not count (-1, out of range, in the future) are left out here, and a duplicate meets its
/// twin in the table. Minimum and union do not depend on the order in which threads come.
template <int kWarps, class WaitEmpty>
__device__ inline void build_union(SelectedControl& c, const GatherPlan& p, const Strided& indices,
                                   const SelectedTile& tile, int buffer, int thread, const WaitEmpty& wait_empty) {
  const auto sync = [] { named_barrier_sync(GatherBarrier::kUnion, kBuilders); };
  int* wanted = c.wanted(p);
  unsigned* table = c.table(p);
#pragma unroll 1
  for (int i = thread; i < 1 << p.table_bits; i += kBuilders) table[i] = SelectedControl::kNone;
#pragma unroll 1
  for (int e = thread; e < p.entries; e += kBuilders) {
    const int rank = p.by_queries.divide(e), query = tile.first_query + e - rank * p.queries;
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
      const int query = e - p.by_queries.divide(e) * p.queries;
      unsigned* users = &c.users(p, buffer)[slot_of(c, p, *find_block(c, p, wanted[e], e))].x;
      atomicOr(users + query / 32, 1u << (query % 32));
    }
  sync();
#pragma unroll 1
  for (int i = thread; i < c.size[buffer]; i += kBuilders) {
    const uint2 users = c.users(p, buffer)[i];
    int idle = 0;
#pragma unroll 1
    for (int w = 0; w < kWarps; ++w) idle += users_of_warp(p, users, w) == 0;
    c.block(p, buffer)[i] |= idle << SelectedControl::kIdleShift;
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

/// True in one thread of the warp, which ptxas then knows to be alone: it need not ask who else has a copy to issue.
__device__ __forceinline__ bool elect_one() {
  std::uint32_t mine;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(mine));
  return mine != 0;
}

/// Fills slots in turn. One thread.
template <class Shape>
struct SelectedCopier {
  SelectedControl& control;
  std::uint32_t ring;
  int slots;
  int slot = 0;
  std::uint32_t phase = 1;  // of the slot's `empty` phase before this fill: a fresh barrier lets it pass
  unsigned position = 0;

  /// The keys of a tile, rows from `row` on of a head into the next slot; `idle` warps do not want them.
  template <int D>
  __device__ __forceinline__ void fill(const CUtensorMap& map, int head, int row, int batch, int idle) {
    const std::uint32_t empty = shared_address(&control.empty[slot]);
    const std::uint32_t full = shared_address(&control.full[position % kFullBarriers]);
    mbarrier_wait(empty, phase);
    if (idle) mbarrier_arrive(empty, idle);
    mbarrier_arrive_expect_tx(full, Shape::kKeys * D * 2);
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel)
      tma_load(ring + slot * Shape::kSlotBytes + panel * (Shape::kKeys * 128), map, panel * 64, head, row, batch, full);
    ++position;
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

/// The four producer warps. prefetch(tile, thread): called by the builders.
template <class Shape, class Prefetch>
__device__ __forceinline__ void produce(SelectedControl& c, std::uint32_t ring, const GatherPlan& p, const Geometry& g,
                                        const Strided& indices, const CUtensorMap& k_map, const CUtensorMap& v_map,
                                        int thread, const Prefetch& prefetch) {
  if (thread >= 32) {
    const int builder = thread - 32;
    for_tiles(p, g, [&](const SelectedTile& tile, int, int buffer, std::uint32_t phase) {
      prefetch(tile, builder);
      build_union<Shape::kWarps>(c, p, indices, tile, buffer, builder, [&] {
        while (!mbarrier_try_wait(shared_address(&c.union_empty[buffer]), phase ^ 1)) __nanosleep(500);
      });
      mbarrier_arrive(shared_address(&c.union_full[buffer]));
    });
    return;
  }
  if (!elect_one()) return;
  SelectedCopier<Shape> copier{c, ring, p.slots};
  for_tiles(p, g, [&](const SelectedTile& tile, int, int buffer, std::uint32_t phase) {
    mbarrier_wait(shared_address(&c.union_full[buffer]), phase);
    const int size = c.size[buffer];
#pragma unroll 1
    for (int i = 0; i < size; ++i) {
      const int entry = c.block(p, buffer)[i], idle = entry >> SelectedControl::kIdleShift;
      int row = tile.seq.k_begin + (entry & SelectedControl::kBlockMask) * p.block_size;
#pragma unroll 1
      for (int key_tile = 0; key_tile < p.tiles_per_block; ++key_tile, row += Shape::kKeys) {
        copier.template fill<Shape::kKeyDim>(k_map, tile.kv_head, row, tile.seq.batch, idle);
        if constexpr (Shape::kFills == 2)
          copier.template fill<Shape::kValueDim>(v_map, tile.kv_head, row, tile.seq.batch, idle);
      }
      // Now and then: it takes as long as a fill. What is not yet published must stay far below kFullBarriers.
      if (i % 32 == 31 || i + 1 == size) publish(&c.issued, copier.position);
    }
    mbarrier_arrive(shared_address(&c.union_empty[buffer]));
  });
}

}  // namespace nsa::cuda::sm90::selected_attention
