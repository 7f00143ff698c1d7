// Importance of selection blocks from the compressed branch's probabilities, and the top n of them.
//
// A thread block takes all heads of a few neighbouring queries of one KV head, walks the compressed keys once, sums the
// probabilities over the heads in a fixed order, and keeps the sums (one float per compressed key and query) in a
// scratch of its own in global memory, where they stay in the cache. Then a warp per query gathers the importances and
// takes the top k. The grid is persistent, so the scratch does not grow with the number of queries.
#pragma once

#include "cuda/common/fallback.cuh"
#include "cuda/common/geometry.cuh"
#include "cuda/common/gumbel.cuh"
#include "cuda/common/params.h"
#include "cuda/common/softmax.cuh"

namespace nsa::cuda::portable {

template <class T, int Dk>
struct SelectShape {
  static constexpr int kKeys = sizeof(T) == 2 && Dk <= 128 ? 64 : 32;
  static constexpr int kStage = Tile<T, Dk>::bytes(kKeys);
  static constexpr int kPitch = kKeys + 4;  // floats of a row of probabilities
  static constexpr int kMemory = 2 * kStage + 64 * kPitch * 4;
};

/// Writes the `topk` blocks of one query. One warp, or a whole thread block of kThreads.
template <int kThreads = 32, class Args>
__device__ inline void top_k_blocks(const Args& args, const DeviceSequence& seq, int position, int kv_head,
                                    const float* sums, float* importance, int* out, int thread) {
  const Geometry& p = args.geometry;
  const int candidates = position / args.block_size + 1;
  if (candidates <= args.topk) {
    for (int i = thread; i < args.topk; i += kThreads) out[i] = i < candidates ? i : -1;
    return;
  }
  const int first_local = max(candidates - args.local_blocks, 0);
  const auto forced = [&](int j) { return j < args.init_blocks || j >= first_local; };
  const int slots = args.topk - min(args.init_blocks, candidates) - (candidates - max(first_local, args.init_blocks));
  const int visible = num_compressed(p, position + 1), l = p.kernel_size, d = p.kernel_stride;
  for (int j = thread; j < candidates; j += kThreads) {
    const int begin = j * args.block_size, end = begin + args.block_size;
    const int first = begin < l ? 0 : (begin - l) / d + 1, last = min((end - 1) / d, visible - 1);
    float sum = 0;
    for (int i = first; i <= last; ++i)
      sum += sums[i] * (static_cast<float>(min(i * d + l, end) - max(i * d, begin)) * args.inverse_stride);
    if (args.noise > 0) sum = perturbed(sum * args.share, args.noise, args.seed, j, position, kv_head, seq.index);
    importance[j] = __uint_as_float(forced(j) ? 0 : ordered(sum));
  }
  // Forced blocks and those that are not there have 0, which reaches no threshold asked for.
  const auto key_of = [&](int j) { return j < candidates ? __float_as_uint(importance[j]) : 0u; };
  // The first ones of each thread stay in registers.
  constexpr int kHeld = kThreads == 32 ? 1 : 4;
  unsigned held[kHeld];
  if constexpr (kThreads == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) held[i] = key_of(i * kThreads + thread);
  // The largest threshold that at least `slots` unforced blocks reach, bit by bit.
  const auto reach = [&](unsigned threshold, int round) {
    int n = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) n += held[i] >= threshold;
    for (int j = kHeld * kThreads + thread; j < candidates; j += kThreads) n += key_of(j) >= threshold;
    n = __reduce_add_sync(0xffffffffu, n);
    if constexpr (kThreads > 32) {
      __shared__ int counts[2][kThreads / 32];  // by turns, so that one barrier is enough
      if (thread % 32 == 0) counts[round % 2][thread / 32] = n;
      __syncthreads();
      n = __reduce_add_sync(0xffffffffu, thread % 32 < kThreads / 32 ? counts[round % 2][thread % 32] : 0);
    }
    return n;
  };
  unsigned threshold = 0;
  int above = 0, round = 0;  // above: blocks that reach threshold + 1, at the end
  for (int bit = 31; bit >= 0; --bit) {
    const unsigned next = threshold | (1u << bit);
    const int n = reach(next, round++);
    if (n >= slots) threshold = next;
    if (n == slots) break;
  }
  above = threshold == 0xffffffffu ? 0 : reach(threshold + 1, round);
  int ties = slots - above, written = 0;
  if (thread >= 32) return;
  const int lane = thread;
  for (int first = 0; first < candidates; first += 32) {
    const int j = first + lane;
    const bool is_forced = j < candidates && forced(j);
    const unsigned key = j < candidates && !is_forced ? __float_as_uint(importance[j]) : 0;
    const bool tied = j < candidates && !is_forced && key == threshold;
    const unsigned tied_lanes = __ballot_sync(0xffffffffu, tied);
    const bool wins = tied && __popc(tied_lanes & ((1u << lane) - 1)) < ties;
    const bool chosen = is_forced || wins || (j < candidates && !is_forced && key > threshold);
    const unsigned lanes = __ballot_sync(0xffffffffu, chosen);
    if (chosen) out[written + __popc(lanes & ((1u << lane) - 1))] = j;
    written += __popc(lanes);
    ties -= min(ties, __popc(tied_lanes));
  }
}

