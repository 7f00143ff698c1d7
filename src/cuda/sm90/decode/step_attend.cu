// One instance of step_attend: compiled with NSA_ELEMENT, NSA_KEY_DIM and NSA_VALUE_DIM.
//
// A cluster of eight thread blocks has 2 or 4 tiles of sixteen rows (query, head) of one KV head, or the one tile of a
// single query. Its thread blocks
// share out the keys in stages of one unit of sixteen keys per warp, which loads it. The warps of a tile share out the
// units of compressed keys, and merge their sums in the end. Of the window and the selected blocks, which are few keys,
// each warp takes all units of a stage and some columns of the values. So keys are read once for all rows, and the
// order of every sum follows from the keys' numbers, not from lengths or other sequences.
//
//   compressed keys, keeping sums for the choice │ window │ exchange of softmaxes │ own candidates │ exchange │
//   choice, the same in all thread blocks │ selected blocks │ exchange of outputs, each thread block some columns
#include "cuda/common/block_list.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/pages.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sm90/decode/block_choice.cuh"

namespace nsa::cuda::sm90::decode {
namespace {

constexpr int kThreads = 32 * kWarps;
/// Up to so many blocks of its own a thread block ranks by counting, each thread one or a few of them.
constexpr int kMostCounted = 512;

template <class T, int Dk, int Dv, int kTiles>
struct Shape {
  static constexpr bool kOneQuery = kTiles == 1;
  static constexpr int kSplits = kWarps / kTiles;               // warps of a tile
  static constexpr int kAtOnce = kTiles == kMostTiles ? 1 : 2;  // units that a warp multiplies together
  static constexpr int kRows = kTiles * kTileRows;
  static constexpr int kValues = Tile<T, Dk>::bytes(kUnitKeys), kUnit = kValues + Tile<T, Dv>::bytes(kUnitKeys);
  static constexpr int kStageKeys = kUnitKeys * kWarps, kStage = kUnit * kWarps, kRing = 2 * kStage;
  static constexpr int kColumns = Dv / 8;                 // tiles of eight columns
  static constexpr int kOwnColumns = kColumns / kSplits;  // that a warp has of its tile after a merge
  static constexpr int kSums = kColumns * 512;            // bytes of a tile's sums, 16 bytes a lane for eight columns
  static_assert(kSums <= kUnit && kColumns % kSplits == 0 && kColumns % kRanks == 0);
};

/// Maxima in base-2 units and sums of the softmaxes of a thread block's rows, in shared memory.
template <class S>
struct RowMemory {
  float2 warps[kWarps][kTileRows];
  float2 branches[kBranches][S::kRows];  // of the thread block; read by the others
  float2 totals[kBranches][S::kRows];    // of the cluster: maximum and 1 / sum, {0, 0}: sees nothing
  float factors[kRanks][S::kRows];       // of the thread blocks' shares of the selected branch
  float gates[kBranches][S::kRows];
};

/// What the choice is made from, in shared memory (StepMemory::choice).
struct ChoiceMemory {
  char* memory;
  int queries, topk;

