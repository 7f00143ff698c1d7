// Tiles of keys and values for thread blocks of several queries: which ones a computing warpgroup goes through, and the
// warps that copy them, two for each warpgroup.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/common/pages.cuh"
#include "cuda/sm90/common/pipeline.cuh"
#include "cuda/sm90/decode/queries/block_lists.cuh"

namespace nsa::cuda::sm90::decode {

template <class T, int D>
struct QueriesTile {
  static constexpr int kQueries = QueriesMemory::kQueries, kGroups = QueriesMemory::kGroups;
  static constexpr int kKeys = QueriesMemory::kKeys, kSlots = QueriesMemory::kSlots;
  static constexpr int kCopiers = 2;  // warps that copy for a warpgroup
  static constexpr int kComputing = kGroups * 128, kThreads = kComputing + 128, kRows = kQueries * kTileRows;
  static constexpr int kComputeRegisters = 216, kCopyRegisters = 72;  // 2 * 216 + 72 = 3 * 168
  static constexpr int kPanel = kKeys * 128, kTile = kKeys * D * 2;   // bytes, of keys or values
  static constexpr int kGroupRing = kSlots * kTile, kRing = kGroups * kGroupRing;
  static constexpr int kHalf = D / 16;           // tiles of eight columns of half of the columns
  static constexpr int kExchange = kHalf * 512;  // bytes of a warp
};

/// Maxima in base-2 key tiles and sums of softmaxes of each warpgroup, gates, barriers of the rings and of turns.
template <class S>
struct QueriesRows {
  float2 softmaxes[2][S::kGroups][S::kRows];
  float gates[kBranches][S::kRows];
  std::uint64_t barriers[S::kGroups][Pipeline<S::kSlots>::kBarriers], turn[2];
};

enum class QueriesBarrier {
  kComputing = 1,  // all computing warps
  kLists = 2,      // lists of blocks are made: all warps
};

/// The end of a turn, where all threads meet: an mbarrier, as computing and copying warps come from two instructions,
/// which synccheck refuses of a BAR.RED, and a word, by its address of 32 bits, as a pointer would spill registers.
struct TurnBarrier {
  std::uint32_t barrier;

  /// One thread; fence_mbarrier_init() is to follow.
  __device__ __forceinline__ void init(int threads) const {
    mbarrier_init(barrier, threads);
    store(0);
  }
  /// An output of turn 0 is not finite.
  __device__ __forceinline__ void report() const { store(1); }
  /// Whether all outputs of turn 0 are finite.
  __device__ __forceinline__ bool wait(int turn) const {
    mbarrier_arrive(barrier);
    mbarrier_wait_warp(barrier, turn & 1);
    int reported;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(reported) : "r"(barrier + 8) : "memory");
    return reported == 0;
  }

 private:
  __device__ __forceinline__ void store(int reported) const {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(barrier + 8), "r"(reported) : "memory");
  }
};

/// What queries of a thread block, at first_position ... last_position, see of a branch, and the tiles of it that a
/// warpgroup has.
struct BranchTiles {
  int branch;
  int begin, end;  // of the keys that any of them sees
  int first, count;
  int log2_tiles = 0;  // of a selected block
  BlockList blocks;    // of the warpgroup

  __device__ __forceinline__ BranchTiles(const StepAttendArgs& args, int branch, int first_position, int last_position,
                                         int group, const BlockList& blocks)
      : branch(branch), blocks(blocks) {
    constexpr int kKeys = QueriesMemory::kKeys;
    const BlockKeys& shape = args.block_keys;
    begin = branch == kWindow ? max(first_position - args.window + 1, 0) : 0;
    end = branch == kCompressed ? shape.compressed(args.geometry.kernel_size, last_position + 1) : last_position + 1;
    if (branch == kSelected) {
      log2_tiles = max(shape.log2_block - 6, 0);
      first = 0, count = blocks.count() << log2_tiles;
    } else {
      first = begin / kKeys;
      first += (first & 1) != group;
      count = max(((end + kKeys - 1) / kKeys - first + 1) / 2, 0);
    }
    count = warp_uniform(count);
  }
  __device__ int entry(int tile) const { return blocks.blocks()[tile >> log2_tiles]; }
  __device__ int key_of(int tile, int entry, int log2_block) const {
    if (branch != kSelected) return (first + 2 * tile) * QueriesMemory::kKeys;
    return (entry >> 2 << log2_block) + (tile & ((1 << log2_tiles) - 1)) * QueriesMemory::kKeys;
  }
};

/// The position of a thread in a ring of up to eight slots, in one register.
template <int kSlots>
class SlotState {
 public:
  __device__ __forceinline__ int stage() const { return at_ & 7; }
  __device__ __forceinline__ std::uint32_t phase() const { return at_ >> 3; }
  __device__ __forceinline__ void advance() { at_ = stage() == kSlots - 1 ? at_ ^ (8 | (kSlots - 1)) : at_ + 1; }

