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
//   compressed keys, keeping sums for the choice │ window │ exchange of softmaxes │ own candidates │ exchange │
//   choice, the same in all thread blocks │ selected blocks │ exchange of outputs, each thread block some columns
#pragma once

#include <iterator>

#include "cuda/common/launch.cuh"
#include "cuda/common/pages.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/decode/attend/block_choice.cuh"
#include "cuda/sm90/decode/attend/config.cuh"
#include "cuda/sm90/decode/sequence_order.cuh"

namespace nsa::cuda::sm90::decode {
namespace {

/// Fragments of queries from bfloat16 to float16, multiplied by a power of two so that the largest number of a tile has
/// the exponent 14 (NaN and infinities aside). Returns it. All warps that have the tile get the same.
template <int kSteps>
__device__ __forceinline__ float to_half_queries(std::uint32_t (&q)[kSteps][4]) {
  unsigned exponents = 0;  // two, one more than they are; 0 of what is not finite
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) exponents = __vmaxu2(exponents, ((q[k][i] & 0x7f807f80u) + 0x00800080u) & 0x7f807f80u);
  const unsigned of_lane = max(exponents & 0xffffu, exponents >> 16) >> 7;
  const unsigned largest = max(__reduce_max_sync(0xffffffffu, of_lane), 16u) - 1;
  const float factor = __uint_as_float((268 - largest) << 23);  // 2^(14 - (largest - 127))
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack(Bf16{}, q[k][i]);
      q[k][i] = pack(Half{}, x.x * factor, x.y * factor);
    }
  return factor;
}

