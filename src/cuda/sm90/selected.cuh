// What the kernels of selected attention on Hopper share: everything but the arithmetic.
//
// A thread block (one per SM, persistent) works on tiles of neighbouring queries of one KV head. Each of its kWarps
// consumer warps stands on sixteen rows: the heads of a query, or those of several queries where a group is small. It
// visits only blocks that one of its own queries chose, with mma.sync fed by ldmatrix, so no product is wasted. What
// the queries of a tile choose overlaps, so all warps read from one ring of slots in shared memory, which is filled
// once per block of the union of their lists.
//
//   builders (3 warps)   indices of tile i + 1 -> union: blocks and who uses them    `ready`, `free`: two buffers
//   copier (1 warp)      union -> ring, by the copy engine: K, V, K, V, ...          `full`, `empty`: slots
//   consumers            ring -> products in registers; they never wait for each other
//
// Order of the union: blocks appear by the lowest rank that one of their users gives them (its place in the row of
// indices). So each stretch of the ring holds work for every warp, and neighbours, whose lists are alike, stay close.
//
// Positions count the fills of all tiles of a thread block; position p lies in slot p % slots. A warp skips what it
// does not use, so it may be far behind or ahead of the copier, and parities of a slot would be ambiguous:
// - `full`: a barrier per position modulo kFullBarriers. A warp further ahead than that (its lists were empty) first
//   waits until the count of issued fills comes near.
// - `empty`: a barrier per slot with one arrival per warp. The copier arrives for the warps that skip the block, hence
//   a slot is free exactly when its users are done with it. They run fence_async before they say so: see ptx.cuh.
#pragma once

#include <algorithm>

#include "cuda/portable/launch.cuh"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/maps.h"
#include "cuda/sm90/ptx.cuh"

namespace nsa::cuda::sm90 {

inline constexpr int kBuilders = 96, kProducers = 128;  // threads
inline constexpr int kFullBarriers = 512, kMostSlots = 32;
inline constexpr int kMostEntries = 1024;         // of the lists of a tile, unless sixteen rows are one query
inline constexpr int kSharedMemory = 227 * 1024;  // of a thread block

/// How a call is cut into tiles, and how shared memory is.
struct SelectedPlan {
  int block_size, topk, units;  // keys of a block; entries of a list; key tiles of a block
  int heads, slices;            // heads of a query in sixteen rows; such slices of a group
  int together, queries;        // queries of a warp, of a tile
  int tiles, total;             // per sequence and slice, an upper bound; in all
  int entries;                  // of the lists of a tile, rounded up to 32
  int table_bits;               // of the builders' hash table: 2^table_bits slots, half of them empty at least
  int slots;                    // of the ring
  int memory;                   // bytes of shared memory
  Divider by_heads, by_queries, by_slots;
};

/// In shared memory behind the ring.
struct SelectedControl {
  std::uint64_t full[kFullBarriers], empty[kMostSlots], ready[2], free[2];
  int size[2];  // blocks of a union
  unsigned issued;
  unsigned unused;
  // Then arrays of plan.entries:
  //   uint2 users[2]             bit q: query q of the tile uses the block
  //   int block[2]
  //   int wanted                 what the lists say: block or -1; entry number = rank * queries + query
  //   unsigned first             (entries / 32) bit e: entry e is the first one of its block
  //   unsigned table             (2^table_bits) the first entry of a block, kNone: free

  static constexpr unsigned kNone = 0xffffffffu;

  __device__ uint2* users(const SelectedPlan& p, int buffer) {
    return reinterpret_cast<uint2*>(this + 1) + buffer * p.entries;
  }
  __device__ int* block(const SelectedPlan& p, int buffer) {
    return reinterpret_cast<int*>(users(p, 2)) + buffer * p.entries;
  }
  __device__ int* wanted(const SelectedPlan& p) { return block(p, 2); }
  __device__ unsigned* first(const SelectedPlan& p) { return reinterpret_cast<unsigned*>(block(p, 3)); }
  __device__ unsigned* table(const SelectedPlan& p) { return first(p) + p.entries / 32; }

