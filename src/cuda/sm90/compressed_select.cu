// Compressed attention, importance and the choice of blocks in one pass over the compressed keys, for compression
// blocks of l = 2d and selection blocks of l' = 4d tokens.
//
// The attention is that of range_forward.cu: a warp has a unit of sixteen rows (SelectUnits). Keys of a tile lie spread
// (make_spread_map), so that a lane owns sixteen neighbouring keys of two rows: four selection blocks. The importance
// of a block under one head is a weighted sum (1, 2, 2, 2, 1) of five probabilities, known up to a factor until the
// last key is seen. Data flow of the importances of a unit:
//
//   its warp        per key tile the weighted sums of its sixteen blocks and sixteen rows as fp16, relative to the
//                   rows' references at that time, and the references -> a scratch of this thread block in global
//                   memory; at the end -lse of the rows -> shared memory
//   a picking warp  the scratch, by the copy engine, times 2^(reference - lse), summed over the heads of a query
//                   (importance.cuh), of a large group over its units in order too -> keys to rank by, in shared
//                   memory, or those of four queries in global memory -> the blocks chosen (pick.cuh)
//
// The computing warps go on with later queries meanwhile: the scratch has kBuffers places per unit of a tile. fp16 is
// enough: what it loses of a probability is 2^-11 of it or 2^-25.
#include <algorithm>

#include "cuda/portable/launch.cuh"
#include "cuda/portable/ranks.cuh"
#include "cuda/sm90/forward_parts.cuh"
#include "cuda/sm90/importance.cuh"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/maps.h"
#include "cuda/sm90/pick.cuh"