 private:
  static_assert(kSlots <= 8);
  std::uint32_t at_ = 0;
};

/// A lane of a warp that copies: half of the rows of each tile, to the slots of a ring in turn. Eight lanes copy 128
/// bytes of a row, as they lie in a panel of the tile.
template <class S>
class TileCopier {
 public:
  static constexpr int kTogether = 32 / 8;              // rows that the warp copies at once
  static constexpr int kRows = S::kKeys / S::kCopiers;  // of the warp
  static constexpr int kPanels = S::kTile / S::kPanel;
  static_assert(kRows == 32);

  __device__ __forceinline__ TileCopier(std::uint32_t ring, const Pipeline<S::kSlots>& barriers, int warp, int lane)
      : to_(ring + (warp * kRows + lane / 8) * 128 + ((lane ^ lane / 8) % 8) * 16),
        barriers_(barriers),
        first_row_(warp * kRows),
        lane_(lane) {}

  /// Where a tile lies: whole: all its rows one after the other from this one of a page on. Else the lane's row; below
  /// 0: it is not loaded. page: not checked yet, so that nothing waits for it.
  struct TileSlot {
    int page, row;
    bool whole;
  };
  __device__ __forceinline__ TileSlot slot_of(const CachedBranch& cached, const BranchTiles& tiles, int key,
                                              int log2_block, int b) const {
    const int behind = tiles.branch == kSelected ? min(tiles.end, key + (1 << log2_block)) : tiles.end;
    TokenPages::Slot at = cached.slot_of(key);
    const bool whole = key >= tiles.begin && key + S::kKeys <= behind && at.row + S::kKeys <= cached.size;
    if (!whole) {
      const int token = key + first_row_ + lane_;
      at = cached.slot_of(min(max(token, tiles.begin), behind - 1));
      if (token < tiles.begin || token >= behind) at.row = -1;
    }
    return {cached.listed_page(b, at.number), at.row, whole};
  }

  /// Keys or values into the next slot, as soon as that is free.
  __device__ __forceinline__ void copy(const CachedBranch& cached, const CachedRows& from, const TileSlot& slot,
                                       int kv_head) {
    barriers_.acquire_warp(state_);
    const std::uint32_t to = to_ + state_.stage() * S::kTile;
    const char* const mine = from.data + (kv_head * from.head + lane_ % 8 * 16);
    const int page = cached.checked(slot.page);
    const auto copy_rows = [&](int i, const char* row, bool valid) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        copy16((to ^ (i * kTogether % 8 * 16)) + i * kTogether * 128 + panel * S::kPanel, row + panel * 128, valid);
    };
    if (slot.whole) {
      const char* const first =
          mine + page * from.page + static_cast<std::int64_t>(slot.row + first_row_ + lane_ / 8) * from.row;
#pragma unroll
      for (int i = 0; i < kRows / kTogether; ++i)
        copy_rows(i, first + static_cast<std::int64_t>(i * kTogether) * from.row, true);
    } else {
      const long long own = slot.row < 0 ? -1 : page * from.page + static_cast<std::int64_t>(slot.row) * from.row;
#pragma unroll
      for (int i = 0; i < kRows / kTogether; ++i) {
        const long long row = __shfl_sync(0xffffffffu, own, i * kTogether + lane_ / 8);
        copy_rows(i, mine + max(row, 0ll), row >= 0);
      }
    }
    cp_async_mbarrier_arrive(barriers_.full(state_.stage()));
    state_.advance();
  }

 private:
  std::uint32_t to_;
  Pipeline<S::kSlots> barriers_;
  int first_row_, lane_;
  SlotState<S::kSlots> state_;
};

/// All tiles of a branch, keys and then values, or keys alone. first_added: the first token that the step adds; before
/// it is read the kernel in front must have ended.
template <int kBranch, class S>
__device__ __forceinline__ void copy_branch(TileCopier<S>& copier, const StepAttendArgs& args, const BranchTiles& tiles,
                                            bool values, int first_added, int b, int kv_head) {
  const CachedBranch& cached = args.cached[kBranch];
  const auto look = [&](int tile) {
    if (tile >= tiles.count) return typename TileCopier<S>::TileSlot{};
    const int log2_block = args.block_keys.log2_block;
    const int key = tiles.key_of(tile, kBranch == kSelected ? tiles.entry(tile) : 0, log2_block);
    if (key + S::kKeys > first_added) griddepcontrol_wait();
    return copier.slot_of(cached, tiles, key, log2_block, b);
  };
  // The first page is loaded in the loop, too: else the compiler lets each tile wait for the load of the next one's.
  typename TileCopier<S>::TileSlot next{};
#pragma unroll 1
  for (int tile = -1; tile < tiles.count; ++tile) {
    const auto now = next;
    next = look(tile + 1);
    if (tile < 0) continue;
    copier.copy(cached, cached.k, now, kv_head);
    if (values) copier.copy(cached, cached.v, now, kv_head);
  }
}

}  // namespace nsa::cuda::sm90::decode
