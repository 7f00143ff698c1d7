// A decode step's attention where there are many queries of several new tokens: a thread block has four neighbouring
// queries of a sequence and KV head, and reads for all of them at once. Compiled with NSA_ELEMENT, NSA_KEY_DIM and
// NSA_VALUE_DIM.
//
// Its rows are 4 x 16 (query, head), those of a query one warp's of each of two warpgroups. Keys come in tiles of 64 at
// absolute numbers, and are multiplied by wgmma. Of compressed keys and of the window the warpgroups take every other
// tile and merge their sums; of the selected blocks each takes those of two queries, together. What a query does not
// see has a probability of zero, so that its bits do not depend on the others.
//
//   compressed keys │ window │ compressed keys again, for the choice, now that their softmax is known │ choice │
//   selected blocks │ outputs
//
// Zero times a value that is not finite would leak to other queries: where an output is not finite, each query is
// served again by itself, and nothing is loaded that it does not see.
#include "cuda/common/launch.cuh"
#include "cuda/common/pages.cuh"
#include "cuda/sm90/common/forward_pipeline.cuh"
#include "cuda/sm90/decode/block_lists.cuh"
#include "cuda/sm90/decode/sequence_order.cuh"

namespace nsa::cuda::sm90::decode {
namespace {

enum class QueriesBarrier { kGroup = 1 };  // of a warpgroup

template <class T, int D>
struct QueriesTile {
  static constexpr int kQueries = QueriesMemory::kQueries, kGroups = QueriesMemory::kGroups;
  static constexpr int kKeys = QueriesMemory::kKeys, kStages = QueriesMemory::kStages;
  static constexpr int kGroupThreads = 128, kThreads = kGroups * kGroupThreads, kRows = kQueries * kTileRows;
  static constexpr int kPanel = kKeys * 128, kTile = kKeys * D * 2;  // bytes, of keys or values
  static constexpr int kGroupRing = 2 * kStages * kTile, kRing = kGroups * kGroupRing;
  static constexpr int kLanes = D / 8;                      // of a row that is copied
  static constexpr int kTogether = kGroupThreads / kLanes;  // rows that a warpgroup copies at once
  static constexpr int kWarpRows = 32 / kLanes;             // of these a warp
  static constexpr int kCopies = kKeys / kTogether;         // of a lane for a tile
  static constexpr int kHalf = D / 16;                      // tiles of eight columns of half of the columns
  static constexpr int kExchange = kHalf * 512;             // bytes of a warp
  static_assert(kTogether % 8 == 0 && kCopies * kWarpRows == 16);
};

/// Maxima in base-2 units and sums of softmaxes of each warpgroup, and gates.
template <class S>
struct QueriesRows {
  float2 softmaxes[2][S::kGroups][S::kRows];
  float gates[kBranches][S::kRows];
};

template <class S, class T, int D>
__global__ void __launch_bounds__(S::kThreads, 1) step_attend_queries(const __grid_constant__ StepAttendArgs args) {
  extern __shared__ __align__(1024) char memory[];
  const StepGeometry& p = args.geometry;
  const BlockKeys& shape = args.block_keys;
  const int lane = threadIdx.x % 32, warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const int group = warp / S::kQueries, mine = warp % S::kQueries;  // the warp's query of the tile
  const int kv_head = blockIdx.y, first_query = blockIdx.x * S::kQueries, query = first_query + mine;
  const int topk = args.topk;
  const bool owner = mine / 2 == group;  // of the query's sums of selected blocks

  char* const exchange = memory + S::kRing;
  auto& rows = *reinterpret_cast<QueriesRows<S>*>(exchange + 2 * S::kQueries * S::kExchange);
  char* const lists = reinterpret_cast<char*>(&rows + 1);
  const auto list_at = [&](int i) { return BlockList{lists + i * QueriesMemory::list_bytes(topk), topk}; };
  const BlockList list = list_at(mine), together = list_at(S::kQueries + group);
  auto* const sums = reinterpret_cast<float*>(lists + (S::kQueries + S::kGroups) * QueriesMemory::list_bytes(topk));
  const int all_units = args.kept_units, all_blocks = all_units << shape.log2_blocks();
  const Importances importances{sums + mine * all_blocks, sums + S::kQueries * all_blocks + mine * all_units};

  const bool longest_first = args.longest_first;
  const int b = longest_first ? longest_sequence(args, reinterpret_cast<int*>(exchange)) : blockIdx.z;
  const StepWish wish(p, args.lengths, args.num_new, args.positions, b);
  const int here = wish.possible ? min(wish.added - first_query, S::kQueries) : 0;  // queries of the tile
  const bool chooses = args.imposed.data == nullptr || args.indices.data != nullptr;
  const auto row_of = [&](int query) { return p.starts ? min(max(p.starts[b] + query, 0), p.rows - 1) : query; };

  // Queries that are idle.
  if (!p.starts && mine >= here && query < p.q_len) {
    for (int head = group; head < p.group; head += S::kGroups)
      for (int i = lane; i < D / 2; i += 32)
        store_pair(args.o.template at<T>(b, query, kv_head * p.group + head) + i * 2, 0, 0);
    if (args.indices.data && group == 0)
      for (int i = lane; i < topk; i += 32) args.indices.template at<int>(b, query, kv_head)[i] = -1;
  }
  const auto leave_length = [&] {
    wait_for_launcher();
    if (threadIdx.x == 0) advance_lengths(args, longest_first, b, static_cast<int>(gridDim.x) * p.kv_heads);
  };
  if (here <= 0) {
    leave_length();
    return;
  }

  // Queries and gates are inputs of the step, as are keys that were there before it.
  const int position = wish.before + query, compressed = shape.compressed(p.kernel_size, position + 1);
  const float scale = positive_scale(args.scale);
  std::uint32_t q[D / 16][4];
  {
    const int at = row_of(query);
    const auto head_row = [&](int head) {
      return mine < here && head < p.group ? args.q.template at<const T>(b, at, kv_head * p.group + head) : nullptr;
    };
    const RowFragments<T, D> fragments(head_row(lane / 4), head_row(lane / 4 + 8), lane, args.scale < 0);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) fragments(q[k], k);
    if (group == 0 && lane < kTileRows) {
#pragma unroll
      for (int branch = 0; branch < kBranches; ++branch)
        rows.gates[branch][mine * kTileRows + lane] =
            mine < here && lane < p.group ? to_float(args.gates.template at<T>(b, at, kv_head * p.group + lane)[branch])
                                          : 0;
    }
  }