namespace nsa::cuda::sm90 {
namespace {

constexpr int kGroups = 3, kThreads = (kGroups + 1) * 128;
constexpr int kUnits = kGroups * 4;
static_assert(kUnits == SelectUnits::kUnits);
constexpr int kKeys = 64;  // of a key tile
constexpr int kComputeRegisters = 144, kHelperRegisters = 80;
constexpr int kStages = 4;
constexpr int kBuffers = CompressedSelectScratch::kBuffers, kPickers = CompressedSelectScratch::kPickers;
constexpr int kMostChunks = 4;  // on their way; fewer where shared memory is full of keys to rank by

template <int D>
struct Layout {
  static constexpr int kTileBytes = kKeys * D * 2, kQueryBytes = 64 * D * 2;
  static constexpr int kFixed = 1024 + kGroups * kQueryBytes + 2 * kStages * kTileBytes;
  /// Of a picking warp: chunks, then a list and keys of a query, or lists of four.
  __host__ __device__ static constexpr int picker(const SelectUnits& units, int blocks, int chunks) {
    return chunks * ChunkRing::kChunkBytes + (units.together > 1 ? 4 * kListed * 8 : kListed * 8 + keys(blocks));
  }
  __host__ __device__ static constexpr int keys(int blocks) { return (blocks + 127) / 128 * 512; }
  static constexpr int memory(const SelectUnits& units, int blocks, int chunks) {
    return kFixed + kPickers * picker(units, blocks, chunks);
  }
};

struct Barriers {
  std::uint64_t key_full[kStages], key_free[kStages], value_full[kStages], value_free[kStages];
  std::uint64_t query_full[kGroups], query_free[kGroups];
  GroupTile tiles[kGroups][2];                                     // the one at work and the next one
  std::uint64_t scored[kBuffers][kUnits], read[kBuffers][kUnits];  // the scratch is complete; may be overwritten
  std::uint64_t chunk_full[kPickers][kMostChunks];
  MinusLse minus_lse[kBuffers][kUnits];
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

/// Units: SelectUnits, or UnitsOfSixteen.
template <class Units>
__device__ __forceinline__ decltype(auto) units_of(const CompressedSelectArgs& args) {
  if constexpr (std::is_same_v<Units, SelectUnits>) {
    return (args.units);
  } else {
    return Units{};
  }
}

/// Whole groups: the units take care of slices.
template <class Units>
__device__ __forceinline__ TileWalk walk_of(const CompressedSelectArgs& args) {
  const Units& units = units_of<Units>(args);
  return TileWalk(args.range.geometry, RowShape(units.heads), units.queries);
}
/// Here rows, heads and positions of a GroupTile are those of the thread block's tile, and so is the number of queries.
template <class Units>
__device__ __forceinline__ GroupTile tile_of(const CompressedSelectArgs& args, const TileWalk& walk,
                                             const KeyTiles& keys, int group) {
  const Geometry& p = args.range.geometry;
  const Units& units = units_of<Units>(args);
  const int queries = min(units.queries, walk.seq.q_len - walk.first_query);
  const int first = units.first_query(4 * group), end = units.first_query(4 * group + 3) + units.together;
  GroupTile tile{queries,
                 walk.seq.batch,
                 walk.seq.q_begin + walk.first_query,
                 walk.kv_head * p.group,
                 walk.seq.position(walk.first_query),
                 0,
                 keys.count,
                 0,
                 0};
  if (first < queries) tile.end = (visible_keys(p, 0, tile.position + min(end, queries) - 1).last + kKeys - 1) / kKeys;
  return tile;
}

/// Neighbouring units whose rows follow each other as those of one box do.
template <class Units>
__host__ __device__ constexpr int units_per_box(const Units& units) {
  return units.slices == 1 && units.rows() == 16 ? 4 : 1;
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
template <int D, class Units>
__device__ __forceinline__ void load_keys(const CompressedSelectArgs& args, const Maps& maps, Barriers& barriers,
                                          std::uint32_t queries, std::uint32_t keys, std::uint32_t values) {
  using L = Layout<D>;
  const Units& units = units_of<Units>(args);
  const int lane = threadIdx.x % 32;
  Place<kStages> place;
  std::uint32_t parity = 0;
  TileWalk walk = walk_of<Units>(args);
  for (bool more = true; more; parity ^= 1) {
    more = walk.next();
    KeyTiles tiles;
    if (more) tiles = key_tiles<kKeys>(args.range.geometry, 0, walk.seq, walk.first_query, units.queries);
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
      tile = tile_of<Units>(args, walk, tiles, group);
      arrive_expecting(full, 4 * units.rows() * D * 2);
      const std::uint32_t to = queries + group * L::kQueryBytes;
      for (int unit = 0; unit < 4; unit += units_per_box(units)) {
        const int head = tile.head + units.first_head(4 * group + unit);
        const int row = tile.row + units.first_query(4 * group + unit);
#pragma unroll
        for (int column = 0; column < D; column += 64)
          load_box(to + column * 64 * 2 + unit * 16 * 128, maps.q, column, head, row, tile.batch, full);
      }
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

/// The scratch of a unit of this thread block's tile.
__device__ __forceinline__ ScratchTile* scratch_of(const CompressedSelectArgs& args, int buffer, int unit) {
  return static_cast<ScratchTile*>(args.scratch) +
         static_cast<std::int64_t>((blockIdx.x * kBuffers + buffer) * kUnits + unit) *
             scratch_tiles(args.range.geometry);
}

/// A computing warpgroup.
template <class T, int D, class Units>
__device__ __forceinline__ void attend(const CompressedSelectArgs& args, const Divider& by_stride, Barriers& barriers,
                                       std::uint32_t queries, std::uint32_t keys, std::uint32_t values, int group) {
  using L = Layout<D>;
  const Geometry& p = args.range.geometry;
  const Units& units = units_of<Units>(args);
  const int lane = threadIdx.x % 32, own = uniform(threadIdx.x / 32);  // own: unit of the tile
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
    // Keys that a row sees; none if it is not there, so that a NaN in its place goes nowhere.
    const auto seen_by = [&](int row) {
      const int query = units.first_query(own) + units.query_of(row);
      return query < tile.queries ? num_compressed(p, by_stride, tile.position + query + 1) : 0;
    };
    const auto seen_by_all = [&] { return min(seen_by(0), seen_by(units.rows() - 1)); };
    int visible = seen_by_all();  // of these keys, those from the next tile on
    char* scratch = reinterpret_cast<char*>(scratch_of(args, buffer.stage, own)) + lane * 16;
    const auto mask = [&](float(&s)[kKeys / 2]) {
      if (args.range.scale < 0) {
#pragma unroll
        for (float& x : s) x = -x;
      }
      if (visible < kKeys) {
        constexpr bool kAlike = std::is_same_v<Units, UnitsOfSixteen>;  // all rows
        const int before = kAlike ? 0 : seen_by_all() - visible;        // keys of the tiles before
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int seen = (kAlike ? visible : seen_by(lane / 4 + 8 * i) - before) - 16 * (lane & 3);
#pragma unroll
          for (int key = 0; key < 16; ++key)
            if (key >= seen) s[ScoringSoftmax::at(i, key)] = -INFINITY;
        }
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
      const bool any = seen_by(lane / 4 + 8 * i) > 0;
      inverse[i] = any ? __fdividef(1, sum) : 0;
      lse[i] = any ? softmax.max[i] + log2f(sum) : -INFINITY;
    }
    if ((lane & 3) == 0)
      *reinterpret_cast<float2*>(reinterpret_cast<char*>(barriers.minus_lse[buffer.stage][own]) + lane / 4 % 4 * 16 +
                                 lane / 16 * 8) =
          make_float2(lane / 4 < units.rows() ? -lse[0] : -INFINITY, lane / 4 + 8 < units.rows() ? -lse[1] : -INFINITY);
    __syncwarp();
    give_back(&barriers.scored[buffer.stage][own]);
    buffer.advance();

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + 8 * i, query = units.query_of(row);
      const int at = units.first_query(own) + query,
                head = tile.head + units.first_head(own) + row - query * units.heads;
      const bool valid = row < units.rows() && at < tile.queries;
      T* to = args.range.o.template at<T>(tile.batch, tile.row + at, head);
      store_row(to, o, i, inverse[i], valid, lane);
      if (valid && lane % 4 == 0) {
        args.range.lse.at(tile.batch, tile.row + at, head) = lse[i] * kLn2;
        if (lse[i] != lse[i]) *args.flag = 1;
      }
    }
  }
}

/// What a query chooses among.
struct Candidates {
  int position;
  int count;    // 0: it is no query of the sequence
  int last;     // the first of the forced last blocks
  bool choice;  // more than are to be taken

  __device__ __forceinline__ Candidates(const CompressedSelectArgs& args, const DeviceSequence& seq, int query)
      : position(seq.position(query)),
        count(query < seq.q_len ? args.by_block.quotient(position) + 1 : 0),
        last(count - args.local_blocks),
        choice(count > args.topk) {}
};

/// The blocks that a query takes in any case: all of them, or the forced ones. `lane` of so many.
__device__ __forceinline__ void write_forced(const CompressedSelectArgs& args, const Candidates& candidates, int* out,
                                             int lane, int lanes) {
  if (!candidates.choice) {
    for (int i = lane; i < args.topk; i += lanes) out[i] = i < candidates.count ? i : -1;
  } else {
    for (int i = lane; i < args.init_blocks; i += lanes) out[i] = i;
    for (int i = lane; i < args.local_blocks; i += lanes) out[args.topk - args.local_blocks + i] = candidates.last + i;
  }
}

/// A picking warp: warps 1 .. 3 of the helping warpgroup take turns at the units of a tile.
template <class Units>
class Picker {
 public:
  __device__ Picker(const CompressedSelectArgs& args, Barriers& barriers, const ChunkRing& ring, uint2* list,
                    int number)
      : args_(args), barriers_(barriers), ring_(ring), list_(list), number_(number), lane_(threadIdx.x % 32) {}

  /// Of units of one query, or slices of one.
  __device__ __forceinline__ void choose_by_query(unsigned* keys) {
    const Units& units = units_of<Units>(args_);
    for (TileWalk walk = walk_of<Units>(args_); walk.next(); buffer_.advance()) {
      for (int query = number_; query * units.slices < kUnits; query += kPickers) {
        const bool in_tile = query < units.queries;  // else some units are left over
        const Candidates own(args_, walk.seq, in_tile ? walk.first_query + query : walk.seq.q_len);
        for (int slice = 0; slice < min(units.slices, kUnits - query * units.slices); ++slice) {
          const int unit = query * units.slices + slice;
          wait_for(unit);
          if (own.choice) sum(unit, own.last, slice > 0, reinterpret_cast<float*>(keys));
          give_back(unit);
        }
        if (own.count == 0) continue;
        int* out = indices_of(walk, query);
        write_forced(args_, own, out, lane_, 32);
        if (!own.choice || places() == 0) continue;
        if (args_.noise > 0) {
          for (int j = args_.init_blocks + lane_; j < own.last; j += 32)
            keys[j] = explore(keys[j], j, own.position, walk);
        }
        pick(keys, args_.init_blocks, own.last, places(), list_, out + args_.init_blocks, lane_);
        __syncwarp();
      }
    }
  }

  /// Of units of several queries, four at a time.
  __device__ __forceinline__ void choose_by_quad(uint4* keys) {
    for (TileWalk walk = walk_of<Units>(args_); walk.next(); buffer_.advance()) {
      for (int unit = number_; unit < kUnits; unit += kPickers) {
        wait_for(unit);
#pragma unroll 1
        for (int quad = 0; quad < args_.units.together; quad += 4) choose_of_quad(walk, unit, quad, keys);
      }
    }
  }

 private:
  __device__ __forceinline__ void wait_for(int unit) const {
    wait(shared_address(&barriers_.scored[buffer_.stage][unit]), buffer_.parity);
  }
  __device__ __forceinline__ void give_back(int unit) const {
    __syncwarp();
    if (lane_ == 0) arrive(shared_address(&barriers_.read[buffer_.stage][unit]));
  }
  __device__ __forceinline__ int places() const { return args_.topk - args_.init_blocks - args_.local_blocks; }
  __device__ __forceinline__ int* indices_of(const TileWalk& walk, int query) const {
    return args_.indices.template at<int>(walk.seq.batch, walk.seq.q_begin + walk.first_query + query, walk.kv_head);
  }
  /// key: of an importance.
  __device__ __forceinline__ unsigned explore(unsigned key, int block, int position, const TileWalk& walk) const {
    const float share = __uint_as_float(key) * (args_.share * (1.f / (1 << kAddedExponent)));
    return portable::ordered(
        portable::explored(share, args_.noise, again(args_.seed), block, position, walk.kv_head, walk.seq.index));
  }

  /// Importances of blocks 0 .. `blocks` - 1 times 2^kAddedExponent; anything to the next multiple of 64.
  __device__ __forceinline__ void sum(int unit, int blocks, bool add, float* importance) {
    float4 minus_lse = barriers_.minus_lse[buffer_.stage][unit][lane_ % 4];
    minus_lse.x += kAddedExponent, minus_lse.y += kAddedExponent;
    minus_lse.z += kAddedExponent, minus_lse.w += kAddedExponent;
    ring_.read(scratch_of(args_, buffer_.stage, unit), blocks, lane_, [&](const ScratchTile* chunk, int i, int tiles) {
      sum_heads(chunk, tiles, minus_lse, add, importance + i * kChunkTiles * kBlocks, lane_);
    });
  }

  /// Four queries of a unit from number `quad` on.
  __device__ __forceinline__ void choose_of_quad(const TileWalk& walk, int unit, int quad, uint4* keys) {
    const int first = walk.first_query + args_.units.first_query(unit) + quad;
    const int count = min(min(4, args_.units.together - quad), walk.seq.q_len - first);  // of them; not always positive
    const bool there = lane_ % 4 < count, is_last = quad + 4 >= args_.units.together;
    const Candidates own(args_, walk.seq, there ? first + lane_ % 4 : walk.seq.q_len);
    int* out = indices_of(walk, there ? first + lane_ % 4 - walk.first_query : 0);
    if (there) write_forced(args_, own, out, lane_ / 4, 8);
    const int last = own.choice ? own.last : 0;
    const int most_blocks = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(last)));
    const int least = static_cast<int>(__reduce_min_sync(0xffffffffu, static_cast<unsigned>(last)));
    if (most_blocks == 0) {  // nothing to choose
      if (is_last) give_back(unit);
      return;
    }
    const QuadOfQueries sums(barriers_.minus_lse[buffer_.stage][unit], args_.units.heads, quad, lane_);
    unsigned most[4] = {};
    int vectors = 0;
    ring_.read(scratch_of(args_, buffer_.stage, unit), most_blocks, lane_,
               [&](const ScratchTile* chunk, int i, int tiles) {
                 unsigned x[kChunkTiles][2];
#pragma unroll
                 for (int t = 0; t < kChunkTiles; ++t) {
                   const float2 sum = sums.of(chunk[min(t, tiles - 1)]);
                   x[t][0] = __float_as_uint(sum.x), x[t][1] = __float_as_uint(sum.y);
                 }
                 const int begin = i * kChunkTiles * kBlocks;
                 if (begin < args_.init_blocks || begin + kChunkTiles * kBlocks > least) {  // some do not count
#pragma unroll
                   for (int e = 0; e < 2 * kChunkTiles; ++e) {
                     const int block = begin + e / 2 * kBlocks + lane_ / 4 * 2 + e % 2;
                     if (block < args_.init_blocks || block >= last) x[e / 2][e % 2] = 0;
                   }
                 }
#pragma unroll
                 for (int e = 0; e < 2 * kChunkTiles; ++e) most[e % 4] = max(most[e % 4], x[e / 2][e % 2]);
#pragma unroll
                 for (int half = 0; half < 2; ++half)
                   keys[(vectors + half) * 32 + lane_] =
                       make_uint4(x[2 * half][0], x[2 * half][1], x[2 * half + 1][0], x[2 * half + 1][1]);
                 vectors += 2;
               });
    if (is_last) give_back(unit);
    if (places() == 0) return;
    if (args_.noise > 0) explore_all(walk, own.position, keys, vectors, last, most);
    QuadPicker(keys, vectors, args_.init_blocks, last, lane_).pick(most, places(), list_, out + args_.init_blocks);
  }

