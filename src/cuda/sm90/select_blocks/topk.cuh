// Block selection from keys that order like their ranks, by selector warps (selector_warp.cuh).
//
// Blocks are in 64 classes. Of n <= 32 slots, at least n blocks reach the n-th largest of the maxima of the classes,
// and seldom many more: these are listed, and each counts the larger ones. Where they are too many the n-th largest key
// is found bit by bit. Where four queries are processed at a time and n <= 16, there are 32 classes, and sorts instead
// of counts.
#pragma once

#include "cuda/sm90/common/epilogue.cuh"

namespace nsa::cuda::sm90::select_blocks {

inline constexpr int kMaxSlots = 32;               // for which blocks are listed
inline constexpr int kClasses = 64, kListed = 64;  // of a query: two for each lane
inline constexpr int kListBytes = kListed * 4;
inline constexpr int kQuadSlots = 16, kQuadListed = 32;  // of four queries, where sorts do
static_assert(kQuadListed * sizeof(uint2) == kListBytes);

/// Of the blocks whose keys a lane adds, the maxima over every second one: two classes.
struct ClassMaxima {
  unsigned x[2] = {0, 0};

  __device__ __forceinline__ void add(unsigned key) {
    const unsigned most = max(x[1], key);
    x[1] = x[0], x[0] = most;
  }
};

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
/// How many of the `count` values below 2^15 on the lanes, two on each, are larger than x[0] and x[1], the lane's own.
/// The others are 0. All lanes read all of them in shared memory, 128 bytes at a multiple of 16: no step waits for
/// another, as those of a sort do.
__device__ __forceinline__ void count_larger(const unsigned (&x)[2], int count, unsigned* all, int (&larger)[2],
                                             int lane) {
  all[lane] = x[0] | x[1] << 16;
  __syncwarp();
  const unsigned minus[2] = {(-x[0] & 0xffff) * 0x10001, (-x[1] & 0xffff) * 0x10001};
  unsigned n[2] = {0, 0};  // of the lower and of the upper halves
#pragma unroll 2
  for (int i = 0; i < count; i += 8) {
    const uint4 other = reinterpret_cast<const uint4*>(all)[i / 8];
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      const auto is_larger = [&](unsigned pair) { return __viaddmin_s16x2_relu(pair, minus[own], 0x10001); };
      n[own] += is_larger(other.x) + is_larger(other.y);
      n[own] += is_larger(other.z) + is_larger(other.w);
    }
  }
  __syncwarp();
#pragma unroll
  for (int own = 0; own < 2; ++own) larger[own] = static_cast<int>((n[own] & 0xffff) + (n[own] >> 16));
}

/// Keys from `least` on as values below 2^15 in the same order; neighbouring keys may become the same.
class Quantizer {
 public:
  __device__ __forceinline__ Quantizer(unsigned least, unsigned most) : least_(least) {
    shift_ = max(17 - __clz(static_cast<int>(most - least)), 0);
  }
  __device__ __forceinline__ unsigned value(unsigned key) const { return (key - least_) >> shift_; }
  __device__ __forceinline__ unsigned least_key(unsigned value) const { return least_ + (value << shift_); }

 private:
  unsigned least_;
  int shift_;
};

