// Compressed attention, importance and the choice of blocks in one pass over the compressed keys, for groups of sixteen
// heads, compression blocks of l = 2d and selection blocks of l' = 4d tokens.
//
// The attention is that of range_forward.cu: a warp has the sixteen heads of one query. Keys of a tile lie spread
// (make_spread_map), so that a lane owns sixteen neighbouring keys of two heads: four selection blocks. The importance
// of a block under one head is a weighted sum (1, 2, 2, 2, 1) of five probabilities, known up to a factor until the
// last key is seen. Data flow of the importances of a query:
//
//   its warp        per key tile the weighted sums of its sixteen blocks and sixteen heads as fp16, relative to the
//                   heads' references at that time, and the references -> a scratch of this thread block in global
//                   memory; at the end -lse of the heads -> shared memory
//   a picking warp  the scratch, by the copy engine, times 2^(reference - lse), summed over the heads: a product with
//                   tensor cores, whose second factor holds the high and the low part of the powers in two columns ->
//                   importances in shared memory -> the blocks chosen
//
// The computing warps go on with later queries meanwhile: the scratch has kBuffers places per query of a tile. fp16 is
// enough: what it loses of a probability is 2^-11 of it or 2^-25.
#include <algorithm>

#include "cuda/portable/launch.cuh"
#include "cuda/sm90/forward_parts.cuh"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/maps.h"

namespace nsa::cuda::sm90 {
namespace {

constexpr int kGroups = 3, kThreads = (kGroups + 1) * 128;
constexpr int kQueries = kGroups * 4;  // of a tile
static_assert(kQueries == CompressedSelectScratch::kQueries);
constexpr int kKeys = 64, kBlocks = 16;  // of a key tile
constexpr int kComputeRegisters = 144, kHelperRegisters = 80;
constexpr int kStages = 4;
constexpr int kBuffers = CompressedSelectScratch::kBuffers;
constexpr int kPickers = 3;         // warps
constexpr int kListed = 32;         // candidates that a picking warp can rank at once
constexpr int kChunkTiles = 4;      // of the scratch, that come at a time
constexpr int kMostChunks = 4;      // on their way; fewer where shared memory is full of importances
constexpr int kAddedExponent = 15;  // so that the fp16 parts of 2^(reference - lse) do not vanish

/// What a query's warp leaves of one key tile.
struct ScratchTile {
  uint4 sums[8][4];     // heads (h, h + 8) in a word; four words: neighbouring blocks
  float4 reference[4];  // of heads h, h + 8, h + 4, h + 12
};
static_assert(sizeof(ScratchTile) == CompressedSelectScratch::kTileBytes);

template <int D>
struct Layout {
  static constexpr int kTileBytes = kKeys * D * 2, kQueryBytes = 64 * D * 2;
  static constexpr int kChunkBytes = kChunkTiles * static_cast<int>(sizeof(ScratchTile));
  static constexpr int kFixed = 1024 + kGroups * kQueryBytes + 2 * kStages * kTileBytes;
  /// Of a picking warp: chunks, list, importances.
  __host__ __device__ static constexpr int picker(int blocks, int chunks) {
    return chunks * kChunkBytes + kListed * 8 + (blocks + 127) / 128 * 512;
  }
  static constexpr int memory(int blocks, int chunks) { return kFixed + kPickers * picker(blocks, chunks); }
};

struct Barriers {
  std::uint64_t key_full[kStages], key_free[kStages], value_full[kStages], value_free[kStages];
  std::uint64_t query_full[kGroups], query_free[kGroups];
  GroupTile tiles[kGroups][2];                                         // the one at work and the next one
  std::uint64_t scored[kBuffers][kQueries], read[kBuffers][kQueries];  // the scratch is complete; may be overwritten
  std::uint64_t chunk_full[kPickers][kMostChunks];
  float4 minus_lse[kBuffers][kQueries][4];  // base 2, in the order of ScratchTile::reference
};

struct Maps {
  CUtensorMap q, k, v, k_row, v_row;
};

/// Base-2 softmax of the two rows of a lane as in range_forward.cu, with the weighted sums of the lane's four blocks.
struct ScoringSoftmax {
  float max[2] = {-INFINITY, -INFINITY};
  float twice_sum[2] = {0, 0};  // of probabilities; what goes over to the next tile is still missing
  float last[2] = {0, 0};       // probability of the lane's last key in the tile before
  float factor[2];

