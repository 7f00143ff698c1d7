// Block selection from keys that order like their ranks, by selector warps (selector_warp.cuh).
//
// Of n slots, at least n blocks reach the n-th largest of 32 maxima over every 32nd block, and seldom many more: these
// are listed, and each counts the larger ones. Where they are too many the n-th largest key is found bit by bit.
#pragma once

#include "cuda/sm90/common/epilogue.cuh"

namespace nsa::cuda::sm90::select_blocks {

inline constexpr int kListed = 32;  // candidates of a query that are ranked at once

/// How many of `lanes` come before this one.
__device__ __forceinline__ int before(unsigned lanes, int lane) { return __popc(lanes & ((1u << lane) - 1)); }

/// Sorts lists of 32 keys, one per lane, the largest first.
template <int kLists>
__device__ __forceinline__ void sort_falling(unsigned (&x)[kLists], int lane) {
#pragma unroll
  for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const bool larger = ((lane & stride) == 0) == ((lane & size) == 0);
#pragma unroll
      for (int i = 0; i < kLists; ++i) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, x[i], stride);
        x[i] = larger ? max(x[i], other) : min(x[i], other);
      }
    }
  }
}

/// The n-th largest of each list: all lists at once, a chain of 15 exchanges.
template <int kLists>
__device__ __forceinline__ void nth_largest(unsigned (&x)[kLists], int n, int lane) {
  sort_falling(x, lane);
#pragma unroll
  for (int i = 0; i < kLists; ++i) x[i] = __shfl_sync(0xffffffffu, x[i], n - 1);
}
/// The n-th largest of the lanes' keys. All read all of them in shared memory, 128 bytes at a multiple of 16, in turn:
/// no step waits for another, as those of a sort do.
__device__ __forceinline__ unsigned nth_largest(unsigned x, int n, unsigned* all, int lane) {
  all[lane] = x;
  __syncwarp();
  int larger = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 other = reinterpret_cast<const uint4*>(all)[i];
    larger += other.x > x, larger += other.y > x, larger += other.z > x, larger += other.w > x;
  }
  __syncwarp();
  return __reduce_min_sync(0xffffffffu, larger < n ? x : 0xffffffffu);
}

/// Lane i holds entry i, {key, block}, of a list in the order of blocks, or {0, 0} behind the list's end. Writes the
/// `slots` blocks of largest key. `threshold`, not 0, is the smallest of their keys; of equals, the earlier.
__device__ __forceinline__ void write_best(uint2 entry, unsigned threshold, int slots, int* out, int lane) {
  const unsigned above = __ballot_sync(0xffffffffu, entry.x > threshold);
  const unsigned tied = __ballot_sync(0xffffffffu, entry.x == threshold);
  const bool chosen = entry.x > threshold || ((tied >> lane & 1) != 0 && before(tied, lane) < slots - __popc(above));
  const unsigned lanes = __ballot_sync(0xffffffffu, chosen);
  if (chosen) out[before(lanes, lane)] = static_cast<int>(entry.y);
}

/// Writes the `slots` blocks of largest key of those on the list, which are at least as many, in order; of equals,
/// the earlier. There are 32 entries, of which the first `listed` count.
__device__ __forceinline__ void write_best_listed(uint2* list, int listed, int slots, int* out, int lane) {
  if (lane >= listed) list[lane] = make_uint2(0, 0);
  __syncwarp();
  const uint2 mine = list[lane];
  int larger = 0;
#pragma unroll 1
  for (int i = 0; i < listed; i += 8) {
#pragma unroll
    for (int u = 0; u < 8; u += 2) {
      const uint4 two = reinterpret_cast<const uint4*>(list)[(i + u) / 2];
      larger += two.x > mine.x, larger += two.z > mine.x;
    }
  }
  const bool chosen = lane < listed && larger < slots;
  const unsigned lanes = __ballot_sync(0xffffffffu, chosen);
  if (__popc(lanes) == slots) {
    if (chosen) out[before(lanes, lane)] = static_cast<int>(mine.y);
  } else {
    write_best(mine, __reduce_min_sync(0xffffffffu, chosen ? mine.x : 0xffffffffu), slots, out, lane);
  }
}