  /// (queries, topk), 0: none; read by the others.
  __device__ unsigned long long* candidates() const { return reinterpret_cast<unsigned long long*>(memory); }
  /// How many blocks a query has, and which ones, ascending: (queries), (queries, topk).
  __device__ int* counts() const { return reinterpret_cast<int*>(candidates() + queries * topk); }
  __device__ int* blocks() const { return counts() + queries; }
  /// The blocks of any query, ascending, (queries * topk), and before them how many there are.
  __device__ int* united() const { return blocks() + queries * topk + 1; }
  /// Their queries, a bit each.
  __device__ unsigned* users() const { return reinterpret_cast<unsigned*>(united() + queries * topk); }
};

template <BranchIndex kBranch>
inline constexpr std::integral_constant<BranchIndex, kBranch> branch_constant;

/// Where a unit of keys lies: a page and the first row in it.
struct UnitAddress {
  int page, slot;
};

/// Importance of a block for the query that has the rows first ... first + count - 1 of a tile: its sums over them, if
/// the unit has any keys, and for a unit's first block what the last key of the unit before gives, which lies in the
/// thread block `rank`. totals: of the tile's rows.
__device__ __forceinline__ float importance_of(bool has_keys, KeptUnit unit, int block, bool crosses, KeptUnit before,
                                               int rank, const float2* totals, int first, int count) {
  const std::uint32_t crossing = map_to_rank(shared_address(before.crossing()), rank);
  const std::uint32_t reference = map_to_rank(shared_address(before.reference()), rank);
  float sum = 0;
#pragma unroll 1
  for (int r = 0; r < kTileRows; r += 8) {  // eight places of rows at a time
    uint4 sums{}, crossings{};
    constexpr float kNone = -INFINITY;
    float4 low{kNone, kNone, kNone, kNone}, high = low, low_before = low, high_before = low;
    if (has_keys) {
      sums = *reinterpret_cast<const uint4*>(unit.sums(block) + r);
      low = *reinterpret_cast<const float4*>(unit.reference() + r);
      high = *reinterpret_cast<const float4*>(unit.reference() + r + 4);
    }
    if (crosses) {
      crossings = load_remote_uint4(crossing + 2 * r);
      low_before = load_remote_float4(reference + 4 * r), high_before = load_remote_float4(reference + 4 * r + 16);
    }
    const auto add = [&](int i, float x, float reference_of, float y, float reference_before) {
      const int row = KeptUnit::row_of(r + i);
      const float2 all = totals[row];
      const float share = x * exp2_fast(reference_of - all.x) + y * exp2_fast(reference_before - all.x);
      sum += static_cast<unsigned>(row - first) < static_cast<unsigned>(count) ? share * all.y : 0;
    };
    const auto add_pair = [&](int i, std::uint32_t x, float2 of, std::uint32_t y, float2 of_before) {
      const float2 a = unpack(Half{}, x), c = unpack(Half{}, y);
      add(i, a.x, of.x, c.x, of_before.x), add(i + 1, a.y, of.y, c.y, of_before.y);
    };
    add_pair(0, sums.x, {low.x, low.y}, crossings.x, {low_before.x, low_before.y});
    add_pair(2, sums.y, {low.z, low.w}, crossings.y, {low_before.z, low_before.w});
    add_pair(4, sums.z, {high.x, high.y}, crossings.z, {high_before.x, high_before.y});
    add_pair(6, sums.w, {high.z, high.w}, crossings.w, {high_before.z, high_before.w});
  }
  return sum;
}

/// The blocks that the cluster's queries attend to, the same lists in all of its thread blocks. Works in the ring's
/// memory, which nobody else uses then.
template <class S>
__device__ __forceinline__ void choose_blocks(const StepAttendArgs& args, char* memory, RowMemory<S>& rows,
                                              const ChoiceMemory& choice, char* all_kept, int queries,
                                              int first_position, int compressed, bool chooses, bool room) {
  const BlockKeys& shape = args.block_keys;
  const int lane = threadIdx.x % 32, warp = warp_uniform(static_cast<int>(threadIdx.x) / 32), rank = cluster_rank();
  const int kv_head = blockIdx.y, b = blockIdx.z, topk = args.topk;
  const int first_query = static_cast<int>(blockIdx.x) / kRanks * args.tiles.queries;
  const int last_position = first_position + queries - 1;
  const int kept_bytes = shape.kept_bytes(), log2_blocks = shape.log2_blocks();
  const auto divide = [](const FastDivmod& by, int e) { return S::kOneQuery ? 0 : by.divide(e); };
  // Where all candidates of every query fit nothing is ranked.
  const bool ranks_blocks = chooses && !Candidates(args, last_position).all(args);
  if (ranks_blocks) {
    const int units = (compressed + kUnitKeys - 1) / kUnitKeys;
    const int all_units = (Candidates(args, last_position).count + shape.blocks() - 1) >> log2_blocks;
    const int stages = max((all_units + kWarps * (kRanks - rank) - 1) / (kWarps * kRanks), 0);
    const int local_blocks = stages * kWarps << log2_blocks;  // in this thread block
    const FastDivmod by_blocks(S::kOneQuery ? 1 : max(local_blocks, 1));
    auto* const keys = reinterpret_cast<unsigned*>(memory);  // importances: (queries, local_blocks)
    const auto block_at = [&](int local) {
      return (UnitPlace::unit_of(local >> log2_blocks, rank) << log2_blocks) + (local & (shape.blocks() - 1));
    };
    for (int i = threadIdx.x; i < queries * topk; i += kThreads) choice.candidates()[i] = 0;
#pragma unroll 1
    for (int e = threadIdx.x; e < queries * local_blocks; e += kThreads) {
      const int query = divide(by_blocks, e), local = e - query * local_blocks;
      const int local_unit = local >> log2_blocks, in_unit = local & (shape.blocks() - 1);
      const int unit = UnitPlace::unit_of(local_unit, rank), block = (unit << log2_blocks) + in_unit;
      const Candidates candidates(args, first_position + query);
      unsigned key = 0;
      if (!candidates.all(args) && block < candidates.count && !candidates.forced(block)) {
        const bool crosses = in_unit == 0 && unit > 0 && unit <= units && shape.strides > 1;
        const UnitPlace before(max(unit - 1, 0));
        float sum = 0;
        const auto add_rows = [&](int tile, int first, int count) {
          char* const of_tile = all_kept + tile * args.kept_units * kept_bytes;
          const KeptUnit here{of_tile + local_unit * kept_bytes, shape.blocks()};
          const KeptUnit there{of_tile + before.local * kept_bytes, shape.blocks()};
          sum += importance_of(unit < units, here, in_unit, crosses, there, before.rank,
                               rows.totals[kCompressed] + tile * kTileRows, first, count);
        };
        if (S::kOneQuery) {
          add_rows(0, 0, args.geometry.group);
        } else if (args.tiles.slices == 1) {
          add_rows(query / args.tiles.together, query % args.tiles.together * args.geometry.group, args.geometry.group);
        } else {
#pragma unroll 1
          for (int slice = 0; slice < args.tiles.slices; ++slice)
            add_rows(query * args.tiles.slices + slice, 0, min(kTileRows, args.geometry.group - slice * kTileRows));
        }
        key = ordered(sum);
      }
      keys[e] = key;
    }
    __syncthreads();
    // The thread block's candidates of each query, the most important first.
    if (local_blocks <= kMostCounted) {
#pragma unroll 1
      for (int e = threadIdx.x; e < queries * local_blocks; e += kThreads) {
        const unsigned mine = keys[e];
        if (mine == 0) continue;
        const int query = divide(by_blocks, e), local = e - query * local_blocks;
        // How many come before: those that are larger, and equal ones of lower blocks.
        const auto* const four = reinterpret_cast<const uint4*>(keys + query * local_blocks);
        int counts[4] = {};
        const auto count = [&](int i, unsigned least) {
          const uint4 k = four[i];
          counts[0] += k.x >= least, counts[1] += k.y >= least, counts[2] += k.z >= least, counts[3] += k.w >= least;
        };
        const int own = local / 4;
#pragma unroll 4
        for (int i = 0; i < own; ++i) count(i, mine);
        const uint4 k = four[own];
        int place = (k.x > mine || (k.x == mine && local % 4 > 0)) + (k.y > mine || (k.y == mine && local % 4 > 1)) +
                    (k.z > mine || (k.z == mine && local % 4 > 2)) + (k.w > mine);
        if (mine != 0xffffffffu)
#pragma unroll 4
          for (int i = own + 1; i < local_blocks / 4; ++i) count(i, mine + 1);
        place += counts[0] + counts[1] + counts[2] + counts[3];
        if (place < Candidates(args, first_position + query).places)
          choice.candidates()[query * topk + place] = candidate(mine, block_at(local));
      }
    } else {
#pragma unroll 1
      for (int query = warp; query < queries; query += kWarps) {
        auto* const list = choice.candidates() + query * topk;
        choose_largest(keys + query * local_blocks, local_blocks, Candidates(args, first_position + query).places, lane,
                       [&](int place, int local) {
                         list[place] = candidate(keys[query * local_blocks + local], block_at(local));
                       });
        sort_descending(list, topk, lane);
      }
    }
    cluster_sync();
  }
  // Some queries at a time: the candidates of all thread blocks, each block's place among them, and the lists in order.
  const int of_query = kRanks * topk;  // entries
  const int at_once = min(queries, S::kRing / (of_query * 8 + topk * 4));
  auto* const entries = reinterpret_cast<unsigned long long*>(memory);      // (at_once, kRanks, topk)
  int* const found = reinterpret_cast<int*>(entries + at_once * of_query);  // (at_once, topk), in any order
  const FastDivmod by_topk(S::kOneQuery ? 1 : topk), by_query(S::kOneQuery ? 1 : of_query);
#pragma unroll 1
  for (int begin = 0; begin < queries; begin += at_once) {
    const int now = S::kOneQuery ? 1 : min(at_once, queries - begin);
    /// Found blocks to the queries' lists, ascending.
    const auto sort = [&](bool writes) {
#pragma unroll 1
      for (int e = threadIdx.x; e < now * topk; e += kThreads) {
        const int query = divide(by_topk, e), i = e - query * topk, count = choice.counts()[begin + query];
        int place = i;
        const int block = i < count ? found[e] : -1;
        if (i < count) {
          place = 0;
#pragma unroll 4
          for (int j = 0; j < count; ++j) place += found[query * topk + j] < block;
          choice.blocks()[(begin + query) * topk + place] = block;
        }
        if (writes) args.indices.at<int>(b, first_query + begin + query, kv_head)[place] = room ? block : -1;
      }
      __syncthreads();
    };
    if (chooses) {
      if (ranks_blocks)
#pragma unroll 1
        for (int e = threadIdx.x; e < now * of_query; e += kThreads) {
          const int query = divide(by_query, e), i = e - query * of_query, place = i / kRanks;
          const std::uint32_t there = shared_address(choice.candidates() + (begin + query) * topk + place);
          const uint2 x = load_remote_uint2(map_to_rank(there, i % kRanks));
          entries[query * of_query + i % kRanks * topk + place] = static_cast<unsigned long long>(x.y) << 32 | x.x;
        }
#pragma unroll 1
      for (int e = threadIdx.x; e < now * topk; e += kThreads) {
        const int query = divide(by_topk, e), i = e - query * topk;
        const Candidates candidates(args, first_position + begin + query);
        const bool all = candidates.all(args);
        found[e] = all ? i : i < candidates.num_forced() ? candidates.forced_block(i) : 0;
        if (i == 0) choice.counts()[begin + query] = all ? candidates.count : candidates.num_forced();
      }
      __syncthreads();
      if (ranks_blocks) {
#pragma unroll 1
        for (int e = threadIdx.x; e < now * of_query; e += kThreads) {
          const unsigned long long mine = entries[e];
          if (mine == 0) continue;
          const int query = divide(by_query, e);
          const Candidates candidates(args, first_position + begin + query);
          const int place = count_larger(entries + query * of_query, topk, mine);
          if (place >= candidates.places) continue;
          found[query * topk + candidates.num_forced() + place] = block_of(mine);
          atomicAdd(choice.counts() + begin + query, 1);
        }
        __syncthreads();
      }
      sort(args.indices.data && rank == 0);
    }
    if (args.imposed.data) {
#pragma unroll 1
      for (int query = warp; query < now; query += kWarps) {
        const int* const given = args.imposed.at<const int>(b, first_query + begin + query, kv_head);
        int count = 0;
        for (int first = 0; first < topk; first += 32) {
          const int i = first + lane;
          const bool good = i < topk && counts(given, i, first_position + begin + query, 1 << shape.log2_block);
          const unsigned lanes = __ballot_sync(0xffffffffu, good);
          if (good) found[query * topk + count + __popc(lanes & ((1u << lane) - 1))] = given[i];
          count += __popc(lanes);
        }
        if (lane == 0) choice.counts()[begin + query] = count;
      }
      __syncthreads();
      sort(false);
    }
  }
  if (S::kOneQuery) return;  // one list
  // Blocks of any query, each with its queries: a bit for each, two blocks a word.
  auto* const users = reinterpret_cast<unsigned*>(memory);
  const int all = (last_position >> shape.log2_block) + 1, words = (all + 1) / 2;
  for (int i = threadIdx.x; i < words; i += kThreads) users[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int query = 0; query < queries; ++query)
    for (int i = threadIdx.x; i < choice.counts()[query]; i += kThreads) {
      const int block = choice.blocks()[query * topk + i];
      atomicOr(users + block / 2, 1u << (query + block % 2 * 16));
    }
  __syncthreads();
  // Each thread has some words; before its blocks are those of the lower threads.
  const int each = (words + kThreads - 1) / kThreads, first = min(static_cast<int>(threadIdx.x) * each, words);
  const int last = min(first + each, words);
  int mine = 0;
  for (int i = first; i < last; ++i) mine += (users[i] & 0xffff ? 1 : 0) + (users[i] >> 16 ? 1 : 0);
  int place = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, place, offset);
    if (lane >= offset) place += other;
  }
  int* const of_warps = reinterpret_cast<int*>(users + words);
  if (lane == 31) of_warps[warp] = place;
  __syncthreads();
  place -= mine;
  int sum = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) place += sum;
    sum += of_warps[w];
  }
  if (threadIdx.x == 0) choice.united()[-1] = sum;
  for (int i = first; i < last; ++i)
    for (int half = 0; half < 2; ++half)
      if (const unsigned of_block = users[i] >> half * 16 & 0xffff) {
        choice.united()[place] = 2 * i + half;
        choice.users()[place++] = of_block;
      }
  __syncthreads();
}