  /// Key 0 .. 15 of the lane's keys of row i among its scores.
  __device__ static constexpr int at(int i, int key) { return 4 * (key % 8) + 2 * i + key / 8; }

  __device__ __forceinline__ bool update(float (&s)[kKeys / 2], float scale, float (&sums)[2][4], int lane) {
    float local[2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float even = fmaxf(s[at(i, 0)], s[at(i, 8)]), odd = fmaxf(s[at(i, 1)], s[at(i, 9)]);
#pragma unroll
      for (int n = 2; n < 8; n += 2) {
        even = fmaxf(even, fmaxf(s[at(i, n)], s[at(i, n + 8)]));
        odd = fmaxf(odd, fmaxf(s[at(i, n + 1)], s[at(i, n + 9)]));
      }
      local[i] = fmaxf(even, odd) * scale;
      grown |= local[i] > max[i] + 8;
    }
    grown = __any_sync(0xffffffffu, grown);
    if (grown) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float m = row_max(local[i]), before = max[i];
        if (m > before + 8) max[i] = m;
        factor[i] = max[i] == before ? 1 : exp2_fast(before - max[i]);
        twice_sum[i] *= factor[i];
        last[i] *= factor[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float base = max[i] == -INFINITY ? 0 : -max[i];  // nothing seen yet
#pragma unroll
      for (int key = 0; key < 16; ++key) s[at(i, key)] = exp2_fast(fmaf(s[at(i, key)], scale, base));
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        sums[i][b] = fmaf(2.f, s[at(i, 4 * b)] + s[at(i, 4 * b + 1)] + s[at(i, 4 * b + 2)], s[at(i, 4 * b + 3)]);
        if (b > 0) sums[i][b] += s[at(i, 4 * b - 1)];
      }
      // The key before the lane's first one is the last one of the lane before, for the first lane in the tile before.
      const float own = s[at(i, 15)];
      const float before = (lane & 3) == 3 ? last[i] : own;
      sums[i][0] += __shfl_sync(0xffffffffu, before, (lane & 28) | ((lane + 3) & 3));
      asm volatile("mov.b32 %0, %1;" : "=f"(last[i]) : "f"(own));  // out of the accumulator, else wgmma waits (C7511)
      // Every probability counts twice in the weighted sums.
      twice_sum[i] += (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]);
    }
    return grown;
  }
};

__device__ __forceinline__ KeyTiles tiles_of(const CompressedSelectArgs& args, const TileWalk& walk) {
  return key_tiles<kKeys>(args.range.geometry, 0, walk.seq, walk.first_query, kQueries);
}

/// 64 rows of keys or values, spread. All lanes of the warp.
template <int D>
__device__ __forceinline__ void load_tile(std::uint32_t to, const CUtensorMap& spread, const CUtensorMap& rows,
                                          bool all_known, int row, const TileWalk& walk, std::uint32_t full, int lane) {
  if (lane == 0) arrive_expecting(full, kKeys * D * 2);  // before any byte can come
  __syncwarp();
#pragma unroll
  for (int column = 0; column < D; column += 64) {
    const std::uint32_t panel = to + column * kKeys * 2;
    if (all_known) {
      if (lane == 0) load_spread_box(panel, spread, column, row, walk.kv_head, walk.seq.batch, full);
    } else {  // near the end of the tensor, row by row
#pragma unroll
      for (int i = lane; i < kKeys; i += 32)
        load_box(panel + (i % 8 * 8 + i / 8) * 128, rows, column, walk.kv_head, row + i, walk.seq.batch, full);
    }
  }
}