  static int bytes(const SelectedPlan& p) {
    return static_cast<int>(sizeof(SelectedControl)) + p.entries * (2 * 8 + 3 * 4) + p.entries / 8 +
           (4 << p.table_bits);
  }
};

/// more_bytes: of shared memory that the kernel needs for itself, a multiple of 16.
template <int kWarps>
SelectedPlan selected_plan(const Geometry& g, int topk, int block_size, int tile_keys, int slot_bytes,
                           int more_bytes = 0) {
  SelectedPlan p{};
  p.block_size = block_size;
  p.topk = topk;
  p.units = block_size / tile_keys;
  p.heads = std::min(g.group, 16);
  p.slices = g.group / p.heads;
  p.together = std::clamp(kMostEntries / (kWarps * std::max(topk, 1)), 1, std::min(16 / p.heads, 64 / kWarps));
  p.queries = kWarps * p.together;
  p.tiles = static_cast<int>(portable::tiles(g.q_len, p.queries));
  p.total = p.tiles * g.kv_heads * p.slices * g.batches;
  p.entries = static_cast<int>(portable::tiles(p.queries * topk, 32)) * 32;
  while ((1 << p.table_bits) < 2 * p.entries) ++p.table_bits;
  p.slots = std::min((kSharedMemory - more_bytes - SelectedControl::bytes(p)) / slot_bytes, kMostSlots);
  p.memory = p.slots * slot_bytes + more_bytes + SelectedControl::bytes(p);
  p.by_heads = Divider(p.heads);
  p.by_queries = Divider(p.queries);
  p.by_slots = Divider(p.slots);
  return p;
}

/// A tile: queries first_query ... of a sequence, heads first_head ... of a group. The tiles of one head follow each
/// other, so that its keys and values stay in the second-level cache.
struct SelectedTile {
  DeviceSequence seq;
  int kv_head, first_head, first_query;

  __device__ SelectedTile(const SelectedPlan& p, const Geometry& g, int index) {
    int rest = index / p.tiles;
    first_query = (index - rest * p.tiles) * p.queries;
    const int lines = g.kv_heads * p.slices, line = rest % lines;
    seq = sequence_of(g, rest / lines);
    kv_head = line / p.slices;
    first_head = (line - kv_head * p.slices) * p.heads;
  }
  __device__ bool empty() const { return first_query >= seq.q_len; }
};

/// For values that cost less to compute again than registers to keep.
__device__ __forceinline__ int again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Row 0 ... 15 of a warp's share of a tile.
struct SelectedRow {
  int part;   // which of the warp's queries
  int query;  // of the sequence
  int head;   // of all
  bool valid;

