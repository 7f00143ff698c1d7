// Selected attention, block-major: the forward for groups of few heads. There a query's own tile would be mostly empty,
// and its blocks would be read for very few rows.
//
//   make_schedule     lists of the inverse index -> items: 64 keys of a block and some queries that selected it
//                     (block_major_schedule.cu)
//   attend_blocks     item -> for each of its query rows the attention to these keys alone: output and lse, a partial
//   combine_partials  partials of a query head -> output and lse, in the order of its row of indices
//
// The scratch holds the partials of a buffer of queries and KV heads (forward_block_major.h); buffers follow each
// other.
//
// attend_blocks: thread blocks of two warpgroups, two on an SM (keys of 192: one of three), take items as
// they get free. K and V of an item lie in shared memory, the warpgroups take its tiles in turn. A tile of 64 rows is
// the heads of a group for 64/G queries of the list; its rows are copied one by one a tile ahead, each warp its
// sixteen. A row's partial depends on nothing but the row and the block: its bits are the same whatever the tile, the
// item and the buffer.
#include "cuda/common/block_list.cuh"
#include "cuda/common/device.h"
#include "cuda/common/fallback.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/common/pipeline.cuh"
#include "cuda/sm90/common/wgmma.cuh"
#include "cuda/sm90/selected_attention/block_major_schedule.cuh"
#include "cuda/sm90/selected_attention/selected_attention.h"

namespace nsa::cuda::sm90::selected_attention {
namespace {

constexpr int kMaxPartials = 128;  // of a query head

/// Warpgroups of a thread block of attend_blocks, and such thread blocks on an SM.
template <int Dk>
inline constexpr int kWarpgroups = Dk > 128 ? 3 : 2;
template <int Dk>
inline constexpr int kResident = Dk > 128 ? 1 : 2;

struct Control {
  BlockItem items[3];  // the one at work and the next two
  std::uint64_t full;
};

/// K and V of an item, and for each warpgroup Q of two tiles. Outputs overwrite Q.
template <int Dk, int Dv>
struct BlockMemory {
  static constexpr int kK = kTileBytes<Dk>, kV = kTileBytes<Dv>, kControl = kK + kV + 2 * kWarpgroups<Dk> * kK;
  static constexpr int kBytes = kControl + sizeof(Control);
  static_assert(Dv <= Dk);

  std::uint32_t base;

  __device__ std::uint32_t k() const { return base; }
  __device__ std::uint32_t v() const { return base + kK; }
  __device__ std::uint32_t q(int warpgroup, int turn) const { return base + kK + kV + (2 * warpgroup + turn % 2) * kK; }
};

/// Takes the items of a buffer for one thread block: numbers three items ahead, so that no thread waits for them. One
/// warp.
class ItemTaker {
 public:
  __device__ __forceinline__ ItemTaker(const BlockArgs& args, int planned, bool used)
      : items_(args.items + planned * args.buffers.items), queue_(args.queues[planned]), end_(queue_.end) {
    if (used) take();
  }
  /// Sends for the next item; put() writes it.
  __device__ __forceinline__ void fetch() {
    const int x = warp_uniform(number_);
    words_ = x < end_ ? reinterpret_cast<const int*>(items_ + x)[lane_id() % kWords] : 0;
    take();
  }
  __device__ __forceinline__ void put(BlockItem& item) const {
    if (lane_id() < kWords) reinterpret_cast<int*>(&item)[lane_id()] = words_;
  }

 private:
  static constexpr int kWords = sizeof(BlockItem) / 4;

  __device__ __forceinline__ void take() {
    if (lane_id() == 0) number_ = atomicAdd(&queue_.next, 1);
  }