/// Warp 0 of the helping warpgroup.
template <int D>
__device__ __forceinline__ void load_keys(const CompressedSelectArgs& args, const Maps& maps, Barriers& barriers,
                                          std::uint32_t queries, std::uint32_t keys, std::uint32_t values) {
  using L = Layout<D>;
  const Geometry& p = args.range.geometry;
  const int lane = threadIdx.x % 32;
  const RowShape shape(16);
  Place<kStages> place;
  std::uint32_t parity = 0;
  TileWalk walk(p, shape, kQueries);
  for (bool more = true; more; parity ^= 1) {
    more = walk.next();
    KeyTiles tiles;
    if (more) tiles = tiles_of(args, walk);
    for (int group = 0; group < kGroups; ++group) {
      GroupTile& tile = barriers.tiles[group][parity];
      const std::uint32_t full = shared_address(&barriers.query_full[group]);
      wait(shared_address(&barriers.query_free[group]), parity ^ 1);
      if (lane != 0) continue;
      if (!more) {
        tile.queries = -1;
        arrive(full);
        continue;
      }
      tile = GroupTile::of<kKeys>(p, 0, shape, walk, tiles, group);
      arrive_expecting(full, L::kQueryBytes);
#pragma unroll
      for (int column = 0; column < D; column += 64)
        load_box(queries + group * L::kQueryBytes + column * 64 * 2, maps.q, column, tile.head, tile.row, tile.batch,
                 full);
    }
    __syncwarp();
    for (int i = 0; i < tiles.count; ++i) {
      const int row = walk.compressed_begin + i * kKeys;
      const bool all_known = row / 8 * 8 + kKeys <= args.spread_rows;
      wait(shared_address(&barriers.key_free[place.stage]), place.parity ^ 1);
      load_tile<D>(keys + place.stage * L::kTileBytes, maps.k, maps.k_row, all_known, row, walk,
                   shared_address(&barriers.key_full[place.stage]), lane);
      wait(shared_address(&barriers.value_free[place.stage]), place.parity ^ 1);
      load_tile<D>(values + place.stage * L::kTileBytes, maps.v, maps.v_row, all_known, row, walk,
                   shared_address(&barriers.value_full[place.stage]), lane);
      place.advance();
    }
  }
}

/// The scratch of a query of this thread block's tile.
__device__ __forceinline__ ScratchTile* scratch_of(const CompressedSelectArgs& args, int buffer, int query) {
  return static_cast<ScratchTile*>(args.scratch) +
         static_cast<std::int64_t>((blockIdx.x * kBuffers + buffer) * kQueries + query) *
             scratch_tiles(args.range.geometry);
}