template <class T, int Dk, int Dv, int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles == 1 && Dk <= 128 ? 3 : 2)
    step_attend(const __grid_constant__ StepAttendArgs args) {
  using S = Shape<T, Dk, Dv, kTiles>;
  extern __shared__ __align__(128) char memory[];
  const StepGeometry& p = args.geometry;
  const BlockKeys& shape = args.block_keys;
  const int lane = threadIdx.x % 32, warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const int tile = warp / S::kSplits, split = warp % S::kSplits;
  const int rank = cluster_rank(), kv_head = blockIdx.y, b = blockIdx.z;
  const int first_query = static_cast<int>(blockIdx.x) / kRanks * args.tiles.queries;
  const int last_written = min(first_query + args.tiles.queries, p.q_len);
  const std::uint32_t ring = shared_address(memory);

  const int kept_bytes = shape.kept_bytes();
  char* const all_kept = memory + S::kRing;
  char* const row_memory = all_kept + kTiles * args.kept_units * kept_bytes;
  auto& rows = *reinterpret_cast<RowMemory<S>*>(row_memory);
  const ChoiceMemory choice{row_memory + sizeof(RowMemory<S>), args.tiles.queries, args.topk};
  const auto kept_unit = [&](int of_tile, int local) {
    return KeptUnit{all_kept + (of_tile * args.kept_units + local) * kept_bytes, shape.blocks()};
  };
  /// Row r of a tile: its query of the cluster (-1: none of `queries`) and its head of the group.
  const auto row_of = [&](int of_tile, int r, int queries) {
    int query, head;
    if constexpr (kTiles == 1) {
      query = r < p.group && queries > 0 ? 0 : -1;
      head = r;
    } else if (args.tiles.slices == 1) {
      query = p.by_group.divide(r);
      head = r - query * p.group;
      if (query >= args.tiles.together) query = args.tiles.queries;
      query += of_tile * args.tiles.together;
    } else {
      query = of_tile / args.tiles.slices;
      head = of_tile % args.tiles.slices * kTileRows + r;
      if (head >= p.group) query = args.tiles.queries;
    }
    return int2{query < queries ? query : -1, head};
  };

  // Queries and gates are inputs of the step: they may be read before the kernel in front has ended, as may the lengths
  // before the step and all keys that were there. Queries come by way of the ring.
#pragma unroll
  for (int i = threadIdx.x; i < S::kRows * (Dk / 8); i += kThreads) {
    const int r = i / (Dk / 8), chunk = i % (Dk / 8);
    const int2 row = row_of(r / kTileRows, r % kTileRows, last_written - first_query);
    const T* const from =
        args.q.at<T>(b, first_query + max(row.x, 0), kv_head * p.group + max(row.y, 0) * (row.x >= 0));
    copy16(ring + r / kTileRows * Tile<T, Dk>::bytes(kTileRows) +
               Tile<T, Dk>::at(r % kTileRows, chunk / 8 * 128, chunk % 8 * 16),
           from + chunk * 8, row.x >= 0);
  }
  commit_copies();
  const StepWish wish(p, args.lengths, args.num_new, args.positions, b);
  const int added = wish.possible ? wish.added : 0;
  const int queries = min(args.tiles.queries, added - first_query);
  // Every cluster has read the length before the last one that says so advances it.
  const auto leave_length = [&] {
    wait_for_launcher();
    if (!args.advance || rank != 0 || threadIdx.x != 0) return;
    const int served = atomicAdd(&args.plan[b].served, 1) + 1;
    if (served == args.tiles.clusters * p.kv_heads && args.plan[b].added > 0) args.lengths[b] = wish.after();
  };
  /// o = 0 and indices = -1 for the queries from `first` on, by all thread blocks together.
  const auto write_nothing = [&](int first) {
#pragma unroll 1
    for (int query = first + rank; query < last_written; query += kRanks) {
#pragma unroll 1
      for (int i = threadIdx.x; i < p.group * (Dv / 2); i += kThreads)
        store_pair(args.o.at<T>(b, query, kv_head * p.group + i / (Dv / 2)) + i % (Dv / 2) * 2, 0, 0);
      if (args.indices.data)
#pragma unroll 1
        for (int i = threadIdx.x; i < args.topk; i += kThreads) args.indices.at<int>(b, query, kv_head)[i] = -1;
    }
  };
  if (queries <= 0) {  // all thread blocks of the cluster
    write_nothing(first_query);
    leave_length();
    wait_copies<0>();
    return;
  }
  const int first_position = wish.before + first_query, last_position = first_position + queries - 1;
  /// The query of the cluster of the lane's row i, -1: no such row. Computed where it is needed, as registers are
  /// scarce.
  const auto query_of = [&](int i) { return row_of(again(tile), again(lane) / 4 + 8 * i, queries).x; };

  // Keys: this thread block's stages of a range, or of the list of blocks.
  const auto stages_of = [](int keys, int of_rank) {
    return max((keys + S::kStageKeys * (kRanks - of_rank) - 1) / (S::kStageKeys * kRanks), 0);
  };
  const int compressed = shape.compressed(p.kernel_size, last_position + 1);
  const int window_begin = max(first_position - args.window + 1, 0) / kUnitKeys * kUnitKeys;
  const int window_rank = kRanks - 1 - rank;  // the first ranks have a stage more of compressed keys
  const auto compressed_key = [&](int stage, int unit) {
    return ((stage * kRanks + rank) * kWarps + unit) * kUnitKeys;
  };
  const auto window_key = [&](int stage, int unit) {
    return window_begin + ((stage * kRanks + window_rank) * kWarps + unit) * kUnitKeys;
  };
  const auto unit_in_ring = [&](int slot, int unit) { return (slot & 1) * S::kStage + unit * S::kUnit; };
  /// Where a unit of keys lies. Page numbers are read a stage ahead of the copies; they may be anything where the step
  /// finds no room. Keys from `end` on are nowhere.
  const auto address_of = [&](auto branch, int key, int end) -> UnitAddress {
    if (key >= end) return {0, 0};
    const CachedBranch& cached = args.cached[branch];
    const int number = cached.by_size.divide(key), slot = key - number * cached.size;
    if (branch == kWindow) return {b, slot};
    const int page = (cached.table + static_cast<std::int64_t>(b) * cached.table_row)[number];
    return {static_cast<unsigned>(page) < static_cast<unsigned>(cached.pages) ? page : 0, slot};
  };
  /// Begins the copies of the warp's unit of a stage: keys and values from `key` on. Those that are not begin ... end -
  /// 1 become zeros.
  const auto load_unit = [&](auto branch, UnitAddress at, int key, int begin, int end, int slot) {
    const CachedBranch& cached = args.cached[branch];
    const int row0 = lane / 8, chunk = lane % 8 * 16;
    const auto of_page = [&](const CachedRows& rows) {
      return rows.data + at.page * rows.page + (kv_head * rows.head + chunk);
    };
    const char *const keys = of_page(cached.k), *const values = of_page(cached.v);
    const std::uint32_t to = ring + unit_in_ring(slot, warp);
#pragma unroll
    for (int first = 0; first < kUnitKeys; first += 4) {
      const int r = first + row0;
      int row = at.slot + r;
      if (branch == kWindow && row >= cached.size) row -= cached.size;  // beyond the ring's end
      const bool counts = static_cast<unsigned>(key + r - begin) < static_cast<unsigned>(end - begin);
      const char* const key_row = keys + static_cast<std::int64_t>(row) * cached.k.row;
      const char* const value_row = values + static_cast<std::int64_t>(row) * cached.v.row;
#pragma unroll
      for (int c = 0; c < Dk / 64; ++c) copy16(to + Tile<T, Dk>::at(r, 0, chunk) + c * 128, key_row + c * 128, counts);
#pragma unroll
      for (int c = 0; c < Dv / 64; ++c)
        copy16(to + S::kValues + Tile<T, Dv>::at(r, 0, chunk) + c * 128, value_row + c * 128, counts);
    }
  };
  /// A thread block's stages of a branch, one after the other. address(i): where the warp's unit of stage i lies;
  /// load(i, at): begins its copies; use(i): reads the stage. own_unit: each warp reads what it loads.
  const auto stream = [&](auto own_unit, int stages, const auto& address, const auto& load, const auto& use) {
    const auto sync_readers = [] {
      if constexpr (decltype(own_unit)::value) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    };
    UnitAddress next = address(0);
#pragma unroll 1
    for (int stage = -1; stage < stages; ++stage) {
      if (stage + 1 < stages) load(stage + 1, next);
      commit_copies();
      next = address(stage + 2);
      if (stage < 0) continue;
      wait_copies<1>();
      sync_readers();
      use(stage);
      sync_readers();
    }
  };
  /// Before the first stage that may have a token of the step, the kernel in front must have ended.
  const auto wait_for_tokens = [&](int key, int first_new) {
    if (key + S::kStageKeys > first_new) wait_for_launcher();
  };
  const auto compressed_address = [&](int stage) {
    return address_of(branch_constant<kCompressed>, compressed_key(stage, warp), compressed);
  };
  const auto load_compressed = [&](int stage, UnitAddress at) {
    wait_for_tokens(compressed_key(stage, 0), wish.first);
    load_unit(branch_constant<kCompressed>, at, compressed_key(stage, warp), 0, compressed, stage);
  };
  const float scale = positive_scale(args.scale);
  std::uint32_t q[Dk / 16][4];
  if (threadIdx.x < S::kRows) {
    const int2 row = row_of(threadIdx.x / kTileRows, threadIdx.x % kTileRows, queries);
#pragma unroll
    for (int branch = 0; branch < kBranches; ++branch)
      rows.gates[branch][threadIdx.x] =
          row.x < 0 ? 0 : to_float(args.gates.at<T>(b, first_query + row.x, kv_head * p.group + row.y)[branch]);
  }
  wait_copies<0>();
  __syncthreads();
  const std::uint32_t sign = args.scale < 0 ? 0x80008000u : 0;  // negative queries instead
#pragma unroll
  for (int k = 0; k < Dk / 16; ++k) {
    Tile<T, Dk>::load_a(q[k], ring + tile * Tile<T, Dk>::bytes(kTileRows), 0, k, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) q[k][i] ^= sign;
  }
  __syncthreads();  // the ring is free

  /// The warp's tile and kUnits units of a stage, first_unit, first_unit + step, ...; of the values the columns that
  /// acc has, from `column` on. partial: not every row sees every key of them; visible(unit, query) says which ones,
  /// first and end, of a unit counted from the first one here (query -1: none). keep(unit, p): takes its probabilities,
  /// relative to state.max.
  const auto attend = [&](auto num_units, auto& state, int column, int slot, int first_unit, int step, bool partial,
                          const auto& visible, const auto& keep) {
    constexpr int kUnits = decltype(num_units)::value, kPairs = sizeof(state.acc) / sizeof(state.acc[0]) / 2;
    const std::uint32_t units = ring + unit_in_ring(slot, first_unit);
    constexpr int kChains = kUnits == 1 && kTiles == 1 ? 2 : 1;  // of products, so that they wait less for each other
    float s[2 * kUnits][4] = {}, other[2][4] = {};
#pragma unroll
    for (int k = 0; k < Dk / 16; ++k) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        std::uint32_t fragment[4];
        Tile<T, Dk>::load_b(fragment, units + unit * step * S::kUnit, 0, k, lane);
        mma(T{}, k % kChains ? other[0] : s[2 * unit], q[k], fragment[0], fragment[1]);
        mma(T{}, k % kChains ? other[1] : s[2 * unit + 1], q[k], fragment[2], fragment[3]);
      }
    }
    if constexpr (kChains == 2) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] += other[n][i];
    }
    if (partial) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int2 seen = visible(unit, query_of(i));
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int k = e / 2 * 8 + 2 * (lane & 3) + e % 2;
            if (k < seen.x || k >= seen.y) s[2 * unit + e / 2][2 * i + e % 2] = -INFINITY;
          }
        }
      }
    }
    state.update(s, scale);
    const auto of_unit = [&](int unit) -> const float(&)[2][4] {
      return reinterpret_cast<const float(&)[2][4]>(s[2 * unit]);
    };
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) keep(unit, of_unit(unit));
    const auto values = [&](int unit) {
      return memory + unit_in_ring(slot, first_unit) + unit * step * S::kUnit + S::kValues;
    };
    // A probability of 0 times a value that is not finite would leak: such values are added where they are seen. What
    // no query of the cluster sees is not loaded, so one query alone has none.
    bool leaks = false;
    if (kTiles > 1 && partial) {
#pragma unroll 1
      for (int unit = 0; unit < kUnits; ++unit) leaks |= has_nonfinite<T, Dv>(values(unit), kUnitKeys, lane, 32);
      leaks = __any_sync(0xffffffffu, leaks);
    }
    if (kTiles > 1 && leaks) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const int2 seen[2] = {visible(unit, query_of(0)), visible(unit, query_of(1))};
        add_nonfinite<T, Dv>(
            state.acc, of_unit(unit), values(unit), 0, lane,
            [&](int i, int k) { return k >= seen[i].x && k < seen[i].y; }, column);
      }
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      std::uint32_t a[4];
      operand_a<T>(a, s, unit);
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        std::uint32_t v[4];
        Tile<T, Dv>::load_b_rows(v, units + unit * step * S::kUnit + S::kValues, 0, column + n * 16, lane);
        if (kTiles > 1 && leaks)
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] &= ~((nonfinite_bits(T{}, v[i]) >> 15) * 0xffffu);
        mma(T{}, state.acc[2 * n], a, v[0], v[1]);
        mma(T{}, state.acc[2 * n + 1], a, v[2], v[3]);
      }
    }
  };

  using OwnSums = float[S::kOwnColumns][4];
  /// A softmax of the thread block's rows, which all of the cluster may read.
  const auto publish = [&](int branch, int i, float2 softmax) {
    if (split == 0 && (lane & 3) == 0) rows.branches[branch][tile * kTileRows + lane / 4 + 8 * i] = softmax;
  };
  /// Merges what the warps of each tile have of its compressed keys, in a stage that nobody reads or fills: each warp
  /// gets its columns, relative to the maximum that is published.
  const auto merge = [&](const OnlineSoftmax<Dv>& state, int slot, OwnSums& sums) {
    if constexpr (S::kSplits == 1) {
#pragma unroll
      for (int i = 0; i < 2; ++i) publish(kCompressed, i, make_float2(state.max[i], row_sum(state.sum[i])));
#pragma unroll
      for (int n = 0; n < S::kOwnColumns; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] = state.acc[n][i];
      return;
    }
    char* const all = memory + (slot & 1) * S::kStage;
    auto* const mine = reinterpret_cast<float4*>(all + warp * S::kUnit) + lane;
#pragma unroll
    for (int n = 0; n < S::kColumns; ++n)
      mine[n * 32] = make_float4(state.acc[n][0], state.acc[n][1], state.acc[n][2], state.acc[n][3]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = row_sum(state.sum[i]);
      if ((lane & 3) == 0) rows.warps[warp][lane / 4 + 8 * i] = make_float2(state.max[i], sum);
    }
    __syncthreads();
    float factor[2][S::kSplits];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane / 4 + 8 * i;
      float largest = -INFINITY, sum = 0;
#pragma unroll
      for (int w = 0; w < S::kSplits; ++w) largest = fmaxf(largest, rows.warps[tile * S::kSplits + w][r].x);
#pragma unroll
      for (int w = 0; w < S::kSplits; ++w) {
        const float2 of_warp = rows.warps[tile * S::kSplits + w][r];
        factor[i][w] = exp2_fast(of_warp.x - (largest == -INFINITY ? 0 : largest));
        sum += of_warp.y * factor[i][w];
      }
      publish(kCompressed, i, make_float2(largest, sum));
    }