  const std::uint32_t ring = shared_address(memory) + group * S::kGroupRing;
  const auto keys_at = [&](int stage) { return ring + stage * (2 * S::kTile); };
  const auto sync_group = [&] { named_barrier_sync(QueriesBarrier::kGroup, S::kGroupThreads, group); };
  // The lane's row and chunk of a copy.
  const int copied_row = mine * S::kWarpRows + lane / S::kLanes, chunk = lane % S::kLanes;
  const std::uint32_t lane_to = chunk / 8 * S::kPanel + copied_row * 128 + ((chunk % 8) ^ (copied_row % 8)) * 16;
  const int looked_row = lane % 16 / S::kWarpRows * S::kTogether + mine * S::kWarpRows + lane % 16 % S::kWarpRows;

  bool room = true, again = false;
#pragma unroll 1
  for (int turn = 0; turn == 0 || (again && turn <= here); ++turn) {
    // The active queries, first to last.
    const int first = turn == 0 ? 0 : turn - 1, last = turn == 0 ? here - 1 : turn - 1;
    const bool active = mine >= first && mine <= last;
    const int last_position = wish.before + first_query + last;
    const bool weighs = chooses && !Candidates(args, last_position).all(args);

    int branch = kCompressed;
    int begin, end;                        // of the keys that the query sees
    int load_begin, load_end, log2_tiles;  // of keys that are loaded; of tiles of a block
    int first_tile, tiles;                 // of the warpgroup
    const auto set_branch = [&](int to) {
      branch = to;
      begin = to == kWindow ? max(position - args.window + 1, 0) : 0;
      end = !active ? 0 : to == kCompressed ? compressed : position + 1;
      load_begin = to == kWindow ? max(wish.before + first_query + first - args.window + 1, 0) : 0;
      load_end = to == kCompressed ? shape.compressed(p.kernel_size, last_position + 1) : last_position + 1;
      log2_tiles = max(shape.log2_block - 6, 0);
      if (to == kSelected) {
        tiles = together.count() << log2_tiles;
        return;
      }
      first_tile = load_begin / S::kKeys;
      first_tile += (first_tile & 1) != group;
      tiles = max(((load_end + S::kKeys - 1) / S::kKeys - first_tile + 1) / 2, 0);
    };
    const auto key_of = [&](int tile) {
      if (branch != kSelected) return (first_tile + 2 * tile) * S::kKeys;
      return (together.blocks()[tile >> log2_tiles] >> 2 << shape.log2_block) +
             (tile & ((1 << log2_tiles) - 1)) * S::kKeys;
    };
    /// Of a tile, where in all pages the lane's row lies: of lanes below 16 that of keys, of the other ones that of
    /// values. Below 0: it is not loaded. whole: all rows are, from one page.
    struct Look {
      int key;
      bool whole;
      long long row;
    };
    const auto look = [&](int tile) {
      Look found{0, false, -1};
      if (tile >= tiles) return found;
      found.key = key_of(tile);
      const int behind = branch == kSelected ? min(load_end, found.key + (1 << shape.log2_block)) : load_end;
      const CachedBranch& cached = args.cached[branch];
      CachedBranch::Place place = cached.place_of(found.key);
      found.whole = found.key >= load_begin && found.key + S::kKeys <= behind && place.row + S::kKeys <= cached.size;
      if (found.whole) {
        place.row += looked_row;
      } else {
        const int token = found.key + looked_row;
        if (token < load_begin || token >= behind) return found;
        place = cached.place_of(token);
      }
      const CachedRows& of = lane < 16 ? cached.k : cached.v;
      found.row = cached.page_of(b, place.number) * of.page + static_cast<std::int64_t>(place.row) * of.row;
      return found;
    };
    const auto copy = [&](const CachedRows& from, const Look& found, int lanes, std::uint32_t to) {
      const char* mine_from = from.data + (kv_head * from.head + chunk * 16);
      to += lane_to;
      if (found.whole) {
        mine_from += __shfl_sync(0xffffffffu, found.row, lanes + lane / S::kLanes);
#pragma unroll
        for (int i = 0; i < S::kCopies; ++i, mine_from += static_cast<std::int64_t>(S::kTogether) * from.row)
          copy16(to + i * (S::kTogether * 128), mine_from, true);
        return;
      }
#pragma unroll
      for (int i = 0; i < S::kCopies; ++i) {
        const long long row = __shfl_sync(0xffffffffu, found.row, lanes + i * S::kWarpRows + lane / S::kLanes);
        copy16(to + i * (S::kTogether * 128), mine_from + max(row, 0ll), row >= 0);
      }
    };
    const auto load_keys = [&](int tile, const Look& found, std::uint32_t to) {
      if (tile < tiles) {
        // Before the first that may have a token of the step, the kernel in front must have ended.
        if (branch != kSelected && found.key + S::kKeys > (branch == kCompressed ? wish.first : wish.before))
          wait_for_launcher();
        copy(args.cached[branch].k, found, 0, to);
      }
      commit_copies();
    };
    const auto load_values = [&](int tile, const Look& found, std::uint32_t to) {
      if (tile < tiles) copy(args.cached[branch].v, found, 16, to);
      commit_copies();
    };
    const auto arrived = [&] {
      wait_copies<2 * S::kStages - 2>();
      fence_async();
      sync_group();
    };
    float s[S::kKeys / 2];
    const auto multiply_keys = [&](std::uint32_t keys) {
      const std::uint32_t k_tile = descriptor(keys, 16);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
        wgmma<T, S::kKeys, false>(s, q[k], full_descriptor(k_tile + k / 4 * (S::kPanel / 16) + k % 4 * 2), k != 0);
      wgmma_commit();
    };
    /// Masks the scores of keys at `key` of which the query sees begin ... end - 1.
    const auto mask = [&](int key, int end, float masked) {
      if (begin <= key && end >= key + S::kKeys) return;
#pragma unroll
      for (int e = 0; e < S::kKeys / 4; ++e) {
        const int at = key + e / 2 * 8 + 2 * (lane & 3) + e % 2, i = e / 2 * 4 + e % 2;
        if (at < begin || at >= end) s[i] = s[i + 2] = masked;
      }
    };

    Look next{};
    const auto begin_branch = [&](int to) {
      set_branch(to);
      sync_group();
      static_assert(S::kStages == 2);
      const Look now = look(0);
      next = look(1);
      load_keys(0, now, keys_at(0));
      load_values(0, now, keys_at(0) + S::kTile);
      load_keys(1, next, keys_at(1));
    };
    SoftmaxReference reference;
    float sum[2], acc[D / 2];
    const auto attend = [&] {
      reference.max[0] = reference.max[1] = -INFINITY, sum[0] = sum[1] = 0;
#pragma unroll
      for (int i = 0; i < D / 2; ++i) acc[i] = 0;
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % S::kStages;
        const std::uint32_t keys = keys_at(stage);
        arrived();
        multiply_keys(keys);
        load_values(tile + S::kStages - 1, next, keys_at(stage ^ 1) + S::kTile);
        next = look(tile + S::kStages);
        const int key = key_of(tile);
        int see_end = end;
        if (branch == kSelected) {
          const int wants = together.blocks()[tile >> log2_tiles] >> (mine & 1) & 1;
          see_end = owner && wants ? min(end, key + (1 << shape.log2_block)) : 0;
        }
        std::uint32_t probabilities[S::kKeys / 4];
        wgmma_wait<0>();
        if (see_end > key && begin < key + S::kKeys) {
          mask(key, see_end, -INFINITY);
          float maxima[2];
          row_maxima<S::kKeys>(s, scale, maxima);
          if (reference.follow(maxima, [&](int i) { sum[i] *= reference.factor[i]; })) {
#pragma unroll
            for (int i = 0; i < D / 2; ++i) acc[i] *= reference.factor[i / 2 % 2];
          }
          const float shifts[2] = {reference.shift(0), reference.shift(1)};
#pragma unroll
          for (int i = 0; i < S::kKeys / 2; ++i) {
            s[i] = exp2_fast(fmaf(s[i], scale, shifts[i / 2 % 2]));
            sum[i / 2 % 2] += s[i];
          }
          pack_rows<T, S::kKeys>(probabilities, s);
        } else {
#pragma unroll
          for (int i = 0; i < S::kKeys / 4; ++i) probabilities[i] = 0;
        }
        arrived();
        gemm_rs<T, D, S::kKeys>(acc, probabilities, descriptor(keys + S::kTile, S::kPanel));
        load_keys(tile + S::kStages, next, keys);
        wgmma_wait<0>();
      }
      wait_copies<0>();
    };

