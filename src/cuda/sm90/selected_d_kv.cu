// dK and dV of the selected blocks. The scheme is that of key_gradients.cuh: a thread block takes 64 keys of one KV
// head and the queries that chose their block, from the lists of inverse_index.cuh. The rows of a query are gathered by
// a copy of their own; the warpgroups take alternate stages and their sums are added at the end.
//
// Long lists are cut into items of kListChunk queries; blocks of several items leave float32 partial sums that the
// portable sum_partials adds in order.
#include "cuda/portable/d_kv.cuh"
#include "cuda/sm90/key_gradients.cuh"

namespace nsa::cuda::sm90 {
namespace {

constexpr int kStages = 5, kMostQueries = 8;

struct ListKeyArgs {
  BackwardArgs branch;
  RowTerms terms;
  QueryTiles tiles;
  KeyItem* items;
  int work;
  float scale;  // in base-2 units
};

__global__ void __launch_bounds__(128) plan_items(const __grid_constant__ ListKeyArgs args) {
  const int x = static_cast<int>(blockIdx.x * 128 + threadIdx.x);
  if (x >= args.work) return;
  const BackwardArgs& branch = args.branch;
  const Geometry& p = branch.geometry;
  const int kv_head = static_cast<int>(x / branch.items);
  int own = static_cast<int>(x - kv_head * branch.items);
  const DeviceSequence seq = portable::sequence_of_item(branch, own);
  const portable::SequenceLists lists = portable::lists_of(branch.lists, p, seq, kv_head);
  const portable::KeyTile tile = portable::selected_item(branch, seq, lists, own);
  KeyItem item{};
  if (tile.count > 0) {
    const int list = static_cast<int>(lists.list - branch.lists.list);
    item.batch = seq.batch;
    item.kv_head = kv_head;
    item.first_key = tile.first;
    item.keys = tile.count;
    item.key_row = seq.k_begin + tile.first;
    item.query_row = seq.q_begin;
    item.shift = seq.position(0);
    item.from = list + tile.query_begin;
    item.to = list + max(tile.query_end, tile.query_begin);
    item.stages = (item.to - item.from + args.tiles.queries - 1) / args.tiles.queries * args.tiles.slices;
    item.slot = tile.items > 1 ? static_cast<int>(kv_head * branch.partial_items + tile.partial) + tile.item : -1;
    item.terms = args.terms.at(item.batch, kv_head * args.tiles.slices, item.query_row);
  }
  args.items[x] = item;
}

/// What the warpgroups need to know of a stage.
struct StageInfo {
  int lead[kMostQueries];  // position of a query - first key; -1: no query
  int all;                 // every query sees every key
};

template <int Dk, int Dv>
struct Memory : KeyMemory<Dk, Dv, 1, kStages> {
  static constexpr int kSums = (KeyMemory<Dk, Dv, 1, kStages>::kBytes + 15) / 16 * 16;  // of one warpgroup, in parts
  static constexpr int kPart = 32;                                                      // floats of a thread
  static constexpr int kBytes = kSums + kPart * 128 * 4;
};

/// The query tiles of an item, as the copying warps see them: f(entry), where this lane's entry of the list is fetched
/// a stage ahead; -1: there is none. `own`: this lane's query of a tile.
template <class F>
__device__ __forceinline__ void for_stages(const ListKeyArgs& args, const volatile KeyItem& item, int own, const F& f) {
  int at = item.from + own;
  const int end = item.to;
  const auto fetch = [&] { return own < args.tiles.queries && at < end ? args.branch.lists.list[at] : -1; };
  int next = fetch();
#pragma unroll 1
  while (at - own < end) {
    const int query = next;
    at += args.tiles.queries;
    next = fetch();
#pragma unroll 1
    for (int slice = 0; slice < args.tiles.slices; ++slice) f(query, slice);
  }
}

/// Keys and query rows. One warp: a lane copies one panel of one query.
template <int Dk, int Dv>
__device__ inline void produce(const ListKeyArgs& args, const KeyMaps& maps, const Memory<Dk, Dv>& memory) {
  constexpr int kPanels = (Dk + Dv) / 64;
  const int lane = lane_again(), own = lane / kPanels, panel = lane % kPanels;
  const bool gradient = panel >= Dk / 64;
  const std::uint32_t to = memory.q(0) +
                           (gradient ? Memory<Dk, Dv>::kK + (panel - Dk / 64) * kPanelBytes : panel * kPanelBytes) +
                           own * args.tiles.heads * 128;
  StageCount<kStages> count;
  std::uint32_t keys_parity = 1;
#pragma unroll 1
  for (int x = blockIdx.x; x < args.work; x += gridDim.x) {
    const volatile KeyItem& item = args.items[x];
    if (item.keys == 0) continue;
    if (lane_again() == 0) {
      wait(memory.keys_empty(), keys_parity);
      arrive_expecting(memory.keys_full(), Memory<Dk, Dv>::kK + Memory<Dk, Dv>::kV);
#pragma unroll 1
      for (int c = 0; c < Dk / 64; ++c)
        load_box(memory.k(0) + c * kPanelBytes, maps.k, c * 64, item.kv_head, item.key_row, item.batch,
                 memory.keys_full());
#pragma unroll 1
      for (int c = 0; c < Dv / 64; ++c)
        load_box(memory.v(0) + c * kPanelBytes, maps.v, c * 64, item.kv_head, item.key_row, item.batch,
                 memory.keys_full());
    }
    __syncwarp();
    keys_parity ^= 1;
    for_stages(args, item, own, [&](int query, int slice) {
      const std::uint32_t full = memory.full(count.stage());
      wait(memory.empty(count.stage()), count.parity() ^ 1);
      if (lane_again() == 0) arrive_expecting(full, args.tiles.rows * (Dk + Dv) * 2);
      __syncwarp();
      if (own < args.tiles.queries) {
        const int row = query < 0 ? args.terms.rows : item.query_row + query;  // past the end: zeros
        load_box(to + count.stage() * (Memory<Dk, Dv>::kK + Memory<Dk, Dv>::kV), gradient ? maps.d_o : maps.q,
                 (gradient ? panel - Dk / 64 : panel) * 64,
                 item.kv_head * args.branch.geometry.group + slice * args.tiles.heads, row, item.batch, full);
      }
      ++count.count;
    });
  }
}

/// What there is per query row. One warp: a lane copies one of the three for one query. Rows of no query get those of
/// another one; they are masked.
template <int Dk, int Dv>
__device__ inline void produce_terms(const ListKeyArgs& args, const Memory<Dk, Dv>& memory) {
  const int lane = lane_again(), own = lane / 3, array = lane % 3, bytes = args.tiles.heads * 4;
  StageCount<kStages> count;
#pragma unroll 1
  for (int x = blockIdx.x; x < args.work; x += gridDim.x) {
    const volatile KeyItem& item = args.items[x];
    if (item.keys == 0) continue;
    const float* base = item.terms + array * args.terms.array;
    for_stages(args, item, own, [&](int query, int slice) {
      const std::uint32_t full = memory.full(count.stage());
      wait(memory.empty(count.stage()), count.parity() ^ 1);
      if (lane_again() == 0) arrive_expecting(full, 3 * args.tiles.queries * bytes);
      __syncwarp();
      if (own < args.tiles.queries)
        load_bytes(memory.terms(count.stage()) + array * 256 + own * bytes,
                   base + slice * args.terms.line + max(query, 0) * args.tiles.heads, bytes, full);
      ++count.count;
    });
  }
}

/// What the warpgroups need to know of a stage. One warp.
template <int Dk, int Dv>
__device__ inline void produce_info(const ListKeyArgs& args, const Memory<Dk, Dv>& memory, char* dynamic) {
  StageCount<kStages> count;
#pragma unroll 1
  for (int x = blockIdx.x; x < args.work; x += gridDim.x) {
    const volatile KeyItem& item = args.items[x];
    if (item.keys == 0) continue;
    const int before = item.shift - item.first_key;
    for_stages(args, item, lane_again(), [&](int query, int) {
      wait(memory.empty(count.stage()), count.parity() ^ 1);
      auto& info = *reinterpret_cast<StageInfo*>(memory.info(dynamic, count.stage()));
      const int lead = query < 0 ? -1 : query + before;
      const bool all = __all_sync(0xffffffffu, lane_again() >= args.tiles.queries || lead >= 63);
      if (lane_again() < args.tiles.queries) info.lead[lane_again()] = lead;
      if (lane_again() == 0) info.all = all;
      __syncwarp();
      if (lane_again() == 0) arrive(memory.full(count.stage()));
      ++count.count;
    });
  }
}

/// Adds the second warpgroup's `sums` to the first one's, part by part through shared memory.
template <int N>
__device__ __forceinline__ void add_sums(float (&sums)[N], float4* shared, int warpgroup) {
  constexpr int kPart = 32;
  static_assert(N % kPart == 0);
  float4* mine = shared + threadIdx.x % 128;
#pragma unroll
  for (int first = 0; first < N; first += kPart) {
    if (warpgroup == 1) {
#pragma unroll
      for (int i = 0; i < kPart; i += 4)
        mine[i / 4 * 128] = float4{sums[first + i], sums[first + i + 1], sums[first + i + 2], sums[first + i + 3]};
      named_arrive(3, 256);
      named_sync(4, 256);
    } else {
      named_sync(3, 256);
#pragma unroll
      for (int i = 0; i < kPart; i += 4) {
        const float4 x = mine[i / 4 * 128];
        sums[first + i] += x.x, sums[first + i + 1] += x.y, sums[first + i + 2] += x.z, sums[first + i + 3] += x.w;
      }
      named_arrive(4, 256);
    }
  }
}

template <class T, int Dk, int Dv>
__device__ inline void consume(const ListKeyArgs& args, const Memory<Dk, Dv>& memory, char* dynamic) {
  const int lane = threadIdx.x % 32, warpgroup = uniform(threadIdx.x / 128);
  const BackwardArgs& branch = args.branch;
  const std::uint32_t k = descriptor(memory.k(0), 16), v = descriptor(memory.v(0), 16);
  const auto take_turn = [&] { named_sync(1 + warpgroup, 256); };
  const auto pass_turn = [&] { named_arrive(1 + (warpgroup ^ 1), 256); };
  const auto release = [&](int stage) {
    if (lane == 0) arrive(memory.empty(stage));
  };
  StageCount<kStages> count;
  const auto mask = [&](float(&s)[32]) {
    const auto& info = *reinterpret_cast<const volatile StageInfo*>(memory.info(dynamic, count.stage()));
    if (info.all) return;
    const int first_key = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = args.tiles.by_heads.quotient(8 * j + 2 * (lane & 3) + i % 2);
        if (first_key + i / 2 * 8 > info.lead[query]) s[4 * j + i] = -INFINITY;
      }
    }
  };
  if (warpgroup == 1) pass_turn();
  std::uint32_t keys_parity = 0;
  int all_stages = 0;  // of the items so far: stages of odd number are the second warpgroup's
  KeyGradients<T, Dk, Dv> gradients;
#pragma unroll 1
  for (int x = blockIdx.x; x < args.work; x += gridDim.x) {
    const volatile KeyItem& item = args.items[x];  // fields are read where they are needed: registers are short
    if (item.keys == 0) continue;
    gradients.clear();
    wait(memory.keys_full(), keys_parity);
    keys_parity ^= 1;
    count.count = all_stages + ((all_stages ^ warpgroup) & 1);
    all_stages += item.stages;
    if (count.count < all_stages) {
      wait(memory.full(count.stage()), count.parity());
      take_turn();
      gradients.first(memory, k, v, count.stage(), args.scale, mask, pass_turn);
#pragma unroll 1
      for (count.count += 2; count.count < all_stages; count.count += 2) {
        wait(memory.full(count.stage()), count.parity());
        take_turn();
        gradients.next(memory, k, v, count.before(2), count.stage(), args.scale, mask, pass_turn, release);
      }
      gradients.last(memory, count.before(2), release);
    }
    __syncwarp();
    if (lane == 0) arrive(memory.keys_empty());

    auto* sums = reinterpret_cast<float4*>(dynamic + Memory<Dk, Dv>::kSums);
    add_sums(gradients.dk, sums, warpgroup);
    add_sums(gradients.dv, sums, warpgroup);
    if (warpgroup == 1) continue;
    const int keys = item.keys, slot = item.slot;
    if (slot >= 0) {
      gradients.store_partial(branch.partials + static_cast<std::int64_t>(slot) * 64 * (Dk + Dv), keys);
    } else {
      gradients.store(branch, item.batch, item.key_row, item.kv_head, keys);
    }
  }
  if ((all_stages & 1) == warpgroup) take_turn();  // that was passed last: no barrier is left half full
}

