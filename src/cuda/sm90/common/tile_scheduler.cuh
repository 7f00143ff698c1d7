// How the forward kernels over ranges of keys share out their work: tiles of queries, and the thread blocks that walk
// over them.
#pragma once

#include "cuda/common/geometry.cuh"
#include "cuda/sm90/common/head_packing.cuh"

namespace nsa::cuda::sm90 {

/// The tiles of a persistent thread block: each is `queries` neighbouring queries of a sequence with one slice of the
/// heads of a KV head. A tile of a sequence, all its slices side by side, then the next tile; tiles from the end and
/// from the start take turns, so that long and short ones mix in every block. Where all are `alike` but for short ones
/// at the start, those come last: not every thread block gets one of the last tiles. A call's tiles follow each other,
/// sequence after sequence, and every gridDim.x-th of them is this block's.
class TileScheduler {
 public:
  __device__ TileScheduler(const Geometry& geometry, const HeadPacking& packing, int queries, bool alike = false)
      : p_(geometry),
        alike_(alike),
        queries_(queries),
        slices_(packing.slices),
        item_(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {}

  DeviceSequence seq{};
  int compressed_begin = 0;  // of seq: its first compressed row
  int first_query = 0, kv_head = 0;
  int slice = 0;  // its first head counted from the first of the group, in units of HeadPacking::heads

  /// On to the next tile; false: there is none.
  __device__ __forceinline__ bool next() {
    item_ += static_cast<int>(gridDim.x);
    while (item_ >= items_) {
      item_ -= items_;
      if (sequence_ == p_.batches) return false;
      if (p_.cu_q) compressed_begin += num_compressed(p_, seq.k_len);  // of the sequence before
      seq = sequence_of(p_, sequence_++);
      tiles_ = (seq.q_len + queries_ - 1) / queries_;
      items_ = tiles_ * p_.kv_heads * slices_;
    }
    const int lines = p_.kv_heads * slices_, grid = static_cast<int>(gridDim.x);
    int y = item_ / lines, line = item_ - y * lines;
    if (alike_) {
      y = tiles_ - 1 - y;
    } else if (grid % (2 * lines) != 0) {
      y = y % 2 ? y / 2 : tiles_ - 1 - y / 2;
    } else {  // this block would get tiles of one end only: in every other round of all blocks it takes the other one
      const int round = item_ / grid, from_end = item_ - (round + 1) / 2 * grid;
      const int at = round % 2 ? from_end : items_ - 1 - from_end;
      y = at / lines, line = at - y * lines;
    }
    first_query = y * queries_;
    kv_head = slices_ == 1 ? line : line / slices_;
    slice = line - kv_head * slices_;
    return true;
  }

 private:
  const Geometry& p_;
  bool alike_;
  int queries_, slices_;
  int sequence_ = 0, tiles_ = 0, items_ = 0;
  int item_;
};

/// Tile i holds the keys first + i * kKeys .. of a sequence.
struct KeyTiles {
  int first = 0, count = 0;
};

/// The tiles of the keys that some of `queries` queries (at least one) from `first_query` on see.
template <int kKeys>
__device__ __forceinline__ KeyTiles key_tiles(const Geometry& p, int window, const DeviceSequence& seq, int first_query,
                                              int queries) {
  const int last_query = min(first_query + queries, seq.q_len) - 1;
  const int first = visible_keys(p, window, seq.position(first_query)).first;
  const int last = visible_keys(p, window, seq.position(last_query)).last;
  return {first, (last - first + kKeys - 1) / kKeys};
}

/// num_compressed(p, length) by a multiplication.
__device__ __forceinline__ int num_compressed(const Geometry& p, const FastDivmod& by_stride, int length) {
  return length < p.kernel_size ? 0 : by_stride.divide(length - p.kernel_size) + 1;
}

/// A warpgroup's share of a tile of queries. The warp that loads queries works it out and leaves it in shared memory,
/// where the computing threads read it again whenever they need it: they have no registers for it.
struct GroupTile {
  int queries;           // their number; -1: there is no tile, the work is done
  int batch, row, head;  // of row 0 in q, o and lse
  int position;          // of its query
  int first_key;         // of key tile 0
  int key_tiles;         // of the thread block
  int begin, end;        // of them, those that some row of the group sees something of

  template <int kKeys>
  __device__ static GroupTile of(const Geometry& p, int window, const HeadPacking& packing,
                                 const TileScheduler& scheduler, const KeyTiles& keys, int group) {
    const int first = scheduler.first_query + group * packing.queries;
    const int queries = max(min(packing.queries, scheduler.seq.q_len - first), 0);
    GroupTile tile{.queries = queries,
                   .batch = scheduler.seq.batch,
                   .row = scheduler.seq.q_begin + first,
                   .head = scheduler.kv_head * p.group + scheduler.slice * packing.heads,
                   .position = scheduler.seq.position(first),
                   .first_key = keys.first,
                   .key_tiles = keys.count,
                   .begin = 0,
                   .end = 0};
    if (queries > 0) {
      tile.begin = (visible_keys(p, window, tile.position).first - keys.first) / kKeys;
      tile.end = (visible_keys(p, window, tile.position + queries - 1).last - keys.first + kKeys - 1) / kKeys;
    }
    return tile;
  }
};

}  // namespace nsa::cuda::sm90