    // The compressed keys once more: importances from what they share of each head's softmax. Keys and values' room is
    // room for keys.
    constexpr int kKeySlots = 2 * S::kStages;
    const auto slot_at = [&](int tile) { return ring + tile % kKeySlots * S::kTile; };
    const auto begin_weights = [&] {
      set_branch(kCompressed);
      sync_group();
#pragma unroll
      for (int tile = 0; tile < kKeySlots - 1; ++tile) load_keys(tile, look(tile), slot_at(tile));
      next = look(kKeySlots - 1);
    };
    /// logarithms: of the rows' softmaxes, base 2. Probabilities are made larger by 2^14, so that float16 has them all.
    const auto weigh = [&](const float(&logarithms)[2]) {
      const BlockWeights first_blocks(shape, 0, lane), beyond(shape, 8, lane);
      const std::uint32_t weights[4] = {first_blocks.b[0], beyond.b[0], first_blocks.b[1], beyond.b[1]};
      const float shifts[2] = {14 - logarithms[0], 14 - logarithms[1]};
      const bool counts[2] = {lane / 4 < p.group, lane / 4 + 8 < p.group};
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        arrived();
        multiply_keys(slot_at(tile));
        load_keys(tile + kKeySlots - 1, next, slot_at(tile + kKeySlots - 1));
        next = look(tile + kKeySlots);
        const int key = key_of(tile);
        wgmma_wait<0>();
        if (end <= key) continue;
        mask(key, end, -INFINITY);
#pragma unroll
        for (int i = 0; i < S::kKeys / 2; ++i)
          s[i] = counts[i / 2 % 2] ? exp2_fast(fmaf(s[i], scale, shifts[i / 2 % 2])) : 0;
#pragma unroll
        for (int u = 0; u < S::kKeys / kUnitKeys; ++u) {
          float of_blocks[4] = {};
#pragma unroll
          for (int i = 0; i < 2; ++i)
            mma(Half{}, of_blocks, weights, pack(Half{}, s[8 * u + 2 * i], s[8 * u + 2 * i + 1]),
                pack(Half{}, s[8 * u + 4 + 2 * i], s[8 * u + 5 + 2 * i]));
          const float low = row_sum(of_blocks[0] + of_blocks[1]), high = row_sum(of_blocks[2] + of_blocks[3]);
          const int unit = key / kUnitKeys + u, block = lane / 4;
          if ((lane & 3) == 0 && unit * kUnitKeys < end) {
            if (block < shape.blocks()) importances.blocks[(unit << shape.log2_blocks()) + block] = low;
            if (block == (shape.blocks() & 7)) importances.crossings[unit] = shape.blocks() == 8 ? high : low;
          }
        }
      }
      wait_copies<0>();
    };

