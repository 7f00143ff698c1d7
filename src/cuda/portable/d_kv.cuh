// dK and dV: a thread block owns up to 64 keys of one KV head, sixteen per warp, and walks the query rows that see
// them: neighbouring queries (window, compressed) or the queries that chose the block (a list, see inverse_index.cu).
// Long walks are cut into items of `chunk` queries whose float32 partial sums are added in order by sum_partials. In
// 16-bit types the compressed branch's dS can stay in memory for range_d_q (DsBuffer in params.h).
#pragma once

#include <climits>

#include "cuda/common/attention_backward.cuh"
#include "cuda/common/fallback.cuh"
#include "cuda/portable/d_kv_items.cuh"

namespace nsa::cuda::portable {

template <class T, int Dk, int Dv>
struct KeyGradients {
  static constexpr int kRows = sizeof(T) == 2 ? (Dk > 128 ? 16 : 32) : 8;  // query rows of a stage
  static constexpr int kStages = sizeof(T) == 4 && Dk > 128 ? 1 : 2;       // within 99 KB
  // Steps of the keys and of the values that stay in registers.
  static constexpr bool kRoom = sizeof(T) == 2 && (kHopper ? Dk <= 128 : Dk < 128);
  static constexpr int kHeldKeys = kRoom ? Dk / kStep<T> : 0;
  static constexpr int kHeldValues = kRoom ? (Dk == 128 ? 4 : Dv / kStep<T>) : 0;
  static constexpr int kValues = Tile<T, Dk>::bytes(kKeyTile);
  static constexpr int kKeysAndValues = kValues + Tile<T, Dv>::bytes(kKeyTile);
  static constexpr int kGradients = Tile<T, Dk>::bytes(kRows);  // where a stage's dO rows begin
  static constexpr int kStage = kGradients + Tile<T, Dv>::bytes(kRows);
  static constexpr int kMemory = kKeysAndValues + kStages * kStage;
};

/// Sixteen rows of a tile as the A operand. The first kHeld of its steps stay in registers, as many as
/// there are free: the traffic of shared memory limits the kernel.
template <class T, int D, int kHeld>
struct HeldRows {
  std::uint32_t tile;
  int row, lane;
  std::uint32_t held[kHeld > 0 ? kHeld : 1][4];

  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) Tile<T, D>::load_a(held[k], tile, row, k, lane);
  }
  __device__ __forceinline__ void operator()(std::uint32_t (&a)[4], int k) const {
    if (k < kHeld) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = held[k][i];
    } else {
      Tile<T, D>::load_a(a, tile, row, k, lane);
    }
  }
};

