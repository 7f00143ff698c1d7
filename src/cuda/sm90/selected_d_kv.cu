// dK and dV of the selected blocks. The scheme is that of key_gradients.cuh: a thread block takes 64 keys of one KV
// head and the queries that chose their block, from the lists of inverse_index.cuh. The rows of a query are gathered by
// a copy of their own; the warpgroups take alternate stages and their sums are added at the end.
//
// Lists are cut into items (list_items.h), which the thread blocks take in the order of their plan, each when it is
// done with the one before. Key tiles of several items leave float32 partial sums that sum_items adds in order.
//
// Producers: warp 8 has Q copied, warp 9 dO, warp 10 what there is per row; warp 11 takes the items, has their keys and
// values copied and notes who sees whom.
#include "cuda/sm90/key_gradients.cuh"
#include "cuda/sm90/list_items.h"

namespace nsa::cuda::sm90 {
namespace {

constexpr int kStages = 5, kMostQueries = 8;

struct ListKeyArgs : ListPlan {
  float scale;  // in base-2 units
};

/// What the warpgroups need to know of a stage.
struct StageInfo {
  int lead[kMostQueries];  // position of a query - first key; -1: no query
  int all;                 // every query sees every key
};

template <int Dk, int Dv>
struct Memory : KeyMemory<Dk, Dv, 1, kStages> {
  using Base = KeyMemory<Dk, Dv, 1, kStages>;
  static constexpr int kPart = 16;  // floats that a thread passes to the other warpgroup at a time
  static constexpr int kItem = Base::kBytes, kSums = (kItem + 3 * 8 + 15) / 16 * 16;
  static constexpr int kBytes = kSums + 2 * kPart * 128 * 4;

