// dK and dV of the selected blocks. The scheme is that of d_kv_mainloop.cuh: a thread block takes 64 keys of one KV
// head, or a block of 32, and the queries that chose their block, from the lists of inverse_index.cu; the warpgroups
// take alternate stages and their sums are added at the end. The rows of a stage are gathered by a copy for each query,
// or for each row where queries have few.
//
// Lists are cut into items (d_kv_schedule.h), which the thread blocks take in the order of their plan, each when it is
// done with the one before. Key tiles of several items leave float32 partial sums that sum_items adds in order. dS^T,
// which is at hand as the operand of dK, is stored for dQ where it is wanted (SelectedDs).
//
// Producers: warp 8 has Q copied, warp 9 dO, warp 10 what there is per row; warp 11 takes the items, has their keys and
// values copied and notes who sees whom.
#include "cuda/common/device.h"
#include "cuda/common/fallback.cuh"
#include "cuda/sm90/common/d_kv_mainloop.cuh"
#include "cuda/sm90/selected_attention/d_kv_schedule.h"
#include "cuda/sm90/selected_attention/selected_attention.h"

namespace nsa::cuda::sm90::selected_attention {
namespace {

/// As many as fit into shared memory. Where warpgroups take no turns (kKeys = 32) the number is even.
template <int Dk, int Dv, int kKeys>
inline constexpr int kStages = Dk + Dv <= 256 ? (kKeys == 32 ? 6 : 5) : 4;
constexpr int kMaxBoxes = 8;  // queries of a stage, for a copy each
/// Of a thread that produces; those that compute share the rest.
template <int Dk, int Dv>
inline constexpr int kProducerRegisters = Dk + Dv <= 128 ? 40 : 24;

struct ListKeyArgs : ListSchedule {
  float scale, masked;  // in base-2 units; what a masked score is before the scale, as an operand at hand
  bool gather;          // rows of Q and dO come one by one
  int planes;           // of a key tile, that its block has
};

/// What the warpgroups need to know of a stage.
struct StageInfo {
  std::int8_t lead[64];  // of a row: the last key that it sees; kFar of the tile: all
  int all;               // every row sees every key
  int ds_rows;           // number of rows whose dS is stored
  char* ds;              // the slot of row 0 of warp 0
};
static_assert(sizeof(StageInfo) <= 256);

template <int Dk, int Dv, int kKeyCount>
struct Memory : KeyMemory<Dk, Dv, 1, kStages<Dk, Dv, kKeyCount>, kKeyCount> {
  using Base = KeyMemory<Dk, Dv, 1, kStages<Dk, Dv, kKeyCount>, kKeyCount>;
  static constexpr int kKeys = kKeyCount, kFar = kKeys - 1;  // of a tile; its last key
  static constexpr int kPart = kKeys == 32 ? 4 : 16;  // floats that a thread passes to the other warpgroup at a time
  static constexpr int kItem = Base::kBytes, kSums = (kItem + 7 * 8 + 15) / 16 * 16;
  static constexpr int kOperands = (kSums + 2 * kPart * 128 * 4 + 1023) / 1024 * 1024, kOperandBytes = 32 * 128;
  static constexpr int kBytes = kKeys == 32 ? kOperands + 2 * kOperandBytes : kSums + 2 * kPart * 128 * 4;
  static_assert(kBytes <= 232448);