    if (weighs) {
      const int used = (Candidates(args, last_position).count >> shape.log2_blocks()) + 1;
      for (int i = threadIdx.x; i < S::kQueries * all_units; i += S::kThreads)
        if (i % all_units < used) sums[S::kQueries * all_blocks + i] = 0;
      for (int i = threadIdx.x; i < S::kQueries * all_blocks; i += S::kThreads)
        if (i % all_blocks >> shape.log2_blocks() < used) sums[i] = 0;
    }
    const auto unite_lists = [&] {
      if (mine == 0) {
        const BlockList of[2] = {list_at(2 * group), list_at(2 * group + 1)};
        const auto count = [&](int i) { return 2 * group + i >= first && 2 * group + i <= last ? of[i].count() : 0; };
        const int counts[2] = {count(0), count(1)};
        unite(together, of, counts, lane);
      }
      __syncthreads();
    };
    const auto take_imposed = [&] {
      if (args.imposed.data == nullptr) return;
      if (group == 0 && active) {
        const int* const given = args.imposed.template at<const int>(b, row_of(query), kv_head);
        const int count = read_imposed(given, topk, position, 1 << shape.log2_block, list.found(), lane);
        if (lane == 0) list.count() = count;
        __syncwarp();
        list.sort(lane, 32);
      }
      __syncthreads();
    };
    if (!chooses) {
      take_imposed();
      unite_lists();
    }