/// The largest threshold that `slots` keys reach, bit by bit. reach(x): how many keys reach x. Then: how many of those
/// with exactly this key are to be taken.
template <class Reach>
__device__ __forceinline__ unsigned find_threshold(int slots, int& ties, const Reach& reach) {
  unsigned threshold = 0;
#pragma unroll 1
  for (int bit = 31; bit >= 0; --bit)
    if (reach(threshold | 1u << bit) >= slots) threshold |= 1u << bit;
  const int above = reach(threshold == 0xffffffffu ? threshold : threshold + 1);
  ties = slots - (threshold == 0xffffffffu ? 0 : above);
  return threshold;
}

/// Where a list does not do: with many equal keys, or many slots. Of top_k.
__device__ __forceinline__ void top_k_exactly(const unsigned* key, int first, int last, int slots, int* out, int lane) {
  int ties;
  const unsigned threshold = find_threshold(slots, ties, [&](unsigned x) {
    int n = 0;
    for (int j = first + lane; j < last; j += 32) n += key[j] >= x;
    return static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(n)));
  });
  for (int begin = first, written = 0; begin < last; begin += 32) {
    const int j = begin + lane;
    const unsigned x = j < last ? key[j] : 0;
    const unsigned tied = __ballot_sync(0xffffffffu, j < last && x == threshold);
    const bool chosen = j < last && (x > threshold || (x == threshold && before(tied, lane) < ties));
    const unsigned lanes = __ballot_sync(0xffffffffu, chosen);
    if (chosen) out[written + before(lanes, lane)] = j;
    written += __popc(lanes);
    ties -= min(ties, __popc(tied));
  }
}

/// Of 32 u + lane, u < 4, those that reach `bound`, in order, with their keys: onto the list behind `listed` entries.
__device__ __forceinline__ void list_reaching(const unsigned (&x)[4], int begin, unsigned bound, uint2* list,
                                              int& listed, int lane) {
  unsigned lanes[4];
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

inline constexpr int kFew = 128;  // blocks, of which a lane has four in registers

/// Writes the `slots` blocks of largest key among first .. last - 1 in ascending order; of equals, the earlier. There
/// are more than `slots`. Keys lie in shared memory; overwrites those before `first`, and from `last` to the next
/// multiple of 128. One warp.
__device__ __forceinline__ void top_k(unsigned* key, int first, int last, int slots, uint2* list, int* out, int lane) {
  int listed = kListed + 1;
  auto* const maxima = reinterpret_cast<unsigned*>(list);
  __syncwarp();
  if (last <= kFew) {
    unsigned x[4], most = 0;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int j = 32 * u + lane;
      x[u] = j >= first && j < last ? key[j] : 0;
      most = max(most, x[u]);
    }
    const unsigned bound = nth_largest(most, min(slots, 32), maxima, lane);
    if (bound > 0 && slots <= 32) listed = 0, list_reaching(x, 0, bound, list, listed, lane);
  } else {
    for (int j = lane; j < first; j += 32) key[j] = 0;
    for (int j = last + lane; j < (last + 127) / 128 * 128; j += 32) key[j] = 0;
    __syncwarp();
    unsigned most = 0;
#pragma unroll 2
    for (int begin = 0; begin < last; begin += 128) {
#pragma unroll
      for (int u = 0; u < 4; ++u) most = max(most, key[begin + 32 * u + lane]);
    }
    const unsigned bound = nth_largest(most, min(slots, 32), maxima, lane);
    if (bound > 0 && slots <= 32) listed = 0;
    for (int begin = 0; begin < last && listed <= kListed; begin += 128) {
      unsigned x[4];
#pragma unroll
      for (int u = 0; u < 4; ++u) x[u] = key[begin + 32 * u + lane];
      list_reaching(x, begin, bound, list, listed, lane);
    }
  }
  if (listed > kListed) return top_k_exactly(key, first, last, slots, out, lane);
  write_best_listed(list, listed, slots, out, lane);
}