  const BlockItem* items_;
  BlockQueue& queue_;
  int end_, number_ = 0, words_ = 0;
};

/// Has the keys and values of an item copied. One thread.
template <int Dk, int Dv>
__device__ __forceinline__ void load_keys(const CUtensorMap& k_map, const CUtensorMap& v_map,
                                          const BlockMemory<Dk, Dv>& memory, const BlockItem& item,
                                          std::uint32_t full) {
  mbarrier_arrive_expect_tx(full, memory.kK + memory.kV);
#pragma unroll 1
  for (int c = 0; c < Dk / 64; ++c)
    tma_load(memory.k() + c * kPanelBytes, k_map, c * 64, item.kv_head, item.key_row, item.batch, full);
#pragma unroll 1
  for (int c = 0; c < Dv / 64; ++c)
    tma_load(memory.v() + c * kPanelBytes, v_map, c * 64, item.kv_head, item.key_row, item.batch, full);
}

/// A warp's sixteen rows of a tile: lane r and lane r + 16 know the query of row r. Rows are copied four at a time,
/// eight lanes a panel.
struct WarpRows {
  int number, head;    // of the lane's row: which query of the tile's, which head of the group's
  std::uint32_t copy;  // where in a tile the lane copies to, or from

  __device__ explicit WarpRows(const HeadPacking& packing) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16, row = first + lane % 16;
    number = packing.by_heads.divide(row);
    head = row - number * packing.heads;
    copy = (first + lane / 8) * 128 + (lane % 8 ^ lane / 8) * 16;
  }
  /// f(what the lane of the row has for x, address in `tile`, column) for this lane's 16-byte vectors.
  template <int D, class F>
  __device__ __forceinline__ void for_vectors(std::uint32_t tile, int x, const F& f) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int of_row = __shfl_sync(0xffffffffu, x, 4 * i + lane / 8);
#pragma unroll
      for (int c = 0; c < D / 64; ++c)
        f(of_row, (tile + copy ^ i % 2 * 64) + i * 512 + c * kPanelBytes, c * 64 + lane % 8 * 8);
    }
  }
};

/// Which entry of its query's indices a lane's item is; the two lanes of a row look for it together.
struct Entries {
  static constexpr int kAhead = 8;  // of a lane, fetched ahead

  int x[kAhead];

  /// `row`: of the indices, from the lane's first entry on.
  __device__ __forceinline__ void fetch(const int* row, int left, bool valid) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) x[n] = valid && 2 * n < left ? row[2 * n] : -1;
  }
  __device__ __forceinline__ int find(int block, const int* row, int left, bool valid) const {
    constexpr int kNone = 1 << 16;
    int found = kNone;
#pragma unroll
    for (int n = kAhead - 1; n >= 0; --n)
      if (x[n] == block) found = 2 * n;
    if (left > 2 * kAhead && valid && found == kNone) {
#pragma unroll 1
      for (int n = 2 * kAhead; n < left && found == kNone; n += 2)
        if (row[n] == block) found = n;
    }
    found += threadIdx.x % 32 / 16;
    return min(found, __shfl_xor_sync(0xffffffffu, found, 16));
  }
};

/// Raw scores of a tile (64 keys) to probabilities; the lse of the rows.
__device__ __forceinline__ void block_softmax(float (&s)[32], float scale, float (&lse)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float even = fmaxf(s[2 * i], s[2 * i + 1]), odd = fmaxf(s[4 + 2 * i], s[4 + 2 * i + 1]);
#pragma unroll
    for (int n = 2; n < 8; n += 2) {
      even = fmaxf(even, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
      odd = fmaxf(odd, fmaxf(s[4 * n + 4 + 2 * i], s[4 * n + 4 + 2 * i + 1]));
    }
    const float max = row_max(fmaxf(even, odd)) * scale, base = max == -INFINITY ? 0 : -max;
    even = odd = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float &x = s[4 * n + 2 * i], &y = s[4 * n + 2 * i + 1];
      x = exp2_fast(fmaf(x, scale, base));
      y = exp2_fast(fmaf(y, scale, base));
      even += x, odd += y;
    }
    const float sum = row_sum(even + odd), inverse = sum == 0 ? 0 : __fdividef(1, sum);
#pragma unroll
    for (int n = 0; n < 8; ++n) s[4 * n + 2 * i] *= inverse, s[4 * n + 2 * i + 1] *= inverse;
    lse[i] = max + __log2f(sum);
  }
}

