// A selector warp of compressed_select.cu: importances of the warp tiles that are complete, and the blocks chosen by
// them.
#pragma once

#include "cuda/common/gumbel.cuh"
#include "cuda/sm90/select_blocks/shared_memory.cuh"

namespace nsa::cuda::sm90::select_blocks {

/// What a query chooses among.
struct Candidates {
  int position;
  int count;    // 0: it is no query of the sequence
  int last;     // the first of the forced last blocks
  bool choice;  // more than are to be taken

  __device__ __forceinline__ Candidates(const CompressedSelectArgs& args, const DeviceSequence& seq, int query)
      : position(seq.position(query)),
        count(query < seq.q_len ? args.by_block.divide(position) + 1 : 0),
        last(count - args.local_blocks),
        choice(count > args.topk) {}
};

/// The blocks that a query takes in any case: all of them, or the forced ones. `lane` is one of `lanes`.
__device__ __forceinline__ void write_forced(const CompressedSelectArgs& args, const Candidates& candidates, int* out,
                                             int lane, int lanes) {
  if (!candidates.choice) {
    for (int i = lane; i < args.topk; i += lanes) out[i] = i < candidates.count ? i : -1;
  } else {
    for (int i = lane; i < args.init_blocks; i += lanes) out[i] = i;
    for (int i = lane; i < args.local_blocks; i += lanes) out[args.topk - args.local_blocks + i] = candidates.last + i;
  }
}

inline constexpr int kRingKeys = CompressedSelectScratch::kRingKeys;

/// AnyBlocks: the importance of a block from those of its keys, if there are no keys but the first `keys`. The last of
/// them lie in shared memory, key i at i % kRingKeys. A key counts in a block by the strides that both have.
__device__ __forceinline__ float block_of_keys(const CompressedSelectArgs& args, const float* key_ring, int block,
                                               int keys) {
  const int begin = block * args.by_strides.divisor, end = begin + args.by_strides.divisor;
  float sum = 0;
#pragma unroll 4
  for (int i = max(begin - args.strides_of_key + 1, 0); i < min(end, keys); ++i)
    sum += key_ring[i % kRingKeys] * static_cast<float>(min(i + args.strides_of_key, end) - max(i, begin));
  return sum;
}

/// A selector warp: warps 1 .. 3 of the helping warpgroup take turns at the warp tiles of a tile.
template <class Tiles, class Blocks>
class SelectorWarp {
 public:
  /// list, key_ring: its own shared memory; the ring for AnyBlocks.
  __device__ SelectorWarp(const CompressedSelectArgs& args, SelectBarriers& barriers, const ChunkRing& ring,
                          unsigned* list, float* key_ring, int number)
      : args_(args),
        barriers_(barriers),
        ring_(ring),
        list_(list),
        key_ring_(key_ring),
        number_(number),
        lane_(threadIdx.x % 32) {}

  /// Of warp tiles of one query, or slices of one. With kFiltered the keys lie in global memory, and `filter` is shared
  /// memory for their upper halves.
  template <bool kFiltered>
  __device__ __forceinline__ void choose_by_query(unsigned* keys, unsigned short* filter = nullptr) {
    const Tiles& warp_tiles = warp_tiles_of<Tiles>(args_);
    for (TileScheduler scheduler = scheduler_of<Tiles>(args_); scheduler.next(); buffer_.advance()) {
      for (int query = number_; query * warp_tiles.slices < kWarpTiles; query += kSelectorWarps) {
        const bool in_tile = query < warp_tiles.queries;  // else some warp tiles are left over
        const Candidates own(args_, scheduler.seq, in_tile ? scheduler.first_query + query : scheduler.seq.q_len);
        ClassMaxima maxima;
        for (int slice = 0; slice < min(warp_tiles.slices, kWarpTiles - query * warp_tiles.slices); ++slice) {
          const int warp_tile = query * warp_tiles.slices + slice;
          wait_for(warp_tile);
          if (own.choice) maxima = sum<kFiltered>(warp_tile, own, slice > 0, reinterpret_cast<float*>(keys), filter);
          consumer_release(warp_tile);
        }
        if (own.count == 0) continue;
        int* out = indices_of(scheduler, query);
        write_forced(args_, own, out, lane_, 32);
        if (!own.choice || slots() == 0) continue;
        if constexpr (std::is_same_v<Tiles, WarpTilesOfSixteen>) begin_next(scheduler, query + kSelectorWarps);
        if (args_.noise > 0) {
          __syncwarp();
          maxima = {};
          for (int j = args_.init_blocks + lane_; j < own.last; j += 32) {
            keys[j] = explore(keys[j], j, own.position, scheduler);
            maxima.add(keys[j]);
            if constexpr (kFiltered) filter[j] = static_cast<unsigned short>(keys[j] >> 16);
          }
        }
        top_k(keys, kFiltered ? filter : nullptr, args_.init_blocks, own.last, slots(), maxima, list_,
              out + args_.init_blocks, lane_);
        __syncwarp();
      }
    }
  }

