// The loads of keys and values: from the pages of a cache to the ring in shared memory, by cp.async.
//
// A warp loads a key tile at a time for all warps of its thread block (page_of, load_key_tile), or, where it multiplies
// two at once, its own rows of keys and values in turn (load_of, chunk_of, load_rows).
#pragma once

#include "cuda/common/pages.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/decode/attend/config.cuh"

namespace nsa::cuda::sm90::decode {

/// A lane of a warp that loads keys and values of sequence b and KV head kv_head.
template <class S>
struct KvLoader {
  const StepAttendArgs& args;
  int b, kv_head;
  int lane, warp;
  std::uint32_t ring;

  /// Where a key tile of a stage is in the ring.
  __device__ __forceinline__ static int key_tile_in_ring(int slot, int key_tile) {
    return key_tile * S::kWarpRing + (slot & 1) * S::kKeyTileBytes;
  }

  /// The page of a key tile of keys; where not all of it is in one, each lane has that of key lane % 16. Page numbers
  /// are read a stage ahead of the copies; they are undefined where the step finds no capacity. Keys from `end` on
  /// do not exist and are not loaded.
  __device__ __forceinline__ int page_of(int branch, int key, int end) const {
    if (key >= end) return 0;
    const CachedBranch& cached = args.cached[branch];
    const CachedBranch::Slot first = cached.slot_of(key);
    return cached.page_of(
        b, first.row + kTileKeys <= cached.size ? first.number : cached.slot_of(key + lane % kTileKeys).number);
  }
  /// Begins the copies of the warp's key tile of a stage: keys and values from `key` on. Those that are not begin ...
  /// end - 1 become zeros, as do all values that are not wanted.
  __device__ __forceinline__ void load_key_tile(int branch, int page, int key, int begin, int end, int slot,
                                                bool wants_values) const {
    const CachedBranch& cached = args.cached[branch];
    constexpr int kKeyBytes = S::kKeyDim * S::kItem, kValueBytes = S::kValueDim * S::kItem;
    constexpr int kLanes = (kKeyBytes | kValueBytes) % 128 ? 4 : 8;  // of a row
    const int row0 = lane / kLanes, chunk = lane % kLanes * 16;
    const auto of_page = [&](const CachedRows& rows, int page) {
      return rows.data + page * rows.page + (kv_head * rows.head + chunk);
    };
    const std::uint32_t to = ring + key_tile_in_ring(slot, warp);
    const auto copy_row = [&](int r, const char* keys, const char* values, int row) {
      const bool counts = static_cast<unsigned>(key + r - begin) < static_cast<unsigned>(end - begin);
      const char* const key_row = keys + static_cast<std::int64_t>(row) * cached.k.row;
      const char* const value_row = values + static_cast<std::int64_t>(row) * cached.v.row;
#pragma unroll
      for (int c = 0; c < kKeyBytes; c += 16 * kLanes) copy16(to + S::Keys::at(r, c, chunk), key_row + c, counts);
#pragma unroll
      for (int c = 0; c < kValueBytes; c += 16 * kLanes)
        copy16(to + S::kValues + S::Values::at(r, c, chunk), value_row + c, counts && wants_values);
    };
    const int first = cached.slot_of(key).row;
    if (first + kTileKeys <= cached.size) {
      const char *const keys = of_page(cached.k, page), *const values = of_page(cached.v, page);
#pragma unroll
      for (int r = 0; r < kTileKeys; r += 32 / kLanes) copy_row(r + row0, keys, values, first + r + row0);
    } else {
#pragma unroll 1
      for (int r = 0; r < kTileKeys; r += 32 / kLanes) {
        const int mine = r + row0, its_page = __shfl_sync(0xffffffffu, page, mine);
        copy_row(mine, of_page(cached.k, its_page), of_page(cached.v, its_page), cached.slot_of(key + mine).row);
      }
    }
  }
  /// What a warp loads at once: its first key, whose row in its page is `row`. page: as from page_of.
  struct Load {
    int key, page, row;
  };
  __device__ __forceinline__ Load load_of(const CachedBranch& cached, int key, int end) const {
    if (key >= end) return Load{key, 0, 0};
    const CachedBranch::Slot slot = cached.slot_of(key);
    const bool in_one = slot.row + S::kLoadKeys <= cached.size;
    return Load{key, cached.page_of(b, in_one ? slot.number : cached.slot_of(key + lane).number), slot.row};
  }
  /// A lane's chunk of row lane / kLanes: in page 0, and in a tile.
  struct LaneChunk {
    const char* from;
    std::uint32_t to;
  };
  template <class Rows>
  __device__ __forceinline__ LaneChunk chunk_of(Rows, const CachedRows& rows, std::uint32_t tile, int lane) const {
    constexpr int kLanes = Rows::kRow % 128 ? 4 : 8;
    const int row = lane / kLanes, chunk = lane % kLanes * 16;
    return LaneChunk{rows.data + (kv_head * rows.head + chunk) + static_cast<std::int64_t>(row) * rows.row,
                     tile + Rows::at(row, 0, chunk)};
  }
  /// Begins the copies of its keys, or its values, to a tile; as load_key_tile.
  template <class Rows>
  __device__ __forceinline__ void load_rows(Rows, const CachedBranch& cached, const CachedRows& rows, LaneChunk chunk,
                                            const Load& load, int begin, int end) const {
    constexpr int kLanes = Rows::kRow % 128 ? 4 : 8, kTogether = 32 / kLanes;  // lanes of a row; rows at a time
    const int row0 = lane / kLanes;
    const char* from = chunk.from;
    const std::uint32_t to = chunk.to;
    const auto copy_row = [&](int r, const char* from) {
      const bool counts = static_cast<unsigned>(load.key + r + row0 - begin) < static_cast<unsigned>(end - begin);
      const std::uint32_t at = (Rows::kSwizzled && r & 4 ? to ^ 64 : to) + r * Rows::kPitch;
#pragma unroll
      for (int c = 0; c < Rows::kRow; c += 16 * kLanes) copy16(at + c, from + c, counts);
    };
    if (load.row + S::kLoadKeys <= cached.size) {
      from += load.page * rows.page + static_cast<std::int64_t>(load.row) * rows.row;
#pragma unroll
      for (int r = 0; r < S::kLoadKeys; r += kTogether, from += std::int64_t{kTogether} * rows.row) copy_row(r, from);
    } else {
#pragma unroll 1
      for (int r = 0; r < S::kLoadKeys; r += kTogether) {
        const int its_page = __shfl_sync(0xffffffffu, load.page, r + row0);
        const int row = cached.slot_of(load.key + r + row0).row - row0;
        copy_row(r, from + its_page * rows.page + static_cast<std::int64_t>(row) * rows.row);
      }
    }
  }
};

}  // namespace nsa::cuda::sm90::decode