/// A warp's sixteen rows of accumulators into a tile.
template <class T, int D>
__device__ __forceinline__ void stage_rows(std::uint32_t tile, const float (&o)[D / 2]) {
  const int lane = threadIdx.x % 32;
  const std::uint32_t to = tile + (threadIdx.x / 32 % 4 * 16 + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
  for (int t = 0; t < D / 16; ++t) {
    std::uint32_t words[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) words[m] = pack(T{}, o[8 * t + 2 * m], o[8 * t + 2 * m + 1]);
    stmatrix4((to ^ t % 4 * 32) + t / 4 * kPanelBytes, words);
  }
}

/// The query of a lane's row in a tile of an item; -1: none.
__device__ __forceinline__ int query_of(const BlockArgs& args, const BlockItem& item, const WarpRows& rows, int tile) {
  const int n = tile * args.packing.queries + rows.number;
  return rows.number < args.packing.queries && n < item.count ? item.list[n] : -1;
}

enum class BlockMajorBarrier {
  kWarpgroup = 1,  // and on, one for each warpgroup
};

/// A barrier of a warpgroup; a number that the compiler does not know would take all sixteen barriers.
template <int kCount>
__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  if (warpgroup == 0) named_barrier_sync(BlockMajorBarrier::kWarpgroup, 128, 0);
  if (warpgroup == 1) named_barrier_sync(BlockMajorBarrier::kWarpgroup, 128, 1);
  if (kCount > 2 && warpgroup == 2) named_barrier_sync(BlockMajorBarrier::kWarpgroup, 128, 2);
}