/// A computing warpgroup.
template <class T, int D>
__device__ __forceinline__ void attend(const CompressedSelectArgs& args, const Divider& by_stride, Barriers& barriers,
                                       std::uint32_t queries, std::uint32_t keys, std::uint32_t values, int group) {
  using L = Layout<D>;
  const Geometry& p = args.range.geometry;
  const int lane = threadIdx.x % 32, own = uniform(threadIdx.x / 32);  // own: query of the tile
  const float scale = positive_scale(args.range.scale);
  const std::uint32_t q = descriptor(queries + group * L::kQueryBytes, 16);
  const std::uint32_t k = descriptor(keys, 16), v = descriptor(values, kKeys * 128);
  const auto give_back = [&](std::uint64_t* barrier) {
    if (lane == 0) arrive(shared_address(barrier));
  };
  Place<kStages> place;
  Place<kBuffers> buffer;
  start_apart(group);

  for (std::uint32_t parity = 0;; parity ^= 1) {
    const volatile GroupTile& tile = barriers.tiles[group][parity];
    wait(shared_address(&barriers.query_full[group]), parity);
    if (tile.queries < 0) break;
    int visible = num_compressed(p, by_stride, tile.position + own % 4 + 1);  // keys from the next tile on
    char* scratch = reinterpret_cast<char*>(scratch_of(args, buffer.stage, own)) + lane * 16;
    const auto mask = [&](float(&s)[kKeys / 2]) {
      if (args.range.scale < 0) {
#pragma unroll
        for (float& x : s) x = -x;
      }
      if (visible < kKeys) {
        const int seen = visible - 16 * (lane & 3);
#pragma unroll
        for (int key = 0; key < 16; ++key)
          if (key >= seen) s[ScoringSoftmax::at(0, key)] = s[ScoringSoftmax::at(1, key)] = -INFINITY;
      }
      visible -= kKeys;
    };
    ScoringSoftmax softmax;
    const auto update = [&](float(&s)[kKeys / 2]) {
      float sums[2][4];
      mask(s);
      const bool grown = softmax.update(s, scale, sums, lane);
      *reinterpret_cast<uint4*>(scratch) =
          make_uint4(pack(Half{}, sums[0][0], sums[1][0]), pack(Half{}, sums[0][1], sums[1][1]),
                     pack(Half{}, sums[0][2], sums[1][2]), pack(Half{}, sums[0][3], sums[1][3]));
      if ((lane & 3) == 0)
        *reinterpret_cast<float2*>(scratch - lane * 16 + sizeof(ScratchTile::sums) + lane / 4 % 4 * 16 +
                                   lane / 16 * 8) = make_float2(softmax.max[0], softmax.max[1]);
      scratch += sizeof(ScratchTile);
      return grown;
    };

    float o[D / 2];
#pragma unroll
    for (float& x : o) x = 0;
    wait(shared_address(&barriers.read[buffer.stage][own]), buffer.parity ^ 1);
    int left = tile.end;
    if (left > 0) {
      float s[kKeys / 2];
      std::uint32_t probabilities[kKeys / 4];
      wait(shared_address(&barriers.key_full[place.stage]), place.parity);
      scores<T, D, kKeys>(s, q, 64, k + place.stage * (L::kTileBytes / 16), kKeys);
      products_wait<0>();
      give_back(&barriers.key_free[place.stage]);
      update(s);
      pack_rows<T, kKeys>(probabilities, s);
      place.advance();
#pragma unroll 1
      while (--left > 0) {
        wait(shared_address(&barriers.key_full[place.stage]), place.parity);
        scores<T, D, kKeys>(s, q, 64, k + place.stage * (L::kTileBytes / 16), kKeys);
        const Place<kStages> before = place.before();  // of the values that go with `probabilities`
        wait(shared_address(&barriers.value_full[before.stage]), before.parity);
        outputs<T, D, kKeys>(o, probabilities, v + before.stage * (L::kTileBytes / 16));
        products_wait<1>();
        give_back(&barriers.key_free[place.stage]);
        const bool grown = update(s);
        products_wait<0>();
        give_back(&barriers.value_free[before.stage]);
        if (grown) {
#pragma unroll
          for (int n = 0; n < D / 2; ++n) o[n] *= softmax.factor[n / 2 % 2];
        }
        pack_rows<T, kKeys>(probabilities, s);
        place.advance();
      }
      give_back(&barriers.query_free[group]);
      const Place<kStages> before = place.before();
      wait(shared_address(&barriers.value_full[before.stage]), before.parity);
      outputs<T, D, kKeys>(o, probabilities, v + before.stage * (L::kTileBytes / 16));
      products_wait<0>();
      give_back(&barriers.value_free[before.stage]);
    } else {
      give_back(&barriers.query_free[group]);
    }
    for (int i = tile.end; i < tile.key_tiles; ++i) {
      wait(shared_address(&barriers.key_full[place.stage]), place.parity);
      give_back(&barriers.key_free[place.stage]);
      wait(shared_address(&barriers.value_full[place.stage]), place.parity);
      give_back(&barriers.value_free[place.stage]);
      place.advance();
    }

    float inverse[2], lse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = 0.5f * row_sum(softmax.twice_sum[i] + ((lane & 3) == 3 ? softmax.last[i] : 0));
      const bool any = num_compressed(p, by_stride, tile.position + own % 4 + 1) > 0;
      inverse[i] = any ? __fdividef(1, sum) : 0;
      lse[i] = any ? softmax.max[i] + log2f(sum) : -INFINITY;
    }
    if ((lane & 3) == 0)
      *reinterpret_cast<float2*>(reinterpret_cast<char*>(barriers.minus_lse[buffer.stage][own]) + lane / 4 % 4 * 16 +
                                 lane / 16 * 8) = make_float2(-lse[0], -lse[1]);
    __syncwarp();
    give_back(&barriers.scored[buffer.stage][own]);
    buffer.advance();

    const bool valid = own % 4 < tile.queries;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = tile.head + lane / 4 + 8 * i;
      T* to = args.range.o.template at<T>(tile.batch, tile.row + own % 4, head);
      store_row(to, o, i, inverse[i], valid, lane);
      if (valid && lane % 4 == 0) {
        args.range.lse.at(tile.batch, tile.row + own % 4, head) = lse[i] * kLn2;
        if (lse[i] != lse[i]) *args.flag = 1;
      }
    }
  }
}

/// Importances of the 64 blocks of a chunk; of its tiles the first `tiles` count, for others they are anything. One
/// warp.
__device__ __forceinline__ void sum_heads(const ScratchTile* chunk, int tiles, const float4& minus_lse,
                                          float* importance, int lane) {
  // As rows of the first factor: block 4 r + j of the first two tiles and of the other two in product j, r = 0 .. 7.
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
  if (c % 2 == r / 4)  // of the columns, those of the row's own tile
    *reinterpret_cast<float4*>(importance + c / 2 * 32 + 4 * r) = make_float4(sum[0], sum[1], sum[2], sum[3]);
}

