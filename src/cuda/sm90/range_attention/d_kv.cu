// dK and dV for ranges of keys per query: the compressed branch and the sliding window. The scheme is that of
// d_kv_mainloop.cuh: a thread block takes 128 keys of one KV head, 64 per warpgroup, and both warpgroups read every
// stage.
//
// The queries that see a key tile are cut into chunks, one item each: of the whole sequence for the compressed branch
// (so that the thread blocks read the same rows at the same time: items of a chunk follow each other, last chunks
// first), from the tile's first query on for the window. Key tiles of several items leave float32 partial sums that
// sum_chunks adds in order. The cut depends on the sequence alone.
#include "cuda/common/device.h"
#include "cuda/common/fallback.cuh"
#include "cuda/sm90/common/d_kv_mainloop.cuh"
#include "cuda/sm90/range_attention/d_kv_chunks.h"
#include "cuda/sm90/range_attention/range_attention.h"

namespace nsa::cuda::sm90::range_attention {
namespace {

constexpr int kKeys = kRangeKeys;
/// As many as fit into shared memory, at most four.
template <int Dk, int Dv>
inline constexpr int kStages = Dk + Dv <= 256 ? 4 : 3;

struct RangeKeyArgs {
  BackwardArgs branch;
  RowTerms terms;
  HeadPacking packing;
  RangeWork work;
  float scale, masked;  // in base-2 units; what a masked score is before the scale, as an operand at hand
  KeyItem* items;
  // Key i of an item sees positions [i * stride, i * stride + window) behind its first one.
  int stride, behind, window;
  std::int64_t to_next_line, to_next_row;  // in `terms`, after the last array and after the last slice
};

/// The queries that see keys [first, first + count), and how they are cut.
struct Cut {
  int from, to, chunk, first_chunk, chunks;
};
__device__ inline Cut cut_of(const BackwardArgs& args, const DeviceSequence& seq, int first, int count) {
  const Geometry& p = args.geometry;
  const int shift = seq.k_len - seq.q_len;  // position of query 0
  const std::int64_t begin =
      args.window ? first : static_cast<std::int64_t>(first) * p.kernel_stride + p.kernel_size - 1;
  const std::int64_t end = args.window ? static_cast<std::int64_t>(first) + count - 1 + args.window : seq.k_len;
  Cut cut;
  cut.from = static_cast<int>(max(begin - shift, std::int64_t{0}));
  cut.to = static_cast<int>(max(min(end - shift, static_cast<std::int64_t>(seq.q_len)), std::int64_t{cut.from}));
  cut.chunk = chunk_queries(args.window, seq.q_len);
  cut.first_chunk = args.window ? 0 : cut.from / cut.chunk;
  const int queries = args.window ? cut.to - cut.from : cut.to - cut.first_chunk * cut.chunk;
  cut.chunks = max((queries + cut.chunk - 1) / cut.chunk, 1);
  return cut;
}

/// A key tile of a line.
struct LineTile {
  DeviceSequence seq;
  int kv_head, tile;  // number in the sequence
  int first_slot;     // of its partial sums
};
__device__ inline LineTile tile_at(const RangeKeyArgs& args, int line, int tile) {
  const Geometry& p = args.branch.geometry;
  const auto first = [&](const RowPrefix& at) { return args.work.tiles_before(at); };
  LineTile found{.seq = sequence_of(p, p.cu_q ? sequence_at(p, tile, first) : line / p.kv_heads),
                 .kv_head = line % p.kv_heads,
                 .tile = tile};
  const RowPrefix before = row_prefix(p, found.seq);
  if (p.cu_q) found.tile -= static_cast<int>(first(before));
  found.first_slot = static_cast<int>(found.kv_head * args.work.partials + args.work.partials_before(before) +
                                      found.tile * max_chunks(args.branch.window, found.seq.q_len));
  return found;
}

/// Item x, of the from_end-th chunk from the end.
__device__ inline KeyItem item_at(const RangeKeyArgs& args, int x, int from_end) {
  const BackwardArgs& branch = args.branch;
  const Geometry& p = branch.geometry;
  const int tiles = (args.work.begin[from_end + 1] - args.work.begin[from_end]) / args.work.lines;
  const int y = x - args.work.begin[from_end];
  const LineTile tile = tile_at(args, y / tiles, y % tiles);
  const DeviceSequence& seq = tile.seq;
  KeyItem item{};
  item.batch = seq.batch;
  item.kv_head = tile.kv_head;
  item.first_key = tile.tile * kKeys;
  const int keys = min((branch.window ? seq.k_len : num_compressed(p, seq.k_len)) - item.first_key, kKeys);
  if (keys <= 0) return {};
  const Cut cut = cut_of(branch, seq, item.first_key, keys);
  const int number = args.work.chunks - 1 - from_end - cut.first_chunk;
  if (number < 0 || number >= cut.chunks) return {};
  item.keys = keys;
  item.key_row = item.first_key + (branch.window ? seq.k_begin : p.cu_q ? compressed_before(p, seq.index, 0, 1) : 0);
  item.query_row = seq.q_begin;
  item.shift = seq.position(0);
  const int start = branch.window ? cut.from : cut.first_chunk * cut.chunk;
  item.from = max(start + number * cut.chunk, cut.from);
  item.to = max(min(start + (number + 1) * cut.chunk, cut.to), item.from);
  item.stages = (item.to - item.from + args.packing.queries - 1) / args.packing.queries * args.packing.slices;
  item.slot = cut.chunks > 1 ? tile.first_slot + number : -1;
  return item;
}

__global__ void __launch_bounds__(128) make_schedule(const __grid_constant__ RangeKeyArgs args) {
  const int x = static_cast<int>(blockIdx.x * 128 + threadIdx.x);
  if (x >= args.work.items) return;
  int from_end = 0;
  while (x >= args.work.begin[from_end + 1]) ++from_end;
  args.items[x] = item_at(args, x, from_end);
}

/// What a warpgroup needs to know of a stage; written by the thread that has it filled.
struct StageInfo {
  int lead;     // (position of the first query) - (first position that sees key 0 of the item)
  int queries;  // that are valid
  int keys;     // of the item
  int seen[2];  // of 64 keys each: kNone, kSome or kAll (pairs of query row and key)
};
enum Seen { kNone, kSome, kAll };

/// Which pairs of a stage's queries and 64 keys of the item see each other. `full`: the stage has all its rows.
__device__ __forceinline__ Seen seen_by(const RangeKeyArgs& args, const StageInfo& info, int warpgroup, bool full) {
  const int key = 64 * warpgroup, end = info.lead + info.queries;
  if (info.keys <= key || end <= key * args.stride || info.lead >= key + 63 + args.window) return kNone;
  const bool all = full && info.keys >= key + 64 && info.lead >= (key + 63) * args.stride && end <= key + args.window;
  return all ? kAll : kSome;
}

template <int Dk, int Dv>
using Memory = KeyMemory<Dk, Dv, 2, kStages<Dk, Dv>>;

/// Keys and query rows. One thread.
template <int Dk, int Dv>
__device__ inline void produce(const RangeKeyArgs& args, const KeyMaps& maps, const Memory<Dk, Dv>& memory) {
  PipelineCount<kStages<Dk, Dv>> count;
  std::uint32_t keys_phase = 1;
#pragma unroll 1
  for (int x = blockIdx.x; x < args.work.items; x += gridDim.x) {
    const volatile KeyItem& item = args.items[x];  // fields are read where they are needed: registers are short
    if (item.keys == 0) continue;
    mbarrier_wait(memory.keys().empty(0), keys_phase);
    keys_phase ^= 1;
    mbarrier_arrive_expect_tx(memory.keys().full(0), 2 * (Memory<Dk, Dv>::kK + Memory<Dk, Dv>::kV));
#pragma unroll 1
    for (int tile = 0; tile < 2; ++tile) {
      const int row = item.key_row + tile * 64;
#pragma unroll 1
      for (int c = 0; c < Dk / 64; ++c)
        tma_load(memory.k(tile) + c * kPanelBytes, maps.k, c * 64, item.kv_head, row, item.batch,
                 memory.keys().full(0));
#pragma unroll 1
      for (int c = 0; c < Dv / 64; ++c)
        tma_load(memory.v(tile) + c * kPanelBytes, maps.v, c * 64, item.kv_head, row, item.batch,
                 memory.keys().full(0));
    }
    const int batch = item.batch;
    int row = item.query_row + item.from, head = item.kv_head * args.branch.geometry.group;
    const int end_head = head + args.branch.geometry.group;
#pragma unroll 1
    for (int left = item.stages; left > 0; --left, count.advance()) {
      const std::uint32_t full = memory.rows().full(count.stage());
      memory.rows().acquire(count);
      mbarrier_arrive_expect_tx(full, args.packing.rows * (Dk + Dv) * 2);
#pragma unroll
      for (int c = 0; c < Dk / 64; ++c)
        tma_load(memory.q(count.stage()) + c * kPanelBytes, maps.q, c * 64, head, row, batch, full);
#pragma unroll
      for (int c = 0; c < Dv / 64; ++c)
        tma_load(memory.d_o(count.stage()) + c * kPanelBytes, maps.d_o, c * 64, head, row, batch, full);
      head += args.packing.heads;
      if (head == end_head) {
        head -= args.branch.geometry.group;
        row += args.packing.queries;
      }
    }
  }
}

/// What there is per query row. One warp.
template <int Dk, int Dv>
__device__ inline void produce_terms(const RangeKeyArgs& args, const Memory<Dk, Dv>& memory) {
  PipelineCount<kStages<Dk, Dv>> count;
#pragma unroll 1
  for (int x = blockIdx.x; x < args.work.items; x += gridDim.x) {
    const volatile KeyItem& item = args.items[x];
    if (item.keys == 0) continue;
    const float* from =
        args.terms.at(item.batch, item.kv_head * args.packing.slices, item.query_row + item.from) + threadIdx.x % 32;
    int slice = 0;
#pragma unroll 1
    for (int left = item.stages; left > 0; --left, count.advance()) {
      memory.rows().acquire_warp(count);
      std::uint32_t to = memory.terms(count.stage()) + threadIdx.x % 32 * 4;
#pragma unroll 1
      for (int array = 0; array < 3; ++array, from += args.terms.array, to += 256) {
        copy4(to, from, true);
        copy4(to + 128, from + 32, true);
      }
      cp_async_mbarrier_arrive(memory.rows().full(count.stage()));
      from += args.to_next_line;
      if (++slice == args.packing.slices) {
        slice = 0;
        from += args.to_next_row;
      }
    }
  }
}

/// What the warpgroups need to know of a stage. One thread.
template <int Dk, int Dv>
__device__ inline void produce_info(const RangeKeyArgs& args, const Memory<Dk, Dv>& memory, char* dynamic) {
  PipelineCount<kStages<Dk, Dv>> count;
#pragma unroll 1
  for (int x = blockIdx.x; x < args.work.items; x += gridDim.x) {
    const volatile KeyItem& item = args.items[x];
    if (item.keys == 0) continue;
    StageInfo info;
    info.keys = item.keys;
    info.lead = item.from + item.shift - item.first_key * args.stride - args.behind;
    int slice = 0, queries = item.to - item.from;
#pragma unroll 1
    for (int left = item.stages; left > 0; --left, count.advance()) {
      memory.rows().acquire(count);
      info.queries = min(args.packing.queries, queries);
      const bool whole = info.queries == args.packing.queries && args.packing.rows == 64;
      info.seen[0] = seen_by(args, info, 0, whole);
      info.seen[1] = seen_by(args, info, 1, whole);
      *reinterpret_cast<StageInfo*>(memory.info(dynamic, count.stage())) = info;
      mbarrier_arrive(memory.rows().full(count.stage()));
      if (++slice == args.packing.slices) {
        slice = 0;
        queries -= args.packing.queries;
        info.lead += args.packing.queries;
      }
    }
  }
}

template <class T, int Dk, int Dv>
__device__ inline void consume(const RangeKeyArgs& args, const Memory<Dk, Dv>& memory, char* dynamic) {
  const int lane = threadIdx.x % 32, warpgroup = warp_uniform(threadIdx.x / 128);
  const BackwardArgs& branch = args.branch;
  const std::uint32_t k = descriptor(memory.k(warpgroup), 16), v = descriptor(memory.v(warpgroup), 16);
  const auto take_turn = [&] { named_barrier_sync(DKvBarrier::kTurn, 256, warpgroup); };
  const auto pass_turn = [&] { named_barrier_arrive(DKvBarrier::kTurn, 256, warpgroup ^ 1); };
  const auto consumer_release = [&](int stage) {
    memory.rows().release(stage);
  };  // every lane has read the rows' terms
  PipelineCount<kStages<Dk, Dv>> count;
  const auto info_of = [&](int stage) -> const volatile StageInfo& {
    return *reinterpret_cast<const volatile StageInfo*>(memory.info(dynamic, stage));
  };
  const auto mask = [&](float(&s)[32]) {
    const volatile StageInfo& info = info_of(count.stage());
    if (info.seen[warpgroup] == kAll) return;
    const int lead = info.lead, queries = info.queries, keys = info.keys, heads = args.packing.heads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = 64 * warpgroup + threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * i, first = key * args.stride - lead;
      // The key is seen by the queries from `first` on: a run of rows, and of this lane's columns.
      const int column = 2 * (lane & 3), from = min(max(first, 0), 64) * heads - column;
      const int to = key < keys ? max(min(first + args.window, queries), 0) * heads - column : 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * j + c < from || 8 * j + c >= to) s[4 * j + 2 * i + c] = args.masked;
      }
    }
  };
  if (warpgroup == 1) pass_turn();
  std::uint32_t keys_phase = 0;
  KeyGradients<T, Dk, Dv> gradients;