/// A warpgroup's tiles of an item, whose keys and values are on their way: every kWarpgroups-th. `query`, `next`: of
/// the first two, then of those of the item that follows.
template <class T, int Dk, int Dv>
__device__ __forceinline__ void attend(const BlockArgs& args, const BlockItem& item, const BlockItem& following,
                                       const BlockMemory<Dk, Dv>& memory, std::uint32_t full, std::uint32_t phase,
                                       int first_kv_head, int warpgroup, int& query, int& next) {
  const SelectedArgs& call = args.selected;
  const int lane = threadIdx.x % 32, heads = call.geometry.group;
  const WarpRows rows(args.packing);
  const std::uint32_t k = descriptor(memory.k(), 16), v = descriptor(memory.v(), kPanelBytes);
  const T* q = call.q.at<T>(item.batch, item.query_row, item.kv_head * heads);
  // The entries that a lane looks at: every second one.
  const int* indices = call.indices.at<int>(item.batch, item.query_row, item.kv_head) + lane / 16;
  const int left = call.topk - lane / 16;
  const int first_partial =
      (item.buffer_row * args.buffers.heads_of_buffer + (item.kv_head - first_kv_head) * heads + rows.head) *
          args.buffers.partials +
      item.tile;
  const auto indices_of = [&](int query) { return indices + query * call.indices.row; };
  const auto copy_rows = [&](int turn, int query) {
    // In units of sixteen bytes (of a sequence: up to 64 GiB).
    const unsigned offset =
        query * static_cast<unsigned>(call.q.row / 8) + rows.head * static_cast<unsigned>(call.q.head / 8);
    rows.for_vectors<Dk>(memory.q(warpgroup, turn), query < 0 ? -1 : static_cast<int>(offset),
                         [&](int of_row, std::uint32_t to, int column) {
                           copy16(to, q + static_cast<std::int64_t>(static_cast<unsigned>(of_row)) * 8 + column,
                                  of_row != -1);
                         });
    commit_copies();
  };
  // The rows of the next tile are there for the warpgroup's products, and those of this one are not needed.
  const auto next_tile = [&] {
    wait_copies<0>();
    fence_async();
    sync_warpgroup<kWarpgroups<Dk>>(warpgroup);
  };
  copy_rows(0, query);
  Entries entries;
  entries.fetch(indices_of(query), left, query >= 0);
  const int then[2] = {query_of(args, following, rows, warpgroup),
                       query_of(args, following, rows, warpgroup + kWarpgroups<Dk>)};
  mbarrier_wait_warp(full, phase);
  next_tile();
#pragma unroll 1
  for (int tile = warpgroup, turn = 0; tile * args.packing.queries < item.count; tile += kWarpgroups<Dk>, ++turn) {
    float s[32];
    gemm_ss<T, Dk, 64>(s, descriptor(memory.q(warpgroup, turn), 16), 64, k, 64);
    copy_rows(turn + 1, next);
    const bool valid = query >= 0;
    const int own_limit = min(valid ? item.shift + query - item.first_key : 63, item.keys - 1);
    const int after = query_of(args, item, rows, tile + 2 * kWarpgroups<Dk>);
    wgmma_wait<0>();
    if (call.scale < 0) {
#pragma unroll
      for (float& x : s) x = -x;
    }
    if (__any_sync(0xffffffffu, own_limit < 63)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int limit = __shfl_sync(0xffffffffu, own_limit, lane / 4 + 8 * i) - 2 * (lane & 3);  // the last key
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int b = 0; b < 2; ++b)
            if (n * 8 + b > limit) s[4 * n + 2 * i + b] = -INFINITY;
      }
    }
    float lse[2];
    block_softmax(s, positive_scale(call.scale), lse);
    std::uint32_t p[16];
    pack_rows<T, 64>(p, s);
    float o[Dv / 2];
    gemm_rs<T, Dv, 64>(o, p, v, false);
    wgmma_wait<0>();
    const int entry = entries.find(item.block, indices_of(query), left, valid);
    const int partial = valid ? first_partial + query * args.buffers.heads_of_buffer * args.buffers.partials +
                                    entry * args.lists.tiles_per_block
                              : -1;
    next_tile();
    entries.fetch(indices_of(next), left, next >= 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of_row = __shfl_sync(0xffffffffu, partial, lane / 4 + 8 * i);
      if (lane % 4 == 0 && of_row >= 0) args.lse[of_row] = lse[i];
    }
    stage_rows<T, Dv>(memory.q(warpgroup, turn), o);
    __syncwarp();
    rows.for_vectors<Dv>(memory.q(warpgroup, turn), partial, [&](int of_row, std::uint32_t from, int column) {
      const uint4 vector = load_uint4(from);
      if (of_row >= 0)
        __stcs(
            reinterpret_cast<uint4*>(static_cast<T*>(args.partials) + static_cast<std::int64_t>(of_row) * Dv + column),
            vector);
    });
    query = next, next = after;
  }
  query = then[0], next = then[1];
}

/// The partials of a buffer, the one number `planned` of those that are planned.
template <class T, int Dk, int Dv>
__global__ void __launch_bounds__(kWarpgroups<Dk> * 128, kResident<Dk>)
    attend_blocks(const __grid_constant__ BlockArgs args, const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map, int planned, int first_kv_head) {
  if (should_fall_back(args.selected.fallback)) return;
  extern __shared__ __align__(1024) char dynamic[];
  using Memory = BlockMemory<Dk, Dv>;
  const Memory memory{shared_address(dynamic)};
  auto& control = *reinterpret_cast<Control*>(dynamic + Memory::kControl);
  const std::uint32_t full = shared_address(&control.full);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  const int warp = warp_uniform(threadIdx.x / 32), warpgroup = warp / 4;
  ItemTaker taker(args, planned, warp == 0);
  if (warp == 0) {
    for (int i = 0; i < 2; ++i) {
      taker.fetch();
      taker.put(control.items[i]);
    }
  }
  __syncthreads();
  const WarpRows rows(args.packing);
  int query = query_of(args, control.items[0], rows, warpgroup),
      next = query_of(args, control.items[0], rows, warpgroup + kWarpgroups<Dk>);
#pragma unroll 1
  for (int n = 0;; ++n) {
    const BlockItem& item = control.items[n % 3];
    if (item.count == 0) return;
    if (threadIdx.x == 0) load_keys(k_map, v_map, memory, item, full);
    if (warp == 0) taker.fetch();
    attend<T, Dk, Dv>(args, item, control.items[(n + 1) % 3], memory, full, n & 1, first_kv_head, warpgroup, query,
                      next);
    if (warp == 0) taker.put(control.items[(n + 2) % 3]);
    __syncthreads();  // everybody is done with the item
  }
}