/// kCompressed: the branch. kSmallChunks: one item has several small chunks (params.h); in a kernel of their own, as
/// the code between two of them costs those without it 18 %.
template <class T, int Dk, int Dv, bool kCompressed, bool kSmallChunks>
__global__ void __launch_bounds__(128, 2) d_kv(const __grid_constant__ BackwardArgs args) {
  using Shape = KeyGradients<T, Dk, Dv>;
  constexpr int kRows = Shape::kRows, kN = kRows / 8;
  if (!runs(args)) return;
  extern __shared__ __align__(128) char memory[];
  __shared__ __align__(16) float stage_lse[2][kRows], stage_delta[2][kRows], stage_gate[2][kRows];
  __shared__ int stage_position[2][kRows];
  __shared__ bool small_begins[2];                      // with the stage a small chunk that is not an item of its own
  __shared__ int chosen[kCompressed ? 1 : kListChunk];  // this item's part of the list
  __shared__ longlong2 stage_offset[2][kRows];          // where a stage's rows begin in q and d_o, -1: no row
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, kv_head = blockIdx.y;
  const Geometry& p = args.geometry;
  const bool selected = !kCompressed && args.indices.data != nullptr;
  __shared__ Item item;         // registers are scarce
  __shared__ const T *q, *d_o;  // rows of the first query
  __shared__ char* stored;      // of the first row and key, for lane 0; bytes from one tile of rows to the next
  __shared__ int stored_pitch;
  const Item found = item_of(args);
  if (found.tile.count == 0) return;
  if (thread == 0) {
    item = found;
    q = args.q.at<T>(found.seq.batch, found.seq.q_begin, kv_head * p.group);
    d_o = args.d_o.at<T>(found.seq.batch, found.seq.q_begin, kv_head * p.group);
    if (kCompressed && args.ds_buffer.tiles) {
      const std::int64_t row = static_cast<std::int64_t>(found.tile.query_begin) * p.group;
      stored = args.ds_buffer.at(p, found.seq, kv_head, row, found.tile.first);
      stored_pitch = DsBuffer::columns(p) * DsBuffer::kTile;
    }
  }
  __syncthreads();
  const DeviceSequence& seq = item.seq;
  const KeyTile& tile = item.tile;
  const std::uint32_t keys = shared_address(memory), values = keys + Shape::kValues;
  const int key_end = tile.first + tile.count;
  RowStream<T, Dk, kKeyTile, 128>(args.k.at<T>(seq.batch, item.key_begin, kv_head), args.k.row, thread)
      .load(keys, tile.first, key_end);
  RowStream<T, Dv, kKeyTile, 128>(args.v.at<T>(seq.batch, item.key_begin, kv_head), args.v.row, thread)
      .load(values, tile.first, key_end);
  const int queries = max(tile.query_end - tile.query_begin, 0), rows = queries * p.group;
  const int stages = (rows + kRows - 1) / kRows;
  if (selected)
    for (int i = thread; i < queries; i += 128) chosen[i] = item.lists.list[tile.query_begin + i];
  if (!args.gate.data && thread < kRows) stage_gate[0][thread] = stage_gate[1][thread] = 1;
  __syncthreads();
  // Row r of this item: a query and a head of the group.
  const auto find_row = [&](int r, int& query, int& head) {
    const int i = p.by_group.divide(r);
    head = r - i * p.group;
    query = tile.query_start + i;
    if (query >= tile.query_end) query -= queries;
    if (selected) query = chosen[i];
  };
  const auto find_rows = [&](int stage) {  // one warp
    if (lane >= kRows) return;
    const int r = stage * kRows + lane;
    int query = 0, head = 0;
    if (r < rows) find_row(r, query, head);
    stage_offset[stage % 2][lane] =
        r < rows ? make_longlong2(query * args.q.row + head * args.q.head, query * args.d_o.row + head * args.d_o.head)
                 : make_longlong2(-1, -1);
  };
  // Needs find_rows(stage), does find_rows(stage + 1).
  const auto load = [&](int stage) {
    const std::uint32_t to = keys + Shape::kKeysAndValues + stage % Shape::kStages * Shape::kStage;
#pragma unroll
    for (int first = 0; first < kRows; first += 16) {
      const int i = first + thread / 8;
      if (kRows % 16 != 0 && i >= kRows) break;
      const longlong2 offset = stage_offset[stage % 2][i];
      Tile<T, Dk>::load_row(to, i, threadIdx.x, offset.x >= 0 ? q + offset.x : nullptr);
      Tile<T, Dv>::load_row(to + Shape::kGradients, i, threadIdx.x, offset.x >= 0 ? d_o + offset.y : nullptr);
    }
    if (warp == 3) find_rows(stage + 1);
    if (lane < kRows) {  // a warp each: lse, delta, gate, position
      const int r = stage * kRows + lane, slot = stage % 2;
      int query = 0, head = 0;
      if (r < rows) find_row(r, query, head);
      if (warp == 3) {
        stage_position[slot][lane] = r < rows ? seq.position(query) : -1;
        if (kSmallChunks && lane == 0)
          small_begins[slot] = stage > 0 && head == 0 && query % small_chunk(seq.q_len) == 0;
      } else if (warp < 2 || args.gate.data) {
        const PerRow& from = warp == 0 ? args.lse : warp == 1 ? args.delta : args.gate;
        float* to = warp == 0 ? stage_lse[slot] : warp == 1 ? stage_delta[slot] : stage_gate[slot];
        copy4(shared_address(to + lane), &from.at(seq.batch, seq.q_begin + query, kv_head * p.group + head), r < rows);
      }
    }
    commit_copies();
  };
  // The first and the last position that see a key of the tile.
  const auto seen_from = [&](int key) {
    const int i = tile.first + key;
    return key >= tile.count ? INT_MAX : kCompressed ? i * p.kernel_stride + p.kernel_size - 1 : i;
  };
  const auto seen_until = [&](int key) {
    return args.window > 0 ? static_cast<int>(min(tile.first + key + args.window - 1ll, INT_MAX + 0ll)) : INT_MAX;
  };
  struct Seen {
    int from[2], until[2];
  };
  const auto my_keys = [&]() -> Seen {
    const int key = warp * 16 + lane / 4;
    return {{seen_from(key), seen_from(key + 8)}, {seen_until(key), seen_until(key + 8)}};
  };
  const Seen seen_early = my_keys();
  const int all_from = seen_from(kKeyTile - 1), all_until = seen_until(0);

  float d_key[Dk / 8][4] = {}, d_value[Dv / 8][4] = {};
  const float scale = args.scale * kLog2e;
  HeldRows<T, Dk, Shape::kHeldKeys> key_fragments{keys, warp * 16, lane};
  HeldRows<T, Dv, Shape::kHeldValues> value_fragments{values, warp * 16, lane};
  if (warp == 3) find_rows(0);
  __syncthreads();
  if constexpr (Shape::kStages == 2) {
    if (stages > 0) load(0);
    __syncthreads();
  }
  // Partial sums of this item go to args.partials, or are added to what is there.
  const auto store_partials = [&](bool more) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = warp * 16 + lane / 4 + 8 * i;
      if (key >= tile.count) continue;
      const std::int64_t partial = kv_head * args.partial_items + tile.partial + tile.item;
      float* to = args.partials + (partial * kKeyTile + key) * (Dk + Dv) + 2 * (lane & 3);
      const auto store = [&](float* at, float x, float y) {
        const float2 before = more ? *reinterpret_cast<const float2*>(at) : float2{0, 0};
        store_pair(at, before.x + x, before.y + y);
      };
#pragma unroll
      for (int n = 0; n < Dk / 8; ++n) store(to + n * 8, d_key[n][2 * i], d_key[n][2 * i + 1]);
#pragma unroll
      for (int n = 0; n < Dv / 8; ++n) store(to + Dk + n * 8, d_value[n][2 * i], d_value[n][2 * i + 1]);
    }
  };
  for (int stage = 0; stage < stages; ++stage) {
    if constexpr (Shape::kStages == 1) {
      load(stage);
      wait_copies<0>();
    } else if (stage + 1 < stages) {
      load(stage + 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    char* queries = memory + Shape::kKeysAndValues + stage % Shape::kStages * Shape::kStage;
    char* gradients = queries + Shape::kGradients;
    const int slot = stage % 2;
    if (kSmallChunks && small_begins[slot]) {
      store_partials(stage * kRows > small_chunk(seq.q_len) * p.group);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (auto& d : d_key) d[i] = 0;
#pragma unroll
        for (auto& d : d_value) d[i] = 0;
      }
    }
    if (stage == 0 || (kSmallChunks && small_begins[slot])) key_fragments.hold(), value_fragments.hold();
    const int at = kSmallChunks && Dk > 128 ? opaque_lane(lane) : lane;
    key_fragments.lane = value_fragments.lane = at;
    float s[kN][4], dp[kN][4];
    Ring<T> ring;
    const Scores<T, Dk, kN, decltype(key_fragments)> scores{key_fragments, shared_address(queries), at};
    const Scores<T, Dv, kN, decltype(value_fragments)> products{value_fragments, shared_address(gradients), at};
    const Outputs<T, Dv, kN> value_outputs{shared_address(gradients), at};
    const Outputs<T, Dk, kN> key_outputs{shared_address(queries), at};
    start(scores, ring);
    scores.run(s, ring, products);
    products.run(dp, ring, value_outputs);
    // Positions ascend in a stage but where a walk comes round, so its ends tell whether all of its rows see all keys.
    const int first_position = stage_position[slot][0], last_position = stage_position[slot][kRows - 1];
    const bool partial = first_position < all_from || last_position < first_position || last_position > all_until;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int column = n * 8 + 2 * (lane & 3);
      const float2 lse = *reinterpret_cast<const float2*>(&stage_lse[slot][column]);
      const float2 delta = *reinterpret_cast<const float2*>(&stage_delta[slot][column]);
      const float2 gate = *reinterpret_cast<const float2*>(&stage_gate[slot][column]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float g = i % 2 ? gate.y : gate.x;
        const float x = exp2_fast(fmaf(s[n][i], scale, (i % 2 ? lse.y : lse.x) * -kLog2e));
        s[n][i] = x * g;
        dp[n][i] = x * fmaf(g, dp[n][i], i % 2 ? -delta.y : -delta.x);
      }
    }
    if (partial) {
      const Seen seen = kHopper ? seen_early : my_keys();
      const auto visible = [&](int i, int j) {
        const int position = stage_position[slot][j];
        return position >= seen.from[i] && position <= seen.until[i];
      };
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (!visible(i / 2, n * 8 + 2 * (lane & 3) + i % 2)) s[n][i] = dp[n][i] = 0;
      }
      const bool bad_query = __syncthreads_or(has_nonfinite<T, Dk>(queries, kRows, thread, 128));
      const bool bad_gradient = __syncthreads_or(has_nonfinite<T, Dv>(gradients, kRows, thread, 128));
      if (bad_query || bad_gradient) {
        add_nonfinite<T, Dv>(d_value, s, gradients, 0, lane, visible);
        add_nonfinite<T, Dk>(d_key, dp, queries, 0, lane, visible);
        __syncthreads();
        clear_nonfinite<T, Dv>(gradients, kRows, thread, 128);
        clear_nonfinite<T, Dk>(queries, kRows, thread, 128);
        __syncthreads();
        start(value_outputs, ring);
      }
    }
    if constexpr (kCompressed && sizeof(T) == 2) {
      std::uint32_t d_s[kRows / 16][4];
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k) operand_a<T>(d_s[k], dp, k);
      value_outputs.run(d_value, s, ring, key_outputs);
      key_outputs.run(
          d_key,
          [&](std::uint32_t(&a)[4], int k, int) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = d_s[k][i];
          },
          ring);
      if (args.ds_buffer.tiles) {
        char* to = stored + static_cast<std::int64_t>(stage) * (kRows / 16 * stored_pitch) + threadIdx.x * 16;
#pragma unroll
        for (int k = 0; k < kRows / 16; ++k)
          __stcs(reinterpret_cast<uint4*>(to + k * stored_pitch),
                 make_uint4(d_s[k][0], d_s[k][1], d_s[k][2], d_s[k][3]));
      }
    } else {
      value_outputs.run(d_value, s, ring, key_outputs);
      key_outputs.run(d_key, dp, ring);
    }
    __syncthreads();  // the stage is free
  }
  wait_copies<0>();

  const bool many = kSmallChunks && many_small_chunks(args, seq, tile);
  if (tile.items > 1 || args.ds_buffer.sums || many) {
    store_partials(many);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = warp * 16 + lane / 4 + 8 * i;
    if (key >= tile.count) continue;
    const std::int64_t row = item.key_begin + tile.first + key;
    if (args.d_k.data) {
      T* to = args.d_k.at<T>(seq.batch, row, kv_head) + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < Dk / 8; ++n)
        store_pair(to + n * 8, d_key[n][2 * i] * args.scale, d_key[n][2 * i + 1] * args.scale);
    }
    if (args.d_v.data) {
      T* to = args.d_v.at<T>(seq.batch, row, kv_head) + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < Dv / 8; ++n) store_pair(to + n * 8, d_value[n][2 * i], d_value[n][2 * i + 1]);
    }
  }
}

