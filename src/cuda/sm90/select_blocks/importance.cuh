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
    const int tiles = (sums + kTileSums - 1) / kTileSums, all = (tiles + kChunkTiles - 1) / kChunkTiles;
    fence_global_async();
    for (int i = 0; i < min(all, chunks_); ++i)
      fetch(scratch, i, tiles, stage_ + i < chunks_ ? stage_ + i : stage_ + i - chunks_, lane);
    begun_ = true;
  }
  /// use(chunk, its number, how many of its tiles count or more) for all chunks that sums 0 .. `sums` - 1 take. One
  /// warp.
  template <class Use>
  __device__ __forceinline__ void read(const ScratchTile* scratch, int sums, int lane, const Use& use) {
    const int tiles = (sums + kTileSums - 1) / kTileSums, all = (tiles + kChunkTiles - 1) / kChunkTiles;
    if (!begun_) begin(scratch, sums, lane);
    begun_ = false;
    for (int i = 0; i < all; ++i) {
      mbarrier_wait_warp(shared_address(full_ + stage_), phase_);
      use(chunk(stage_), i, tiles - i * kChunkTiles);
      fence_async();
      __syncwarp();
      if (i + chunks_ < all) fetch(scratch, i + chunks_, tiles, stage_, lane);
      if (++stage_ == chunks_) stage_ = 0, phase_ ^= 1;
    }
  }

 private:
  __device__ ScratchTile* chunk(int stage) const {
    return reinterpret_cast<ScratchTile*>(memory_) + stage * kChunkTiles;
  }
  __device__ __forceinline__ void fetch(const ScratchTile* scratch, int i, int tiles, int stage, int lane) const {
    if (lane != 0) return;
    const int bytes = min(tiles - i * kChunkTiles, kChunkTiles) * static_cast<int>(sizeof(ScratchTile));
    mbarrier_arrive_expect_tx(shared_address(full_ + stage), bytes);
    bulk_copy(shared_address(chunk(stage)), scratch + i * kChunkTiles, bytes, shared_address(full_ + stage));
  }

  char* memory_;
  std::uint64_t* full_;
  int chunks_, stage_ = 0;
  std::uint32_t phase_ = 0;
  bool begun_ = false;
};

/// A warp tile of one query: importances of the 64 / kSums blocks of a chunk, times 2^kAddedExponent, or added to what
/// is there. A block is kSums sums. Of the chunk's tiles the first `tiles` count, for others they are anything. With
/// kFiltered, for blocks of one sum, the upper halves of them, too. One warp.
template <int kSums, bool kFiltered = false>
__device__ __forceinline__ void sum_heads(const ScratchTile* chunk, int tiles, const float4& minus_lse, bool add,
                                          float* importance, int lane, unsigned short* filter = nullptr) {
  // As rows of the first factor: sum 4 r + j of the first two tiles and of the other two in product j, r = 0 .. 7.
  // Columns 2 t and 2 t + 1 of the second factor: high and low parts of tile t.
  const int r = lane / 4, c = lane % 4;
  const ScratchTile& near = chunk[min(r / 4, tiles - 1)];
  const ScratchTile& far = chunk[min(2 + r / 4, tiles - 1)];
  const uint4 a0 = near.sums[c][r % 4], a1 = far.sums[c][r % 4];
  const uint4 a2 = near.sums[c + 4][r % 4], a3 = far.sums[c + 4][r % 4];
  const float4 reference = chunk[min(r / 2, tiles - 1)].reference[c];
  const float x = exp2_fast(reference.x + minus_lse.x), y = exp2_fast(reference.y + minus_lse.y);
  const float z = exp2_fast(reference.z + minus_lse.z), w = exp2_fast(reference.w + minus_lse.w);
  std::uint32_t b0 = pack(Half{}, x, y), b1 = pack(Half{}, z, w);
  if (r & 1) {
    const float2 high0 = unpack(Half{}, b0), high1 = unpack(Half{}, b1);
    b0 = pack(Half{}, x - high0.x, y - high0.y);
    b1 = pack(Half{}, z - high1.x, w - high1.y);
  }
  const std::uint32_t rows[4][4] = {
      {a0.x, a1.x, a2.x, a3.x}, {a0.y, a1.y, a2.y, a3.y}, {a0.z, a1.z, a2.z, a3.z}, {a0.w, a1.w, a2.w, a3.w}};
  float sum[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float d[4] = {};
    mma(Half{}, d, rows[j], b0, b1);
    sum[j] = c < 2 ? d[0] + d[1] : d[2] + d[3];
  }
  if (c % 2 != r / 4) return;  // of the columns, those of the row's own tile
  if constexpr (kSums == 1) {
    float4& to = *reinterpret_cast<float4*>(importance + c / 2 * 32 + 4 * r);
    if (add) {
      const float4 before = to;
      sum[0] += before.x, sum[1] += before.y, sum[2] += before.z, sum[3] += before.w;
    }
    to = make_float4(sum[0], sum[1], sum[2], sum[3]);
    if constexpr (kFiltered) {
      const auto halves = [&](int n) {
        return __byte_perm(__float_as_uint(sum[n]), __float_as_uint(sum[n + 1]), 0x7632);
      };
      *reinterpret_cast<uint2*>(filter + c / 2 * 32 + 4 * r) = make_uint2(halves(0), halves(2));
    }
  } else {
    float2& to = *reinterpret_cast<float2*>(importance + c / 2 * 16 + 2 * r);
    const float2 before = add ? to : float2{};
    to = make_float2(before.x + (sum[0] + sum[1]), before.y + (sum[2] + sum[3]));
  }
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