#pragma unroll
    for (int n = 0; n < S::kOwnColumns; ++n) {
      sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;
#pragma unroll
      for (int w = 0; w < S::kSplits; ++w) {
        const float4 x = reinterpret_cast<const float4*>(all + (tile * S::kSplits + w) *
                                                                   S::kUnit)[(split * S::kOwnColumns + n) * 32 + lane];
        sums[n][0] += x.x * factor[0][w], sums[n][1] += x.y * factor[0][w];
        sums[n][2] += x.z * factor[1][w], sums[n][3] += x.w * factor[1][w];
      }
    }
    __syncthreads();
  };
  /// Totals of a row over the thread blocks of the cluster, by the eight lanes of a group, one for each. Returns what
  /// the lane's thread block counts by.
  const auto total = [&](int branch, int row) {
    const float2 of_rank = load_remote_float2(map_to_rank(shared_address(&rows.branches[branch][row]), lane % kRanks));
    float largest = of_rank.x;
#pragma unroll
    for (int offset = 1; offset < kRanks; offset *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    const float base = largest == -INFINITY ? 0 : largest, factor = exp2_fast(of_rank.x - base);
    float sum = of_rank.y * factor;
#pragma unroll
    for (int offset = 1; offset < kRanks; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const float inverse = sum == 0 ? 0 : __frcp_rn(sum);
    if (lane % kRanks == 0) rows.totals[branch][row] = make_float2(base, inverse);
    return factor * inverse;
  };

  OwnSums sums;  // of the branches so far
  const bool chooses = args.imposed.data == nullptr || args.indices.data != nullptr;
  {
    OnlineSoftmax<Dv> state;
    const BlockWeights weights(shape, 0, lane);
    const int visible_to_all = shape.compressed(p.kernel_size, first_position + 1);
    stream(std::bool_constant<S::kOneQuery>{}, stages_of(compressed, rank), compressed_address, load_compressed,
           [&](int stage) {
             // The warp's units, some at a time.
             constexpr int kAtOnce = kTiles < S::kAtOnce ? kTiles : S::kAtOnce, kStep = S::kSplits * kUnitKeys;
#pragma unroll 1
             for (int i = 0; i < kWarps / S::kSplits; i += kAtOnce) {
               const int first = split + i * S::kSplits, key = compressed_key(stage, first);
               attend(
                   std::integral_constant<int, kAtOnce>{}, state, 0, stage, first, S::kSplits,
                   key + (kAtOnce - 1) * kStep + kUnitKeys > visible_to_all,
                   [&](int unit, int query) {
                     const int seen = query < 0 ? 0 : shape.compressed(p.kernel_size, first_position + query + 1);
                     return int2{0, seen - key - unit * kStep};
                   },
                   [&](int unit, const float(&probabilities)[2][4]) {
                     if (chooses && key + unit * kStep < compressed)
                       keep_unit(kept_unit(tile, stage * kWarps + first + unit * S::kSplits), shape, weights,
                                 probabilities, state.max, lane);
                   });
             }
           });
    merge(state, 1, sums);
  }

  // The window, then the selected blocks: all units of a stage, the warp's columns of the values.
  OnlineSoftmax<S::kOwnColumns * 8> state;
  const int log2_units = shape.log2_block - 4;  // of a block
  const int window_stages = stages_of(last_position + 1 - window_begin, window_rank);
  int num_united = 0, selected_stages = 0;  // of the blocks of any query
  bool room = true;
#pragma unroll 1
  for (int branch = kWindow; branch >= kSelected; --branch) {
    const bool in_window = branch == kWindow;
    if (!in_window) {
      // Exchange of the softmaxes so far, and both branches as one sum.
      cluster_sync();
      for (int e = threadIdx.x / kRanks; e < 2 * S::kRows; e += kThreads / kRanks)
        total(e < S::kRows ? kCompressed : kWindow, e % S::kRows);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = tile * kTileRows + lane / 4 + 8 * i;
        const auto share = [&](BranchIndex of) {
          const float2 all = rows.totals[of][row];
          return rows.gates[of][row] * (exp2_fast(rows.branches[of][row].x - all.x) * all.y);
        };
        const float by_compressed = share(kCompressed), by_window = share(kWindow);
#pragma unroll
        for (int n = 0; n < S::kOwnColumns; ++n) {
          sums[n][2 * i] = sums[n][2 * i] * by_compressed + state.acc[n][2 * i] * by_window;
          sums[n][2 * i + 1] = sums[n][2 * i + 1] * by_compressed + state.acc[n][2 * i + 1] * by_window;
        }
      }
      wait_for_launcher();
      room = args.plan[b].added > 0;
      choose_blocks<S>(args, memory, rows, choice, all_kept, queries, first_position, compressed, chooses, room);
      num_united = S::kOneQuery ? choice.counts()[0] : choice.united()[-1];
      selected_stages = stages_of(num_united << shape.log2_block, rank);
      state = {};
    }
    const auto selected_unit = [&](int stage, int unit) { return (stage * kRanks + rank) * kWarps + unit; };
    const auto selected_key = [&](int stage, int unit) {
      const int at = selected_unit(stage, unit), place = at >> log2_units;
      if (place >= num_united) return last_position + 1;
      const int* const blocks = S::kOneQuery ? choice.blocks() : choice.united();
      return (blocks[place] << shape.log2_block) + (at & ((1 << log2_units) - 1)) * kUnitKeys;
    };
    const auto key_of = [&](int stage, int unit) {
      return in_window ? window_key(stage, unit) : selected_key(stage, unit);
    };
    /// A bit for each query that has chosen the unit's block.
    const auto users_of = [&](int stage, int unit) {
      if (in_window || S::kOneQuery) return 0xffffu;
      const int place = selected_unit(stage, unit) >> log2_units;
      return place < num_united ? choice.users()[place] : 0u;
    };
    const int end = last_position + 1, stages = in_window ? window_stages : selected_stages;
    const auto address = [&](int stage) {
      return in_window ? address_of(branch_constant<kWindow>, window_key(stage, warp), end)
                       : address_of(branch_constant<kSelected>, selected_key(stage, warp), end);
    };
    const auto load = [&](int stage, UnitAddress at) {
      if (in_window) {
        wait_for_tokens(window_key(stage, 0), wish.before);
        load_unit(branch_constant<kWindow>, at, window_key(stage, warp), first_position - args.window + 1, end, stage);
      } else {
        load_unit(branch_constant<kSelected>, at, selected_key(stage, warp), 0, end, stage);
      }
    };
    const unsigned every_query = (1u << queries) - 1;
    stream(std::false_type{}, stages, address, load, [&](int stage) {
#pragma unroll 1
      for (int first = 0; first < kWarps; first += S::kAtOnce) {
        bool partial = false;
#pragma unroll
        for (int unit = 0; unit < S::kAtOnce; ++unit) {
          const int key = key_of(stage, first + unit);
          partial |= (users_of(stage, first + unit) & every_query) != every_query ||
                     key + kUnitKeys > first_position + 1 || (in_window && key < last_position - args.window + 1);
        }
        attend(
            std::integral_constant<int, S::kAtOnce>{}, state, split * S::kOwnColumns * 8, stage, first, 1, partial,
            [&](int unit, int query) {
              if (query < 0 || !(users_of(stage, first + unit) >> query & 1)) return int2{0, 0};
              const int seen = first_position + query + 1 - key_of(stage, first + unit);
              return int2{in_window ? seen - args.window : 0, seen};
            },
            [](int, const float(&)[2][4]) {});
      }
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) publish(branch, i, make_float2(state.max[i], row_sum(state.sum[i])));
  }

  // Exchange of outputs: each thread block writes Dv / 8 columns, of what all of them have.
  auto* const known_outputs = reinterpret_cast<float4*>(memory);  // (tile, eight columns, lane)
  auto* const selected_outputs = known_outputs + kTiles * S::kColumns * 32;
  static_assert(2 * kTiles * S::kSums <= S::kRing);
#pragma unroll
  for (int n = 0; n < S::kOwnColumns; ++n) {
    const int at = (tile * S::kColumns + split * S::kOwnColumns + n) * 32 + lane;
    const float* const gates = rows.gates[kSelected] + tile * kTileRows + lane / 4;
    const float low = gates[0], high = gates[8];
    known_outputs[at] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
    selected_outputs[at] =
        make_float4(state.acc[n][0] * low, state.acc[n][1] * low, state.acc[n][2] * high, state.acc[n][3] * high);
  }
  cluster_sync();
  for (int row = threadIdx.x / kRanks; row < S::kRows; row += kThreads / kRanks)
    rows.factors[lane % kRanks][row] = total(kSelected, row);
  __syncthreads();
  constexpr int kMine = S::kColumns / kRanks;  // tiles of eight columns that this thread block writes
#pragma unroll 1
  for (int e = warp; e < kTiles * kMine; e += kWarps) {
    const int of_tile = e / kMine, column = rank * kMine + e % kMine, at = (of_tile * S::kColumns + column) * 32 + lane;
    float o[4] = {};
    constexpr int kAtOnce = kRanks / 2;  // loads on their way
#pragma unroll
    for (int first = 0; first < kRanks; first += kAtOnce) {
      float4 known[kAtOnce], chosen[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        known[i] = load_remote_float4(map_to_rank(shared_address(known_outputs + at), first + i));
        chosen[i] = load_remote_float4(map_to_rank(shared_address(selected_outputs + at), first + i));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float low = rows.factors[first + i][of_tile * kTileRows + lane / 4];
        const float high = rows.factors[first + i][of_tile * kTileRows + lane / 4 + 8];
        o[0] += known[i].x + chosen[i].x * low, o[1] += known[i].y + chosen[i].y * low;
        o[2] += known[i].z + chosen[i].z * high, o[3] += known[i].w + chosen[i].w * high;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int2 row = row_of(of_tile, lane / 4 + 8 * i, queries);
      if (row.x >= 0)
        store_pair(args.o.at<T>(b, first_query + row.x, kv_head * p.group + row.y) + column * 8 + 2 * (lane & 3),
                   room ? o[2 * i] : 0, room ? o[2 * i + 1] : 0);
    }
  }
  write_nothing(first_query + queries);
  leave_length();
  cluster_sync();  // nobody ends while others read its memory
}

template <class T, int Dk, int Dv, int kTiles>
cudaError_t launch_tiles(StepAttendArgs args, bool programmatic, cudaStream_t stream) {
  using S = Shape<T, Dk, Dv, kTiles>;
  const Geometry& g = args.geometry;
  const std::int64_t keys = num_compressed(g, g.k_len);
  const StepMemory memory(args.tiles, args.block_keys, Dk, Dv, args.topk, keys,
                          (g.k_len >> args.block_keys.log2_block) + 1);
  if (memory.ring != S::kRing || memory.rows != sizeof(RowMemory<S>) || !memory.fits()) return cudaErrorInvalidValue;
  args.kept_units = static_cast<int>(StepMemory::kept_units(keys));
  const dim3 grid(args.tiles.clusters * kRanks, g.kv_heads, g.batches);
  return launch_cluster(step_attend<T, Dk, Dv, kTiles>, kRanks, programmatic, grid, kThreads,
                        static_cast<std::size_t>(memory.bytes()), stream, args);
}

}  // namespace

template <class T, int Dk, int Dv>
cudaError_t launch_step_attend(const StepAttendArgs& args, bool programmatic, cudaStream_t stream) {
  switch (args.tiles.tiles) {
    case 1:
      return launch_tiles<T, Dk, Dv, 1>(args, programmatic, stream);
    case 2:
      return launch_tiles<T, Dk, Dv, 2>(args, programmatic, stream);
    default:
      return launch_tiles<T, Dk, Dv, kMostTiles>(args, programmatic, stream);
  }
}
template cudaError_t launch_step_attend<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const StepAttendArgs&, bool,
                                                                                 cudaStream_t);

}  // namespace nsa::cuda::sm90::decode