  /// Of warp tiles of several queries, four at a time.
  __device__ __forceinline__ void choose_by_quad(uint4* keys) {
    for (TileScheduler scheduler = scheduler_of<Tiles>(args_); scheduler.next(); buffer_.advance()) {
      for (int warp_tile = number_; warp_tile < kWarpTiles; warp_tile += kSelectorWarps) {
        wait_for(warp_tile);
#pragma unroll 1
        for (int quad = 0; quad < args_.warp_tiles.together; quad += 4)
          choose_of_quad(scheduler, warp_tile, quad, keys);
      }
    }
  }

 private:
  static constexpr int kChunkBlocks = kChunkTiles * kTileSums / Blocks::kSums;

  __device__ __forceinline__ void wait_for(int warp_tile) const {
    mbarrier_wait_warp(shared_address(&barriers_.scratch_full[buffer_.stage()][warp_tile]), buffer_.phase());
  }
  /// Each lane for itself, as in attend(): racecheck does not see that one arrival would do.
  __device__ __forceinline__ void consumer_release(int warp_tile) const {
    mbarrier_arrive(shared_address(&barriers_.scratch_empty[buffer_.stage()][warp_tile]));
  }
  __device__ __forceinline__ int slots() const { return args_.topk - args_.init_blocks - args_.local_blocks; }
  __device__ __forceinline__ int* indices_of(const TileScheduler& scheduler, int query) const {
    return args_.indices.template at<int>(scheduler.seq.batch, scheduler.seq.q_begin + scheduler.first_query + query,
                                          scheduler.kv_head);
  }
  /// Sends for the sums of a later query of the tile, while blocks are chosen for another.
  __device__ __forceinline__ void begin_next(const TileScheduler& scheduler, int query) {
    if (query >= kWarpTiles) return;
    const Candidates own(args_, scheduler.seq, scheduler.first_query + query);
    if (!own.choice) return;
    wait_for(query);
    ring_.begin(scratch_of<Blocks>(args_, buffer_.stage(), query), own.last * Blocks::kSums, lane_);
  }
  /// key: of an importance.
  __device__ __forceinline__ unsigned explore(unsigned key, int block, int position,
                                              const TileScheduler& scheduler) const {
    const float share = __uint_as_float(key) * (args_.share * (1.f / (1 << kAddedExponent)));
    return ordered(
        perturbed(share, args_.noise, again(args_.seed), block, position, scheduler.kv_head, scheduler.seq.index));
  }