/// A key that the n-th largest of the maxima reaches, and seldom a smaller one. words: 128 bytes of shared memory.
__device__ __forceinline__ unsigned bound_of(const ClassMaxima& maxima, int n, unsigned* words, int lane) {
  const unsigned(&x)[2] = maxima.x;
  const Quantizer quantizer(__reduce_min_sync(0xffffffffu, min(x[0], x[1])),
                            __reduce_max_sync(0xffffffffu, max(x[0], x[1])));
  const unsigned values[2] = {quantizer.value(x[0]), quantizer.value(x[1])};
  int larger[2];
  count_larger(values, kClasses, words, larger, lane);
  const auto if_among = [&](int own) { return larger[own] < n ? values[own] : 0xffffu; };
  return quantizer.least_key(__reduce_min_sync(0xffffffffu, min(if_among(0), if_among(1))));
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

/// Writes the `slots` blocks of largest key(block) of those on the list, which are at least as many, in order; of
/// equals, the earlier. All reach `bound`, which is not 0. Overwrites the list.
template <class Key>
__device__ __forceinline__ void write_best_listed(const Key& key, unsigned bound, unsigned* list, int listed, int slots,
                                                  int* out, int lane) {
  __syncwarp();
  const uint2 block = reinterpret_cast<const uint2*>(list)[lane];
  const bool there[2] = {2 * lane < listed, 2 * lane + 1 < listed};
  const unsigned x[2] = {there[0] ? key(block.x) : bound, there[1] ? key(block.y) : bound};
  const Quantizer quantizer(bound, __reduce_max_sync(0xffffffffu, max(x[0], x[1])));
  __syncwarp();
  int larger[2];
  count_larger({quantizer.value(x[0]), quantizer.value(x[1])}, listed, list, larger, lane);
  bool chosen[2] = {there[0] && larger[0] < slots, there[1] && larger[1] < slots};
  unsigned even = __ballot_sync(0xffffffffu, chosen[0]), odd = __ballot_sync(0xffffffffu, chosen[1]);
  if (__popc(even) + __popc(odd) != slots) {  // equal values
    const auto lanes = [&](const auto& condition, int own) {
      return __ballot_sync(0xffffffffu, there[own] && condition(x[own]));
    };
    int ties;
    const unsigned threshold = find_threshold(slots, ties, [&](unsigned y) {
      const auto reaches = [&](unsigned z) { return z >= y; };
      return __popc(lanes(reaches, 0)) + __popc(lanes(reaches, 1));
    });
    const auto is_tied = [&](unsigned z) { return z == threshold; };
    const unsigned even_tied = lanes(is_tied, 0), odd_tied = lanes(is_tied, 1);
    const int rank = before(even_tied, lane) + before(odd_tied, lane), own_tied = even_tied >> lane & 1;
    chosen[0] = there[0] && (x[0] > threshold || (x[0] == threshold && rank < ties));
    chosen[1] = there[1] && (x[1] > threshold || (x[1] == threshold && rank + own_tied < ties));
    even = __ballot_sync(0xffffffffu, chosen[0]), odd = __ballot_sync(0xffffffffu, chosen[1]);
  }
  const int at = before(even, lane) + before(odd, lane);
  if (chosen[0]) out[at] = static_cast<int>(block.x);
  if (chosen[1]) out[at + chosen[0]] = static_cast<int>(block.y);
}

/// Lists, in order, the blocks first .. last - 1 whose keys reach `bound`; how many there are, or more than kListed.
__device__ __forceinline__ int list_reaching(const unsigned* key, int first, int last, unsigned bound, unsigned* list,
                                             int lane) {
  int listed = 0;
  for (int begin = first; begin < last && listed <= kListed; begin += 128) {
    unsigned lanes[4];
    bool reaches[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int block = begin + 32 * u + lane;
      reaches[u] = (block < last ? key[block] : 0) >= bound;
      lanes[u] = __ballot_sync(0xffffffffu, reaches[u]);
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      if (lanes[u] == 0) continue;
      const int at = listed + before(lanes[u], lane);
      if (reaches[u] && at < kListed) list[at] = static_cast<unsigned>(begin + 32 * u + lane);
      listed += __popc(lanes[u]);
    }
  }
  return listed;
}

/// The same by the upper halves of the keys, of which a multiple of 256 is read: all that may reach `bound`. Overwrites
/// those of other blocks. The lower half of `bound` is 0.
__device__ __forceinline__ int list_reaching(unsigned short* filter, int first, int last, unsigned bound,
                                             unsigned* list, int lane) {
  for (int j = lane; j < first; j += 32) filter[j] = 0;
  for (int j = last + lane; j < (last + 255) / 256 * 256; j += 32) filter[j] = 0;
  __syncwarp();
  const auto* pairs = reinterpret_cast<const unsigned*>(filter);
  const unsigned upper = bound >> 16;
  int listed = 0;
  for (int begin = 0; begin < last && listed <= kListed; begin += 256) {
    unsigned x[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) x[u] = pairs[begin / 2 + 32 * u + lane];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const bool takes_even = (x[u] & 0xffff) >= upper, takes_odd = x[u] >> 16 >= upper;
      if (!__any_sync(0xffffffffu, takes_even || takes_odd)) continue;
      const unsigned evens = __ballot_sync(0xffffffffu, takes_even), odds = __ballot_sync(0xffffffffu, takes_odd);
      const int at = listed + before(evens, lane) + before(odds, lane), block = begin + 64 * u + 2 * lane;
      if (takes_even && at < kListed) list[at] = static_cast<unsigned>(block);
      if (takes_odd && at + takes_even < kListed) list[at + takes_even] = static_cast<unsigned>(block + 1);
      listed += __popc(evens) + __popc(odds);
    }
  }
  return listed;
}

/// Writes the `slots` blocks of largest key among first .. last - 1 in ascending order; of equals, the earlier. There
/// are more than `slots`. maxima: of these blocks. list: kListBytes. With a filter the keys lie in global memory, and
/// it has the upper halves of them. One warp.
__device__ __forceinline__ void top_k(const unsigned* key, unsigned short* filter, int first, int last, int slots,
                                      const ClassMaxima& maxima, unsigned* list, int* out, int lane) {
  int listed = kListed + 1;
  unsigned bound = 0;
  __syncwarp();
  if (slots <= kMaxSlots) bound = bound_of(maxima, slots, list, lane);
  if (filter) bound &= 0xffff0000;
  if (bound > 0)
    listed = filter ? list_reaching(filter, first, last, bound, list, lane)
                    : list_reaching(key, first, last, bound, list, lane);
  if (listed > kListed) return top_k_exactly(key, first, last, slots, out, lane);
  write_best_listed([&](unsigned block) { return key[block]; }, bound, list, listed, slots, out, lane);
}