/// The same where the keys lie in global memory: `filter`, in shared memory, has the upper halves of them, of which a
/// multiple of 256 is read. Who is listed by these is ranked by the keys themselves. Overwrites halves only.
__device__ __forceinline__ void top_k_filtered(const unsigned* key, unsigned short* filter, int first, int last,
                                               int slots, uint2* list, int* out, int lane) {
  for (int j = lane; j < first; j += 32) filter[j] = 0;
  for (int j = last + lane; j < (last + 255) / 256 * 256; j += 32) filter[j] = 0;
  __syncwarp();
  const auto* pairs = reinterpret_cast<const unsigned*>(filter);
  unsigned even = 0, odd = 0;
  for (int begin = 0; begin < last; begin += 256) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const unsigned x = pairs[begin / 2 + 32 * u + lane];
      even = max(even, x & 0xffff), odd = max(odd, x >> 16);
    }
  }
  const unsigned bound = nth_largest(max(even, odd), min(slots, 32), reinterpret_cast<unsigned*>(list), lane);
  int listed = bound > 0 && slots <= 32 ? 0 : kListed + 1;
  for (int begin = 0; begin < last && listed <= kListed; begin += 256) {
    unsigned x[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) x[u] = pairs[begin / 2 + 32 * u + lane];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const bool takes_even = (x[u] & 0xffff) >= bound, takes_odd = x[u] >> 16 >= bound;
      if (!__any_sync(0xffffffffu, takes_even || takes_odd)) continue;
      const unsigned evens = __ballot_sync(0xffffffffu, takes_even), odds = __ballot_sync(0xffffffffu, takes_odd);
      const int at = listed + before(evens, lane) + before(odds, lane), block = begin + 64 * u + 2 * lane;
      if (takes_even && at < kListed) list[at].y = static_cast<unsigned>(block);
      if (takes_odd && at + takes_even < kListed) list[at + takes_even].y = static_cast<unsigned>(block + 1);
      listed += __popc(evens) + __popc(odds);
    }
  }
  if (listed > kListed) return top_k_exactly(key, first, last, slots, out, lane);
  __syncwarp();
  if (lane < listed) list[lane].x = key[list[lane].y];
  write_best_listed(list, listed, slots, out, lane);
}

/// Four queries at a time, as of QuadOfQueries: lane 4 r + c has the keys of query c.
class QuadSelector {
 public:
  /// keys: 16 bytes of lane l at 32 n + l are its blocks 32 n + 2 r + {0, 1, 16, 17}. Zero outside of first .. last - 1
  /// (of this lane's query; last = 0: nothing is wanted). vectors: for each lane.
  __device__ __forceinline__ QuadSelector(const uint4* keys, int vectors, int first, int last, int lane)
      : mine_(keys + lane), vectors_(vectors), first_(first), last_(last), lane_(lane) {}