  /// A warpgroup's P^T or dS^T, where they are operands in shared memory.
  __device__ std::uint32_t operand(int warpgroup) const { return this->base + kOperands + warpgroup * kOperandBytes; }
  __device__ std::uint32_t item_full() const { return this->base + kItem; }
  __device__ std::uint32_t item_empty() const { return item_full() + 8; }
  /// Of the part of its sums that a warpgroup gives to the other one: it is there, it has been read.
  __device__ std::uint32_t sums_full(int warpgroup) const { return item_full() + 24 + warpgroup * 16; }
  __device__ std::uint32_t sums_empty(int warpgroup) const { return sums_full(warpgroup) + 8; }
  /// The number of the next item; negative: there is none.
  __device__ static volatile int& item(char* memory) { return *reinterpret_cast<int*>(memory + kItem + 16); }
  /// `row_writers`: arrivals for Q at a stage, and as many for dO.
  __device__ void init(int row_writers) const {
    mbarrier_init(item_full(), 1);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(sums_full(i), 128);
      mbarrier_init(sums_empty(i), 128);
    }
    mbarrier_init(item_empty(), (8 + 3) * 32);
    Base::init(2 * row_writers + 32 + 32, 128);
  }
};

/// Takes the next item as soon as the other warps have begun the one before: f(item). One warp.
template <class Memory, class F>
__device__ __forceinline__ void take_items(const ListKeyArgs& args, const Memory& memory, char* dynamic, const F& f) {
  const int end = args.queue->end;
#pragma unroll 1
  for (std::uint32_t phase = 1;; phase ^= 1) {
    int x = 0;
    if (lane_id() == 0) {
      mbarrier_wait(memory.item_empty(), phase);
      x = atomicAdd(&args.queue->next, 1);
      memory.item(dynamic) = x < end ? x : -1;
      mbarrier_arrive(memory.item_full());
    }
    x = warp_uniform(x);
    if (x >= end) return;
    f(args.items[x]);
  }
}
/// f(item) for the items of this thread block, in the other warps. Fields are read where they are needed: registers are
/// short.
template <class Memory, class F>
__device__ __forceinline__ void for_items(const ListKeyArgs& args, const Memory& memory, char* dynamic, const F& f) {
#pragma unroll 1
  for (std::uint32_t phase = 0;; phase ^= 1) {
    mbarrier_wait_warp(memory.item_full(), phase);
    const int x = memory.item(dynamic);
    mbarrier_arrive(memory.item_empty());  // each lane for what it read
    if (x < 0) return;
    const volatile KeyItem& item = args.items[x];
    f(item);
  }
}

/// The stages of an item, as the producers see them, slices of a query one after the other: f(queries, slice), the
/// queries of this lane's rows of the tile, lane and lane + 32; -1: a row of no query. They are fetched a stage ahead.
template <class F>
__device__ __forceinline__ void for_stages(const ListKeyArgs& args, const volatile KeyItem& item, int slices,
                                           const F& f) {
  int left = item.to - item.from;
  const int* list = args.branch.lists.list + item.from;
  const auto fetch = [&](int row) {
    const int number = args.packing.by_heads.divide(row);
    return number < min(left, args.packing.queries) ? list[number] : -1;
  };
  int next[2] = {fetch(lane_id()), fetch(lane_id() + 32)};
#pragma unroll 1
  while (left > 0) {
    const int queries[2] = {next[0], next[1]};
    left -= args.packing.queries;
    list += args.packing.queries;
    next[0] = fetch(lane_id()), next[1] = fetch(lane_id() + 32);
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) f(queries, slice);
  }
}

/// Rows of Q or dO by TMA, `first` the address of a tile of them in stage 0. One warp: a lane copies one
/// panel of one query. The swizzle follows the address, so that a query may begin at any row. Rows of no query become
/// zeros, or stay so.
template <int D, class Memory>
__device__ inline void copy_rows(const ListKeyArgs& args, const CUtensorMap& map, const Memory& memory,
                                 std::uint32_t first, char* dynamic) {
  const int own = lane_id() / (D / 64), column = lane_id() % (D / 64) * 64, tile_row = own * args.packing.heads;
  const std::uint32_t to = first + column / 64 * kPanelBytes + tile_row * 128;
  PipelineCount<Memory::kStages> count;
  for_items(args, memory, dynamic, [&](const volatile KeyItem& item) {
    const int batch = item.batch, head = item.kv_head * args.branch.geometry.group, query_row = item.query_row;
    for_stages(args, item, args.packing.slices, [&](const int(&queries)[2], int slice) {
      const std::uint32_t full = memory.rows().full(count.stage());
      memory.rows().acquire_warp(count);
      if (lane_id() == 0) mbarrier_arrive_expect_tx(full, args.packing.rows * D * 2);
      const int low = __shfl_sync(0xffffffffu, queries[0], tile_row);
      const int high = __shfl_sync(0xffffffffu, queries[1], tile_row), query = tile_row < 32 ? low : high;
      const int row = query < 0 ? args.terms.rows : query_row + query;  // past the end: zeros
      if (own < args.packing.queries)
        tma_load(to + count.stage() * (Memory::kK + Memory::kV), map, column, head + slice * args.packing.heads, row,
                 batch, full);
      count.advance();
    });
  });
}