/// A picking warp's way of reading the scratch: a ring of chunks in shared memory.
class ChunkRing {
 public:
  __device__ ChunkRing(char* memory, std::uint64_t* full, int chunks) : memory_(memory), full_(full), chunks_(chunks) {}

  /// Importances of blocks 0 .. `blocks` - 1 up to a common factor; anything to the next multiple of 64.
  __device__ __forceinline__ void sum(const ScratchTile* scratch, int blocks, const float4& minus_lse,
                                      float* importance, int lane) {
    const int tiles = (blocks + kBlocks - 1) / kBlocks, all = (tiles + kChunkTiles - 1) / kChunkTiles;
    fence_global_async();
    for (int i = 0; i < min(all, chunks_); ++i)
      fetch(scratch, i, tiles, stage_ + i < chunks_ ? stage_ + i : stage_ + i - chunks_, lane);
    for (int i = 0; i < all; ++i) {
      wait(shared_address(full_ + stage_), parity_);
      sum_heads(chunk(stage_), tiles - i * kChunkTiles, minus_lse, importance + i * kChunkTiles * kBlocks, lane);
      fence_async();
      __syncwarp();
      if (i + chunks_ < all) fetch(scratch, i + chunks_, tiles, stage_, lane);
      if (++stage_ == chunks_) stage_ = 0, parity_ ^= 1;
    }
  }

 private:
  __device__ ScratchTile* chunk(int stage) const {
    return reinterpret_cast<ScratchTile*>(memory_) + stage * kChunkTiles;
  }
  __device__ __forceinline__ void fetch(const ScratchTile* scratch, int i, int tiles, int stage, int lane) const {
    if (lane != 0) return;
    const int bytes = min(tiles - i * kChunkTiles, kChunkTiles) * static_cast<int>(sizeof(ScratchTile));
    arrive_expecting(shared_address(full_ + stage), bytes);
    load_bytes(shared_address(chunk(stage)), scratch + i * kChunkTiles, bytes, shared_address(full_ + stage));
  }

  char* memory_;
  std::uint64_t* full_;
  int chunks_, stage_ = 0;
  std::uint32_t parity_ = 0;
};

/// How many of `lanes` come before this one.
__device__ __forceinline__ int before(unsigned lanes, int lane) { return __popc(lanes & ((1u << lane) - 1)); }

/// Writes the `places` blocks of highest importance among first .. last - 1 in ascending order; of equals, the earlier.
/// There are more than `places`. Importances are not negative; anything else does no harm. Overwrites those before
/// `first`, and from `last` to the next multiple of 128. One warp.
__device__ __forceinline__ void pick(float* importance, int first, int last, int places, uint2* list, int* out,
                                     int lane) {
  const auto key = [&](int j) { return __float_as_uint(importance[j]); };  // orders like the floats
  for (int j = lane; j < first; j += 32) importance[j] = 0;
  for (int j = last + lane; j < (last + 127) / 128 * 128; j += 32) importance[j] = 0;
  __syncwarp();
  // At least `places` blocks reach the `places`-th largest of the lanes' maxima, and seldom many more.
  unsigned most = 0, bound = 0;
#pragma unroll 2
  for (int begin = 0; begin < last; begin += 128) {
#pragma unroll
    for (int u = 0; u < 4; ++u) most = max(most, key(begin + 32 * u + lane));
  }
  if (places <= 32) {
    int rank = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const unsigned other = __shfl_sync(0xffffffffu, most, i);
      rank += other > most || (other == most && i < lane);
    }
    bound = __shfl_sync(0xffffffffu, most, __ffs(__ballot_sync(0xffffffffu, rank == places - 1)) - 1);
  }
  int listed = bound > 0 ? 0 : kListed + 1;
  for (int begin = 0; begin < last && listed <= kListed; begin += 128) {
    unsigned x[4], lanes[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) x[u] = key(begin + 32 * u + lane);
#pragma unroll
    for (int u = 0; u < 4; ++u) lanes[u] = __ballot_sync(0xffffffffu, x[u] >= bound);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      if (lanes[u] == 0) continue;
      const int at = listed + before(lanes[u], lane);
      if (x[u] >= bound && at < kListed) list[at] = make_uint2(x[u], static_cast<unsigned>(begin + 32 * u + lane));
      listed += __popc(lanes[u]);
    }
  }
  __syncwarp();
  if (listed <= kListed) {
    const uint2 mine = lane < listed ? list[lane] : make_uint2(0, 0);  // below all of the others
    int rank = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const unsigned other = __shfl_sync(0xffffffffu, mine.x, i);
      rank += other > mine.x || (other == mine.x && i < lane);
    }
    const unsigned lanes = __ballot_sync(0xffffffffu, rank < places);
    if (rank < places) out[before(lanes, lane)] = static_cast<int>(mine.y);
    return;
  }
  // Many equal ones, or many places: the largest threshold that `places` blocks reach, bit by bit.
  const auto reach = [&](unsigned threshold) {
    int n = 0;
    for (int j = first + lane; j < last; j += 32) n += key(j) >= threshold;
    return static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(n)));
  };
  unsigned threshold = 0;
  for (int bit = 31; bit >= 0; --bit)
    if (reach(threshold | 1u << bit) >= places) threshold |= 1u << bit;
  int ties = places - (threshold == 0xffffffffu ? 0 : reach(threshold + 1));
  for (int begin = first, written = 0; begin < last; begin += 32) {
    const int j = begin + lane;
    const unsigned x = j < last ? key(j) : 0;
    const unsigned tied = __ballot_sync(0xffffffffu, j < last && x == threshold);
    const bool chosen = j < last && (x > threshold || (x == threshold && before(tied, lane) < ties));
    const unsigned lanes = __ballot_sync(0xffffffffu, chosen);
    if (chosen) out[written + before(lanes, lane)] = j;
    written += __popc(lanes);
    ties -= min(ties, __popc(tied));
  }
}

