// A picking warp of compressed_select.cu: importances of the units that are complete, and the blocks chosen by them.
#pragma once

#include "cuda/portable/ranks.cuh"
#include "cuda/sm90/compressed_select_parts.cuh"

namespace nsa::cuda::sm90 {

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
template <class Units, class Blocks>
class Picker {
 public:
  __device__ Picker(const CompressedSelectArgs& args, SelectBarriers& barriers, const ChunkRing& ring, uint2* list,
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
          if (own.choice) sum(unit, sums_of(own), slice > 0, reinterpret_cast<float*>(keys));
          give_back(unit);
        }
        if (own.count == 0) continue;
        int* out = indices_of(walk, query);
        write_forced(args_, own, out, lane_, 32);
        if (!own.choice || places() == 0) continue;
        if constexpr (Blocks::kAddsKeysUp) {
          take_best_of_keys(walk, own, reinterpret_cast<float*>(keys), keys + args_.row, out);
        } else {
          take_best(walk, own, keys, out);
        }
      }
    }
  }

  /// Of units of several queries, four at a time.
  __device__ __forceinline__ void choose_by_quad(uint4* keys) {
    for (TileWalk walk = walk_of<Units>(args_); walk.next(); buffer_.advance()) {
      for (int unit = number_; unit < kUnits; unit += kPickers) {
        wait_for(unit);
#pragma unroll 1
        for (int quad = 0; quad < args_.units.together; quad += 4) {
          if constexpr (Blocks::kAddsKeysUp) {
            choose_one_by_one(walk, unit, quad, reinterpret_cast<float*>(keys));
          } else {
            choose_of_quad(walk, unit, quad, keys);
          }
        }
      }
    }
  }

 private:
  static constexpr int kChunkBlocks = kChunkTiles * kTileSums / Blocks::kSums;

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

  /// The first sums of the scratch, those that the candidates are made of. Of keys the visible ones: what is beyond
  /// them may never have been written.
  __device__ __forceinline__ int sums_of(const Candidates& own) const {
    if constexpr (!Blocks::kAddsKeysUp) return own.last * Blocks::kSums;
    return min(visible_keys(args_.range.geometry, 0, own.position).last, own.last * strides_of_block());
  }
  __device__ __forceinline__ int strides_of_block() const {
    return args_.block_size / args_.range.geometry.kernel_stride;
  }

  /// The blocks of one query by their keys, which exploration changes.
  __device__ __forceinline__ void take_best(const TileWalk& walk, const Candidates& own, unsigned* keys, int* out) {
    if (args_.noise > 0) {
      for (int j = args_.init_blocks + lane_; j < own.last; j += 32)
        keys[j] = explore(keys[j], j, own.position, walk);
    }
    pick(keys, args_.init_blocks, own.last, places(), list_, out + args_.init_blocks, lane_);
    __syncwarp();
  }
  /// The same by the sums over heads of single compressed keys' probabilities: a key counts in a block by the strides
  /// that both have. keys: for the blocks.
  __device__ __forceinline__ void take_best_of_keys(const TileWalk& walk, const Candidates& own,
                                                    const float* probability, unsigned* keys, int* out) {
    const Geometry& g = args_.range.geometry;
    const int of_key = g.kernel_size / g.kernel_stride, of_block = strides_of_block(), visible = sums_of(own);
    __syncwarp();
#pragma unroll 1
    for (int j = args_.init_blocks + lane_; j < own.last; j += 32) {
      const int begin = j * of_block, end = begin + of_block;
      float importance = 0;
#pragma unroll 1
      for (int i = max(begin - of_key + 1, 0); i < min(end, visible); ++i)
        importance += probability[i] * static_cast<float>(min(i + of_key, end) - max(i, begin));
      keys[j] = __float_as_uint(importance);
    }
    __syncwarp();
    take_best(walk, own, keys, out);
  }

  /// The first `sums` sums of the scratch over heads, times 2^kAddedExponent, as importances of blocks; anything to the
  /// end of the last chunk.
  __device__ __forceinline__ void sum(int unit, int sums, bool add, float* importance) {
    float4 minus_lse = barriers_.minus_lse[buffer_.stage][unit][lane_ % 4];
    minus_lse.x += kAddedExponent, minus_lse.y += kAddedExponent;
    minus_lse.z += kAddedExponent, minus_lse.w += kAddedExponent;
    ring_.read(scratch_of<Blocks>(args_, buffer_.stage, unit), sums, lane_,
               [&](const ScratchTile* chunk, int i, int tiles) {
                 sum_heads<Blocks::kSums>(chunk, tiles, minus_lse, add, importance + i * kChunkBlocks, lane_);
               });
  }

  /// Of four queries: importances of the lane's two of sixteen blocks, the n-th sixteen of a chunk.
  __device__ __forceinline__ static float2 of_sixteen(const QuadOfQueries& sums, const ScratchTile* chunk, int tiles,
                                                      int n) {
    if constexpr (Blocks::kSums == 1) {
      return sums.of(chunk[min(n, tiles - 1)]);
    } else {
      return sums.of(chunk[min(2 * n, tiles - 1)], chunk[min(2 * n + 1, tiles - 1)]);
    }
  }
  /// Block e of the lane's, of which every sixteen blocks from `begin` on have two.
  __device__ __forceinline__ int block_of(int begin, int e) const { return begin + e / 2 * 16 + lane_ / 4 * 2 + e % 2; }

  /// Four queries of a unit from number `quad` on: the sums of their keys together, then each for itself. memory: four
  /// rows, and keys of one query.
  __device__ __forceinline__ void choose_one_by_one(const TileWalk& walk, int unit, int quad, float* memory) {
    const int first = args_.units.first_query(unit) + quad;
    const int count = min(min(4, args_.units.together - quad), walk.seq.q_len - walk.first_query - first);
    const auto candidates = [&](int query) {
      return Candidates(args_, walk.seq, query < count ? walk.first_query + first + query : walk.seq.q_len);
    };
    const Candidates last = candidates(max(count, 1) - 1);  // sees the most
    if (last.choice && places() > 0) {
      const QuadOfQueries sums(barriers_.minus_lse[buffer_.stage][unit], args_.units.heads, quad, lane_);
      float* row = memory + lane_ % 4 * args_.row + lane_ / 4 * 2;
      ring_.read(scratch_of<Blocks>(args_, buffer_.stage, unit), sums_of(last), lane_,
                 [&](const ScratchTile* chunk, int i, int tiles) {
#pragma unroll
                   for (int n = 0; n < kChunkTiles; ++n)
                     *reinterpret_cast<float2*>(row + (i * kChunkTiles + n) * kTileSums) =
                         sums.of(chunk[min(n, tiles - 1)]);
                 });
    }
    if (quad + 4 >= args_.units.together) give_back(unit);
#pragma unroll 1
    for (int query = 0; query < count; ++query) {
      const Candidates own = candidates(query);
      int* out = indices_of(walk, first + query);
      write_forced(args_, own, out, lane_, 32);
      if (own.choice && places() > 0)
        take_best_of_keys(walk, own, memory + query * args_.row, reinterpret_cast<unsigned*>(memory + 4 * args_.row),
                          out);
    }
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
    constexpr int kVectors = kChunkBlocks / 32;
    ring_.read(scratch_of<Blocks>(args_, buffer_.stage, unit), most_blocks * Blocks::kSums, lane_,
               [&](const ScratchTile* chunk, int i, int tiles) {
                 unsigned x[4 * kVectors];
#pragma unroll
                 for (int n = 0; n < 2 * kVectors; ++n) {
                   const float2 sum = of_sixteen(sums, chunk, tiles, n);
                   x[2 * n] = __float_as_uint(sum.x), x[2 * n + 1] = __float_as_uint(sum.y);
                 }
                 const int begin = i * kChunkBlocks;
                 if (begin < args_.init_blocks || begin + kChunkBlocks > least) {  // some do not count
#pragma unroll
                   for (int e = 0; e < 4 * kVectors; ++e) {
                     const int block = block_of(begin, e);
                     if (block < args_.init_blocks || block >= last) x[e] = 0;
                   }
                 }
#pragma unroll
                 for (int e = 0; e < 4 * kVectors; ++e) most[e % 4] = max(most[e % 4], x[e]);
#pragma unroll
                 for (int n = 0; n < kVectors; ++n)
                   keys[(vectors + n) * 32 + lane_] = make_uint4(x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]);
                 vectors += kVectors;
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
        const int block = block_of(32 * n, e);
        if (block >= args_.init_blocks && block < last) x[e] = explore(x[e], block, position, walk);
        most[e] = max(most[e], x[e]);
      }
      keys[n * 32 + lane_] = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }

  const CompressedSelectArgs& args_;
  SelectBarriers& barriers_;
  ChunkRing ring_;
  uint2* list_;
  int number_, lane_;
  Place<kBuffers> buffer_;
};

}  // namespace nsa::cuda::sm90