#pragma unroll 1
  for (int x = blockIdx.x; x < args.work.items; x += gridDim.x) {
    const volatile KeyItem& item = args.items[x];  // fields are read where they are needed: registers are short
    if (item.keys == 0) continue;
    gradients.clear();
    mbarrier_wait_warp(memory.keys().full(0), keys_phase);
    keys_phase ^= 1;
    int left = item.stages;
    /// Waits for the next stage; whether this warpgroup has anything to do with it.
    const auto arrived = [&] {
      memory.rows().wait_warp(count);
      return info_of(count.stage()).seen[warpgroup] != kNone;
    };
    const auto skip = [&] {
      take_turn();
      pass_turn();
      consumer_release(count.stage());
      count.advance(), --left;
    };
#pragma unroll 1
    while (left > 0 && !arrived()) skip();
    if (left > 0) {
      take_turn();
      gradients.first(memory, k, v, count.stage(), args.scale, mask, pass_turn);
      count.advance(), --left;
#pragma unroll 1
      while (left > 0 && arrived()) {
        take_turn();
        gradients.next(memory, k, v, count.before(), count.stage(), args.scale, mask, pass_turn, consumer_release);
        count.advance(), --left;
      }
      gradients.last(memory, count.before(), consumer_release);
#pragma unroll 1
      for (; left > 0; skip()) arrived();
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(memory.keys().empty(0));

    const int keys = item.keys - 64 * warpgroup, slot = item.slot;
    if (slot >= 0) {
      float* to = branch.partials + (static_cast<std::int64_t>(slot) * kKeys + 64 * warpgroup) * (Dk + Dv);
      gradients.store_partial_dk(to, keys);
      gradients.store_partial_dv(to, keys);
    } else {
      const int row = item.key_row + 64 * warpgroup;
      gradients.store_dk(branch, item.batch, row, item.kv_head, keys);
      gradients.store_dv(branch, item.batch, row, item.kv_head, keys);
    }
  }
  if (warpgroup == 0) take_turn();  // that the other one has passed: no barrier is left half full
}