/// The same by copies of sixteen bytes, for groups of one slice. One warp: eight lanes copy a panel of a row at a time,
/// of the eight rows that are theirs and the eight 32 further on.
template <int D, class Memory>
__device__ inline void gather_rows(const ListKeyArgs& args, const Strided& from, const Memory& memory,
                                   std::uint32_t first, char* dynamic) {
  const std::uint32_t to = first + lane_id() / 8 * 1024 + lane_id() % 8 * 16;
  PipelineCount<Memory::kStages> count;
  for_items(args, memory, dynamic, [&](const volatile KeyItem& item) {
    const char* data = again(reinterpret_cast<const char*>(
        from.at<std::uint16_t>(item.batch, item.query_row, item.kv_head * args.branch.geometry.group) +
        lane_id() % 8 * 8));
    for_stages(args, item, 1, [&](const int(&queries)[2], int) {
      // Of this lane's rows, in units of sixteen bytes (of a sequence: up to 64 GiB); of its eight lanes' rows, a bit
      // each.
      unsigned offset[2], valid[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane_id() + 32 * i, head = row - args.packing.by_heads.divide(row) * args.packing.heads;
        offset[i] =
            max(queries[i], 0) * static_cast<unsigned>(from.row / 8) + head * static_cast<unsigned>(from.head / 8);
        valid[i] = __ballot_sync(0xffffffffu, queries[i] >= 0) >> lane_id() / 8 * 8;
      }
      memory.rows().acquire_warp(count);
      const std::uint32_t stage = to + count.stage() * (Memory::kK + Memory::kV);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const std::uint32_t swizzled = (stage ^ k * 16) + k * 128;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const char* row = data + __shfl_sync(0xffffffffu, offset[i], k, 8) * std::int64_t{16};
#pragma unroll
          for (int c = 0; c < D / 64; ++c)
            copy16(swizzled + i * 4096 + c * kPanelBytes, row + c * 128, (valid[i] & 1u << k) != 0);
        }
      }
      cp_async_mbarrier_arrive(memory.rows().full(count.stage()));
      count.advance();
    });
  });
}

/// Rows of Q or dO. One warp.
template <int D, class Memory>
__device__ __forceinline__ void produce_rows(const ListKeyArgs& args, const Strided& from, const CUtensorMap& map,
                                             const Memory& memory, std::uint32_t first, char* dynamic) {
  if (args.gather) {
    gather_rows<D>(args, from, memory, first, dynamic);
  } else {
    copy_rows<D>(args, map, memory, first, dynamic);
  }
}

/// What there is per query row; zeros for rows of no query, which then add nothing. One warp.
template <class Memory>
__device__ inline void produce_terms(const ListKeyArgs& args, const Memory& memory, char* dynamic) {
  PipelineCount<Memory::kStages> count;
  for_items(args, memory, dynamic, [&](const volatile KeyItem& item) {
    const float* terms = item.terms;
    for_stages(args, item, args.packing.slices, [&](const int(&queries)[2], int slice) {
      memory.rows().acquire_warp(count);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane_id() + 32 * i, head = row - args.packing.by_heads.divide(row) * args.packing.heads;
        const float* from = terms + slice * args.terms.line + (max(queries[i], 0) * args.packing.heads + head);
        const std::uint32_t to = memory.terms(count.stage()) + row * 4;
#pragma unroll
        for (int array = 0; array < 3; ++array)
          copy4(to + array * 256, from + array * args.terms.array, queries[i] >= 0);
      }
      cp_async_mbarrier_arrive(memory.rows().full(count.stage()));
      count.advance();
    });
  });
}

