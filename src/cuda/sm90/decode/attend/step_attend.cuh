// step_attend, for two files: one with the kernels that multiply two key tiles of keys at once in 16 bits, one with the
// others. They say by NSA_STEP_REGISTERS how many registers a thread may have.
//
// A cluster of thread blocks has one query of one KV head: one or two tiles of sixteen rows, the heads of the group.
// How many thread blocks and warps (ClusterShape) depends on how many queries a step has. The thread blocks share out
// the keys of each branch in stages of one key tile of sixteen keys per warp, which loads it. The warps of a tile share
// out the key tiles of a stage, and merge their sums when the branch ends. The order of every sum follows from the
// shape and the keys' numbers, not from lengths, other sequences or the step's other queries.
//
// A group of more than 32 heads has a cluster for every 32. As all heads choose the blocks together, each multiplies
// the compressed keys with the other clusters' queries too, before its own.
//
// Keys and values are loaded in kv_loader.cuh, queries in queries.cuh; scores.cuh computes of a key tile what a warp
// needs of it; cluster_merge.cuh merges sums of warps and of thread blocks; block_choice.cuh selects blocks;
// epilogue.cuh stores outputs.
//
//   compressed keys, keeping sums for the choice │ window │ exchange of softmaxes │ own candidates │ exchange │
//   choice, the same in all thread blocks │ selected blocks │ exchange of outputs, each thread block some columns
//
// Of S::kWindowLast the window is attended to after the choice: by thread blocks that have few of the selected blocks.
#pragma once

#include <iterator>

#include "cuda/common/launch.cuh"
#include "cuda/common/pages.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/decode/attend/block_choice.cuh"
#include "cuda/sm90/decode/attend/cluster_merge.cuh"
#include "cuda/sm90/decode/attend/config.cuh"
#include "cuda/sm90/decode/attend/epilogue.cuh"
#include "cuda/sm90/decode/attend/kv_loader.cuh"
#include "cuda/sm90/decode/attend/queries.cuh"
#include "cuda/sm90/decode/attend/scores.cuh"
#include "cuda/sm90/decode/sequence_order.cuh"