__device__ inline void add(float4& sum, const float4& x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

/// Adds the partial sums of key tiles with several items, in order. Some thread blocks (grid z) per item; only those of
/// first items work.
template <class T>
__global__ void __launch_bounds__(128) sum_partials(const __grid_constant__ BackwardArgs args, int dk, int dv) {
  if (!runs(args)) return;
  const Item item = item_of(args);
  const DeviceSequence& seq = item.seq;
  const KeyTile& tile = item.tile;
  const bool many = sizeof(T) == 2 && args.compressed() && many_small_chunks(args, seq, tile);
  if (tile.count == 0 || (tile.items <= 1 && !args.ds_buffer.sums && !many) || tile.item != 0) return;
  const int kv_head = blockIdx.y;
  const int width = dk + dv;
  const int size = kKeyTile * width;
  const float* from = args.partials + (kv_head * args.partial_items + tile.partial) * size;
  const int threads = gridDim.z * blockDim.x, mine = blockIdx.z * blockDim.x + threadIdx.x;
  for (int e = mine * 4; e < tile.count * width; e += threads * 4) {
    const int key = e / width, column = e % width;
    float4 sum{};
    const auto partial = [&](int i) {
      return *reinterpret_cast<const float4*>(from + static_cast<std::int64_t>(i) * size + e);
    };
    if (const DsBuffer& stored = args.ds_buffer; stored.sums) {
      const std::int64_t at = kv_head * stored.sums_head + seq.index * stored.sums_sequence +
                              static_cast<std::int64_t>(tile.first) * width + e;
      float4* const sums = reinterpret_cast<float4*>(stored.sums + at);
      float4* const chunk_sums = reinterpret_cast<float4*>(stored.chunk_sums + at);
      const int small = small_chunk(stored.q_len), chunk = range_chunk(0, stored.q_len);
      const int end = (stored.first + seq.q_len + small - 1) / small * small;
      float4 of_chunk = *chunk_sums;
      sum = *sums;
#pragma unroll 4
      for (int i = tile.items - 1; i >= 0; --i) {
        const int query = end - (i + 1) * small;
        if (query % chunk == 0) of_chunk = float4{};
        add(of_chunk, partial(i));
        if ((query + small) % chunk == 0 || query + small >= stored.q_len) add(sum, of_chunk);
      }
      if (stored.first + seq.q_len < stored.q_len) {
        *sums = sum;
        *chunk_sums = of_chunk;
        continue;
      }
    } else {
#pragma unroll 4
      for (int i = 0; i < tile.items; ++i) add(sum, partial(i));
    }
    const std::int64_t row = item.key_begin + tile.first + key;
    const bool of_key = column < dk;
    const Strided& gradient = of_key ? args.d_k : args.d_v;
    if (!gradient.data) continue;
    const float scale = of_key ? args.scale : 1;
    T* to = gradient.at<T>(seq.batch, row, kv_head) + (of_key ? column : column - dk);
    store_pair(to, sum.x * scale, sum.y * scale);
    store_pair(to + 2, sum.z * scale, sum.w * scale);
  }
}

}  // namespace nsa::cuda::portable