/// Keys and values, and what the warpgroups need to know of a stage. One warp.
template <int Dk, int Dv, class Memory>
__device__ inline void produce_items(const ListKeyArgs& args, const KeyMaps& maps, const Memory& memory,
                                     char* dynamic) {
  PipelineCount<Memory::kStages> count;
  std::uint32_t keys_phase = 1;
  take_items(args, memory, dynamic, [&](const volatile KeyItem& item) {
    if (lane_id() == 0) {
      mbarrier_wait(memory.keys().empty(0), keys_phase);
      mbarrier_arrive_expect_tx(memory.keys().full(0), Memory::kKeyBytes + Memory::kValueBytes);
#pragma unroll 1
      for (int c = 0; c < Dk / 64; ++c)
        tma_load(memory.k(0) + c * Memory::kKeyPanelBytes, maps.k, c * 64, item.kv_head, item.key_row, item.batch,
                 memory.keys().full(0));
#pragma unroll 1
      for (int c = 0; c < Dv / 64; ++c)
        tma_load(memory.v(0) + c * Memory::kKeyPanelBytes, maps.v, c * 64, item.kv_head, item.key_row, item.batch,
                 memory.keys().full(0));
    }
    __syncwarp();
    keys_phase ^= 1;
    const int before = item.shift - item.first_key;
    const SelectedDs& stored = args.branch.selected_ds;
    int ds_rows = stored.data ? (item.to - item.from) * args.packing.heads : 0;
    const int plane = (item.first_key & (args.branch.block_size - 1)) / SelectedDs::kPlaneKeys;
    char* ds = stored.data + plane * stored.plane() + stored.offset(args.packing.heads, 0, item.from, 0);
    for_stages(args, item, args.packing.slices, [&](const int(&queries)[2], int slice) {
      const auto lead = [&](int query) { return query < 0 ? Memory::kFar : min(query + before, Memory::kFar); };
      const int low = lead(queries[0]), high = lead(queries[1]);
      const bool all = __all_sync(0xffffffffu, min(low, high) == Memory::kFar);
      memory.rows().acquire_warp(count);
      auto& info = *reinterpret_cast<StageInfo*>(memory.info(dynamic, count.stage()));
      info.lead[lane_id()] = static_cast<std::int8_t>(low);
      info.lead[lane_id() + 32] = static_cast<std::int8_t>(high);
      if (lane_id() == 0) {
        info.all = all;
        info.ds_rows = min(ds_rows, args.packing.rows);
        info.ds = ds + stored.offset(args.packing.heads, slice, 0, 0);
      }
      if (slice + 1 == args.packing.slices) {
        ds_rows -= args.packing.rows;
        ds += args.packing.rows * SelectedDs::kRow;
      }
      mbarrier_arrive(memory.rows().full(count.stage()));
      count.advance();
    });
  });
}

/// Adds to `kept` what the other warpgroup gives, and gives it `given`, part by part through shared memory. The order
/// of the two summands does not change the sum. An even number of parts: the barriers end as they began.
template <class Memory, int kKept, int kGiven>
__device__ __forceinline__ void exchange_sums(float (&kept)[kKept], const float (&given)[kGiven], const Memory& memory,
                                              char* dynamic, int warpgroup) {
  constexpr int kPart = Memory::kPart, kMax = std::max(kKept, kGiven);
  static_assert(kKept % kPart == 0 && kGiven % kPart == 0 && kMax / kPart % 2 == 0);
  auto* shared = reinterpret_cast<float4*>(dynamic + Memory::kSums) + threadIdx.x % 128;
  float4* from = shared + (warpgroup ^ 1) * (kPart / 4 * 128);
  float4* to = shared + warpgroup * (kPart / 4 * 128);
#pragma unroll
  for (int first = 0; first < kMax; first += kPart) {
    const std::uint32_t phase = first / kPart & 1;
    mbarrier_wait_warp(memory.sums_empty(warpgroup), phase ^ 1);
#pragma unroll
    for (int i = first; i < first + kPart && i < kGiven; i += 4)
      to[(i - first) / 4 * 128] = float4{given[i], given[i + 1], given[i + 2], given[i + 3]};
    mbarrier_arrive(memory.sums_full(warpgroup));
    mbarrier_wait_warp(memory.sums_full(warpgroup ^ 1), phase);
#pragma unroll
    for (int i = first; i < first + kPart && i < kKept; i += 4) {
      const float4 x = from[(i - first) / 4 * 128];
      kept[i] += x.x, kept[i + 1] += x.y, kept[i + 2] += x.z, kept[i + 3] += x.w;
    }
    mbarrier_arrive(memory.sums_empty(warpgroup ^ 1));
  }
}