/// Warps 1 .. 3 of the helping warpgroup; they take turns at the queries of a tile.
__device__ __forceinline__ void choose_blocks(const CompressedSelectArgs& args, Barriers& barriers, ChunkRing ring,
                                              uint2* list, float* importance, int picker) {
  const Geometry& p = args.range.geometry;
  const int lane = threadIdx.x % 32;
  Place<kBuffers> buffer;
  TileWalk walk(p, RowShape(16), kQueries);
  while (walk.next()) {
    for (int own = picker; own < kQueries; own += kPickers) {
      wait(shared_address(&barriers.scored[buffer.stage][own]), buffer.parity);
      const int query = walk.first_query + own;
      const int candidates = query < walk.seq.q_len ? walk.seq.position(query) / args.block_size + 1 : 0;
      const int last = candidates - args.local_blocks;  // the first of the forced last blocks
      const bool choice = candidates > args.topk;
      if (choice) {
        float4 minus_lse = barriers.minus_lse[buffer.stage][own][lane % 4];
        minus_lse.x += kAddedExponent, minus_lse.y += kAddedExponent;
        minus_lse.z += kAddedExponent, minus_lse.w += kAddedExponent;
        ring.sum(scratch_of(args, buffer.stage, own), last, minus_lse, importance, lane);
      }
      __syncwarp();
      if (lane == 0) arrive(shared_address(&barriers.read[buffer.stage][own]));
      if (query >= walk.seq.q_len) continue;
      int* out = args.indices.template at<int>(walk.seq.batch, walk.seq.q_begin + query, walk.kv_head);
      if (!choice) {
        for (int i = lane; i < args.topk; i += 32) out[i] = i < candidates ? i : -1;
        continue;
      }
      const int places = args.topk - args.init_blocks - args.local_blocks;
      for (int i = lane; i < args.init_blocks; i += 32) out[i] = i;
      for (int i = lane; i < args.local_blocks; i += 32) out[args.init_blocks + places + i] = last + i;
      if (places > 0) pick(importance, args.init_blocks, last, places, list, out + args.init_blocks, lane);
      __syncwarp();
    }
    buffer.advance();
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads, 1)
    compressed_select(const __grid_constant__ Maps maps, const __grid_constant__ CompressedSelectArgs args,
                      const __grid_constant__ Divider by_stride) {
  using L = Layout<D>;
  extern __shared__ __align__(1024) char memory[];
  __shared__ Barriers barriers;
  const Geometry& p = args.range.geometry;
  if (stood_in_for(args.flag)) return;
  const std::uint32_t queries = (shared_address(memory) + 1023) & ~1023u;
  const std::uint32_t keys = queries + kGroups * L::kQueryBytes, values = keys + kStages * L::kTileBytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&barriers.key_full[i]), 1);
      barrier_init(shared_address(&barriers.value_full[i]), 1);
      barrier_init(shared_address(&barriers.key_free[i]), kGroups * 4);
      barrier_init(shared_address(&barriers.value_free[i]), kGroups * 4);
    }
    for (int i = 0; i < kGroups; ++i) {
      barrier_init(shared_address(&barriers.query_full[i]), 1);
      barrier_init(shared_address(&barriers.query_free[i]), 4);
    }
    for (int i = 0; i < kBuffers * kQueries; ++i) {
      barrier_init(shared_address(&barriers.scored[0][0] + i), 1);
      barrier_init(shared_address(&barriers.read[0][0] + i), 1);
    }
    for (int i = 0; i < kPickers * kMostChunks; ++i) barrier_init(shared_address(&barriers.chunk_full[0][0] + i), 1);
    barriers_ready();
  }
  __syncthreads();

  const int warp = uniform(threadIdx.x / 32);
  if (warp < kGroups * 4) {
    more_registers<kComputeRegisters>();
    attend<T, D>(args, by_stride, barriers, queries, keys, values, warp / 4);
  } else {
    fewer_registers<kHelperRegisters>();
    const int helper = warp - kGroups * 4;
    if (helper == 0) {
      load_keys<D>(args, maps, barriers, queries, keys, values);
    } else {
      char* own = memory + (values + kStages * L::kTileBytes - shared_address(memory)) +
                  (helper - 1) * L::picker(selection_blocks(p, args.block_size), args.chunks);
      uint2* list = reinterpret_cast<uint2*>(own + args.chunks * L::kChunkBytes);
      choose_blocks(args, barriers, {own, barriers.chunk_full[helper - 1], args.chunks}, list,
                    reinterpret_cast<float*>(list + kListed), helper - 1);
    }
  }
}

}  // namespace