  __device__ std::uint32_t item_full() const { return this->base + kItem; }
  __device__ std::uint32_t item_empty() const { return item_full() + 8; }
  /// The number of the next item; negative: there is none.
  __device__ static volatile int& item(char* memory) { return *reinterpret_cast<int*>(memory + kItem + 16); }
  __device__ void init() const {
    barrier_init(item_full(), 1);
    barrier_init(item_empty(), 8 + 3);
    Base::init(4, 4);
  }
};

/// Takes the next item as soon as the other warps have begun the one before: f(item). One warp.
template <int Dk, int Dv, class F>
__device__ __forceinline__ void take_items(const ListKeyArgs& args, const Memory<Dk, Dv>& memory, char* dynamic,
                                           const F& f) {
  const int end = args.queue->end;
#pragma unroll 1
  for (std::uint32_t parity = 1;; parity ^= 1) {
    int x = 0;
    if (lane_again() == 0) {
      wait(memory.item_empty(), parity);
      x = atomicAdd(&args.queue->next, 1);
      memory.item(dynamic) = x < end ? x : -1;
      arrive(memory.item_full());
    }
    x = uniform(x);
    if (x >= end) return;
    f(args.items[x]);
  }
}
/// f(item) for the items of this thread block, in the other warps. Fields are read where they are needed: registers are
/// short.
template <int Dk, int Dv, class F>
__device__ __forceinline__ void for_items(const ListKeyArgs& args, const Memory<Dk, Dv>& memory, char* dynamic,
                                          const F& f) {
#pragma unroll 1
  for (std::uint32_t parity = 0;; parity ^= 1) {
    wait(memory.item_full(), parity);
    const int x = memory.item(dynamic);
    __syncwarp();
    if (lane_again() == 0) arrive(memory.item_empty());
    if (x < 0) return;
    const volatile KeyItem& item = args.items[x];
    f(item);
  }
}

/// The query tiles of an item, as the copying warps see them: f(query, slice), this lane's query `own` of a tile; -1:
/// there is none. A lane fetches every 32nd entry of the list, 32 ahead.
template <class F>
__device__ __forceinline__ void for_stages(const ListKeyArgs& args, const volatile KeyItem& item, int own, const F& f) {
  int left = item.to - item.from;
  const int* at = args.branch.lists.list + item.from + lane_again();
  const auto fetch = [&] { return lane_again() < left ? *at : -1; };
  int next = fetch();
#pragma unroll 1
  while (left > 0) {
    const int entries = next;
    left -= 32;
    at += 32;
    next = fetch();
#pragma unroll 1
    for (int i = 0; i < 32 && i < left + 32; i += args.tiles.queries) {
      const int query = __shfl_sync(0xffffffffu, entries, i + own);
#pragma unroll 1
      for (int slice = 0; slice < args.tiles.slices; ++slice) f(query, slice);
    }
  }
}

/// Rows of Q or dO, `first` the address of a tile of them in stage 0. One warp: a lane copies one panel of one query.
template <int D, int Dk, int Dv>
__device__ inline void produce_rows(const ListKeyArgs& args, const CUtensorMap& map, const Memory<Dk, Dv>& memory,
                                    std::uint32_t first, char* dynamic) {
  const int own = lane_again() / (D / 64), column = lane_again() % (D / 64) * 64;
  const std::uint32_t to = first + column / 64 * kPanelBytes + own * args.tiles.heads * 128;
  StageCount<kStages> count;
  for_items(args, memory, dynamic, [&](const volatile KeyItem& item) {
    const int batch = item.batch, head = item.kv_head * args.branch.geometry.group, query_row = item.query_row;
    for_stages(args, item, own, [&](int query, int slice) {
      const std::uint32_t full = memory.full(count.stage());
      wait(memory.empty(count.stage()), count.parity() ^ 1);
      if (lane_again() == 0) arrive_expecting(full, args.tiles.rows * D * 2);
      __syncwarp();
      const int row = query < 0 ? args.terms.rows : query_row + query;  // past the end: zeros
      if (own < args.tiles.queries)
        load_box(to + count.stage() * (Memory<Dk, Dv>::kK + Memory<Dk, Dv>::kV), map, column,
                 head + slice * args.tiles.heads, row, batch, full);
      ++count.count;
    });
  });
}

/// What there is per query row. One warp: a lane copies one of the three for one query. Rows of no query get those of
/// another one; they are masked.
template <int Dk, int Dv>
__device__ inline void produce_terms(const ListKeyArgs& args, const Memory<Dk, Dv>& memory, char* dynamic) {
  const int lane = lane_again(), own = lane / 3, array = lane % 3, bytes = args.tiles.heads * 4;
  StageCount<kStages> count;
  for_items(args, memory, dynamic, [&](const volatile KeyItem& item) {
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
  });
}

/// Keys and values, and what the warpgroups need to know of a stage. One warp.
template <int Dk, int Dv>
__device__ inline void produce_items(const ListKeyArgs& args, const KeyMaps& maps, const Memory<Dk, Dv>& memory,
                                     char* dynamic) {
  StageCount<kStages> count;
  std::uint32_t keys_parity = 1;
  take_items(args, memory, dynamic, [&](const volatile KeyItem& item) {
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
  });
}

/// Adds to `kept` what the other warpgroup gives, and gives it `given`, part by part through shared memory. The order
/// of the two summands does not change the sum.
template <int kPart, int N>
__device__ __forceinline__ void exchange_sums(float (&kept)[N], const float (&given)[N], float4* shared,
                                              int warpgroup) {
  static_assert(N % kPart == 0);
  float4* from = shared + threadIdx.x % 128 + (warpgroup ^ 1) * (kPart / 4 * 128);
  float4* to = shared + threadIdx.x % 128 + warpgroup * (kPart / 4 * 128);
#pragma unroll
  for (int first = 0; first < N; first += kPart) {
#pragma unroll
    for (int i = first; i < first + kPart; i += 4)
      to[(i - first) / 4 * 128] = float4{given[i], given[i + 1], given[i + 2], given[i + 3]};
    named_sync(3, 256);
#pragma unroll
    for (int i = first; i < first + kPart; i += 4) {
      const float4 x = from[(i - first) / 4 * 128];
      kept[i] += x.x, kept[i + 1] += x.y, kept[i + 2] += x.z, kept[i + 3] += x.w;
    }
    named_sync(3, 256);
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
  for_items(args, memory, dynamic, [&](const volatile KeyItem& item) {
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

    // The first warpgroup stores dK, the second one dV.
    auto* shared = reinterpret_cast<float4*>(dynamic + Memory<Dk, Dv>::kSums);
    const int keys = item.keys, slot = item.slot;
    float* partial = branch.partials + static_cast<std::int64_t>(slot) * 64 * (Dk + Dv);
    if (warpgroup == 0) {
      exchange_sums<Memory<Dk, Dv>::kPart>(gradients.dk, gradients.dv, shared, 0);
      if (slot >= 0) {
        gradients.store_partial_dk(partial, keys);
      } else {
        gradients.store_dk(branch, item.batch, item.key_row, item.kv_head, keys);
      }
    } else {
      exchange_sums<Memory<Dk, Dv>::kPart>(gradients.dv, gradients.dk, shared, 1);
      if (slot >= 0) {
        gradients.store_partial_dv(partial, keys);
      } else {
        gradients.store_dv(branch, item.batch, item.key_row, item.kv_head, keys);
      }
    }
  });
  if ((all_stages & 1) == warpgroup) take_turn();  // that was passed last: no barrier is left half full
}

template <class T, int Dk, int Dv>
__global__ void __launch_bounds__(384, 1)
    selected_d_kv(const __grid_constant__ ListKeyArgs args, const __grid_constant__ KeyMaps maps) {
  if (*args.branch.redo.flag != 0) return;
  extern __shared__ __align__(1024) char dynamic[];
  const Memory<Dk, Dv> memory{shared_address(dynamic)};
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  const int warp = uniform(threadIdx.x / 32);
  if (warp >= 8) {
    fewer_registers<24>();
    if (warp == 8) {
      produce_rows<Dk>(args, maps.q, memory, memory.q(0), dynamic);
    } else if (warp == 9) {
      produce_rows<Dv>(args, maps.d_o, memory, memory.d_o(0), dynamic);
    } else if (warp == 10) {
      produce_terms(args, memory, dynamic);
    } else {
      produce_items(args, maps, memory, dynamic);
    }
  } else {
    more_registers<240>();
    consume<T, Dk, Dv>(args, memory, dynamic);
  }
}

/// Adds the partial sums of key tiles with several items. Grid: such key tiles, 1, parts.
template <class T>
__global__ void __launch_bounds__(256) sum_items(const __grid_constant__ ListKeyArgs args, int dk, int dv) {
  if (*args.branch.redo.flag != 0 || static_cast<int>(blockIdx.x) >= args.queue->sums) return;
  const KeyItem& item = args.items[args.sums[blockIdx.x]];
  sum_partials<T>(args.branch, item.slot, item.partials, 64, item.batch, item.key_row, item.kv_head, item.keys, dk, dv);
}

}  // namespace

template <>
cudaError_t launch_selected_d_kv<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const BackwardArgs& branch,
                                                                          cudaStream_t stream) {
  constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;
  const Geometry& g = branch.geometry;
  const ListWork work(g, branch.lists);
  if (work.items == 0) return cudaSuccess;
  const ListKeyArgs args{ListPlan(branch, work), branch.scale * kLog2e};
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
  if (error == cudaSuccess) error = plan_items(args, stream);
  const auto most = static_cast<unsigned>(work.items);
  if (error == cudaSuccess)
    error = portable::launch(selected_d_kv<NSA_ELEMENT, Dk, Dv>, std::min<unsigned>(most, processors), 384,
                             Memory<Dk, Dv>::kBytes, stream, args, maps);
  if (error != cudaSuccess) return error;
  const dim3 sums(static_cast<unsigned>(work.sums), 1, kSumParts);
  return portable::launch(sum_items<NSA_ELEMENT>, sums, 256, 0, stream, args, Dk, Dv);
}

}  // namespace nsa::cuda::sm90