template <class T, int Dk, int Dv>
__global__ void __launch_bounds__(384, 1)
    range_d_kv(const __grid_constant__ RangeKeyArgs args, const __grid_constant__ KeyMaps maps) {
  if (should_fall_back(*args.branch.fallback.flag)) return;
  extern __shared__ __align__(1024) char dynamic[];
  using Shape = Memory<Dk, Dv>;
  const Shape memory{shared_address(dynamic)};
  if (threadIdx.x == 0) memory.init(1 + 32 + 1, 256);
  memory.clear_stages(dynamic);
  __syncthreads();
  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp >= 8) {
    warpgroup_reg_dealloc<24>();
    if (threadIdx.x == 8 * 32) produce<Dk, Dv>(args, maps, memory);
    if (warp == 9) produce_terms<Dk, Dv>(args, memory);
    if (threadIdx.x == 10 * 32) produce_info<Dk, Dv>(args, memory, dynamic);
  } else {
    warpgroup_reg_alloc<240>();
    consume<T, Dk, Dv>(args, memory, dynamic);
  }
}

/// Adds the partial sums of key tiles with several items. Grid: key tiles, lines, parts.
template <class T>
__global__ void __launch_bounds__(256) sum_chunks(const __grid_constant__ RangeKeyArgs args, int dk, int dv) {
  const BackwardArgs& branch = args.branch;
  const Geometry& p = branch.geometry;
  if (should_fall_back(*branch.fallback.flag)) return;
  const LineTile tile = tile_at(args, blockIdx.y, blockIdx.x);
  const DeviceSequence& seq = tile.seq;
  const int kv_head = tile.kv_head, first = tile.tile * kKeys;
  const int keys = min((branch.window ? seq.k_len : num_compressed(p, seq.k_len)) - first, kKeys);
  if (keys <= 0) return;
  const Cut cut = cut_of(branch, seq, first, keys);
  if (cut.chunks == 1) return;
  const std::int64_t begin = branch.window ? seq.k_begin : compressed_begin_in_warp(p, seq.index);
  sum_partials<T>(branch, tile.first_slot, cut.chunks, kKeys, seq.batch, begin + first, kv_head, keys, dk, dv);
}

}  // namespace