/// Sums over the heads of a group of the probabilities of key tiles [first_tile, last_tile), for `queries` queries from
/// `first_query` on: sums[query * args.scratch_keys + key]. Of the sequence's compressed keys, which begin at row
/// `key_begin`, those from number `keys` on are not read. base2_lse(sees_any, query, head): of a row of this lane;
/// +inf for one that sees nothing or is not there, which gives it no probabilities.
template <class T, int Dk, class Args, class Lse>
__device__ inline void sum_probabilities(const Args& args, const DeviceSequence& seq, int kv_head, int first_query,
                                         int queries, int key_begin, int keys, int first_tile, int last_tile,
                                         float* sums, char* memory, const Lse& base2_lse) {
  using Shape = SelectShape<T, Dk>;
  constexpr int kKeys = Shape::kKeys, kPitch = Shape::kPitch;
  float* probabilities = reinterpret_cast<float*>(memory + 2 * Shape::kStage);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const Geometry& p = args.geometry;
  const float scale = positive_scale(args.scale * key_scale(args.k, kv_head));
  const int all_visible = num_compressed(p, seq.position(first_query) + 1);
  for (int chunk = 0; chunk * 64 < queries * p.group; ++chunk) {
    int visible[2];
    float lse[2];
    const T* q_row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = chunk * 64 + warp * 16 + lane / 4 + 8 * i;
      const bool valid = r < queries * p.group;
      const int query = first_query + (valid ? r / p.group : 0), head = kv_head * p.group + r % p.group;
      visible[i] = valid ? num_compressed(p, seq.position(query) + 1) : 0;
      q_row[i] = valid ? args.q.template at<T>(seq.batch, seq.q_begin + query, head) : nullptr;
      lse[i] = base2_lse(visible[i] > 0, query, head);
    }
    const RowFragments<T, Dk> q(q_row[0], q_row[1], lane, args.scale < 0);
    const auto k = key_stream<T, Dk, kKeys, 128>(args.k, seq, key_begin, kv_head, thread);
    const auto load = [&](int key_tile) {
      k.load(shared_address(memory) + key_tile % 2 * Shape::kStage, key_tile * kKeys, keys);
      commit_copies();
    };
    if (first_tile < last_tile) load(first_tile);
    for (int key_tile = first_tile; key_tile < last_tile; ++key_tile) {
      if (key_tile + 1 < last_tile) {
        load(key_tile + 1);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
      float s[kKeys / 8][4];
      Ring<T> ring;
      const Scores<T, Dk, kKeys / 8, decltype(q)> scores{q, shared_address(memory) + key_tile % 2 * Shape::kStage,
                                                         lane};
      start(scores, ring);
      scores.run(s, ring);
      if ((key_tile + 1) * kKeys > all_visible) {  // not all rows see all of it
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (key_tile * kKeys + n * 8 + 2 * (lane & 3) + i % 2 >= visible[i / 2]) s[n][i] = -INFINITY;
        }
      }
      float* row = probabilities + (warp * 16 + lane / 4) * kPitch + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          *reinterpret_cast<float2*>(row + 8 * i * kPitch + n * 8) = make_float2(
              exp2_fast(fmaf(s[n][2 * i], scale, -lse[i])), exp2_fast(fmaf(s[n][2 * i + 1], scale, -lse[i])));
      }
      __syncthreads();
      // Rows of the chunk that belong to a query, added in the order of the heads.
      for (int e = thread; e < queries * kKeys; e += 128) {
        const int query = e / kKeys, column = e % kKeys;
        const int first = max(query * p.group - chunk * 64, 0), last = min((query + 1) * p.group - chunk * 64, 64);
        if (first >= last) continue;
        float* sum = sums + query * args.scratch_keys + key_tile * kKeys + column;
        float x = query * p.group < chunk * 64 ? *sum : 0;
        for (int r = first; r < last; ++r) x += probabilities[r * kPitch + column];
        *sum = x;
      }
      __syncthreads();  // the stage and the probabilities are free
    }
  }
}