  /// The `slots` best blocks of each query in ascending order; of equals, the earlier. outs: of this lane's query.
  /// most: maxima of the lane's four blocks of a vector over all vectors. list: four times kListed.
  __device__ __forceinline__ void top_k(unsigned (&most)[4], int slots, uint2* list, int* out) const {
    transpose_in_quad(most, lane_);
    nth_largest(most, min(slots, 32), lane_);
    const unsigned bound = of_query(most);
    const bool listable = bound > 0 && slots <= 32;
    int listed = list_blocks(listable ? bound : 0xffffffffu, list + lane_ % 4 * kListed);
    if (last_ > 0 && !listable) listed = kListed + 1;
    __syncwarp();
    if (__any_sync(0xffffffffu, listed > kListed)) return top_k_exactly(slots, out);
    uint2 entries[4];
    unsigned thresholds[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int count = __shfl_sync(0xffffffffu, listed, q);
      entries[q] = lane_ < count ? list[q * kListed + lane_] : make_uint2(0, 0);
      thresholds[q] = entries[q].x;
    }
    nth_largest(thresholds, slots, lane_);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int count = __shfl_sync(0xffffffffu, listed, q);
      int* to = reinterpret_cast<int*>(__shfl_sync(0xffffffffu, reinterpret_cast<std::uint64_t>(out), q));
      if (count > 0) write_best(entries[q], thresholds[q], slots, to, lane_);
    }
    __syncwarp();
  }

 private:
  /// Of four values, that of this lane's query.
  __device__ __forceinline__ unsigned of_query(const unsigned (&x)[4]) const {
    const unsigned low = lane_ & 1 ? x[1] : x[0], high = lane_ & 1 ? x[3] : x[2];
    return lane_ & 2 ? high : low;
  }
  /// Flags for a lane's blocks 2 r and 2 r + 1 of a tile -> bits 4 r and 4 r + 1 of a word for its query.
  __device__ __forceinline__ unsigned bits_of_query(bool even, bool odd) const {
    const unsigned evens = __ballot_sync(0xffffffffu, even), odds = __ballot_sync(0xffffffffu, odd);
    return (evens >> (lane_ & 3) & 0x11111111u) | (odds >> (lane_ & 3) & 0x11111111u) << 1;
  }
  /// Bits of the lanes before.
  __device__ __forceinline__ int before_mine(unsigned bits) const { return before(bits, lane_ & 28); }
  __device__ __forceinline__ int block(int vector, int half) const { return 32 * vector + 16 * half + lane_ / 4 * 2; }

  /// Lists, in order, the blocks that reach `bound`; how many there are.
  __device__ __forceinline__ int list_blocks(unsigned bound, uint2* list) const {
    int listed = 0;
    const auto add = [&](unsigned even, unsigned odd, int block) {
      const bool takes_even = even >= bound, takes_odd = odd >= bound;
      const unsigned bits = bits_of_query(takes_even, takes_odd);
      const int at = listed + before_mine(bits);
      if (takes_even && at < kListed) list[at] = make_uint2(even, block);
      if (takes_odd && at + takes_even < kListed) list[at + takes_even] = make_uint2(odd, block + 1);
      listed += __popc(bits);
    };
    constexpr int kAtOnce = 4;  // on their way while as many are looked at
    uint4 next[kAtOnce];
    const auto load = [&](int n) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) next[u] = n + u < vectors_ ? mine_[(n + u) * 32] : uint4{};
    };
    load(0);
#pragma unroll 1
    for (int n = 0; n < vectors_; n += kAtOnce) {
      uint4 x[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) x[u] = next[u];
      load(n + kAtOnce);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        add(x[u].x, x[u].y, block(n + u, 0));
        add(x[u].z, x[u].w, block(n + u, 1));
      }
    }
    return listed;
  }

  /// Where a list does not do: with many equal keys, or many slots.
  __device__ __forceinline__ void top_k_exactly(int slots, int* out) const {
    const auto in = [&](int block) { return block >= first_ && block < last_; };
    int ties, written = 0;
    const unsigned threshold = find_threshold(slots, ties, [&](unsigned bound) {
      int n = 0;
#pragma unroll 1
      for (int v = 0; v < vectors_; ++v) {
        const uint4 x = mine_[v * 32];
        n += (x.x >= bound) + (x.y >= bound) + (x.z >= bound) + (x.w >= bound);
      }
      for (int lanes = 4; lanes < 32; lanes *= 2) n += __shfl_xor_sync(0xffffffffu, n, lanes);
      return n;
    });
#pragma unroll 1
    for (int i = 0; i < 2 * vectors_; ++i) {
      const uint4 x = mine_[i / 2 * 32];
      const unsigned even = i % 2 ? x.z : x.x, odd = i % 2 ? x.w : x.y;
      const int block = this->block(i / 2, i % 2);
      const bool even_tied = in(block) && even == threshold, odd_tied = in(block + 1) && odd == threshold;
      const unsigned tied = bits_of_query(even_tied, odd_tied);
      const int rank = before_mine(tied);
      const bool takes_even = in(block) && (even > threshold || (even_tied && rank < ties));
      const bool takes_odd = in(block + 1) && (odd > threshold || (odd_tied && rank + even_tied < ties));
      const unsigned bits = bits_of_query(takes_even, takes_odd);
      const int at = written + before_mine(bits);
      if (takes_even) out[at] = block;
      if (takes_odd) out[at + takes_even] = block + 1;
      written += __popc(bits);
      ties -= min(ties, __popc(tied));
    }
  }

  const uint4* mine_;
  int vectors_, first_, last_, lane_;
};

}  // namespace nsa::cuda::sm90::select_blocks