  __device__ __forceinline__ void explore_all(const TileWalk& walk, int position, uint4* keys, int vectors, int last,
                                              unsigned (&most)[4]) const {
#pragma unroll
    for (unsigned& x : most) x = 0;
#pragma unroll 1
    for (int n = 0; n < vectors; ++n) {
      const uint4 before = keys[n * 32 + lane_];
      unsigned x[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int block = 32 * n + e / 2 * kBlocks + lane_ / 4 * 2 + e % 2;
        if (block >= args_.init_blocks && block < last) x[e] = explore(x[e], block, position, walk);
        most[e] = max(most[e], x[e]);
      }
      keys[n * 32 + lane_] = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }

  const CompressedSelectArgs& args_;
  Barriers& barriers_;
  ChunkRing ring_;
  uint2* list_;
  int number_, lane_;
  Place<kBuffers> buffer_;
};

/// kQuads: for units of several queries.
template <class T, int D, class Units, bool kQuads>
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
    for (int i = 0; i < kBuffers * kUnits; ++i) {
      barrier_init(shared_address(&barriers.scored[0][0] + i), 1);
      barrier_init(shared_address(&barriers.read[0][0] + i), 1);
    }
    for (int i = 0; i < kPickers * kMostChunks; ++i) barrier_init(shared_address(&barriers.chunk_full[0][0] + i), 1);
    barriers_ready();
  }
  if (units_of<Units>(args).rows() < 16) {  // rows without use stay zero: the copy engine does not touch them
    auto* pieces = reinterpret_cast<uint4*>(memory + (queries - shared_address(memory)));
    for (int i = threadIdx.x; i < kGroups * L::kQueryBytes / 16; i += kThreads) pieces[i] = uint4{};
    fence_async();
  }
  __syncthreads();