/// `x`, a window's sum of some columns of the keys, plus that of the windows before. Whether it is complete; else the
/// windows behind find it.
template <int kKeys, int D>
__device__ __forceinline__ bool add_windows(const SelectedWindows& windows, int cut, float (&x)[D * kKeys / 128],
                                            int batch, std::int64_t first, int kv_head, int column, int keys) {
  if (cut == 0) return true;
  const auto so_far = [&](int key, int n) { return windows.sums.at<float>(batch, first + key, kv_head) + column + n; };
  if (cut & SelectedWindows::kBefore)
    for_pairs<kKeys, D>(x, keys, [&](int key, int n, float& left, float& right) {
      const float2 before = *reinterpret_cast<const float2*>(so_far(key, n));
      left += before.x, right += before.y;
    });
  if (cut & SelectedWindows::kAfter)
    for_pairs<kKeys, D>(x, keys,
                        [&](int key, int n, float left, float right) { store_pair(so_far(key, n), left, right); });
  return (cut & SelectedWindows::kAfter) == 0;
}

template <class T, int Dk, int Dv, class Memory>
__device__ inline void consume(const ListKeyArgs& args, const Memory& memory, char* dynamic) {
  const int lane = threadIdx.x % 32, warpgroup = warp_uniform(threadIdx.x / 128);
  constexpr bool kNarrow = Memory::kKeys == 32;
  const BackwardArgs& branch = args.branch;
  const std::uint32_t k = descriptor(memory.k(0), 16), v = descriptor(memory.v(0), 16);
  // Turns also keep a warpgroup from getting ahead by a round of the ring, where an odd number of stages makes the
  // other one wait at the same barriers: it would take the phase of the round before last for its own.
  const auto take_turn = [&] { named_barrier_sync(DKvBarrier::kTurn, 256, warpgroup); };
  const auto pass_turn = [&] { named_barrier_arrive(DKvBarrier::kTurn, 256, warpgroup ^ 1); };
  const auto consumer_release = [&](int stage) {
    memory.rows().release(stage);
  };  // every lane has read the rows' terms
  PipelineCount<Memory::kStages> count;
  const auto mask = [&](auto& s) {
    const auto& info = *reinterpret_cast<const volatile StageInfo*>(memory.info(dynamic, count.stage()));
    if (info.all) return;
    if constexpr (kNarrow) {
      const int first_row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (i / 4 * 8 + 2 * (lane & 3) + i % 2 > info.lead[first_row + i / 2 % 2 * 8]) s[i] = args.masked;
    } else {
      const int first_key = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (first_key + i / 2 * 8 > info.lead[8 * j + 2 * (lane & 3) + i % 2]) s[4 * j + i] = args.masked;
      }
    }
  };
  /// dS^T of the sixteen keys of a plane and query rows from `first` on, as an A operand: a pair of rows and two keys
  /// of each are neighbours in a lane as in memory.
  const auto store_ds = [&](const auto& ds, int stage, int plane, int first) {
    const auto& info = *reinterpret_cast<const volatile StageInfo*>(memory.info(dynamic, stage));
    const int rows = info.ds_rows - first - 2 * (lane & 3);
    if (rows <= 0 || plane >= args.planes) return;
    char* to =
        info.ds + plane * branch.selected_ds.plane() + first * SelectedDs::kRow + SelectedDs::stored_vector(lane);
#pragma unroll
    for (int j = 0; j < static_cast<int>(sizeof(ds) / 8); ++j)
      if (8 * j < rows)
        __stcs(reinterpret_cast<uint2*>(to + 8 * j * SelectedDs::kRow), make_uint2(ds[2 * j], ds[2 * j + 1]));
  };
  const auto leave = [&](const std::uint32_t(&ds)[16], int stage) { store_ds(ds, stage, threadIdx.x / 32 % 4, 0); };
  /// The same from the operand in shared memory. A warp has a plane and 32 rows.
  const auto leave_operand = [&](int stage) {
    if (!branch.selected_ds.data) return;
    const int warp = threadIdx.x / 32 % 4, key = warp % 2 * 16 + (lane & 15);
    const std::uint32_t row = memory.operand(warpgroup) + key * 128;
    std::uint32_t ds[8];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ldmatrix4(reinterpret_cast<std::uint32_t(&)[4]>(ds[4 * i]),
                row + ((warp / 2 * 4 + 2 * i + lane / 16) ^ (key & 7)) * 16);
    store_ds(ds, stage, warp % 2, warp / 2 * 32);
  };
  /// Waits for a stage. Rows that threads copied are for the tensor cores to see.
  const auto arrived = [&] {
    memory.rows().wait_warp(count);
    if (args.gather) fence_async();
  };
  if (!kNarrow && warpgroup == 1) pass_turn();
  std::uint32_t keys_phase = 0;
  int all_stages = 0;  // of the items so far: stages of odd number are the second warpgroup's
  std::conditional_t<kNarrow, NarrowKeyGradients<T, Dk, Dv>, KeyGradients<T, Dk, Dv>> gradients;
  for_items(args, memory, dynamic, [&](const volatile KeyItem& item) {
    gradients.clear();
    mbarrier_wait_warp(memory.keys().full(0), keys_phase);
    keys_phase ^= 1;
    count.count = all_stages + ((all_stages ^ warpgroup) & 1);
    all_stages += item.stages;
    if constexpr (kNarrow) {
      if (count.count < all_stages) {
        const std::uint32_t operand = memory.operand(warpgroup);
        arrived();
        gradients.first(memory, k, v, operand, count.stage(), args.scale, mask, leave_operand);
#pragma unroll 1
        for (count.count += 2; count.count < all_stages; count.count += 2) {
          arrived();
          gradients.next(memory, k, v, operand, count.before(2), count.stage(), args.scale, mask, consumer_release,
                         leave_operand);
        }
        gradients.last(memory, operand, count.before(2), consumer_release);
      }
    } else if (count.count < all_stages) {
      arrived();
      take_turn();
      gradients.first(memory, k, v, count.stage(), args.scale, mask, pass_turn, leave);
#pragma unroll 1
      for (count.count += 2; count.count < all_stages; count.count += 2) {
        arrived();
        take_turn();
        gradients.next(memory, k, v, count.before(2), count.stage(), args.scale, mask, pass_turn, consumer_release,
                       leave);
      }
      gradients.last(memory, count.before(2), consumer_release);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(memory.keys().empty(0));

    // The first warpgroup stores dK, the second one dV.
    const int keys = item.keys, slot = item.slot;
    float* partial = branch.partials + static_cast<std::int64_t>(slot) * 64 * (Dk + Dv);
    if (warpgroup == 0) {
      exchange_sums(gradients.dk, gradients.dv, memory, dynamic, 0);
      if (slot >= 0) {
        gradients.store_partial_dk(partial, keys);
      } else if (add_windows<Memory::kKeys, Dk>(branch.windows, item.cut, gradients.dk, item.batch, item.key_row,
                                                item.kv_head, 0, keys)) {
        gradients.store_dk(branch, item.batch, item.key_row, item.kv_head, keys);
      }
    } else {
      exchange_sums(gradients.dv, gradients.dk, memory, dynamic, 1);
      if (slot >= 0) {
        gradients.store_partial_dv(partial, keys);
      } else if (add_windows<Memory::kKeys, Dv>(branch.windows, item.cut, gradients.dv, item.batch, item.key_row,
                                                item.kv_head, Dk, keys)) {
        gradients.store_dv(branch, item.batch, item.key_row, item.kv_head, keys);
      }
    }
  });
  if (!kNarrow && (all_stages & 1) == warpgroup) take_turn();  // that was passed last: no barrier is left half full
}