/// Which of the partials of a query lane, lane + 32, ... can be seen, a bit each.
__device__ __forceinline__ unsigned seen_partials(const BlockArgs& args, const int* indices, int position) {
  const int lane = threadIdx.x % 32, tiles = args.lists.tiles_per_block, block_size = args.selected.block_size;
  const auto seen = [&](int block, int tile) {
    return block >= 0 && static_cast<std::int64_t>(block) * block_size + tile * 64 <= position;
  };
  if (args.buffers.partials <= 32) {
    const int entry = tiles == 1 ? lane : lane / 2, tile = tiles == 1 ? 0 : lane % 2;
    const int block = lane < args.buffers.partials ? indices[entry] : -1;
    const bool valid = seen(block, tile);
    const unsigned alike = __match_any_sync(0xffffffffu, valid ? 2 * block + tile : -1 - lane);
    return valid && (alike & ((1u << lane) - 1)) == 0;
  }
  unsigned found = 0;
#pragma unroll 1
  for (int partial = lane, bit = 1; partial < args.buffers.partials; partial += 32, bit *= 2) {
    const int entry = tiles == 1 ? partial : partial / 2, tile = tiles == 1 ? 0 : partial % 2;
    if (counts(indices, entry, position, block_size) && seen(indices[entry], tile)) found |= bit;
  }
  return found;
}

/// The attention of the heads of a query and KV head from their partials. A warp for each; grid: queries of the buffer
/// by eight, KV heads. Lanes side by side have a row, sixteen bytes each; so several partials come at once.
template <class T, int Dv>
__global__ void __launch_bounds__(256) combine_partials(const __grid_constant__ BlockArgs args, int number) {
  if (should_fall_back(args.selected.fallback)) return;
  constexpr int kLanes = Dv / 8, kAtOnce = 32 / kLanes, kAhead = 8;
  __shared__ float weights[8][kMaxPartials];
  float* weight = weights[threadIdx.x / 32];
  const SelectedArgs& call = args.selected;
  const Geometry& g = call.geometry;
  const QueryBuffers& buffers = args.buffers;
  const QueryBuffer buffer(buffers, number);
  const int lane = threadIdx.x % 32, row = static_cast<int>(blockIdx.x * 8 + threadIdx.x / 32);
  const int kv_head = buffer.first_kv_head + static_cast<int>(blockIdx.y);
  const std::int64_t all_rows = buffer.first_row + row;
  if (row >= buffers.rows || kv_head >= g.kv_heads || all_rows >= buffers.all_rows) return;
  const DeviceSequence seq = sequence_of(g, sequence_at(g, all_rows, [](const RowPrefix& at) { return at.q; }));
  const int query = static_cast<int>(all_rows - row_prefix(g, seq).q);
  if (query < 0 || query >= seq.q_len || !args.loop_order.takes(true, g, seq.index, kv_head)) return;
  const int at = seq.q_begin + query;
  const unsigned seen = seen_partials(args, call.indices.at<int>(seq.batch, at, kv_head), seq.position(query));
  std::int64_t first = (std::int64_t{row} * buffers.heads_of_buffer + blockIdx.y * g.group) * buffers.partials;

#pragma unroll 1
  for (int head = kv_head * g.group; head < (kv_head + 1) * g.group; ++head, first += buffers.partials) {
    float max = -INFINITY, sum = 0;
#pragma unroll 1
    for (int partial = lane, bit = 1; partial < buffers.partials; partial += 32, bit *= 2) {
      // What is not seen may not have been written.
      weight[partial] = seen & bit ? args.lse[first + partial] : -INFINITY;
      max = fmaxf(max, weight[partial]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, step));
#pragma unroll 1
    for (int partial = lane; partial < buffers.partials; partial += 32) {
      weight[partial] = exp2_fast(weight[partial] - (max == -INFINITY ? 0 : max));
      sum += weight[partial];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    __syncwarp();

    const T* from = static_cast<const T*>(args.partials) + first * Dv + lane * 8;
    float o[8] = {};
#pragma unroll 1
    for (int base = 0; base < buffers.partials; base += kAhead * kAtOnce, from += kAhead * kAtOnce * Dv) {
      float factor[kAhead];
      uint4 vector[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int partial = base + i * kAtOnce + lane / kLanes;
        factor[i] = partial < buffers.partials ? weight[partial] : 0;
        vector[i] = factor[i] > 0 ? __ldcs(reinterpret_cast<const uint4*>(from + i * kAtOnce * Dv)) : uint4{};
      }
      if (!always()) return;  // all of them on their way at once
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const std::uint32_t words[4] = {vector[i].x, vector[i].y, vector[i].z, vector[i].w};
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float2 x = unpack(T{}, words[m]);
          o[2 * m] = fmaf(factor[i], x.x, o[2 * m]);
          o[2 * m + 1] = fmaf(factor[i], x.y, o[2 * m + 1]);
        }
      }
    }
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2)
#pragma unroll
      for (float& x : o) x += __shfl_xor_sync(0xffffffffu, x, step);
    const float inverse = sum > 0 ? 1 / sum : 0;
    uint4 vector;
    vector.x = pack(T{}, o[0] * inverse, o[1] * inverse);
    vector.y = pack(T{}, o[2] * inverse, o[3] * inverse);
    vector.z = pack(T{}, o[4] * inverse, o[5] * inverse);
    vector.w = pack(T{}, o[6] * inverse, o[7] * inverse);
    if (lane < kLanes) __stcg(reinterpret_cast<uint4*>(call.o.at<T>(seq.batch, at, head) + lane * 8), vector);
    if (lane == 0) call.lse.at(seq.batch, at, head) = (max + log2f(sum)) * kLn2;
    __syncwarp();  // the weights have been read
  }
}

}  // namespace