  const int warp = uniform(threadIdx.x / 32);
  if (warp < kGroups * 4) {
    more_registers<kComputeRegisters>();
    attend<T, D, Units>(args, by_stride, barriers, queries, keys, values, warp / 4);
  } else {
    fewer_registers<kHelperRegisters>();
    const int helper = warp - kGroups * 4;
    if (helper == 0) {
      load_keys<D, Units>(args, maps, barriers, queries, keys, values);
    } else {
      const int blocks = selection_blocks(p, args.block_size), picker = helper - 1;
      char* own = memory + (values + kStages * L::kTileBytes - shared_address(memory)) +
                  picker * L::picker(args.units, blocks, args.chunks);
      uint2* list = reinterpret_cast<uint2*>(own + args.chunks * ChunkRing::kChunkBytes);
      Picker<Units> pick(args, barriers, {own, barriers.chunk_full[picker], args.chunks}, list, picker);
      if constexpr (kQuads) {
        const std::int64_t bytes = (scratch_tiles(p) + 3) / 4 * CompressedSelectScratch::kKeyBytes;
        pick.choose_by_quad(args.keys + (blockIdx.x * kPickers + picker) * (bytes / 16));
      } else {
        pick.choose_by_query(reinterpret_cast<unsigned*>(list + kListed));
      }
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
  CompressedSelectArgs args = call;
  const Geometry& g = args.range.geometry;
  const CompressedSelectScratch scratch(g);
  args.units = SelectUnits(g.group);
  args.by_block = Divider(args.block_size);
  args.keys = reinterpret_cast<uint4*>(static_cast<char*>(args.scratch) + scratch.sums);
  if (query_rows(g) == 0 || g.batches == 0) return cudaSuccess;
  int processors = 0;
  cudaError_t error = multiprocessors(processors);
  const int batches = tensor_batches(g);
  const std::int64_t rows = compressed_rows(g);
  args.spread_rows = static_cast<int>(spread_rows(rows));
  const int blocks = selection_blocks(g, args.block_size);
  args.chunks = kMostChunks;
  while (args.chunks > 1 && L::memory(args.units, blocks, args.chunks) > kDynamic) --args.chunks;
  // Without a key nothing is read through the maps of keys and values.
  const Strided &k = rows > 0 ? args.range.k : args.range.q, &v = rows > 0 ? args.range.v : args.range.q;
  Maps maps;
  if (error == cudaSuccess)
    error = make_map(maps.q, args.range.q, D, g.heads, query_rows(g), batches, args.units.heads,
                     args.units.together * units_per_box(args.units));
  if (error == cudaSuccess) error = make_spread_map(maps.k, k, D, g.kv_heads, rows, batches);
  if (error == cudaSuccess) error = make_spread_map(maps.v, v, D, g.kv_heads, rows, batches);
  if (error == cudaSuccess) error = make_map(maps.k_row, k, D, g.kv_heads, rows, batches, 1, 1);
  if (error == cudaSuccess) error = make_map(maps.v_row, v, D, g.kv_heads, rows, batches, 1, 1);
  if (error != cudaSuccess) return error;
  const auto kernel = args.units.together > 1 ? compressed_select<NSA_ELEMENT, D, SelectUnits, true>
                      : g.group != 16         ? compressed_select<NSA_ELEMENT, D, SelectUnits, false>
                                              : compressed_select<NSA_ELEMENT, D, UnitsOfSixteen, false>;
  return portable::launch(kernel, std::min(scratch.thread_blocks, processors), kThreads,
                          L::memory(args.units, blocks, args.chunks), stream, maps, args, Divider(g.kernel_stride));
}

}  // namespace nsa::cuda::sm90