template <class T, int Dk, int Dv, int kKeys>
__global__ void __launch_bounds__(384, 1)
    selected_d_kv(const __grid_constant__ ListKeyArgs args, const __grid_constant__ KeyMaps maps) {
  if (should_fall_back(*args.branch.fallback.flag)) return;
  extern __shared__ __align__(1024) char dynamic[];
  const Memory<Dk, Dv, kKeys> memory{shared_address(dynamic)};
  if (threadIdx.x == 0) memory.init(args.gather ? 32 : 1);
  if (args.packing.rows < 64) memory.clear_stages(dynamic);
  __syncthreads();
  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp >= 8) {
    warpgroup_reg_dealloc<kProducerRegisters<Dk, Dv>>();
    if (warp == 8) {
      produce_rows<Dk>(args, args.branch.q, maps.q, memory, memory.q(0), dynamic);
    } else if (warp == 9) {
      produce_rows<Dv>(args, args.branch.d_o, maps.d_o, memory, memory.d_o(0), dynamic);
    } else if (warp == 10) {
      produce_terms(args, memory, dynamic);
    } else {
      produce_items<Dk, Dv>(args, maps, memory, dynamic);
    }
  } else {
    warpgroup_reg_alloc<(504 - kProducerRegisters<Dk, Dv>) / 2>();
    consume<T, Dk, Dv>(args, memory, dynamic);
  }
}

