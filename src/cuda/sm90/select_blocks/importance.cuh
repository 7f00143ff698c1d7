// Importances of selection blocks from what computing warps leave of their key tiles (compressed_select.cu): how it is
// written, and how selector warps read it and sum it over heads.
//
// A sum over the heads of a warp tile is a product with tensor cores: sums of blocks and heads times 2^(reference -
// lse) of the heads, in two columns, for its high and its low part, so that 16 bits are enough.
#pragma once

#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/select_blocks/compressed_select.h"

namespace nsa::cuda::sm90::select_blocks {

inline constexpr int kTileSums = 16;       // of a tile of the scratch, per head
inline constexpr int kChunkTiles = 4;      // of the scratch, that come at a time
inline constexpr int kAddedExponent = 15;  // so that the fp16 parts of 2^(reference - lse) do not vanish

/// What a computing warp leaves of one key tile, or of a part of it. Heads: rows of the warp tile.
struct ScratchTile {
  uint4 sums[8][4];     // heads (h, h + 8) in a word; four words: neighbouring sums
  float4 reference[4];  // of heads h, h + 8, h + 4, h + 12
};
static_assert(sizeof(ScratchTile) == CompressedSelectScratch::kTileBytes);

/// Base 2, in the order of ScratchTile::reference; -inf: the row is not used.
using MinusLse = float4[4];

/// A computing warp's way of writing the scratch: kTiles after each other for every key tile.
template <int kTiles>
class ScratchWriter {
 public:
  __device__ __forceinline__ ScratchWriter(ScratchTile* first, int lane)
      : mine_(reinterpret_cast<char*>(first) + slot_of(lane)), lane_(lane) {}

  /// sums: of the lane's two rows, one after the other; reference: of these rows.
  __device__ __forceinline__ void write(const float (&sums)[2][4 * kTiles], const float (&reference)[2]) {
#pragma unroll
    for (int n = 0; n < 4 * kTiles; n += 4)
      reinterpret_cast<uint4*>(mine_)[n / 4] =
          make_uint4(pack(Half{}, sums[0][n], sums[1][n]), pack(Half{}, sums[0][n + 1], sums[1][n + 1]),
                     pack(Half{}, sums[0][n + 2], sums[1][n + 2]), pack(Half{}, sums[0][n + 3], sums[1][n + 3]));
    const int tile = lane_ & 3;
    if (tile < kTiles)
      *reinterpret_cast<float2*>(mine_ - slot_of(lane_) + tile * sizeof(ScratchTile) + sizeof(ScratchTile::sums) +
                                 lane_ / 4 % 4 * 16 + lane_ / 16 * 8) = make_float2(reference[0], reference[1]);
    mine_ += kTiles * sizeof(ScratchTile);
  }

 private:
  /// Of the lane's first sum. A row's sums of a key tile are those of its four lanes, kTiles words of each.
  __device__ __forceinline__ static int slot_of(int lane) {
    const int word = lane % 4 * kTiles;
    return word / 4 * static_cast<int>(sizeof(ScratchTile)) + (lane / 4 * 4 + word % 4) * 16;
  }

  char* mine_;
  int lane_;
};

/// A selector warp's way of reading the scratch: a ring of chunks in shared memory. It is no Pipeline: the warp itself
/// refills what it has read, so that there is no `empty` barrier, and the number of chunks is known at run time only.
class ChunkRing {
 public:
  static constexpr int kChunkBytes = kChunkTiles * static_cast<int>(sizeof(ScratchTile));

  __device__ ChunkRing(char* memory, std::uint64_t* full, int chunks) : memory_(memory), full_(full), chunks_(chunks) {}

