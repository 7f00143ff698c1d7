// A decode step's attention where there are many queries of several new tokens: a thread block has four neighbouring
// queries of a sequence and KV head, and reads for all of them at once. Compiled with NSA_ELEMENT, NSA_KEY_DIM and
// NSA_VALUE_DIM.
//
// Its rows are 4 x 16 (query, head), those of a query one warp's of each of two warpgroups. Keys come in tiles of 64 at
// absolute numbers, and are multiplied by wgmma. Of compressed keys and of the window the warpgroups take every other
// tile and merge their sums; of the selected blocks each takes those of two queries, together. What a query does not
// see has a probability of zero, so that its bits do not depend on the others.
//
//   compressed keys │ compressed keys again, for the choice, now that their softmax is known │ choice │
//   selected blocks │ window │ outputs
//
// Compressed keys are bound by the chain of a computing warpgroup, selected blocks by memory. So where blocks are
// given, half of the thread blocks begin with these: memory is in use all the time. The sum of both does not tell which
// was first.
//
// Keys and values are loaded in kv_loader.cuh, attended to and weighed for the choice in attention.cuh.
//
// Zero times a value that is not finite would leak to other queries: where an output is not finite, each query is
// served again by itself, and nothing is loaded that it does not see.
#include "cuda/sm90/decode/queries/attention.cuh"
#include "cuda/sm90/decode/queries/kv_loader.cuh"
#include "cuda/sm90/decode/sequence_order.cuh"

