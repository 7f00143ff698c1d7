// φ of the blocks that a step completes, by a cluster: the loads of weights and tokens, both layers, the stores.
#pragma once

#include "cuda/sm90/common/cluster.cuh"
#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/decode/append/config.cuh"

namespace nsa::cuda::sm90::decode {

/// φ of `count` rows from number `first` on: completed blocks of the list, for one head each, at most kEntries.
/// sequence0: the one in slot 0. Rows of shared weights are all heads of a block one after the other. kN: columns
/// of the first layer / 64. The whole cluster.
template <class T, int kN, bool kFloat8>
__device__ __forceinline__ void compress_rows(const AppendCompressArgs& args, const CompressSide& side, int set,
                                              int sequence0, int first, int count, CompressShared<T>& shared_memory,
                                              char* memory) {
  constexpr int kHidden = 64 * kN, kRowBytes = kHidden * 2, kWeightStage = kCompressStageRows * kRowBytes;
  constexpr int kStage = kWeightStage + kTokenStage;
  const StepGeometry& p = args.geometry;
  const int thread = thread_of_block(), lane = thread % 32, warp = thread / 32, rank = cluster_rank();
  const bool shared = side.clusters == 1;
  const int flat = p.kernel_size * side.dim, slice = flat / kCompressRanks, begin = rank * slice;
  const int stages = slice / kCompressStageRows, tiles = (count + 1 + 15) / 16;
  const int weight_head = side.clusters > 1 ? set : 0;
  const auto entry_of = [&](int row) {
    const int at = shared_memory.entries[shared ? (first + row) / p.kv_heads : first + row];
    const int slot = at / kMaxCompleted;
    return Entry{sequence0 + slot, shared_memory.first[slot] + at % kMaxCompleted, shared_memory.before[slot]};
  };
  const auto head_of = [&](int row) { return shared ? (first + row) % p.kv_heads : set; };

  // Of a stage each thread copies some columns of a row of W1; the first ones also sixteen bytes of a row of raw
  // tokens, of which a stage has a part of one for each block. Rows behind the last are not loaded: no thread reads
  // their sums.
  static_assert(kThreads == kCompressStageRows * 8);
  const char* weights_from =
      reinterpret_cast<const char*>(side.w1.at<T>(weight_head, begin + thread / 8, 0)) + thread % 8 * 16;
  const std::uint32_t ring = shared_address(memory), weights_to = ring + weight_at(thread / 8, thread % 8, kRowBytes);
  const std::int64_t stage_bytes = side.w1.row * (kCompressStageRows * 2);
  const int token_row = thread / 4, token_chunk = thread % 4;
  const bool loads_tokens = token_row <= count, has_tokens = token_row > 0 || side.pe.data;
  const Entry entry = token_row > 0 && loads_tokens ? entry_of(token_row - 1) : Entry{0, 0, 0};
  const int head = token_row > 0 && loads_tokens ? head_of(token_row - 1) : 0;
  int of_block = rank * p.kernel_size / kCompressRanks, channel = begin - of_block * side.dim;  // of the next stage
  const T* tokens_from = nullptr;  // channel 0 of the token
  const auto load = [&](int stage) {
    if (stage >= stages) return;
    const int slot = stage % kCompressStages * kStage;
#pragma unroll
    for (int j = 0; j < kN; ++j) copy16(weights_to + slot + j * 128, weights_from + j * 128, true);
    weights_from += stage_bytes;
    if (!loads_tokens) return;
    if (stage == 0 || channel == 0) {
      const int token = entry.block * p.kernel_stride + of_block;
      if (token_row == 0)
        tokens_from = has_tokens ? side.pe.at<T>(weight_head, of_block, 0) : side.w1.at<T>(weight_head, 0, 0);
      else if (token >= entry.before)
        tokens_from =
            side.fresh.at<T>(entry.sequence, (p.starts ? p.starts[entry.sequence] : 0) + token - entry.before, head);
      else
        tokens_from = reinterpret_cast<const T*>(side.raw.at(entry.sequence, token, head));
    }
    copy16(ring + slot + kWeightStage + token_at(token_row, token_chunk), tokens_from + channel + token_chunk * 8,
           has_tokens);
    channel += kCompressStageRows;
    if (channel == side.dim) channel = 0, ++of_block;
  };

  // The second layer's weights of this thread block's hidden units, sixteen at a time, come with the first stage.
  constexpr int kGroups = (kN * 4 + kCompressRanks - 1) / kCompressRanks;
  static_assert(kGroups <= kMaxGroups && kThreads == 16 * 16);
  if (side.mlp)
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int unit = (rank + g * kCompressRanks) * 16, r = thread / 16, c = thread % 16;
      const T* const from = side.w2.at<T>(weight_head, unit + r, c * 8);
      const std::uint32_t to = shared_address(shared_memory.w2[g]) + weight_at(r, c, side.dim * 2);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (unit < kHidden && (c + 16 * j) * 8 < side.dim) copy16(to + j * 256, from + j * 128, true);
    }
#pragma unroll 1
  for (int i = 0; i < kCompressStages - 1; ++i) {
    load(i);
    commit_copies();
  }
  // Biases of what this thread block works out, and the angles of its keys.
  const int half = side.dim / 2, pairs = half / kCompressRanks;
  float bias = 0;
  const auto read_bias = [&](const Weights& biases, int at) {
    if (biases.data) bias = to_float(*biases.at<T>(weight_head, 0, at));
  };
  if (thread < kMaxBiases) {
    const int unit = (rank + thread / 16 * kCompressRanks) * 16 + thread % 16;
    if (side.mlp && unit < kHidden) read_bias(side.b1, unit);
  } else if (const int i = thread - kMaxBiases; i < 2 * pairs) {
    const int which = i >= pairs;
    read_bias(side.mlp ? side.b2 : side.b1, rank * pairs + i - which * pairs + which * half);
  } else if (const int row = thread - 64; row >= 0 && row < count && &side == &args.sides[0] && args.rotation.cos) {
    const std::int64_t at =
        std::min<std::int64_t>(std::int64_t{entry_of(row).block} * p.kernel_stride, args.rotation.positions - 1);
    prefetch_line(args.rotation.cos + at * args.rotation.cos_row + rank * pairs);
    prefetch_line(args.rotation.sin + at * args.rotation.sin_row + rank * pairs);
  }
  // Each thread block checks the capacity of some rows in a table.
#pragma unroll 1
  for (int look = rank; look < count * kTables; look += kCompressRanks) {
    const int b = entry_of(look / kTables).sequence;
    const StepRequest request(args.geometry, args.lengths, args.num_new, args.positions, b);
    const bool fits = __syncthreads_and(own_capacity(args, request, b, look % kTables));
    if (thread == 0) shared_memory.fits[look / kCompressRanks] = fits;
  }
  if (thread < kMaxBiases + 2 * pairs) shared_memory.biases[thread] = bias;
  float acc[kCompressTiles][kN][4] = {};
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    wait_copies<kCompressStages - 2>();
    __syncthreads();
    load(stage + kCompressStages - 1);
    commit_copies();
    const std::uint32_t weights = ring + stage % kCompressStages * kStage, tokens = weights + kWeightStage;
#pragma unroll
    for (int k = 0; k < kCompressStageRows / 16; ++k) {
      std::uint32_t a[kCompressTiles][4];
#pragma unroll
      for (int m = 0; m < kCompressTiles; ++m)
        if (m < tiles) ldmatrix4(a[m], tokens + token_at(m * 16 + (lane & 15), k * 2 + lane / 16));
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        std::uint32_t b[4];
        const int chunk = warp * kN + n + (n + 1 < kN ? lane / 16 : 0);
        ldmatrix4_transposed(b, weights + weight_at(k * 16 + (lane & 15), chunk, kRowBytes));
#pragma unroll
        for (int m = 0; m < kCompressTiles; ++m) {
          if (m >= tiles) break;
          mma(T{}, acc[m][n], a[m], b[0], b[1]);
          if (n + 1 < kN) mma(T{}, acc[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
  wait_copies<0>();
  __syncthreads();
  auto* const z = reinterpret_cast<float*>(memory);  // (kRows, kHidden): this thread block's share of the sums
  auto* const second = z + kRows * kHidden;          // (kRows, D): the same of the second layer
#pragma unroll
  for (int m = 0; m < kCompressTiles; ++m) {
    if (m >= tiles) break;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<float2*>(z + (m * 16 + lane / 4 + 8 * i) * kHidden + (warp * kN + n) * 8 + 2 * (lane & 3)) =
            make_float2(acc[m][n][2 * i], acc[m][n][2 * i + 1]);
  }
  cluster_sync();
  const int columns = side.dim / 64;  // tiles of eight columns for a warp, of the second layer
  if (side.mlp) {
    float out[kCompressTiles][3][4] = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int unit = (rank + g * kCompressRanks) * 16;
      if (unit >= kHidden) break;
        // Sums over the thread blocks, four hidden units of a row at a time: sixteen neighbouring lanes have a thread
        // block each.
#pragma unroll 1
      for (int e = thread / kCompressRanks; e < 4 * (count + 1); e += kThreads / kCompressRanks) {
        float4 sum = load_remote_float4(
            map_to_rank(shared_address(z + e / 4 * kHidden + unit + e % 4 * 4), lane % kCompressRanks));
        sum.x = sum_of_ranks(sum.x), sum.y = sum_of_ranks(sum.y);
        sum.z = sum_of_ranks(sum.z), sum.w = sum_of_ranks(sum.w);
        if (lane % kCompressRanks == 0) reinterpret_cast<float4*>(shared_memory.sums)[e] = sum;
      }
      __syncthreads();
      // Rows of sixteen hidden units, as an A operand has them. What row 0, the position encoding, gives is added to
      // each.
      static_assert(kThreads == 8 * kRows);
      {
        const int row = thread / 8, pair = thread % 8 * 2;
        const auto silu = [&](int i) {
          const float y = shared_memory.sums[row * 16 + pair + i] +
                          (shared_memory.sums[pair + i] + shared_memory.biases[g * 16 + pair + i]);
          return __fdividef(y, 1 + exp2_fast(-y * kLog2e));
        };
        reinterpret_cast<std::uint32_t*>(shared_memory.hidden)[thread] =
            row > 0 && row <= count ? pack(T{}, silu(0), silu(1)) : 0;
      }
      __syncthreads();
      std::uint32_t a[kCompressTiles][4];
#pragma unroll
      for (int m = 0; m < kCompressTiles; ++m)
        if (m < tiles)
          ldmatrix4(a[m], shared_address(shared_memory.hidden + (m * 16 + (lane & 15)) * 16 + lane / 16 * 8));
#pragma unroll
      for (int n = 0; n < 3; n += 2) {
        if (n >= columns) break;
        std::uint32_t b[4];
        const int chunk = warp * columns + n + (n + 1 < columns ? lane / 16 : 0);
        ldmatrix4_transposed(b, shared_address(shared_memory.w2[g]) + weight_at(lane & 15, chunk, side.dim * 2));
#pragma unroll
        for (int m = 0; m < kCompressTiles; ++m) {
          if (m >= tiles) break;
          mma(T{}, out[m][n], a[m], b[0], b[1]);
          if (n + 1 < columns) mma(T{}, out[m][(n + 1) % 3], a[m], b[2], b[3]);
        }
      }
      if (g + 1 < kGroups) __syncthreads();  // the rows and sums are free
    }
#pragma unroll
    for (int m = 0; m < kCompressTiles; ++m) {
      if (m >= tiles) break;
#pragma unroll
      for (int n = 0; n < 3; ++n) {
        if (n >= columns) break;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          *reinterpret_cast<float2*>(second + (m * 16 + lane / 4 + 8 * i) * side.dim + (warp * columns + n) * 8 +
                                     2 * (lane & 3)) = make_float2(out[m][n][2 * i], out[m][n][2 * i + 1]);
      }
    }
    cluster_sync();
  }
  // Pairs of channels (j, j + D / 2), which a rotation turns.
  const float* const sums = side.mlp ? second : z;
#pragma unroll 1
  for (int e = thread / kCompressRanks; e < count * pairs; e += kThreads / kCompressRanks) {
    const int row = e / pairs, of_pairs = e - row * pairs, channel = rank * pairs + of_pairs,
              from = lane % kCompressRanks;
    const int look = row * kTables + from % kTables;
    const bool fits =
        load_remote_int(map_to_rank(shared_address(shared_memory.fits + look / kCompressRanks), look % kCompressRanks));
    float x[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const mine = sums + channel + i * half;
      x[i] = load_remote_float(map_to_rank(shared_address(mine + (row + 1) * side.dim), from));
      if (!side.mlp) x[i] += load_remote_float(map_to_rank(shared_address(mine), from));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) x[i] = sum_of_ranks(x[i]) + shared_memory.biases[kMaxBiases + i * pairs + of_pairs];
    static_assert(kCompressRanks == 16 && kTables <= kCompressRanks);
    const unsigned full = __ballot_sync(0xffffffffu, !fits) >> (lane & 16) & 0xffff;  // tables, of these lanes
    if (full || from != 0) continue;
    const Entry of_row = entry_of(row);
    const T pair[2] = {from_float<T>(x[0]), from_float<T>(x[1])};
    store_pair_of_token<kFloat8>(args, &side == &args.sides[0] ? 0 : 1, pair, of_row.sequence, of_row.block,
                                 head_of(row), channel);
  }
  cluster_sync_reads();  // no thread block refills its memory, or ends, while others read it
}

/// The whole cluster, for its set of weights.
template <class T, int kN, bool kFloat8>
__device__ __forceinline__ void compress_completed(const AppendCompressArgs& args, const CompressSide& side, int set,
                                                   CompressShared<T>& shared_memory, char* memory) {
  const StepGeometry& p = args.geometry;
  const int thread = thread_of_block(), lane = thread % 32, warp = thread / 32;
#pragma unroll 1
  for (int begin = 0; begin < p.batches; begin += kSequences) {
    // The completed blocks of some sequences, in their order.
    int completed = 0, first = 0, before = 0;
    if (thread < kSequences && begin + thread < p.batches) {
      const StepRequest request(p, args.lengths, args.num_new, args.positions, begin + thread);
      if (request.possible) completed = request.completed, first = request.first, before = request.before;
    }
    int slot = completed;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, slot, offset);
      if (lane >= offset) slot += other;
    }
    if (lane == 31) shared_memory.warp_counts[warp] = slot;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int w = 0; w < kCompressWarps; ++w) {
      if (w == warp) slot += all - completed;
      all += shared_memory.warp_counts[w];
    }
#pragma unroll 1
    for (int i = 0; i < completed; ++i)
      shared_memory.entries[slot + i] = static_cast<unsigned short>(thread * kMaxCompleted + i);
    if (thread < kSequences) shared_memory.first[thread] = first, shared_memory.before[thread] = before;
    __syncthreads();
    const int rows = all * (side.clusters == 1 ? p.kv_heads : 1);
#pragma unroll 1
    for (int row = 0; row < rows; row += kEntries) {
      const int count = min(rows - row, kEntries);
      compress_rows<T, kN, kFloat8>(args, side, set, begin, row, count, shared_memory, memory);
    }
  }
}

}  // namespace nsa::cuda::sm90::decode