    float known[S::kHalf][4];      // the warp's half of the columns, of the branches so far
    float logarithms[2] = {0, 0};  // of the softmaxes of compressed keys
    /// The warpgroups' sums of a branch together, each warp half of the columns of its query.
    const auto merge = [&](int branch) {
      const auto& softmaxes = rows.softmaxes[branch == kWindow];
      float share[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = mine * kTileRows + lane / 4 + 8 * i;
        const float2 of[2] = {softmaxes[0][r], softmaxes[1][r]};
        const float largest = fmaxf(of[0].x, of[1].x), base = largest == -INFINITY ? 0 : largest;
        const float factors[2] = {exp2_fast(of[0].x - base), exp2_fast(of[1].x - base)};
        const float all = of[0].y * factors[0] + of[1].y * factors[1];
        share[i] = all == 0 ? 0 : rows.gates[branch][r] * __frcp_rn(all) * (group ? factors[1] : factors[0]);
        if (branch == kCompressed) logarithms[i] = all == 0 ? INFINITY : base + __log2f(all);
      }
      auto* const there = reinterpret_cast<float4*>(exchange + warp * S::kExchange) + lane;
      const auto* const from = reinterpret_cast<const float4*>(exchange + (warp ^ S::kQueries) * S::kExchange) + lane;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == group) continue;
#pragma unroll
        for (int n = 0; n < S::kHalf; ++n) {
          const float* const x = acc + (half * S::kHalf + n) * 4;
          there[n * 32] = make_float4(x[0] * share[0], x[1] * share[0], x[2] * share[1], x[3] * share[1]);
        }
      }
      __syncthreads();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half != group) continue;
#pragma unroll
        for (int n = 0; n < S::kHalf; ++n) {
          const float* const x = acc + (half * S::kHalf + n) * 4;
          const float4 y = from[n * 32];
          const float other[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float both = __fmul_rn(x[i], share[i / 2]) + other[i];
            known[n][i] = branch == kCompressed ? both : known[n][i] + both;
          }
        }
      }
    };
    const auto leave_softmax = [&](int branch) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float all = row_sum(sum[i]);
        if ((lane & 3) == 0)
          rows.softmaxes[branch == kWindow][group][mine * kTileRows + lane / 4 + 8 * i] =
              make_float2(reference.max[i], all);
      }
    };

    begin_branch(kCompressed);