namespace nsa::cuda::sm90::decode {
namespace {

template <class S, class T, int D>
__global__ void __launch_bounds__(S::kThreads, 1) step_attend_queries(const __grid_constant__ StepAttendArgs args) {
  extern __shared__ __align__(1024) char memory[];
  const StepGeometry& p = args.geometry;
  const BlockKeys& shape = args.block_keys;
  const int lane = threadIdx.x % 32, warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const bool computes = warp < S::kComputing / 32;
  // The warpgroup that the warp is of or copies for; of a computing one, its query of the tile.
  const int group = computes ? warp / S::kQueries : (warp - S::kComputing / 32) / S::kCopiers;
  const int mine = warp % S::kQueries;
  const int kv_head = blockIdx.y, first_query = blockIdx.x * S::kQueries, query = first_query + mine;
  const int topk = args.topk;

  auto& rows = *reinterpret_cast<QueriesRows<S>*>(memory + S::kRing);
  char* const lists = reinterpret_cast<char*>(&rows + 1);
  const auto list_at = [&](int i) { return BlockList{lists + i * QueriesMemory::list_bytes(topk), topk}; };
  const BlockList together = list_at(S::kQueries + group);
  char* const exchange = lists + ((S::kQueries + S::kGroups) * QueriesMemory::list_bytes(topk) + 15) / 16 * 16;
  const std::uint32_t ring = shared_address(memory) + group * S::kGroupRing;
  const Pipeline<S::kSlots> barriers{shared_address(rows.barriers[group])};
  const TurnBarrier turn_barrier{shared_address(rows.turn)};

  const bool longest_first = args.longest_first;
  const int b = longest_first ? longest_sequence(args, reinterpret_cast<int*>(exchange)) : blockIdx.z;
  const StepRequest request(p, args.lengths, args.num_new, args.positions, b);
  const int here =
      warp_uniform(request.possible ? min(request.added - first_query, S::kQueries) : 0);  // queries of the tile
  const auto chooses = [&] { return args.given.data == nullptr || args.indices.data != nullptr; };
  // Whether a query there does not take all blocks.
  const auto weighs = [&](int position) { return chooses() && !Candidates(args, position).all(args); };
  // By heads and sequences, as thread blocks of one head share its compressed keys in L2.
  const bool selected_first = !chooses() && ((blockIdx.y + blockIdx.z) & 1) != 0;
  const auto branch_at = [&](int pass) {
    return pass == 2 ? kWindow : (pass == 0) == selected_first ? kSelected : kCompressed;
  };
  const auto row_of = [&](int query) { return p.starts ? min(max(p.starts[b] + query, 0), p.rows - 1) : query; };

  // Queries that are idle.
  if (computes && !p.starts && mine >= here && query < p.q_len) {
    for (int head = group; head < p.group; head += S::kGroups)
      for (int i = lane; i < D / 2; i += 32)
        store_pair(args.o.template at<T>(b, query, kv_head * p.group + head) + i * 2, 0, 0);
    if (args.indices.data && group == 0)
      for (int i = lane; i < topk; i += 32) args.indices.template at<int>(b, query, kv_head)[i] = -1;
  }
  const auto publish_length = [&] {
    griddepcontrol_wait();
    if (threadIdx.x == 0) advance_lengths(args, longest_first, b, static_cast<int>(gridDim.x) * p.kv_heads);
  };
  if (here <= 0) {
    publish_length();
    return;
  }

  // All queries in turn 0, and where an output is not finite each by itself.
  const auto is_last = [&](int turn, bool all_finite, bool fits) {
    return turn > 0 ? turn == here : all_finite || !fits || here == 1;
  };
  if (threadIdx.x < S::kGroups) {
    Pipeline<S::kSlots>{shared_address(rows.barriers[threadIdx.x])}.init(S::kCopiers * 32, S::kQueries);
    if (threadIdx.x == 0) turn_barrier.init(S::kThreads);
    fence_mbarrier_init();
  }
  __syncthreads();

  if (!computes) {
    warpgroup_reg_dealloc<S::kCopyRegisters>();
    TileCopier<S> copier(ring, barriers, warp % S::kCopiers, lane);
    const int first_position = request.before + first_query;
#pragma unroll 1
    for (int turn = 0;; ++turn) {
      const int first = turn == 0 ? 0 : turn - 1, last = turn == 0 ? here - 1 : turn - 1;
      const auto copy = [&](auto branch, bool values, int first_added) {
        const BranchTiles tiles(args, branch, first_position + first, first_position + last, group, together);
        copy_branch<branch>(copier, args, tiles, values, first_added, b, kv_head);
      };
#pragma unroll 1
      for (int pass = 0; pass < kBranches; ++pass) {
        const int branch = branch_at(pass);
        if (branch == kWindow) {
          copy(std::integral_constant<int, kWindow>{}, true, request.before);
        } else if (branch == kSelected) {
          named_barrier_sync(QueriesBarrier::kLists, S::kThreads);
          copy(std::integral_constant<int, kSelected>{}, true, request.before);
        } else {
          const int times = weighs(first_position + last) ? 2 : 1;
#pragma unroll 1
          for (int i = 0; i < times; ++i) copy(std::integral_constant<int, kCompressed>{}, i == 0, request.first);
        }
      }
      griddepcontrol_wait();  // for the plan
      if (is_last(turn, turn_barrier.wait(turn), args.plan[b].added > 0)) break;
    }
    publish_length();
    return;
  }
  warpgroup_reg_alloc<S::kComputeRegisters>();
  const auto sync = [] { named_barrier_sync(QueriesBarrier::kComputing, S::kComputing); };
  const int thread = threadIdx.x;
  const bool owner = mine / 2 == group;  // of the query's sums of selected blocks
  const BlockList list = list_at(mine);
  auto* const sums = reinterpret_cast<float*>(exchange);
  const int all_key_tiles = args.cached_tiles, all_blocks = all_key_tiles << shape.log2_blocks();
  const Importances importances{sums + mine * all_blocks, sums + S::kQueries * all_blocks + mine * all_key_tiles};

  // Queries and gates are inputs of the step, as are keys that were there before it.
  const int position = request.before + query, compressed = shape.compressed(p.kernel_size, position + 1);
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

  bool fits = true;
  SlotState<S::kSlots> filled;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    // The active queries, first to last.
    const int first = turn == 0 ? 0 : turn - 1, last = turn == 0 ? here - 1 : turn - 1;
    const bool active = mine >= first && mine <= last;
    const int first_position = request.before + first_query + first,
              last_position = request.before + first_query + last;

    float s[S::kKeys / 2];
    int begin, end;  // of the keys that the query sees
    TileScores<S, T, D> scores{ring, barriers, filled, q, s, begin, lane};
    SoftmaxReference reference;
    float sum[2], acc[D / 2];
    float known[S::kHalf][4];      // the warp's half of the columns, of the branches so far
    float logarithms[2] = {0, 0};  // of the softmaxes of compressed keys
    const auto attend = [&](int branch) {
      const BranchTiles tiles(args, branch, first_position, last_position, group, together);
      begin = branch == kWindow ? max(position - args.window + 1, 0) : 0;
      end = !active ? 0 : branch == kCompressed ? compressed : position + 1;
      reference.max[0] = reference.max[1] = -INFINITY, sum[0] = sum[1] = 0;
#pragma unroll
      for (int i = 0; i < D / 2; ++i) acc[i] = 0;
      if (tiles.count == 0) return;
      attend_tiles<S, T, D>(scores, tiles, branch, shape, end, owner, mine, scale, reference, sum, acc);
    };

    const auto weigh = [&] {
      const BranchTiles tiles(args, kCompressed, first_position, last_position, group, together);
      begin = 0, end = active ? compressed : 0;
      weigh_tiles<S, T, D>(scores, tiles, shape, end, p.group, scale, logarithms, importances);
    };
    const auto clear_sums = [&] {
      const int used = (Candidates(args, last_position).count >> shape.log2_blocks()) + 1;
      for (int i = thread; i < S::kQueries * all_key_tiles; i += S::kComputing)
        if (i % all_key_tiles < used) sums[S::kQueries * all_blocks + i] = 0;
      for (int i = thread; i < S::kQueries * all_blocks; i += S::kComputing)
        if (i % all_blocks >> shape.log2_blocks() < used) sums[i] = 0;
    };
    const auto unite_lists = [&] {
      if (mine == 0) {
        const BlockList of[2] = {list_at(2 * group), list_at(2 * group + 1)};
        const auto count = [&](int i) { return 2 * group + i >= first && 2 * group + i <= last ? of[i].count() : 0; };
        const int counts[2] = {count(0), count(1)};
        unite(together, of, counts, lane);
      }
      sync();
      named_barrier_arrive(QueriesBarrier::kLists, S::kThreads);
    };
    const auto take_given = [&] {
      if (args.given.data == nullptr) return;
      if (group == 0 && active) {
        const int* const given = args.given.template at<const int>(b, row_of(again(query)), kv_head);
        const int count = read_given(given, topk, position, 1 << shape.log2_block, list.found(), lane);
        if (lane == 0) list.count() = count;
        __syncwarp();
        list.sort(lane, 32);
      }
      sync();
    };
    if (!chooses()) {
      take_given();
      unite_lists();
    }

    /// The warpgroups' sums of a branch together, each warp half of the columns of its query; to those of the others,
    /// if it is not the first.
    const auto merge = [&](int branch, bool is_first) {
      const int lane = lane_id();
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
      sync();
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
            known[n][i] = is_first ? both : known[n][i] + both;
          }
        }
      }
    };
    const auto publish_softmax = [&](int branch) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float all = row_sum(sum[i]);
        if ((lane & 3) == 0)
          rows.softmaxes[branch == kWindow][group][mine * kTileRows + lane / 4 + 8 * i] =
              make_float2(reference.max[i], all);
      }
    };