/// Adds the partial sums of key tiles with several items. Grid: such key tiles, 1, parts.
template <class T>
__global__ void __launch_bounds__(256) sum_items(const __grid_constant__ ListKeyArgs args, int dk, int dv) {
  if (should_fall_back(*args.branch.fallback.flag) || static_cast<int>(blockIdx.x) >= args.queue->sums) return;
  const KeyItem& item = args.items[args.sums[blockIdx.x]];
  sum_partials<T>(args.branch, item.slot, item.partials, 64, item.batch, item.key_row, item.kv_head, item.keys, dk, dv,
                  item.cut);
}

template <class T, int Dk, int Dv, int kKeys>
cudaError_t launch_keys(const BackwardArgs& branch, cudaStream_t stream) {
  const Geometry& g = branch.geometry;
  const ListWork work(g, branch.lists, branch.windows.several);
  if (work.items == 0) return cudaSuccess;
  const float scale = log2_scale(branch.scale);
  ListKeyArgs args{ListSchedule(branch, work), scale, masked_score(scale)};
  args.gather = args.packing.queries > kMaxBoxes;
  args.planes = std::min(branch.block_size, kKeys) / SelectedDs::kPlaneKeys;
  KeyMaps maps;
  // One query each: a stage gathers them.
  const int heads = args.packing.heads, batches = tensor_batches(g);
  int num_sms = 0;
  cudaError_t error = sm_count(num_sms);
  if (error == cudaSuccess) error = make_tensor_map(maps.q, branch.q, Dk, g.heads, query_rows(g), batches, heads, 1);
  if (error == cudaSuccess)
    error = make_tensor_map(maps.d_o, branch.d_o, Dv, g.heads, query_rows(g), batches, heads, 1);
  if (error == cudaSuccess) error = make_key_tensor_map(maps.k, branch.k, g, Dk, false, kKeys);
  if (error == cudaSuccess) error = make_key_tensor_map(maps.v, branch.v, g, Dv, false, kKeys);
  if (error == cudaSuccess) error = make_row_terms(branch, stream, kKeys == 64 && !kSideBySide<Dk, Dv>);
  if (error == cudaSuccess) error = make_schedule(args, stream);
  const auto most = static_cast<unsigned>(work.items);
  if (error == cudaSuccess)
    error = launch(selected_d_kv<T, Dk, Dv, kKeys>, std::min<unsigned>(most, num_sms), 384,
                   Memory<Dk, Dv, kKeys>::kBytes, stream, args, maps);
  if (error != cudaSuccess) return error;
  const dim3 sums(static_cast<unsigned>(work.sums), 1, kSumBlocks);
  return launch(sum_items<T>, sums, 256, 0, stream, args, Dk, Dv);
}

}  // namespace

template <>
cudaError_t launch_selected_d_kv<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const BackwardArgs& branch,
                                                                          cudaStream_t stream) {
  constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;
  return branch.block_size == 32 ? launch_keys<NSA_ELEMENT, Dk, Dv, 32>(branch, stream)
                                 : launch_keys<NSA_ELEMENT, Dk, Dv, 64>(branch, stream);
}

}  // namespace nsa::cuda::sm90::selected_attention