namespace nsa::cuda::sm90::decode {
namespace {

/// kMany: a query has several clusters. With eight warps a thread block could have 255 registers for a thread; with the
/// 168 of twelve warps, compilers count in uniform ones what they otherwise count in these.
template <class S, class T, int Dk, int Dv, bool kMany>
__global__ void NSA_STEP_REGISTERS step_attend(const __grid_constant__ StepAttendArgs args) {
  constexpr int kRanks = S::kRanks, kWarps = S::kWarps, kThreads = S::kThreads, kTiles = S::kTiles;
  constexpr bool kFloat8 = S::kFloat8;
  const StepGeometry& p = args.geometry;
  const BlockKeys& shape = args.block_keys;
  const int lane = threadIdx.x % 32, warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const int tile = warp / S::kSplits, split = warp % S::kSplits;
  const int rank = S::rank(), kv_head = blockIdx.y;
  const int clusters = kMany ? args.clusters : 1, number = static_cast<int>(blockIdx.x) / kRanks;
  const int query = number / clusters, mine = number - query * clusters;  // the cluster's number for this query
  const int first_head = mine * S::kRows, num_heads = min(p.group - first_head, S::kRows);
  const std::uint32_t ring = shared_address(step_memory);

  const int scores_bytes = shape.scores_bytes();
  char* const queries = step_memory + S::kRing + tile * (S::kQueries / kTiles) + lane * 16;
  char* const all_scores = step_memory + S::kRing + S::kQueries;
  char* const row_memory = all_scores + clusters * kTiles * args.cached_tiles * scores_bytes;
  auto& rows = *reinterpret_cast<RowMemory<S>*>(row_memory);
  auto* const others = reinterpret_cast<OtherRows<S>*>(row_memory + sizeof(RowMemory<S>));  // own: not used
  const ChoiceMemory choice{reinterpret_cast<char*>(others + (clusters > 1 ? clusters : 0)), args.topk};

  const bool longest_first = S::kAtOnce == 2 && args.longest_first;
  const int b = longest_first ? longest_sequence(args, reinterpret_cast<int*>(all_scores)) : blockIdx.z;

  // Queries and gates are inputs of the step: they may be read before the kernel in front has ended, as may the lengths
  // before the step and all keys that were there. Queries come by way of the ring.
  const auto row = [&] { return row_of_query(p, b, query); };
  const QueryLoader<S> query_loader{args, b, query, kv_head, lane, tile, split, ring, queries};
  const bool chooses = args.given.data == nullptr || args.indices.data != nullptr;
  // The compressed keys of the others' queries come first, in phases below 0.
  const int first_phase = kMany && chooses ? 1 - clusters : 0;
  const auto cluster_of = [&](int phase) { return phase == 0 ? mine : -1 - phase + (-1 - phase >= mine); };
  query_loader.copy(cluster_of(first_phase));
  const StepRequest request(p, args.lengths, args.num_new, args.positions, b);
  const auto publish_length = [&] {
    griddepcontrol_wait();
    if (rank == 0 && threadIdx.x == 0) advance_lengths(args, longest_first, b, p.q_len * clusters * p.kv_heads);
  };
  if (!request.possible || query >= request.added) {  // all thread blocks of the cluster
    if (!p.starts) {                                  // packed rows are cleared by the kernel in front
      clear_query<S, T, Dv>(args, b, query, kv_head, first_head, num_heads, rank, mine == 0);
    }
    publish_length();
    wait_copies<0>();
    return;
  }
  const int position = request.before + query;
  const int compressed = shape.compressed(p.kernel_size, position + 1);
  const KvLoader<S> kv_loader{args, b, kv_head, lane, warp, ring};
  /// Before and after a stage is read: a single tile's warps read what they load themselves.
  const auto sync_readers = [] {
    if constexpr (kTiles == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
  QueryFragments<S> q;
  load_gates<S, T>(args, rows, b, row, kv_head, first_head, num_heads);
  float scale;
  query_loader.read(q, scale);

  const StepWarp<S> place{rows, lane, warp, tile, split};
  OwnSums<S> known, own, window;  // of the branches so far, of the last one, and of a window that comes after
  bool fits = true;
#pragma unroll 1
  for (int phase = first_phase; phase < kBranches; ++phase) {
    const bool wants_values = !kMany || phase >= 0;
    const BranchIndex branch = !wants_values || phase == 0 ? kCompressed : phase == 1 ? kWindow : kSelected;
    const int cluster_id = wants_values ? mine : cluster_of(phase);
    const bool compresses = branch == kCompressed, in_window = branch == kWindow, selects = branch == kSelected;
    // The query sees the keys begin ... end - 1, of the selection those in its blocks.
    const int begin = in_window ? max(position - args.window + 1, 0) : 0, end = compresses ? compressed : position + 1;
    const int first_load = begin / S::kLoadKeys;
    const int turn = in_window ? kRanks - 1 - rank : rank;  // the first ranks have a stage more of compressed keys
    const int num_blocks = selects ? choice.count() : 0;
    const auto key_of = [&](int stage, int key_tile) {
      const int number = (stage * kRanks + turn) * kWarps + key_tile;
      if (!selects) return (first_load + number) * S::kLoadKeys;
      const int log2_loads = shape.log2_block - 4 - S::kAtOnce / 2, slot = number >> log2_loads;
      if (slot >= num_blocks) return end;
      return (choice.blocks()[slot] << shape.log2_block) + (number & ((1 << log2_loads) - 1)) * S::kLoadKeys;
    };
    const int keys = selects ? num_blocks << shape.log2_block : end - first_load * S::kLoadKeys;
    const int stages = max((keys + S::kStageKeys * (kRanks - turn) - 1) / (S::kStageKeys * kRanks), 0);

    const BlockWeights weights(shape, 0, lane);
    OnlineSoftmax<Dv> state;
    if constexpr (S::kAtOnce == 2) {
      // Each warp by itself. Its keys are overwritten by the next ones once they are multiplied, while its values are
      // on their way, and the other way around.
      const CachedBranch& cached = args.cached[branch];
      const std::uint32_t here = ring + warp * S::kWarpRing, values_here = here + S::Keys::bytes(S::kLoadKeys);
      constexpr int kEvery = kRanks * kWarps;
      const int loads = ((keys + S::kLoadKeys - 1) / S::kLoadKeys - (turn * kWarps + warp) + kEvery - 1) / kEvery;
      // Of e4m3 there are no registers to keep these: they are computed again.
      const auto key_chunk = [&](int lane) { return kv_loader.chunk_of(typename S::Keys{}, cached.k, here, lane); };
      const auto value_chunk = [&](int lane) {
        return kv_loader.chunk_of(typename S::Values{}, cached.v, values_here, lane);
      };
      const auto own_key_chunk = key_chunk(lane), own_value_chunk = value_chunk(lane);
      const auto load_keys = [&](const auto& load) {
        // Before the first that may have a token of the step, the kernel in front must have ended.
        if (!selects && load.key + S::kLoadKeys > (compresses ? request.first : request.before)) griddepcontrol_wait();
        kv_loader.load_rows(typename S::Keys{}, cached, cached.k, kFloat8 ? key_chunk(again(lane)) : own_key_chunk,
                            load, begin, end);
        commit_copies();
      };
      const auto load_values = [&](const auto& load) {
        kv_loader.load_rows(typename S::Values{}, cached, cached.v,
                            kFloat8 ? value_chunk(again(lane)) : own_value_chunk, load, begin, end);
        commit_copies();
      };
      const bool keeps = compresses && chooses;
      char* scores = all_scores + warp * S::kAtOnce * scores_bytes;
      auto next = kv_loader.load_of(cached, key_of(0, warp), end),
           after = kv_loader.load_of(cached, key_of(1, warp), end);
      int key = next.key;
      if (loads > 0) load_keys(next), load_values(next);
      next = after, after = kv_loader.load_of(cached, key_of(2, warp), end);
#pragma unroll 1
      for (int stage = 0; stage < loads; ++stage) {
        const bool more = stage + 1 < loads;
        Scores<S> s = {};
        wait_copies<1>();
        __syncwarp();
        multiply_keys<S>(s, q, queries, here, lane);
        __syncwarp();
        if (more)
          load_keys(next);
        else
          commit_copies();
        update_softmax<S>(state, s, scale, begin - key, end - key, lane);
        if (keeps) {
          cache_scores<2>({scores, shape.blocks()}, shape, weights, s, 0, state.max, lane);
          if (key + kTileKeys < compressed)
            cache_scores<2>({scores + scores_bytes, shape.blocks()}, shape, weights, s, 1, state.max, lane);
          scores += S::kStageKeyTiles * scores_bytes;
        }
        wait_copies<1>();
        __syncwarp();
        add_values<S>(state, s, values_here, lane);
        __syncwarp();
        if (more)
          load_values(next);
        else
          commit_copies();
        key = next.key, next = after, after = kv_loader.load_of(cached, key_of(stage + 3, warp), end);
      }
      __syncwarp();
    } else {
      int next = kv_loader.page_of(branch, key_of(0, warp), end);
#pragma unroll 1
      for (int stage = -1; stage < stages; ++stage) {
        if (stage + 1 < stages) {
          // Before the first stage that may have a token of the step, the kernel in front must have ended.
          if (!selects && key_of(stage + 1, kWarps) > (compresses ? request.first : request.before))
            griddepcontrol_wait();
          kv_loader.load_key_tile(branch, next, key_of(stage + 1, warp), begin, end, stage + 1, wants_values);
        }
        commit_copies();
        next = kv_loader.page_of(branch, key_of(stage + 2, warp), end);
        if (stage < 0) continue;
        wait_copies<1>();
        sync_readers();
        // The key tiles that are the warp's.
#pragma unroll 1
        for (int i = 0; i < kWarps / S::kSplits; ++i) {
          const int key_tile = split + i * S::kSplits, key = key_of(stage, key_tile);
          attend_key_tile<S>(
              state, q, queries, begin - key, end - key, ring + kv_loader.key_tile_in_ring(stage, key_tile), scale,
              wants_values, lane, [&](const float(&probabilities)[2][4]) {
                const int slot =
                    ((cluster_id * kTiles + tile) * args.cached_tiles + stage * kWarps + key_tile) * scores_bytes;
                if (compresses && chooses && key < compressed)
                  cache_scores<1>({all_scores + slot, shape.blocks()}, shape, weights, probabilities, 0, state.max,
                                  lane);
              });
        }
        sync_readers();
      }
    }
    merge_warps(place, wants_values ? rows.branches[branch] : others[cluster_id].own, state, own, wants_values,
                stages > 0);

    if (!wants_values) {
      query_loader.copy(cluster_of(phase + 1));
      query_loader.read(q, scale);
      continue;
    }
    const auto keep = [&](OwnSums<S>& sums) {
#pragma unroll
      for (int n = 0; n < S::kOwnColumns; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] = own[n][i];
    };
    if (compresses) keep(known);
    if (S::kWindowLast && in_window) keep(window);
    if (S::kWindowLast ? compresses : in_window) {
      // Exchange of the softmaxes so far, and their branches as one sum.
      S::sync();
      merge_softmaxes(rows, lane);
      for (int other = first_phase; other < 0; ++other) merge_softmaxes(others[cluster_of(other)], lane);
      __syncthreads();
      add_window(place, known, own);
      griddepcontrol_wait();
      // The next kernel may read what it does not get from here. Earlier its reads would delay the compressed keys.
      launch_dependents();
      fits = args.plan[b].added > 0;
      const auto totals_of = [&](int of_tile) -> const float2* {
        const int of = of_tile / kTiles;
        return (of == mine ? rows.totals[kCompressed] : others[of].totals) + of_tile % kTiles * kTileRows;
      };
      choose_blocks<S>(args, b, step_memory, totals_of, clusters * kTiles, choice, all_scores, row(), position,
                       compressed, chooses, fits, args.indices.data && rank == 0 && mine == 0);
    }
  }

  const int at_row = row();
  if constexpr (kFloat8 && S::kAtOnce == 2) fits = args.plan[b].added > 0;  // again: there is no register to keep it
  const OutputRows<S, T> out{args, b, at_row, kv_head, first_head, num_heads, lane, fits};
  if constexpr (kRanks == 1) {
    store_columns_of_warp(place, out, known, own);
    publish_length();
  } else {
    store_columns_of_rank(place, out, known, own, window, rank);
    publish_length();
    S::sync_reads();  // no thread block ends while others read its memory
  }
}

template <class S, class T, int Dk, int Dv, bool kMany>
cudaError_t launch_shape(StepAttendArgs args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  const std::int64_t keys = num_compressed(g, g.k_len);
  const StepMemory memory(S::kShape, g.group, args.block_keys, Dk, Dv, S::kFloat8, args.topk, keys,
                          (g.k_len >> args.block_keys.log2_block) + 1);
  if (memory.ring != S::kRing || memory.rows != sizeof(RowMemory<S>) || !memory.fits()) return cudaErrorInvalidValue;
  args.cached_tiles = static_cast<int>(StepMemory::cached_tiles(S::kRanks, S::kStageKeyTiles, keys));
  args.clusters = step_clusters(g.group);
  const dim3 grid(g.q_len * args.clusters * S::kRanks, g.kv_heads, g.batches);
  return launch_cluster(step_attend<S, T, Dk, Dv, kMany>, S::kRanks, true, grid, S::kThreads,
                        static_cast<std::size_t>(memory.bytes()), stream, args);
}

/// By the one of kClusterShapes from `at` on that the arguments name, of those with kKeyTiles at once.
template <class T, int Dk, int Dv, int kTiles, bool kMany, bool kFloat8, int kKeyTiles, int at = 0>
cudaError_t launch_tiles(const StepAttendArgs& args, cudaStream_t stream) {
  constexpr ClusterShape shape = kClusterShapes[at];
  if constexpr (shape.key_tiles == kKeyTiles && has_kernel(shape, kTiles, Dk, kFloat8))
    if (args.shape == shape)
      return launch_shape<StepShape<T, Dk, Dv, kTiles, kFloat8, shape.ranks, shape.warps, kKeyTiles>, T, Dk, Dv, kMany>(
          args, stream);
  if constexpr (at + 1 < static_cast<int>(std::size(kClusterShapes)))
    return launch_tiles<T, Dk, Dv, kTiles, kMany, kFloat8, kKeyTiles, at + 1>(args, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace nsa::cuda::sm90::decode