  /// Sends for the first chunks of what is read next. One warp.
  __device__ __forceinline__ void begin(const ScratchTile* scratch, int sums, int lane) {
    scratch_ = reinterpret_cast<const char*>(scratch), sent_ = 0;
    bytes_ = (sums + kTileSums - 1) / kTileSums * static_cast<int>(sizeof(ScratchTile));
    fence_global_async();
#pragma unroll 1
    for (int i = 0; i < chunks_ && sent_ < bytes_; ++i)
      send(stage_ + i < chunks_ ? stage_ + i : stage_ + i - chunks_, lane);
    begun_ = true;
  }
  /// use(load(chunk, its number, how many of its tiles count or more), its number) for all chunks that sums 0 ..
  /// `sums` - 1 take. A chunk is overwritten after `load`. One warp.
  template <class Load, class Use>
  __device__ __forceinline__ void read(const ScratchTile* scratch, int sums, int lane, const Load& load,
                                       const Use& use) {
    if (!begun_) begin(scratch, sums, lane);
    begun_ = false;
    const int tiles = bytes_ / static_cast<int>(sizeof(ScratchTile));
#pragma unroll 1
    for (int i = 0; i * kChunkTiles < tiles; ++i) {
      mbarrier_wait_warp(shared_address(full_ + stage_), phase_);
      const auto loaded = load(chunk(stage_), i, tiles - i * kChunkTiles);
      fence_async();
      __syncwarp();
      if (sent_ < bytes_) send(stage_, lane);
      if (++stage_ == chunks_) stage_ = 0, phase_ ^= 1;
      use(loaded, i);
    }
  }
  /// The same where `use` reads the chunk itself: use(chunk, its number, tiles).
  template <class Use>
  __device__ __forceinline__ void read(const ScratchTile* scratch, int sums, int lane, const Use& use) {
    read(
        scratch, sums, lane,
        [&](const ScratchTile* chunk, int i, int tiles) {
          use(chunk, i, tiles);
          return 0;
        },
        [](int, int) {});
  }

 private:
  __device__ ScratchTile* chunk(int stage) const {
    return reinterpret_cast<ScratchTile*>(memory_) + stage * kChunkTiles;
  }
  /// For the next chunk.
  __device__ __forceinline__ void send(int stage, int lane) {
    if (lane == 0) {
      const int bytes = min(bytes_ - sent_, kChunkBytes);
      mbarrier_arrive_expect_tx(shared_address(full_ + stage), bytes);
      bulk_copy(shared_address(chunk(stage)), scratch_ + sent_, bytes, shared_address(full_ + stage));
    }
    sent_ += kChunkBytes;
  }

  char* memory_;
  std::uint64_t* full_;
  int chunks_, stage_ = 0;
  std::uint32_t phase_ = 0;
  bool begun_ = false;
  const char* scratch_ = nullptr;  // of what is read, ...
  int bytes_ = 0, sent_ = 0;       // ... all and those sent for
};

/// A lane's part of a chunk of a warp tile of one query: 64 sums over its heads.
///
/// A product for each tile of the chunk. Rows r and r + 8 of its first factor: sums 2 r and 2 r + 1 of the tile.
/// Columns 2 t and 2 t + 1 of the second factor, the same for all: high and low parts of tile t. So lane 4 r + c has
/// the result for these sums in the product of tile c.
class HeadSums {
 public:
  /// Tiles that do not count may have anything: no result of others depends on them.
  __device__ __forceinline__ HeadSums(const ScratchTile* chunk, int lane) {
    const int r = lane / 4, c = lane % 4;
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile) {
      near_[tile] = reinterpret_cast<const uint2*>(chunk[tile].sums[c])[r];
      far_[tile] = reinterpret_cast<const uint2*>(chunk[tile].sums[c + 4])[r];
    }
    reference_ = chunk[r / 2].reference[c];
  }

  /// Sums 2 r and 2 r + 1 of tile c, times 2^kAddedExponent that is in minus_lse.
  __device__ __forceinline__ float2 sum(const float4& minus_lse, int lane) const {
    const float x = exp2_fast(reference_.x + minus_lse.x), y = exp2_fast(reference_.y + minus_lse.y);
    const float z = exp2_fast(reference_.z + minus_lse.z), w = exp2_fast(reference_.w + minus_lse.w);
    const bool is_low = (lane / 4 & 1) != 0;
    const std::uint32_t high0 = pack(Half{}, x, y), high1 = pack(Half{}, z, w);
    const float2 minus0 = unpack(Half{}, is_low ? high0 : 0), minus1 = unpack(Half{}, is_low ? high1 : 0);
    const std::uint32_t b0 = pack(Half{}, x - minus0.x, y - minus0.y), b1 = pack(Half{}, z - minus1.x, w - minus1.y);
    float2 sum;
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile) {
      const std::uint32_t a[4] = {near_[tile].x, near_[tile].y, far_[tile].x, far_[tile].y};
      float d[4] = {};
      mma(Half{}, d, a, b0, b1);
      if (lane % 4 == tile) sum = make_float2(d[0] + d[1], d[2] + d[3]);
    }
    return sum;
  }

 private:
  uint2 near_[kChunkTiles], far_[kChunkTiles];  // of heads (c, c + 8) and (c + 4, c + 12)
  float4 reference_;
};