/// Compressed keys that matter to queries up to position `last`: none where everything is selected anyway.
template <class Args>
__device__ inline int scored_keys(const Args& args, int last) {
  return last / args.block_size + 1 <= args.topk ? 0 : num_compressed(args.geometry, last + 1);
}

template <class T, int Dk, class Args>
__global__ void __launch_bounds__(128, sizeof(T) == 4                  ? 2
                                       : Dk == 64 && !kHasSplits<Args> ? 4
                                                                       : 3)
    select_blocks(const __grid_constant__ Args args) {
  constexpr int kKeys = SelectShape<T, Dk>::kKeys;
  extern __shared__ __align__(128) char memory[];
  if (!runs(args)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto& p = args.geometry;
  float* sums =
      args.scratch + static_cast<std::int64_t>(blockIdx.x) * args.queries * (args.scratch_keys + args.scratch_blocks);
  float* importances = sums + args.queries * args.scratch_keys;
  const int work = args.tiles * p.kv_heads * p.batches;

  for (int item = blockIdx.x; item < work; item += gridDim.x) {
    // Last queries (the longest) first; tiles of one KV head follow each other.
    const int tile = args.tiles - 1 - item % args.tiles;
    const int kv_head = item / args.tiles % p.kv_heads, b = item / args.tiles / p.kv_heads;
    const DeviceSequence seq = sequence_of(p, b);
    const int first_query = tile * args.queries;
    if (first_query >= seq.q_len) continue;
    const int queries = min(args.queries, seq.q_len - first_query);
    const int key_begin = compressed_begin(p, b);
    const int keys = scored_keys(args, seq.position(first_query + queries - 1));
    sum_probabilities<T, Dk>(args, seq, kv_head, first_query, queries, key_begin, keys, 0, (keys + kKeys - 1) / kKeys,
                             sums, memory, [&](bool sees_any, int query, int head) {
                               return sees_any ? args.lse.at(seq.batch, seq.q_begin + query, head) * kLog2e : INFINITY;
                             });
    __syncthreads();
    for (int query = warp; query < queries; query += 4)
      top_k_blocks(args, seq, seq.position(first_query + query), kv_head, sums + query * args.scratch_keys,
                   importances + query * args.scratch_blocks,
                   args.indices.template at<int>(seq.batch, seq.q_begin + first_query + query, kv_head), lane);
    __syncthreads();
  }
}

}  // namespace nsa::cuda::portable