  __device__ SelectedRow(const SelectedPlan& p, const Geometry& g, const SelectedTile& tile, int warp, int row) {
    part = p.by_heads.quotient(row);
    query = tile.first_query + warp * p.together + part;
    head = tile.kv_head * g.group + tile.first_head + row - part * p.heads;
    valid = part < p.together && query < tile.seq.q_len;
  }
};

/// The queries of warp `warp` among the users of a block.
__device__ __forceinline__ unsigned users_of_warp(const SelectedPlan& p, uint2 users, int warp) {
  const std::uint64_t all = static_cast<std::uint64_t>(users.y) << 32 | users.x;
  return static_cast<unsigned>(all >> (warp * p.together)) & ((1u << p.together) - 1);
}

// The builders.

/// Where the hash table holds `block`, or would hold it.
__device__ inline unsigned* find_block(SelectedControl& c, const SelectedPlan& p, int block, unsigned entry) {
  unsigned* table = c.table(p);
  const int* wanted = c.wanted(p);
  unsigned at = static_cast<unsigned>(block) * 2654435761u >> (32 - p.table_bits);
  for (;; at = (at + 1) & ((1u << p.table_bits) - 1)) {
    const unsigned found = atomicCAS(&table[at], SelectedControl::kNone, entry);
    if (found == SelectedControl::kNone || wanted[found] == block) return &table[at];
  }
}

/// Which place in the union the block whose first entry is `entry` has.
__device__ inline int place_of(SelectedControl& c, const SelectedPlan& p, unsigned entry) {
  const unsigned* first = c.first(p);
  int place = __popc(first[entry / 32] & ((1u << (entry % 32)) - 1));
  for (unsigned i = 0; i < entry / 32; ++i) place += __popc(first[i]);
  return place;
}

/// The union of a tile's lists into a buffer that wait_free() says is free. Entries of a list that do not count (-1,
/// out of range, in the future) are left out here, and a duplicate meets its twin in the table. Minimum and union do
/// not depend on the order in which threads come.
template <class WaitFree>
__device__ inline void build_union(SelectedControl& c, const SelectedPlan& p, const Strided& indices,
                                   const SelectedTile& tile, int buffer, int thread, const WaitFree& wait_free) {
  const auto sync = [] { named_sync(1, kBuilders); };
  int* wanted = c.wanted(p);
  unsigned* table = c.table(p);
#pragma unroll 1
  for (int i = thread; i < 1 << p.table_bits; i += kBuilders) table[i] = SelectedControl::kNone;
#pragma unroll 1
  for (int e = thread; e < p.entries; e += kBuilders) {
    const int rank = p.by_queries.quotient(e), query = tile.first_query + e - rank * p.queries;
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
  wait_free();
  sync();
#pragma unroll 1
  for (int e = thread; e < p.entries; e += kBuilders)
    if (c.first(p)[e / 32] >> (e % 32) & 1) {
      const int place = place_of(c, p, e);
      c.block(p, buffer)[place] = wanted[e];
      c.users(p, buffer)[place] = make_uint2(0, 0);
    }
  if (thread == 0) c.size[buffer] = place_of(c, p, p.entries - 1) + (c.first(p)[p.entries / 32 - 1] >> 31);
  sync();
#pragma unroll 1
  for (int e = thread; e < p.entries; e += kBuilders)
    if (wanted[e] >= 0) {
      const int query = e - p.by_queries.quotient(e) * p.queries;
      unsigned* users = &c.users(p, buffer)[place_of(c, p, *find_block(c, p, wanted[e], e))].x;
      atomicOr(users + query / 32, 1u << (query % 32));
    }
  sync();
}

/// Rows that consumers will soon read from global memory, on their way into the second-level cache.
template <class T, int D>
__device__ inline void prefetch_rows(const SelectedPlan& p, const Geometry& g, const SelectedTile& tile,
                                     const Strided& t, int warps, int thread) {
#pragma unroll 1
  for (int r = thread; r < warps * 16; r += kBuilders) {
    const SelectedRow row(p, g, tile, r / 16, r % 16);
    if (!row.valid) continue;
    const T* from = t.at<T>(tile.seq.batch, tile.seq.q_begin + row.query, row.head);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(D * 2) : "memory");
  }
}

// The copier.

__device__ __forceinline__ void publish(unsigned* count, unsigned x) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(count)), "r"(x) : "memory");
}
__device__ __forceinline__ unsigned published(const unsigned* count) {
  unsigned x;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(x) : "r"(shared_address(count)) : "memory");
  return x;
}

/// Fills slots in turn. One thread.
template <int kKeys, int kSlotBytes>
struct SelectedCopier {
  SelectedControl& control;
  std::uint32_t ring;
  int slots;
  int slot = 0;
  std::uint32_t parity = 1;  // of the slot's `empty` phase before this fill: a fresh barrier lets it pass
  unsigned position = 0;

  /// kKeys rows from `row` on of a head into the next slot; `idle` warps do not want them.
  template <int D>
  __device__ __forceinline__ void fill(const CUtensorMap& map, int head, int row, int batch, int idle) {
    const std::uint32_t empty = shared_address(&control.empty[slot]);
    const std::uint32_t full = shared_address(&control.full[position % kFullBarriers]);
    wait(empty, parity);
    if (idle) arrive(empty, idle);
    arrive_expecting(full, kKeys * D * 2);
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel)
      load_box(ring + slot * kSlotBytes + panel * (kKeys * 128), map, panel * 64, head, row, batch, full);
    publish(&control.issued, ++position);
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

/// Walks the tiles of this thread block: body(tile, its number, buffer, parity of its `ready` phase).
template <class Body>
__device__ __forceinline__ void for_tiles(const SelectedPlan& p, const Geometry& g, const Body& body) {
  unsigned turn = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < p.total; index += gridDim.x) {
    const SelectedTile tile(p, g, index);
    if (tile.empty()) continue;
    body(tile, index, static_cast<int>(turn & 1), turn >> 1 & 1);
    ++turn;
  }
}