/// Where a lane's part of the sums over heads of a chunk goes: a float2, or their sum where a block is two sums.
template <int kSums>
__device__ __forceinline__ int place_in_chunk(int lane) {
  return (lane % 4 * kTileSums + lane / 4 * 2) / kSums;
}

/// A warp tile of several queries, four of them at a time: lane 4 r + c gets what is of query `first` + c, namely
/// blocks 2 r and 2 r + 1 of sixteen.
///
/// As rows of the first factor: blocks 2 r and (row r + 8) 2 r + 1. Columns 2 q and 2 q + 1 of the second factor: high
/// and low parts for query q, zero for heads that are not its own. A query has at most eight heads, so of the pairs
/// (h, h + 8) that share a word at most one is its own.
class QuadOfQueries {
 public:
  __device__ __forceinline__ QuadOfQueries(const MinusLse& minus_lse, int heads, int first, int lane)
      : r_(lane / 4), c_(lane % 4) {
    const float* all = &minus_lse[0].x;
    const int begin = (first + r_ / 2) * heads, end = min(begin + heads, 16);
#pragma unroll
    for (int word = 0; word < 2; ++word) {  // heads (c, c + 8) and (c + 4, c + 12)
      const int low = c_ + 4 * word, high = low + 8;
      const bool is_high = high >= begin && high < end, any = is_high || (low >= begin && low < end);
      at_[word] = 4 * c_ + 2 * word + is_high;
      minus_lse_[word] = any ? all[at_[word]] + kAddedExponent : -INFINITY;
      bytes_[word] = (is_high ? 0x1044 : 0x4410) + (is_high ? 0x2200 : 0x0022) * word;
    }
  }

  /// Importances, times 2^kAddedExponent, of the lane's two of the sixteen blocks of a tile, ...
  __device__ __forceinline__ float2 of(const ScratchTile& tile) const {
    const std::uint32_t powers = powers_of(tile);
    const uint2 a = reinterpret_cast<const uint2*>(tile.sums[c_])[r_];
    const uint2 b = reinterpret_cast<const uint2*>(tile.sums[c_ + 4])[r_];
    float d[4] = {};
    multiply(d, {a.x, a.y, b.x, b.y}, powers);
    return make_float2(d[0] + d[1], d[2] + d[3]);
  }
  /// ... or of two tiles with eight blocks each, a block being two sums.
  __device__ __forceinline__ float2 of(const ScratchTile& tile, const ScratchTile& next) const {
    const float2 near = of_eight(tile), far = of_eight(next);
    return r_ < 4 ? near : far;
  }

 private:
  /// The high or low parts of 2^(reference - lse) of the lane's two heads.
  __device__ __forceinline__ std::uint32_t powers_of(const ScratchTile& tile) const {
    const float* reference = &tile.reference[0].x;
    const float x = exp2_fast(reference[at_[0]] + minus_lse_[0]), y = exp2_fast(reference[at_[1]] + minus_lse_[1]);
    const std::uint32_t pair = pack(Half{}, x, y);
    if ((r_ & 1) == 0) return pair;
    const float2 high = unpack(Half{}, pair);
    return pack(Half{}, x - high.x, y - high.y);
  }
  __device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&rows)[4], std::uint32_t powers) const {
    mma(Half{}, d, rows, __byte_perm(powers, 0, bytes_[0]), __byte_perm(powers, 0, bytes_[1]));
  }
  /// Blocks 2 r and 2 r + 1, modulo 8, of a tile of two sums each.
  __device__ __forceinline__ float2 of_eight(const ScratchTile& tile) const {
    const std::uint32_t powers = powers_of(tile);
    const uint4 a = tile.sums[c_][r_ % 4], b = tile.sums[c_ + 4][r_ % 4];
    float d[4] = {};
    multiply(d, {a.x, a.z, b.x, b.z}, powers);
    multiply(d, {a.y, a.w, b.y, b.w}, powers);
    return make_float2(d[0] + d[1], d[2] + d[3]);
  }

  int r_, c_;
  int at_[2];           // of the lane's head in a word: its slot among the references
  float minus_lse_[2];  // -inf: none of its query
  unsigned bytes_[2];   // of a pair of halves and zeros, that make the word
};

}  // namespace nsa::cuda::sm90::select_blocks