/// Where the key of one of four queries for a block lies: see QuadSelector.
__device__ __forceinline__ int quad_slot(int block, int query) {
  return (block / 32 * 32 + block % 16 / 2 * 4 + query) * 4 + block % 32 / 16 * 2 + block % 2;
}

/// Maxima of the four blocks that a lane has in a vector of keys, over every second vector.
struct QuadMaxima {
  unsigned x[2][4] = {};

  __device__ __forceinline__ void add(const uint4& vector) {
    const unsigned keys[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const unsigned most = max(x[1][e], keys[e]);
      x[1][e] = x[0][e], x[0][e] = most;
    }
  }
};

/// Four queries at a time, as of QuadOfQueries: lane 4 r + c has the keys of query c.
class QuadSelector {
 public:
  /// keys: 16 bytes of lane l at 32 n + l are its blocks 32 n + 2 r + {0, 1, 16, 17}. Zero outside of first .. last - 1
  /// (of this lane's query; last = 0: nothing is wanted). vectors: for each lane.
  __device__ __forceinline__ QuadSelector(const uint4* keys, int vectors, int first, int last, int lane)
      : mine_(keys + lane), vectors_(vectors), first_(first), last_(last), lane_(lane) {}

  /// The `slots` best blocks of each query in ascending order; of equals, the earlier. out: of this lane's query.
  /// maxima: of the lane's four blocks of a vector. list: four times kListBytes.
  __device__ __forceinline__ void top_k(const QuadMaxima& maxima, int slots, unsigned* list, int* out) const {
    if (slots > kQuadSlots) return top_many(maxima, slots, list, out);
    unsigned most[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) most[e] = max(maxima.x[0][e], maxima.x[1][e]);
    transpose_in_quad(most, lane_);
    nth_largest(most, slots, lane_);
    const unsigned bound = of_query(most);
    auto* const pairs = reinterpret_cast<uint2*>(list);
    uint2* const own = pairs + lane_ % 4 * kQuadListed;
    int listed = list_blocks<4>(bound, kQuadListed, [&](int at, unsigned key, int block) {
      own[at] = make_uint2(key, static_cast<unsigned>(block));
    });
    __syncwarp();
    if (__any_sync(0xffffffffu, listed > kQuadListed)) return top_k_exactly(slots, out);
    uint2 entries[4];
    unsigned thresholds[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int count = __shfl_sync(0xffffffffu, listed, q);
      entries[q] = lane_ < count ? pairs[q * kQuadListed + lane_] : make_uint2(0, 0);
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
  /// More slots than kQuadSlots: 64 classes, and the listed blocks of one query after the other.
  __device__ __forceinline__ void top_many(const QuadMaxima& maxima, int slots, unsigned* list, int* out) const {
    unsigned most[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) most[i][e] = maxima.x[i][e];
      transpose_in_quad(most[i], lane_);
    }
    unsigned bound = 0;
    if (slots <= kMaxSlots) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const unsigned of_q = bound_of({{most[0][q], most[1][q]}}, slots, list, lane_);
        if (lane_ % 4 == q) bound = of_q;
      }
    }
    unsigned* const own = list + lane_ % 4 * kListed;
    const int listed =
        list_blocks<2>(bound, kListed, [&](int at, unsigned, int block) { own[at] = static_cast<unsigned>(block); });
    if (__any_sync(0xffffffffu, listed > kListed)) return top_k_exactly(slots, out);
#pragma unroll 1
    for (int q = 0; q < 4; ++q) {
      const int count = __shfl_sync(0xffffffffu, listed, q);
      int* to = reinterpret_cast<int*>(__shfl_sync(0xffffffffu, reinterpret_cast<std::uint64_t>(out), q));
      const auto* keys = reinterpret_cast<const unsigned*>(mine_ - lane_);
      const auto key = [&](unsigned block) { return keys[quad_slot(static_cast<int>(block), q)]; };
      const unsigned of_q = __shfl_sync(0xffffffffu, bound, q);
      if (count > 0) write_best_listed(key, of_q, list + q * kListed, count, slots, to, lane_);
    }
    __syncwarp();
  }

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

  /// store(at, key, block) for the blocks that reach `bound`, in order, and at < capacity; how many there are, or more
  /// than `capacity` where the bound is 0.
  template <int kAtOnce, class Store>
  __device__ __forceinline__ int list_blocks(unsigned bound, int capacity, const Store& store) const {
    int listed = 0;
    const bool listable = bound > 0;
    if (!listable) bound = 0xffffffffu;
    const auto add = [&](unsigned even, unsigned odd, int block) {
      const bool takes_even = even >= bound, takes_odd = odd >= bound;
      const unsigned bits = bits_of_query(takes_even, takes_odd);
      const int at = listed + before_mine(bits);
      if (takes_even && at < capacity) store(at, even, block);
      if (takes_odd && at + takes_even < capacity) store(at + takes_even, odd, block + 1);
      listed += __popc(bits);
    };
    uint4 next[kAtOnce];  // on their way while as many are looked at
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
    return listable || last_ == 0 ? listed : capacity + 1;
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