template <class T, int Dk, int Dv>
__global__ void __launch_bounds__(384, 1)
    selected_d_kv(const __grid_constant__ ListKeyArgs args, const __grid_constant__ KeyMaps maps) {
  if (*args.branch.redo.flag != 0) return;
  extern __shared__ __align__(1024) char dynamic[];
  const Memory<Dk, Dv> memory{shared_address(dynamic)};
  if (threadIdx.x == 0) memory.init(1 + 1 + 1, 4);
  __syncthreads();
  const int warp = uniform(threadIdx.x / 32);
  if (warp >= 8) {
    fewer_registers<24>();
    if (warp == 8) {
      produce<Dk, Dv>(args, maps, memory);
    } else if (warp == 9) {
      produce_terms<Dk, Dv>(args, memory);
    } else if (warp == 10) {
      produce_info<Dk, Dv>(args, memory, dynamic);
    }
  } else {
    more_registers<240>();
    consume<T, Dk, Dv>(args, memory, dynamic);
  }
}

}  // namespace

template <>
cudaError_t launch_selected_d_kv<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const BackwardArgs& branch,
                                                                          cudaStream_t stream) {
  constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;
  const Geometry& g = branch.geometry;
  ListKeyArgs args{branch,
                   RowTerms(g, branch.row_terms),
                   QueryTiles(g.group),
                   static_cast<KeyItem*>(branch.plan),
                   static_cast<int>(g.kv_heads * branch.items),
                   branch.scale * kLog2e};
  if (args.work == 0) return cudaSuccess;
  KeyMaps maps;
  // One query each: a stage gathers them.
  const int heads = args.tiles.heads, batches = tensor_batches(g);
  int processors = 0;
  cudaError_t error = multiprocessors(processors);
  if (error == cudaSuccess) error = make_map(maps.q, branch.q, Dk, g.heads, query_rows(g), batches, heads, 1);
  if (error == cudaSuccess) error = make_map(maps.d_o, branch.d_o, Dv, g.heads, query_rows(g), batches, heads, 1);
  if (error == cudaSuccess) error = key_map(maps.k, branch.k, g, Dk, false, 64);
  if (error == cudaSuccess) error = key_map(maps.v, branch.v, g, Dv, false, 64);
  if (error == cudaSuccess) error = make_row_terms(branch, stream);
  const auto blocks = static_cast<unsigned>(portable::tiles(args.work, 128));
  if (error == cudaSuccess) error = portable::launch(plan_items, blocks, 128, 0, stream, args);
  if (error == cudaSuccess)
    error = portable::launch(selected_d_kv<NSA_ELEMENT, Dk, Dv>, std::min(args.work, processors), 384,
                             Memory<Dk, Dv>::kBytes, stream, args, maps);
  if (error != cudaSuccess) return error;
  BackwardArgs sums = branch;
  sums.redo = {};  // where the flag is set the portable kernels write after it
  return portable::launch(portable::sum_partials<NSA_ELEMENT>, dim3(static_cast<unsigned>(branch.items), g.kv_heads),
                          128, 0, stream, sums, Dk, Dv);
}

}  // namespace nsa::cuda::sm90