template <>
cudaError_t launch_compressed_select<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const CompressedSelectArgs& call,
                                                                              cudaStream_t stream) {
  constexpr int D = NSA_KEY_DIM;
  static_assert(NSA_VALUE_DIM == D);
  using L = Layout<D>;
  constexpr int kDynamic = kSharedMemory - (static_cast<int>(sizeof(Barriers)) + 1023) / 1024 * 1024;
  static_assert(L::memory(CompressedSelectScratch::kBlocks, 1) <= kDynamic);
  CompressedSelectArgs args = call;
  const Geometry& g = args.range.geometry;
  const CompressedSelectScratch scratch(g);
  if (query_rows(g) == 0 || g.batches == 0) return cudaSuccess;
  int processors = 0;
  cudaError_t error = multiprocessors(processors);
  const int batches = tensor_batches(g);
  const std::int64_t rows = compressed_rows(g);
  args.spread_rows = static_cast<int>(spread_rows(rows));
  const int blocks = selection_blocks(g, args.block_size);
  args.chunks = kMostChunks;
  while (args.chunks > 1 && L::memory(blocks, args.chunks) > kDynamic) --args.chunks;
  // Without a key nothing is read through the maps of keys and values.
  const Strided &k = rows > 0 ? args.range.k : args.range.q, &v = rows > 0 ? args.range.v : args.range.q;
  Maps maps;
  if (error == cudaSuccess) error = make_map(maps.q, args.range.q, D, g.heads, query_rows(g), batches, 16, 4);
  if (error == cudaSuccess) error = make_spread_map(maps.k, k, D, g.kv_heads, rows, batches);
  if (error == cudaSuccess) error = make_spread_map(maps.v, v, D, g.kv_heads, rows, batches);
  if (error == cudaSuccess) error = make_map(maps.k_row, k, D, g.kv_heads, rows, batches, 1, 1);
  if (error == cudaSuccess) error = make_map(maps.v_row, v, D, g.kv_heads, rows, batches, 1, 1);
  if (error != cudaSuccess) return error;
  return portable::launch(compressed_select<NSA_ELEMENT, D>, std::min(scratch.thread_blocks, processors), kThreads,
                          L::memory(blocks, args.chunks), stream, maps, args, Divider(g.kernel_stride));
}

}  // namespace nsa::cuda::sm90