/// kMany: a query has several clusters. With eight warps a thread block could have 255 registers for a thread; with the
/// 168 of twelve warps, compilers count in uniform ones what they otherwise count in these.
template <class S, class T, int Dk, int Dv, bool kMany>
__global__ void NSA_STEP_REGISTERS step_attend(const __grid_constant__ StepAttendArgs args) {
  constexpr int kRanks = S::kRanks, kWarps = S::kWarps, kThreads = S::kThreads, kTiles = S::kTiles;
  constexpr bool kFloat8 = S::kFloat8;
  using Element = typename S::Element;
  extern __shared__ __align__(128) char memory[];
  const StepGeometry& p = args.geometry;
  const BlockKeys& shape = args.block_keys;
  const int lane = threadIdx.x % 32, warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const int tile = warp / S::kSplits, split = warp % S::kSplits;
  const int rank = S::rank(), kv_head = blockIdx.y;
  const int clusters = kMany ? args.clusters : 1, number = static_cast<int>(blockIdx.x) / kRanks;
  const int query = number / clusters, mine = number - query * clusters;  // the cluster's number for this query
  const int first_head = mine * S::kRows, num_heads = min(p.group - first_head, S::kRows);
  const std::uint32_t ring = shared_address(memory);

  const int scores_bytes = shape.scores_bytes();
  char* const queries = memory + S::kRing + tile * (S::kQueries / kTiles) + lane * 16;
  char* const all_scores = memory + S::kRing + S::kQueries;
  char* const row_memory = all_scores + clusters * kTiles * args.cached_tiles * scores_bytes;
  auto& rows = *reinterpret_cast<RowMemory<S>*>(row_memory);
  auto* const others = reinterpret_cast<OtherRows<S>*>(row_memory + sizeof(RowMemory<S>));  // own: not used
  const ChoiceMemory choice{reinterpret_cast<char*>(others + (clusters > 1 ? clusters : 0)), args.topk};

  const bool longest_first = S::kAtOnce == 2 && args.longest_first;
  const int b = longest_first ? longest_sequence(args, reinterpret_cast<int*>(all_scores)) : blockIdx.z;

  // Queries and gates are inputs of the step: they may be read before the kernel in front has ended, as may the lengths
  // before the step and all keys that were there. Queries come by way of the ring.
  /// The query's row; somewhere in the packed ones where the step cannot serve it. Read again rather than kept.
  const auto row = [&] { return p.starts ? min(max(p.starts[b] + query, 0), p.rows - 1) : query; };
  const auto copy_queries = [&](int cluster_id) {
    const int at = row();
#pragma unroll
    for (int i = threadIdx.x; i < S::kRows * (Dk / 8); i += kThreads) {
      const int r = i / (Dk / 8), chunk = i % (Dk / 8), head = cluster_id * S::kRows + r;
      const T* const from = args.q.template at<T>(b, at, kv_head * p.group + min(head, p.group - 1));
      copy16(ring + r / kTileRows * Tile<T, Dk>::bytes(kTileRows) +
                 Tile<T, Dk>::at(r % kTileRows, chunk / 8 * 128, chunk % 8 * 16),
             from + chunk * 8, head < p.group);
    }
    commit_copies();
  };
  const bool chooses = args.given.data == nullptr || args.indices.data != nullptr;
  // The compressed keys of the others' queries come first, in phases below 0.
  const int first_phase = kMany && chooses ? 1 - clusters : 0;
  const auto cluster_of = [&](int phase) { return phase == 0 ? mine : -1 - phase + (-1 - phase >= mine); };
  copy_queries(cluster_of(first_phase));
  const StepRequest request(p, args.lengths, args.num_new, args.positions, b);
  const auto publish_length = [&] {
    griddepcontrol_wait();
    if (rank == 0 && threadIdx.x == 0) advance_lengths(args, longest_first, b, p.q_len * clusters * p.kv_heads);
  };
  if (!request.possible || query >= request.added) {  // all thread blocks of the cluster
    if (!p.starts) {                                  // packed rows are cleared by the kernel in front
#pragma unroll 1
      for (int head = rank; head < num_heads; head += kRanks)
        for (int i = threadIdx.x; i < Dv / 2; i += kThreads)
          store_pair(args.o.template at<T>(b, query, kv_head * p.group + first_head + head) + i * 2, 0, 0);
      if (args.indices.data && rank == 0 && mine == 0)
#pragma unroll 1
        for (int i = threadIdx.x; i < args.topk; i += kThreads)
          args.indices.template at<int>(b, query, kv_head)[i] = -1;
    }
    publish_length();
    wait_copies<0>();
    return;
  }
  const int position = request.before + query;
  const int compressed = shape.compressed(p.kernel_size, position + 1);
  const auto key_tile_in_ring = [&](int slot, int key_tile) {
    return key_tile * S::kWarpRing + (slot & 1) * S::kKeyTileBytes;
  };
  /// The page of a key tile of keys; where not all of it is in one, each lane has that of key lane % 16. Page numbers
  /// are read a stage ahead of the copies; they are undefined where the step finds no capacity. Keys from `end` on are
  /// nowhere.
  const auto page_of = [&](int branch, int key, int end) {
    if (key >= end) return 0;
    const CachedBranch& cached = args.cached[branch];
    const CachedBranch::Slot first = cached.slot_of(key);
    return cached.page_of(
        b, first.row + kTileKeys <= cached.size ? first.number : cached.slot_of(key + lane % kTileKeys).number);
  };
  /// Begins the copies of the warp's key tile of a stage: keys and values from `key` on. Those that are not begin ...
  /// end - 1 become zeros, as do all values that are not wanted.
  const auto load_key_tile = [&](int branch, int page, int key, int begin, int end, int slot, bool wants_values) {
    const CachedBranch& cached = args.cached[branch];
    constexpr int kKeyBytes = Dk * S::kItem, kValueBytes = Dv * S::kItem;
    constexpr int kLanes = (kKeyBytes | kValueBytes) % 128 ? 4 : 8;  // of a row
    const int row0 = lane / kLanes, chunk = lane % kLanes * 16;
    const auto of_page = [&](const CachedRows& rows, int page) {
      return rows.data + page * rows.page + (kv_head * rows.head + chunk);
    };
    const std::uint32_t to = ring + key_tile_in_ring(slot, warp);
    const auto copy_row = [&](int r, const char* keys, const char* values, int row) {
      const bool counts = static_cast<unsigned>(key + r - begin) < static_cast<unsigned>(end - begin);
      const char* const key_row = keys + static_cast<std::int64_t>(row) * cached.k.row;
      const char* const value_row = values + static_cast<std::int64_t>(row) * cached.v.row;
#pragma unroll
      for (int c = 0; c < kKeyBytes; c += 16 * kLanes) copy16(to + S::Keys::at(r, c, chunk), key_row + c, counts);
#pragma unroll
      for (int c = 0; c < kValueBytes; c += 16 * kLanes)
        copy16(to + S::kValues + S::Values::at(r, c, chunk), value_row + c, counts && wants_values);
    };
    const int first = cached.slot_of(key).row;
    if (first + kTileKeys <= cached.size) {
      const char *const keys = of_page(cached.k, page), *const values = of_page(cached.v, page);
#pragma unroll
      for (int r = 0; r < kTileKeys; r += 32 / kLanes) copy_row(r + row0, keys, values, first + r + row0);
    } else {
#pragma unroll 1
      for (int r = 0; r < kTileKeys; r += 32 / kLanes) {
        const int mine = r + row0, its_page = __shfl_sync(0xffffffffu, page, mine);
        copy_row(mine, of_page(cached.k, its_page), of_page(cached.v, its_page), cached.slot_of(key + mine).row);
      }
    }
  };
  /// What a warp loads at once: its first key, whose row in its page is `row`. page: as from page_of.
  struct Load {
    int key, page, row;
  };
  const auto load_of = [&](const CachedBranch& cached, int key, int end) {
    if (key >= end) return Load{key, 0, 0};
    const CachedBranch::Slot slot = cached.slot_of(key);
    const bool in_one = slot.row + S::kLoadKeys <= cached.size;
    return Load{key, cached.page_of(b, in_one ? slot.number : cached.slot_of(key + lane).number), slot.row};
  };
  /// A lane's chunk of row lane / kLanes: in page 0, and in a tile.
  struct LaneChunk {
    const char* from;
    std::uint32_t to;
  };
  const auto chunk_of = [&](auto tile_of_rows, const CachedRows& rows, std::uint32_t tile, int lane) {
    constexpr int kLanes = decltype(tile_of_rows)::kRow % 128 ? 4 : 8;
    const int row = lane / kLanes, chunk = lane % kLanes * 16;
    return LaneChunk{rows.data + (kv_head * rows.head + chunk) + static_cast<std::int64_t>(row) * rows.row,
                     tile + decltype(tile_of_rows)::at(row, 0, chunk)};
  };
  /// Begins the copies of its keys, or its values, to a tile; as load_key_tile.
  const auto load_rows = [&](auto tile_of_rows, const CachedBranch& cached, const CachedRows& rows, LaneChunk chunk,
                             const Load& load, int begin, int end) {
    using Rows = decltype(tile_of_rows);
    constexpr int kLanes = Rows::kRow % 128 ? 4 : 8, kTogether = 32 / kLanes;  // lanes of a row; rows at a time
    const int row0 = lane / kLanes;
    const char* from = chunk.from;
    const std::uint32_t to = chunk.to;
    const auto copy_row = [&](int r, const char* from) {
      const bool counts = static_cast<unsigned>(load.key + r + row0 - begin) < static_cast<unsigned>(end - begin);
      const std::uint32_t at = (Rows::kSwizzled && r & 4 ? to ^ 64 : to) + r * Rows::kPitch;
#pragma unroll
      for (int c = 0; c < Rows::kRow; c += 16 * kLanes) copy16(at + c, from + c, counts);
    };
    if (load.row + S::kLoadKeys <= cached.size) {
      from += load.page * rows.page + static_cast<std::int64_t>(load.row) * rows.row;
#pragma unroll
      for (int r = 0; r < S::kLoadKeys; r += kTogether, from += std::int64_t{kTogether} * rows.row) copy_row(r, from);
    } else {
#pragma unroll 1
      for (int r = 0; r < S::kLoadKeys; r += kTogether) {
        const int its_page = __shfl_sync(0xffffffffu, load.page, r + row0);
        const int row = cached.slot_of(load.key + r + row0).row - row0;
        copy_row(r, from + its_page * rows.page + static_cast<std::int64_t>(row) * rows.row);
      }
    }
  };
  /// Before and after a stage is read: a single tile's warps read what they load themselves.
  const auto sync_readers = [] {
    if constexpr (kTiles == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
  std::uint32_t q[Dk / 16][4];
  if (threadIdx.x < S::kRows) {
    const int at = row(), head = kv_head * p.group + first_head + static_cast<int>(threadIdx.x);
#pragma unroll
    for (int branch = 0; branch < kBranches; ++branch)
      rows.gates[branch][threadIdx.x] =
          static_cast<int>(threadIdx.x) < num_heads ? to_float(args.gates.template at<T>(b, at, head)[branch]) : 0;
    if constexpr (kFloat8)
#pragma unroll
      for (int branch = 0; branch < kBranches; ++branch) rows.gates[branch][threadIdx.x] *= args.value_scales[kv_head];
  }
  float scale;
  /// The fragments of what copy_queries has brought, and what their products are multiplied by.
  const auto read_queries = [&] {
    wait_copies<0>();
    __syncthreads();
    const std::uint32_t sign = args.scale < 0 ? 0x80008000u : 0;  // negative queries instead
    scale = args.scale;
    if constexpr (kFloat8) {
      // Four neighbouring channels of a row to a lane, as it has them of a key.
#pragma unroll
      for (int k = 0; k < Dk / 16; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 x = *reinterpret_cast<const uint2*>(memory + tile * Tile<T, Dk>::bytes(kTileRows) +
                                                          Tile<T, Dk>::at(lane / 4 + 8 * i, k * 32, lane % 4 * 8));
          q[k][i] = x.x ^ sign, q[k][2 + i] = x.y ^ sign;
        }
      scale *= args.key_scales[kv_head];
      if constexpr (!std::is_same_v<T, Half>) scale /= to_half_queries(q);
    } else {
#pragma unroll
      for (int k = 0; k < Dk / 16; ++k) {
        Tile<T, Dk>::load_a(q[k], ring + tile * Tile<T, Dk>::bytes(kTileRows), 0, k, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) q[k][i] ^= sign;
      }
    }
    scale = positive_scale(scale);
    // Of e4m3 in shared memory, each lane its own: four thread blocks have no registers for them.
    if (kFloat8 && split == 0) {
#pragma unroll
      for (int k = 0; k < Dk / 16; ++k)
        *reinterpret_cast<uint4*>(queries + k * 512) = make_uint4(q[k][0], q[k][1], q[k][2], q[k][3]);
    }
    __syncthreads();  // the ring is free
  };
  read_queries();

  using Scores = float[2 * S::kAtOnce][4];
  /// The scores of the warp's tile and the key tiles whose keys lie at `keys`.
  const auto multiply_keys = [&](Scores& s, std::uint32_t keys) {
    if constexpr (kFloat8) {
#pragma unroll
      for (int k = 0; k < Dk / 16; k += 2) {
        std::uint32_t fragment[S::kAtOnce][4];  // of eight keys each: (keys, sixteen channels)
#pragma unroll
        for (int u = 0; u < S::kAtOnce; ++u) S::Keys::load_a(fragment[u], keys, u * kTileKeys, k / 2, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 x = *reinterpret_cast<const uint4*>(queries + (k + i) * 512);
          const std::uint32_t a[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int n = 0; n < 2 * S::kAtOnce; ++n) {
            const std::uint32_t word = fragment[n / 2][2 * i + n % 2];
            mma(Element{}, s[n], a, to_half2(word, false), to_half2(word, true));
          }
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < Dk / 16; ++k)
#pragma unroll
        for (int u = 0; u < S::kAtOnce; ++u) {
          std::uint32_t fragment[4];
          Tile<T, Dk>::load_b(fragment, keys, u * kTileKeys, k, lane);
          mma(T{}, s[2 * u], q[k], fragment[0], fragment[1]);
          mma(T{}, s[2 * u + 1], q[k], fragment[2], fragment[3]);
        }
    }
  };
  /// Scores to probabilities, relative to state.max; of the key tiles' keys the query sees begin ... end - 1.
  const auto update = [&](OnlineSoftmax<Dv>& state, Scores& s, int begin, int end) {
    if (begin > 0 || end < S::kLoadKeys) {
#pragma unroll
      for (int e = 0; e < 4 * S::kAtOnce; ++e) {
        const int k = e / 2 * 8 + 2 * (lane & 3) + e % 2;
        if (k < begin || k >= end) s[e / 2][e % 2] = s[e / 2][2 + e % 2] = -INFINITY;
      }
    }
    state.update(s, scale);
  };
  /// Adds p V of the key tiles whose values lie at `values`.
  const auto add_values = [&](OnlineSoftmax<Dv>& state, const Scores& p, std::uint32_t values) {
#pragma unroll
    for (int u = 0; u < S::kAtOnce; ++u) {
      std::uint32_t a[4];
      operand_a<Element>(a, p, u);
      if constexpr (kFloat8) {
        // Neighbouring channels of a key come together; the even ones go to one tile of columns, the odd ones to the
        // next.
#pragma unroll
        for (int n = 0; n < Dv / 32; ++n) {
          std::uint32_t v[4];
          S::Values::load_b_rows(v, values, u * kTileKeys, n * 16, lane);
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] = __byte_perm(v[i], 0, 0x3120);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            mma(Element{}, state.acc[4 * n + 2 * i], a, to_half2(v[2 * i], false), to_half2(v[2 * i + 1], false));
            mma(Element{}, state.acc[4 * n + 2 * i + 1], a, to_half2(v[2 * i], true), to_half2(v[2 * i + 1], true));
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < Dv / 16; ++n) {
          std::uint32_t v[4];
          Tile<T, Dv>::load_b_rows(v, values, u * kTileKeys, n * 16, lane);
          mma(T{}, state.acc[2 * n], a, v[0], v[1]);
          mma(T{}, state.acc[2 * n + 1], a, v[2], v[3]);
        }
      }
    }
  };

  /// The warp's tile and a key tile of a stage, of whose keys the query sees begin ... end - 1. keep(p): takes the
  /// probabilities, relative to state.max. What the query does not see has not been loaded, so that values there are 0.
  const auto attend = [&](OnlineSoftmax<Dv>& state, int slot, int key_tile, int begin, int end, bool wants_values,
                          const auto& keep) {
    const std::uint32_t keys = ring + key_tile_in_ring(slot, key_tile), values = keys + S::kValues;
    Scores s = {};
    if constexpr (kFloat8) {
      multiply_keys(s, keys);
    } else {
      constexpr int kChains = kTiles == 1 ? 2 : 1;  // of products, so that they wait less for each other
      float other[2][4] = {};
#pragma unroll
      for (int k = 0; k < Dk / 16; ++k) {
        std::uint32_t fragment[4];
        Tile<T, Dk>::load_b(fragment, keys, 0, k, lane);
        mma(T{}, k % kChains ? other[0] : s[0], q[k], fragment[0], fragment[1]);
        mma(T{}, k % kChains ? other[1] : s[1], q[k], fragment[2], fragment[3]);
      }
      if constexpr (kChains == 2) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[n][i] += other[n][i];
      }
    }
    update(state, s, begin, end);
    keep(s);
    if (wants_values) add_values(state, s, values);
  };

  using OwnSums = float[S::kOwnColumns][4];
  /// Merges what the warps of each tile have of a branch, in their own key tiles of the ring, which no thread reads or
  /// fills: each warp gets its columns, relative to the maximum that goes to `softmaxes`, which all of the cluster may
  /// read.
  const auto merge = [&](float2* softmaxes, const OnlineSoftmax<Dv>& state, OwnSums& sums, bool wants_values) {
    if (wants_values) {
      auto* const mine = reinterpret_cast<float4*>(memory + warp * S::kWarpRing) + lane;
#pragma unroll
      for (int n = 0; n < S::kColumns; ++n)
        mine[n * 32] = make_float4(state.acc[n][0], state.acc[n][1], state.acc[n][2], state.acc[n][3]);
    }
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
      if (split == 0 && (lane & 3) == 0) softmaxes[tile * kTileRows + r] = make_float2(largest, sum);
    }
#pragma unroll
    for (int n = 0; n < S::kOwnColumns; ++n) {
      sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;
      if (!wants_values) continue;
#pragma unroll
      for (int w = 0; w < S::kSplits; ++w) {
        const float4 x = reinterpret_cast<const float4*>(
            memory + (tile * S::kSplits + w) * S::kWarpRing)[(split * S::kOwnColumns + n) * 32 + lane];
        sums[n][0] += x.x * factor[0][w], sums[n][1] += x.y * factor[0][w];
        sums[n][2] += x.z * factor[1][w], sums[n][3] += x.w * factor[1][w];
      }
    }
    __syncthreads();
  };
  /// Totals of a row over the thread blocks of the cluster, by as many neighbouring lanes, one for each. Returns what
  /// the lane's thread block counts by.
  const auto total = [&](const float2& softmax, float2& all) {
    const float2 of_rank = load_rank<kRanks>(&softmax, lane % kRanks);
    float largest = of_rank.x;
#pragma unroll
    for (int offset = 1; offset < kRanks; offset *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    const float base = largest == -INFINITY ? 0 : largest, factor = exp2_fast(of_rank.x - base);
    float sum = of_rank.y * factor;
#pragma unroll
    for (int offset = 1; offset < kRanks; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const float inverse = sum == 0 ? 0 : __frcp_rn(sum);
    if (lane % kRanks == 0) all = make_float2(base, inverse);
    return factor * inverse;
  };

  OwnSums known, own;  // of the branches so far, and of the last one
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
      // Of e4m3 there are no registers to keep these: they are worked out again.
      const auto key_chunk = [&](int lane) { return chunk_of(typename S::Keys{}, cached.k, here, lane); };
      const auto value_chunk = [&](int lane) { return chunk_of(typename S::Values{}, cached.v, values_here, lane); };
      const LaneChunk own_key_chunk = key_chunk(lane), own_value_chunk = value_chunk(lane);
      const auto load_keys = [&](const Load& load) {
        // Before the first that may have a token of the step, the kernel in front must have ended.
        if (!selects && load.key + S::kLoadKeys > (compresses ? request.first : request.before)) griddepcontrol_wait();
        load_rows(typename S::Keys{}, cached, cached.k, kFloat8 ? key_chunk(again(lane)) : own_key_chunk, load, begin,
                  end);
        commit_copies();
      };
      const auto load_values = [&](const Load& load) {
        load_rows(typename S::Values{}, cached, cached.v, kFloat8 ? value_chunk(again(lane)) : own_value_chunk, load,
                  begin, end);
        commit_copies();
      };
      const bool keeps = compresses && chooses;
      char* scores = all_scores + warp * S::kAtOnce * scores_bytes;
      Load next = load_of(cached, key_of(0, warp), end), after = load_of(cached, key_of(1, warp), end);
      int key = next.key;
      if (loads > 0) load_keys(next), load_values(next);
      next = after, after = load_of(cached, key_of(2, warp), end);
#pragma unroll 1
      for (int stage = 0; stage < loads; ++stage) {
        const bool more = stage + 1 < loads;
        Scores s = {};
        wait_copies<1>();
        __syncwarp();
        multiply_keys(s, here);
        __syncwarp();
        if (more)
          load_keys(next);
        else
          commit_copies();
        update(state, s, begin - key, end - key);
        if (keeps) {
          cache_scores<2>({scores, shape.blocks()}, shape, weights, s, 0, state.max, lane);
          if (key + kTileKeys < compressed)
            cache_scores<2>({scores + scores_bytes, shape.blocks()}, shape, weights, s, 1, state.max, lane);
          scores += S::kStageKeyTiles * scores_bytes;
        }
        wait_copies<1>();
        __syncwarp();
        add_values(state, s, values_here);
        __syncwarp();
        if (more)
          load_values(next);
        else
          commit_copies();
        key = next.key, next = after, after = load_of(cached, key_of(stage + 3, warp), end);
      }
      __syncwarp();
    } else {
      int next = page_of(branch, key_of(0, warp), end);
#pragma unroll 1
      for (int stage = -1; stage < stages; ++stage) {
        if (stage + 1 < stages) {
          // Before the first stage that may have a token of the step, the kernel in front must have ended.
          if (!selects && key_of(stage + 1, kWarps) > (compresses ? request.first : request.before))
            griddepcontrol_wait();
          load_key_tile(branch, next, key_of(stage + 1, warp), begin, end, stage + 1, wants_values);
        }
        commit_copies();
        next = page_of(branch, key_of(stage + 2, warp), end);
        if (stage < 0) continue;
        wait_copies<1>();
        sync_readers();
        // The key tiles that are the warp's.
#pragma unroll 1
        for (int i = 0; i < kWarps / S::kSplits; ++i) {
          const int key_tile = split + i * S::kSplits, key = key_of(stage, key_tile);
          attend(state, stage, key_tile, begin - key, end - key, wants_values, [&](const float(&probabilities)[2][4]) {
            const int slot =
                ((cluster_id * kTiles + tile) * args.cached_tiles + stage * kWarps + key_tile) * scores_bytes;
            if (compresses && chooses && key < compressed)
              cache_scores<1>({all_scores + slot, shape.blocks()}, shape, weights, probabilities, 0, state.max, lane);
          });
        }
        sync_readers();
      }
    }
    merge(wants_values ? rows.branches[branch] : others[cluster_id].own, state, own, wants_values);

    if (!wants_values) {
      copy_queries(cluster_of(phase + 1));
      read_queries();
    } else if (compresses) {
#pragma unroll
      for (int n = 0; n < S::kOwnColumns; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) known[n][i] = own[n][i];
    } else if (in_window) {
      // Exchange of the softmaxes so far, and both branches as one sum.
      S::sync();
      for (int e = threadIdx.x / kRanks; e < 2 * S::kRows; e += kThreads / kRanks) {
        const BranchIndex of = e < S::kRows ? kCompressed : kWindow;
        total(rows.branches[of][e % S::kRows], rows.totals[of][e % S::kRows]);
      }
      for (int other = first_phase; other < 0; ++other) {
        OtherRows<S>& of = others[cluster_of(other)];
        for (int e = threadIdx.x / kRanks; e < S::kRows; e += kThreads / kRanks) total(of.own[e], of.totals[e]);
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = tile * kTileRows + lane / 4 + 8 * i;
        const auto share = [&](BranchIndex of) {
          const float2 all = rows.totals[of][r];
          return rows.gates[of][r] * (exp2_fast(rows.branches[of][r].x - all.x) * all.y);
        };
        const float by_compressed = share(kCompressed), by_window = share(kWindow);
#pragma unroll
        for (int n = 0; n < S::kOwnColumns; ++n) {
          known[n][2 * i] = known[n][2 * i] * by_compressed + own[n][2 * i] * by_window;
          known[n][2 * i + 1] = known[n][2 * i + 1] * by_compressed + own[n][2 * i + 1] * by_window;
        }
      }
      griddepcontrol_wait();
      // The next kernel may read what it does not get from here. Earlier its reads would delay the compressed keys.
      launch_dependents();
      fits = args.plan[b].added > 0;
      const auto totals_of = [&](int of_tile) -> const float2* {
        const int of = of_tile / kTiles;
        return (of == mine ? rows.totals[kCompressed] : others[of].totals) + of_tile % kTiles * kTileRows;
      };
      choose_blocks<S>(args, b, memory, totals_of, clusters * kTiles, choice, all_scores, row(), position, compressed,
                       chooses, fits, args.indices.data && rank == 0 && mine == 0);
    }
  }

  const int at_row = row();
  if constexpr (kFloat8 && S::kAtOnce == 2) fits = args.plan[b].added > 0;  // again: there is no register to keep it
  /// Eight columns of a tile that are the lane's: those of two of its rows.
  const auto write = [&](int of_tile, int column, const float(&o)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = of_tile * kTileRows + lane / 4 + 8 * i;
      if (head >= num_heads) continue;
      T* const to = args.o.template at<T>(b, at_row, kv_head * p.group + first_head + head);
      const float x = fits ? o[2 * i] : 0, y = fits ? o[2 * i + 1] : 0;
      if constexpr (kFloat8) {  // every other one of sixteen channels
        T* const mine = to + (column / 2 * 16 + column % 2 + 4 * (lane & 3));
        mine[0] = from_float<T>(x), mine[2] = from_float<T>(y);
      } else {
        store_pair(to + column * 8 + 2 * (lane & 3), x, y);
      }
    }
  };
  if constexpr (kRanks == 1) {  // each warp has all of its columns
    float share[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = tile * kTileRows + lane / 4 + 8 * i;
      const float sum = rows.branches[kSelected][r].y;
      share[i] = sum == 0 ? 0 : rows.gates[kSelected][r] * __frcp_rn(sum);
    }
#pragma unroll
    for (int n = 0; n < S::kOwnColumns; ++n) {
      const float o[4] = {known[n][0] + own[n][0] * share[0], known[n][1] + own[n][1] * share[0],
                          known[n][2] + own[n][2] * share[1], known[n][3] + own[n][3] * share[1]};
      write(tile, split * S::kOwnColumns + n, o);
    }
    publish_length();
    return;
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
    known_outputs[at] = make_float4(known[n][0], known[n][1], known[n][2], known[n][3]);
    selected_outputs[at] = make_float4(own[n][0] * low, own[n][1] * low, own[n][2] * high, own[n][3] * high);
  }
  S::sync();
  for (int r = threadIdx.x / kRanks; r < S::kRows; r += kThreads / kRanks)
    rows.factors[lane % kRanks][r] = total(rows.branches[kSelected][r], rows.totals[kSelected][r]);
  __syncthreads();
  constexpr int kMine = S::kColumns / kRanks;  // tiles of eight columns that this thread block writes
#pragma unroll 1
  for (int e = warp; e < kTiles * kMine; e += kWarps) {
    const int of_tile = e / kMine, column = rank * kMine + e % kMine, at = (of_tile * S::kColumns + column) * 32 + lane;
    float o[4] = {};
    constexpr int kAtOnce = kRanks < 4 ? kRanks : 4;  // loads on their way
#pragma unroll
    for (int first = 0; first < kRanks; first += kAtOnce) {
      float4 known[kAtOnce], chosen[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        known[i] = load_rank<kRanks>(known_outputs + at, first + i);
        chosen[i] = load_rank<kRanks>(selected_outputs + at, first + i);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float low = rows.factors[first + i][of_tile * kTileRows + lane / 4];
        const float high = rows.factors[first + i][of_tile * kTileRows + lane / 4 + 8];
        o[0] += known[i].x + chosen[i].x * low, o[1] += known[i].y + chosen[i].y * low;
        o[2] += known[i].z + chosen[i].z * high, o[3] += known[i].w + chosen[i].w * high;
      }
    }
    write(of_tile, column, o);
  }
  publish_length();
  S::sync_reads();  // no thread block ends while others read its memory
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