template <>
cudaError_t launch_selected_block_major<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const BlockMajorArgs& call,
                                                                                 cudaStream_t stream) {
  constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;
  const Geometry& g = call.selected.geometry;
  const QueryBuffers buffers(g, call.lists, call.selected.topk, Dv);
  if (buffers.count == 0) return cudaSuccess;
  const BlockArgs args(call, buffers, Dv);
  CUtensorMap k_map, v_map;
  int num_sms = 0;
  cudaError_t error = sm_count(num_sms);
  if (error == cudaSuccess) error = make_key_tensor_map(k_map, call.selected.k, g, Dk, false, 64);
  if (error == cudaSuccess) error = make_key_tensor_map(v_map, call.selected.v, g, Dv, false, 64);
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(buffers.items, num_sms * kResident<Dk>));
  const dim3 sums(static_cast<unsigned>(ceil_div(buffers.rows, 8)), buffers.kv_heads);
  for (int first = 0; first < buffers.count; first += buffers.planned) {
    const int count = std::min(buffers.planned, buffers.count - first);
    if (error == cudaSuccess) error = make_schedule(args, first, count, stream);
    for (int i = 0; i < count && error == cudaSuccess; ++i) {
      const int first_kv_head = (first + i) / buffers.by_rows * buffers.kv_heads;
      error = launch(attend_blocks<NSA_ELEMENT, Dk, Dv>, blocks, kWarpgroups<Dk> * 128, BlockMemory<Dk, Dv>::kBytes,
                     stream, args, k_map, v_map, i, first_kv_head);
      if (error == cudaSuccess)
        error = launch(combine_partials<NSA_ELEMENT, Dv>, sums, 256, 0, stream, args, first + i);
    }
  }
  return error;
}

}  // namespace nsa::cuda::sm90::selected_attention