  /// AnyBlocks: the keys that candidates are made of, those before the last blocks that are visible. What is beyond
  /// them may never have been written.
  __device__ __forceinline__ int keys_of(const Candidates& own) const {
    return min(visible_keys(args_.range.geometry, 0, own.position).last, own.last * args_.by_strides.divisor);
  }
  /// AnyBlocks: f(blocks) after every chunk of keys, when as many blocks, but no more than `most`, are complete.
  template <class Use, class Finish>
  __device__ __forceinline__ void read_keys(int warp_tile, int keys, int most, const Use& use, const Finish& finish) {
    ring_.read(scratch_of<Blocks>(args_, buffer_.stage(), warp_tile), keys, lane_,
               [&](const ScratchTile* chunk, int i, int tiles) {
                 constexpr int kChunkKeys = kChunkTiles * kTileSums;
                 use(chunk, i * kChunkKeys % kRingKeys, tiles);
                 __syncwarp();
                 finish(min(args_.by_strides.divide((i + 1) * kChunkKeys), most));
               });
    finish(most);
    __syncwarp();
  }

  /// Importances of blocks before own.last times 2^kAddedExponent; anything to the end of the last chunk. Maxima: of
  /// the candidates.
  template <bool kFiltered>
  __device__ __forceinline__ ClassMaxima sum(int warp_tile, const Candidates& own, bool add, float* importance,
                                             unsigned short* filter) {
    ClassMaxima maxima;
    float4 minus_lse = barriers_.minus_lse[buffer_.stage()][warp_tile][lane_ % 4];
    minus_lse.x += kAddedExponent, minus_lse.y += kAddedExponent;
    minus_lse.z += kAddedExponent, minus_lse.w += kAddedExponent;
    if constexpr (Blocks::kAddsKeysUp) {
      const int keys = keys_of(own);
      int block = lane_;
      read_keys(
          warp_tile, keys, own.last,
          [&](const ScratchTile* chunk, int at, int) {
            *reinterpret_cast<float2*>(key_ring_ + at + place_in_chunk<1>(lane_)) =
                HeadSums(chunk, lane_).sum(minus_lse, lane_);
          },
          [&](int complete) {
#pragma unroll 1
            for (; block < complete; block += 32) {
              const float x = (add ? importance[block] : 0) + block_of_keys(args_, key_ring_, block, keys);
              importance[block] = x;
              if (block >= args_.init_blocks) maxima.add(__float_as_uint(x));
            }
          });
    } else {
      ring_.read(
          scratch_of<Blocks>(args_, buffer_.stage(), warp_tile), own.last * Blocks::kSums, lane_,
          [&](const ScratchTile* chunk, int, int) { return HeadSums(chunk, lane_); },
          [&](const HeadSums& heads, int i) {
            const float2 sum = heads.sum(minus_lse, lane_);
            const int begin = i * kChunkBlocks, block = begin + place_in_chunk<Blocks::kSums>(lane_);
            // Some of the chunk's blocks are no candidates.
            const bool ends = begin < args_.init_blocks || begin + kChunkBlocks > own.last;
            const auto count = [&](float x, int n) {
              unsigned key = __float_as_uint(x);
              if (ends && (block + n < args_.init_blocks || block + n >= own.last)) key = 0;
              maxima.add(key);
            };
            if constexpr (Blocks::kSums == 1) {
              float2& to = *reinterpret_cast<float2*>(importance + block);
              const float2 before = add ? to : float2{};
              const float2 x = add ? make_float2(before.x + sum.x, before.y + sum.y) : sum;
              to = x;
              count(x.x, 0), count(x.y, 1);
              if constexpr (kFiltered)
                *reinterpret_cast<unsigned*>(filter + block) =
                    __byte_perm(__float_as_uint(x.x), __float_as_uint(x.y), 0x7632);
            } else {
              const float x = (add ? importance[block] : 0) + (sum.x + sum.y);
              importance[block] = x;
              count(x, 0);
            }
          });
    }
    return maxima;
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

  /// Four queries of a warp tile from number `quad` on.
  __device__ __forceinline__ void choose_of_quad(const TileScheduler& scheduler, int warp_tile, int quad, uint4* keys) {
    const int first = scheduler.first_query + args_.warp_tiles.first_query(warp_tile) + quad;
    const int count =
        min(min(4, args_.warp_tiles.together - quad), scheduler.seq.q_len - first);  // of them; not always positive
    const bool there = lane_ % 4 < count, is_last = quad + 4 >= args_.warp_tiles.together;
    const Candidates own(args_, scheduler.seq, there ? first + lane_ % 4 : scheduler.seq.q_len);
    int* out = indices_of(scheduler, there ? first + lane_ % 4 - scheduler.first_query : 0);
    if (there) write_forced(args_, own, out, lane_ / 4, 8);
    const int last = own.choice ? own.last : 0;
    const int most_blocks = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(last)));
    const int least = static_cast<int>(__reduce_min_sync(0xffffffffu, static_cast<unsigned>(last)));
    if (most_blocks == 0) {  // nothing to choose
      if (is_last) consumer_release(warp_tile);
      return;
    }
    const QuadOfQueries sums(barriers_.minus_lse[buffer_.stage()][warp_tile], args_.warp_tiles.heads, quad, lane_);
    QuadMaxima maxima;
    int vectors = 0;
    if constexpr (Blocks::kAddsKeysUp) {
      const int own_keys = last > 0 ? keys_of(own) : 0;
      const int most_keys = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(own_keys)));
      float* key_ring = key_ring_ + lane_ % 4 * kRingKeys;
      auto* single = reinterpret_cast<unsigned*>(keys);
      int block = lane_ / 4;
      read_keys(
          warp_tile, most_keys, most_blocks,
          [&](const ScratchTile* chunk, int at, int tiles) {
#pragma unroll
            for (int n = 0; n < kChunkTiles; ++n)
              *reinterpret_cast<float2*>(key_ring + at + n * kTileSums + lane_ / 4 * 2) =
                  sums.of(chunk[min(n, tiles - 1)]);
          },
          [&](int complete) {
#pragma unroll 1
            for (; block < complete; block += 8)
              single[quad_slot(block, lane_ % 4)] = __float_as_uint(block_of_keys(args_, key_ring, block, own_keys));
          });
      vectors = (most_blocks + 31) / 32;
    } else {
      constexpr int kVectors = kChunkBlocks / 32;
      ring_.read(scratch_of<Blocks>(args_, buffer_.stage(), warp_tile), most_blocks * Blocks::kSums, lane_,
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
                   for (int n = 0; n < kVectors; ++n) {
                     const uint4 vector = make_uint4(x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]);
                     maxima.add(vector);
                     keys[(vectors + n) * 32 + lane_] = vector;
                   }
                   vectors += kVectors;
                 });
    }
    if (is_last) consumer_release(warp_tile);
    if (slots() == 0) return;
    if (Blocks::kAddsKeysUp || args_.noise > 0) maxima = rank_all(scheduler, own.position, keys, vectors, last);
    QuadSelector(keys, vectors, args_.init_blocks, last, lane_).top_k(maxima, slots(), list_, out + args_.init_blocks);
  }

  /// Exploration, and zero for what is no candidate.
  __device__ __forceinline__ QuadMaxima rank_all(const TileScheduler& scheduler, int position, uint4* keys, int vectors,
                                                 int last) const {
#pragma unroll 1
    for (int n = 0; n < vectors; ++n) {
      const uint4 before = keys[n * 32 + lane_];
      unsigned x[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int block = block_of(32 * n, e);
        if (block < args_.init_blocks || block >= last) {
          x[e] = 0;
        } else if (args_.noise > 0) {
          x[e] = explore(x[e], block, position, scheduler);
        }
      }
      keys[n * 32 + lane_] = make_uint4(x[0], x[1], x[2], x[3]);
    }
    QuadMaxima maxima;  // apart: beside exploration ptxas would spill them
#pragma unroll 2
    for (int n = 0; n < vectors; ++n) maxima.add(keys[n * 32 + lane_]);
    return maxima;
  }

  const CompressedSelectArgs& args_;
  SelectBarriers& barriers_;
  ChunkRing ring_;
  unsigned* list_;
  float* key_ring_;
  int number_, lane_;
  PipelineState<kBuffers> buffer_;
};

}  // namespace nsa::cuda::sm90::select_blocks