template <>
cudaError_t launch_range_d_kv<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const BackwardArgs& branch,
                                                                       cudaStream_t stream) {
  constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;
  const Geometry& g = branch.geometry;
  const bool compressed = branch.window == 0;
  RangeKeyArgs args{.branch = branch,
                    .terms = RowTerms(g, branch.row_terms),
                    .packing = HeadPacking(g.group),
                    .work = RangeWork(g, branch.window),
                    .scale = log2_scale(branch.scale),
                    .masked = masked_score(log2_scale(branch.scale)),
                    .items = static_cast<KeyItem*>(branch.schedule)};
  if (args.work.items == 0) return cudaSuccess;
  args.stride = compressed ? g.kernel_stride : 1;
  args.behind = compressed ? g.kernel_size - 1 : 0;
  args.window = compressed ? 1 << 30 : branch.window;
  args.to_next_line = args.terms.line - 3 * args.terms.array;
  args.to_next_row = args.packing.rows - args.packing.slices * args.terms.line;
  KeyMaps maps;
  int num_sms = 0;
  cudaError_t error = sm_count(num_sms);
  if (error == cudaSuccess) error = args.packing.make_tensor_map(maps.q, branch.q, g, Dk);
  if (error == cudaSuccess) error = args.packing.make_tensor_map(maps.d_o, branch.d_o, g, Dv);
  if (error == cudaSuccess) error = make_key_tensor_map(maps.k, branch.k, g, Dk, compressed, 64);
  if (error == cudaSuccess) error = make_key_tensor_map(maps.v, branch.v, g, Dv, compressed, 64);
  const auto blocks = static_cast<unsigned>(ceil_div(args.work.items, 128));
  if (error == cudaSuccess) error = make_row_terms(branch, stream, !kSideBySide<Dk, Dv>);
  if (error == cudaSuccess) error = launch(make_schedule, blocks, 128, 0, stream, args);
  if (error == cudaSuccess)
    error = launch(range_d_kv<NSA_ELEMENT, Dk, Dv>, std::min(args.work.items, num_sms), 384, Memory<Dk, Dv>::kBytes,
                   stream, args, maps);
  if (error != cudaSuccess || args.work.chunks == 1) return error;
  const dim3 sums(args.work.key_tiles, args.work.lines, kSumBlocks);
  return launch(sum_chunks<NSA_ELEMENT>, sums, 256, 0, stream, args, Dk, Dv);
}

}  // namespace nsa::cuda::sm90::range_attention