#pragma unroll 1
    for (int pass = 0; pass < kBranches; ++pass) {
      const int branch = branch_at(pass);
      attend(branch);
      publish_softmax(branch);
      if (pass == 0) {
        griddepcontrol_wait();
        launch_dependents();
        fits = warp_uniform(args.plan[b].added > 0);
      }
      sync();
      merge(branch, pass == 0);
      if (branch != kCompressed || !chooses()) continue;
      sync();
      if (warp_uniform(weighs(last_position))) {
        clear_sums();
        sync();
        weigh();
        sync();
      }
      find_blocks(args, memory + mine * (S::kRing / S::kQueries), importances, list, position, active,
                  group * 32 + lane, sync);
      if (args.indices.data && active && group == 0)
        for (int i = lane; i < topk; i += 32)
          args.indices.template at<int>(b, row_of(again(query)), kv_head)[i] =
              fits && i < list.count() ? list.blocks()[i] : -1;
      if (args.given.data) sync();
      take_given();
      unite_lists();
    }

    bool finite = true;
    if (active) {
      const int at = row_of(again(query));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int head = lane / 4 + 8 * i;
        T* const outputs =
            args.o.template at<T>(b, at, kv_head * p.group + min(head, p.group - 1)) + group * D / 2 + 2 * (lane & 3);
#pragma unroll
        for (int n = 0; n < S::kHalf; ++n) {
          const float x = known[n][2 * i], y = known[n][2 * i + 1];
          finite &= is_finite(x) && is_finite(y);
          if (head < p.group) store_pair(outputs + n * 8, fits ? x : 0, fits ? y : 0);
        }
      }
    }
    if (turn == 0 && !finite) turn_barrier.report();
    if (is_last(turn, turn_barrier.wait(turn), fits)) break;
  }
  publish_length();
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
    args.cached_tiles = static_cast<int>(QueriesMemory::key_tiles_of(args.block_keys, blocks));
    args.clusters = 1;
    const dim3 grid((g.q_len + S::kQueries - 1) / S::kQueries, g.kv_heads, g.batches);
    return launch_dependent(step_attend_queries<S, T, Dk>, grid, dim3(S::kThreads),
                            static_cast<std::size_t>(memory.bytes()), stream, args);
  }
}
template cudaError_t launch_step_queries<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const StepAttendArgs&, cudaStream_t);

}  // namespace nsa::cuda::sm90::decode