#pragma unroll 1
    for (int done = kCompressed;; done = kWindow) {
      attend();
      if (branch == kSelected) break;
      leave_softmax(done);
      // What comes next is on its way while sums are merged, if it is known.
      if (done == kCompressed) {
        begin_branch(kWindow);
      } else {
        wait_for_launcher();
        launch_dependents();
        room = args.plan[b].added > 0;
        if (weighs)
          begin_weights();
        else if (!chooses)
          begin_branch(kSelected);
      }
      __syncthreads();
      merge(done);
      if (done == kCompressed) continue;
      if (!chooses) continue;
      if (weighs) weigh(logarithms);
      __syncthreads();
      find_blocks(args, memory + mine * (S::kRing / S::kQueries), importances, list, position, active,
                  group * 32 + lane);
      if (args.indices.data && active && group == 0)
        for (int i = lane; i < topk; i += 32)
          args.indices.template at<int>(b, row_of(query), kv_head)[i] =
              room && i < list.count() ? list.blocks()[i] : -1;
      if (args.imposed.data) __syncthreads();
      take_imposed();
      unite_lists();
      begin_branch(kSelected);
    }

    auto* const others = reinterpret_cast<float4*>(exchange + warp * S::kExchange) + lane;
    const auto* const from = reinterpret_cast<const float4*>(exchange + (warp ^ S::kQueries) * S::kExchange) + lane;
    __syncthreads();  // the exchange is free
    if (!owner) {
#pragma unroll
      for (int n = 0; n < S::kHalf; ++n)
        others[n * 32] = make_float4(known[n][0], known[n][1], known[n][2], known[n][3]);
    }
    __syncthreads();
    bool finite = true;
    if (owner && active) {
      float share[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float all = row_sum(sum[i]);
        share[i] = all == 0 ? 0 : rows.gates[kSelected][mine * kTileRows + lane / 4 + 8 * i] * __frcp_rn(all);
      }
      const int at = row_of(query);
      T* outputs[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        outputs[i] =
            args.o.template at<T>(b, at, kv_head * p.group + min(lane / 4 + 8 * i, p.group - 1)) + 2 * (lane & 3);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < S::kHalf; ++n) {
          float o[4] = {known[n][0], known[n][1], known[n][2], known[n][3]};
          if (half != group) {
            const float4 x = from[n * 32];
            o[0] = x.x, o[1] = x.y, o[2] = x.z, o[3] = x.w;
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            o[i] += acc[(half * S::kHalf + n) * 4 + i] * share[i / 2];
            finite &= is_finite(o[i]);
          }
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (lane / 4 + 8 * i < p.group)
              store_pair(outputs[i] + (half * S::kHalf + n) * 8, room ? o[2 * i] : 0, room ? o[2 * i + 1] : 0);
        }
    }
    const bool all_finite = __syncthreads_and(finite);
    if (turn == 0) again = !all_finite && room && here > 1;
  }
  leave_length();
}

}  // namespace

template <class T, int Dk, int Dv>
cudaError_t launch_step_queries(const StepAttendArgs& of_step, cudaStream_t stream) {
  if constexpr (Dk != Dv) {
    return cudaErrorInvalidValue;
  } else {
    using S = QueriesTile<T, Dk>;
    StepAttendArgs args = of_step;
    const Geometry& g = args.geometry;
    const std::int64_t blocks = (g.k_len >> args.block_keys.log2_block) + 1;
    const QueriesMemory memory(args.block_keys, Dk, args.topk, blocks);
    if (memory.ring != S::kRing || memory.rows != sizeof(QueriesRows<S>) || !memory.fits() || g.group > kTileRows)
      return cudaErrorInvalidValue;
    args.kept_units = static_cast<int>(QueriesMemory::units_of(args.block_keys, blocks));
    args.clusters = 1;
    const dim3 grid((g.q_len + S::kQueries - 1) / S::kQueries, g.kv_heads, g.batches);
    return launch_dependent(step_attend_queries<S, T, Dk>, grid, dim3(S::kThreads),
                            static_cast<std::size_t>(memory.bytes()), stream, args);
  }
}
template cudaError_t launch_step_queries<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const StepAttendArgs&, cudaStream_t);

}  // namespace nsa::cuda::sm90::decode