/// The four producer warps. prefetch(tile, thread): called by the builders.
template <int Dk, int Dv, int kKeys, int kSlotBytes, int kWarps, class Prefetch>
__device__ __forceinline__ void produce(SelectedControl& c, std::uint32_t ring, const SelectedPlan& p,
                                        const Geometry& g, const Strided& indices, const CUtensorMap& k_map,
                                        const CUtensorMap& v_map, int thread, const Prefetch& prefetch) {
  if (thread >= 32) {
    const int builder = thread - 32;
    for_tiles(p, g, [&](const SelectedTile& tile, int, int buffer, std::uint32_t parity) {
      prefetch(tile, builder);
      build_union(c, p, indices, tile, buffer, builder, [&] {
        while (!test(shared_address(&c.free[buffer]), parity ^ 1)) __nanosleep(500);
      });
      if (builder == 0) arrive(shared_address(&c.ready[buffer]));
    });
    return;
  }
  SelectedCopier<kKeys, kSlotBytes> copier{c, ring, p.slots};
  for_tiles(p, g, [&](const SelectedTile& tile, int, int buffer, std::uint32_t parity) {
    wait(shared_address(&c.ready[buffer]), parity);
    const int size = c.size[buffer];
#pragma unroll 1
    for (int first = 0; first < size; first += 32) {
      int block = 0, idle = 0;
      if (first + thread < size) {
        block = c.block(p, buffer)[first + thread];
        const uint2 users = c.users(p, buffer)[first + thread];
#pragma unroll 1
        for (int w = 0; w < kWarps; ++w) idle += users_of_warp(p, users, w) == 0;
      }
#pragma unroll 1
      for (int i = 0; i < min(size - first, 32); ++i) {
        const int skipped = __shfl_sync(0xffffffffu, idle, i);
        int row = tile.seq.k_begin + __shfl_sync(0xffffffffu, block, i) * p.block_size;
        if (thread == 0) {
#pragma unroll 1
          for (int unit = 0; unit < p.units; ++unit, row += kKeys) {
            copier.template fill<Dk>(k_map, tile.kv_head, row, tile.seq.batch, skipped);
            copier.template fill<Dv>(v_map, tile.kv_head, row, tile.seq.batch, skipped);
          }
        }
        __syncwarp();
      }
    }
    if (thread == 0) arrive(shared_address(&c.free[buffer]));
  });
}

// The consumers.

/// A fill that this warp uses: wait, read, release.
struct SelectedSlot {
  std::uint32_t tile;  // address
  std::uint32_t full, parity, empty;

  __device__ __forceinline__ void wait() const {
    sm90::wait(full, parity);
    __syncwarp();
  }
  __device__ __forceinline__ void release(int lane) const {
    fence_async();
    __syncwarp();
    if (lane == 0) arrive(empty);
  }
};

/// One warp's way through the ring.
template <int kSlotBytes>
struct SelectedReader {
  SelectedControl& control;
  std::uint32_t ring;
  const SelectedPlan& plan;
  unsigned base = 0;    // position of the tile's first fill
  unsigned issued = 0;  // so many fills are known to be issued

  __device__ __forceinline__ SelectedSlot at(unsigned position) {
    // The earlier fill with the same barrier must be over: a fill that reuses its slot has been issued.
    while (static_cast<int>(position - issued) > kFullBarriers - plan.slots - 1) issued = published(&control.issued);
    const unsigned slot = position - plan.by_slots.quotient(static_cast<int>(position)) * plan.by_slots.divisor;
    return {ring + slot * kSlotBytes, shared_address(&control.full[position % kFullBarriers]),
            position / kFullBarriers & 1, shared_address(&control.empty[slot])};
  }
};

/// body(block, which of the warp's queries use it, position of its first fill) for the blocks that a warp uses.
template <int kSlotBytes, class Body>
__device__ __forceinline__ void for_blocks(SelectedReader<kSlotBytes>& reader, int buffer, std::uint32_t parity,
                                           int warp, int lane, const Body& body) {
  SelectedControl& c = reader.control;
  const SelectedPlan& p = reader.plan;
  wait(shared_address(&c.ready[buffer]), parity);
  __syncwarp();
  const int size = c.size[buffer];
#pragma unroll 1
  for (int first = 0; first < size; first += 32) {
    const unsigned mine = first + lane < size ? users_of_warp(p, c.users(p, buffer)[first + lane], warp) : 0;
#pragma unroll 1
    for (unsigned rest = __ballot_sync(0xffffffffu, mine != 0); rest; rest &= rest - 1) {
      const int i = __ffs(static_cast<int>(rest)) - 1;
      body(c.block(p, buffer)[first + i], __shfl_sync(0xffffffffu, mine, i),
           reader.base + 2 * p.units * static_cast<unsigned>(first + i));
    }
  }
  __syncwarp();
  if (lane == 0) arrive(shared_address(&c.free[buffer]));
  reader.base += 2 * p.units * static_cast<unsigned>(size);
}

template <int kWarps>
__device__ inline void init_control(SelectedControl& c, int threads) {
  for (int i = threadIdx.x; i < kFullBarriers; i += threads) barrier_init(shared_address(&c.full[i]), 1);
  if (threadIdx.x < kMostSlots) barrier_init(shared_address(&c.empty[threadIdx.x]), kWarps);
  if (threadIdx.x < 2) {
    barrier_init(shared_address(&c.ready[threadIdx.x]), 1);
    barrier_init(shared_address(&c.free[threadIdx.x]), kWarps + 1);
  }
  if (threadIdx.x == 0) c.issued = 0;
  barriers_ready();
  __syncthreads();
}

// Products of a warp with tiles as the copy engine leaves them: kKeys rows in panels of 64 columns, 128 bytes a row,
// 16-byte pieces permuted by the swizzle. The eight rows of an ldmatrix lie in different banks.

/// s = a * tile^T: sixteen rows (fragments by load_a(a, k)) against keys `first` ... + 8 * N - 1 of the tile.
template <class T, int D, int kKeys, int N, class LoadA>
__device__ __forceinline__ void key_scores(float (&s)[N][4], const LoadA& load_a, std::uint32_t tile, int first,
                                           int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = 0;
  const std::uint32_t mine = tile + (first + (lane & 16) / 2 + (lane & 7)) * 128 + (((lane & 8) / 8) ^ (lane & 7)) * 16;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    std::uint32_t a[4], b[4];
    load_a(a, k);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      ldmatrix4(b, (mine ^ (k % 4 * 32)) + k / 4 * (kKeys * 128) + n * 2048);
      mma(T{}, s[2 * n], a, b[0], b[1]);
      mma(T{}, s[2 * n + 1], a, b[2], b[3]);
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

/// What the two rows of a lane see.
class SelectedLimits {
 public:
  __device__ SelectedLimits(const SelectedPlan& p, const SelectedTile& tile, int warp, int lane)
      : position_(tile.seq.position(tile.first_query + warp * p.together)),
        low_(min(p.by_heads.quotient(lane / 4), p.together - 1)),
        high_(min(p.by_heads.quotient(lane / 4 + 8), p.together - 1)) {}

  /// Keys key ... key + limit of a block that `users` of the warp's queries use are visible to row i.
  __device__ int limit(int i, unsigned users, int key) const {
    const int part = i == 0 ? low_ : high_;
    return users >> part & 1 ? position_ + part - key : -1;
  }

 private:
  int position_;    // of the warp's first query
  int low_, high_;  // which of its queries the rows are; of rows that are none no matter what
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

/// Registers of consumers and producers.
template <int kWarps>
struct SelectedBudget {
  static constexpr int kConsumer = kWarps == 12 ? 152 : 224, kProducer = 56;
};

/// Tensor maps of keys and values, and a launch on as many thread blocks as there are SMs.
template <class Args>
cudaError_t launch_selected(void (*kernel)(Args, SelectedPlan, CUtensorMap, CUtensorMap), const Args& args,
                            const SelectedPlan& plan, int key_dim, int value_dim, int tile_keys, int threads,
                            cudaStream_t stream) {
  if (plan.total == 0) return cudaSuccess;
  const Geometry& g = args.geometry;
  const std::int64_t rows = g.cu_k ? g.total_k : g.k_len;
  CUtensorMap k_map, v_map;
  int device = 0, processors = 0;
  cudaError_t error = make_map(k_map, args.k, key_dim, g.kv_heads, rows, tensor_batches(g), 1, tile_keys);
  if (error == cudaSuccess)
    error = make_map(v_map, args.v, value_dim, g.kv_heads, rows, tensor_batches(g), 1, tile_keys);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  return portable::launch(kernel, std::min(plan.total, processors), threads, plan.memory, stream, args, plan, k_map,
                          v_map);
}

}  // namespace nsa::cuda::sm90
