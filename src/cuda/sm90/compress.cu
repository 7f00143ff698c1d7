// phi, both of its layers in one kernel: out = silu(x W1 + constant) W2 + b2, or x W1 + constant (linear), where x is a
// block of tokens, read in place, and constant = pe W1 + b1 is the same for all blocks.
//
//   prepare         the constants, and the tiles: neighbouring compressed rows of a sequence
//   loader warp     per step 64 terms of the sums: a token and 64 channels of it for every row of the tile (tokens d
//   apart,
//                   by a tensor map) and the 64 rows of W1 that go with them; then W2, 64 rows a step. One ring, two
//                   barriers a stage: `full` (bytes have come) and `free` (every computing warp has arrived)
//   warpgroups      z = x W1 in registers, h = silu(z + constant) rounded to T, out = h W2
//
// Thread blocks are persistent; an item is a tile, a KV head, and k or v. The steps of block j's token r and of token
// r + d, which is block j + 1's token r, follow each other, so that tokens come from memory once.
//
// Wide tiles have 128 rows, 64 for each of two warpgroups, and h never leaves the registers. Narrow ones have 64 rows,
// where there are few tiles or many hidden units: the warpgroups share the rows and have half of the units each, and h
// goes through shared memory. Every sum has the same order in both, so a row's bits depend on its own tokens only.
#include "cuda/sm90/compress.h"

#include <algorithm>

#include "cuda/portable/launch.cuh"
#include "cuda/sm90/forward_parts.cuh"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/maps.h"

namespace nsa::cuda::sm90 {
namespace {

using portable::CompressArgs;

constexpr int kGroups = 2;  // computing warpgroups
constexpr int kThreads = (kGroups + 1) * 128;
constexpr int kComputeRegisters = 240, kLoadRegisters = 24;  // 2 * 240 + 24 = 3 * 168
constexpr int kPrepareThreads = 512;
constexpr int kPanelBytes = 64 * 128;  // of weights

/// kColumns: hidden units (or channels of the output, for linear) of a warpgroup.
template <int D, int kColumns, bool kNarrow>
struct Layout {
  static constexpr int kRows = kNarrow ? CompressWork::kNarrowRows : CompressWork::kWideRows;
  static constexpr int kWidth = kNarrow ? kGroups * kColumns : kColumns;
  static constexpr int kTokenBytes = kRows * 128, kWeightBytes = std::max(kWidth, D) * 128;
  static constexpr int kHiddenBytes = kNarrow ? kWidth * 128 : 0;
  static constexpr int kReserved = 2048;  // barriers, and to align the tiles
  static constexpr int kStages = std::min(8, (kSharedMemory - kReserved - kHiddenBytes) / (kTokenBytes + kWeightBytes));
  static constexpr int kMemory = 1024 + kHiddenBytes + kStages * (kTokenBytes + kWeightBytes);
  static_assert(kStages >= 2);
};

struct Maps {
  CUtensorMap tokens, last_tokens, w1, w2;
};
struct MapPair {
  Maps of[2];
};

template <int kStages>
struct Ring {
  std::uint64_t full[kStages], free[kStages];
};

/// The items of a thread block: tiles of one head, which share weights, side by side.
class Walk {
 public:
  __device__ explicit Walk(const CompressWork& work)
      : tiles_(work.totals[0]),
        heads_(work.problem[0].geometry.kv_heads),
        items_(tiles_ * heads_ * work.problems),
        item_(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {}

  int problem = 0, head = 0, tile = 0;

  __device__ __forceinline__ bool next() {
    item_ += static_cast<int>(gridDim.x);
    if (item_ >= items_) return false;
    const int line = item_ / tiles_;
    tile = item_ - line * tiles_;
    problem = line / heads_;
    head = line - problem * heads_;
    return true;
  }

 private:
  int tiles_, heads_, items_, item_;
};

// ------------------------------------------------------------------------------------------------------------- prepare

/// Inclusive sums over the threads of a block.
__device__ inline int2 running_sums(int2 x) {
  __shared__ int2 of_warp[kPrepareThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int a = __shfl_up_sync(0xffffffffu, x.x, offset), b = __shfl_up_sync(0xffffffffu, x.y, offset);
    if (lane >= offset) x.x += a, x.y += b;
  }
  __syncthreads();  // of_warp may still be read
  if (lane == 31) of_warp[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; ++i) x.x += of_warp[i].x, x.y += of_warp[i].y;
  return x;
}

__device__ inline void write_tiles(const CompressWork& work) {
  const CompressArgs& args = work.problem[0];
  const Geometry& p = args.geometry;
  __shared__ int2 before;  // tiles and rows of the sequences of earlier rounds
  if (threadIdx.x == 0) before = make_int2(0, 0);
  for (int first = 0; first < p.batches; first += kPrepareThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    DeviceSequence seq{};
    if (b < p.batches) seq = sequence_of(p, b);
    const int blocks = b < p.batches ? num_compressed(p, seq.k_len) : 0;
    const int row_end = running_sums(make_int2(0, blocks)).y + before.y;
    // Offsets that are none could make more rows than there are.
    const int row = row_end - blocks, rows = p.cu_q ? max(min(blocks, args.rows - row), 0) : blocks;
    const int tiles = (rows + work.tile_rows - 1) / work.tile_rows;
    const int2 end = running_sums(make_int2(tiles, rows));
    CompressTile* to = work.tiles + before.x + end.x - tiles;
    for (int i = 0; i < tiles; ++i) {
      const int at = i * work.tile_rows;
      to[i] = {seq.batch, seq.k_begin + at * p.kernel_stride, min(work.tile_rows, rows - at), (p.cu_q ? row : 0) + at};
    }
    __syncthreads();
    if (threadIdx.x == kPrepareThreads - 1) before.x += end.x, before.y = row_end;
    __syncthreads();
  }
  if (threadIdx.x == 0) work.totals[0] = before.x, work.totals[1] = min(before.y, args.rows);
}

/// Sixteen columns of a set's constants: a thread has eight of them and every 256th row of W1.
template <class T>
__device__ inline void write_constants(const CompressArgs& args, int set, int first_column) {
  constexpr int kLanes = kPrepareThreads / 2;
  __shared__ float parts[kPrepareThreads / 32][16];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = threadIdx.x % 2 * 8;
  const int column = first_column + mine;
  float sum[8] = {};
  if (args.pe.data && column < args.hidden) {
    const int rows = args.geometry.kernel_size * args.dim;
#pragma unroll 8
    for (int k = threadIdx.x / 2; k < rows; k += kLanes) {
      const float position = to_float(*args.pe.at<T>(set, k / args.dim, k % args.dim));
      const uint4 w = *reinterpret_cast<const uint4*>(args.w1.at<T>(set, k, column));
      const std::uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack(T{}, words[i]);
        sum[2 * i] = fmaf(position, x.x, sum[2 * i]);
        sum[2 * i + 1] = fmaf(position, x.y, sum[2 * i + 1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    for (int offset = 2; offset < 32; offset *= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
    if (lane < 2) parts[warp][mine + i] = sum[i];
  }
  __syncthreads();
  const int n = first_column + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= 16 || n >= args.hidden) return;
  float all = args.b1.data ? to_float(*args.b1.at<T>(set, 0, n)) : 0;
  for (int i = 0; i < kPrepareThreads / 32; ++i) all += parts[i][threadIdx.x];
  args.constant[set * args.hidden + n] = all;
}

/// Grid: 1 + sixteens of hidden units, sets of weights, problems.
template <class T>
__global__ void __launch_bounds__(kPrepareThreads) prepare(const __grid_constant__ CompressWork work) {
  if (blockIdx.x > 0) {
    write_constants<T>(work.problem[blockIdx.z], blockIdx.y, (static_cast<int>(blockIdx.x) - 1) * 16);
  } else if (blockIdx.y == 0 && blockIdx.z == 0) {
    write_tiles(work);
  }
}

// ------------------------------------------------------------------------------------------------------------ products

/// c += a * b, 16 terms: b's rows are the terms, its N columns lie in panels.
template <class T, int N>
__device__ __forceinline__ void multiply(float (&c)[N / 2], std::uint32_t a, std::uint32_t b) {
  constexpr int kFirst = N == 192 ? 128 : N;
  product<T, kFirst, false, true>(reinterpret_cast<float(&)[kFirst / 2]>(c[0]), full_descriptor(a), full_descriptor(b),
                                  1);
  if constexpr (N > kFirst)
    product<T, N - kFirst, false, true>(reinterpret_cast<float(&)[(N - kFirst) / 2]>(c[kFirst / 2]), full_descriptor(a),
                                        full_descriptor(b + kFirst / 64 * (kPanelBytes / 16)), 1);
}
/// The same with a in registers.
template <class T, int N>
__device__ __forceinline__ void multiply(float (&c)[N / 2], const std::uint32_t* a, std::uint32_t b) {
  constexpr int kFirst = N == 192 ? 128 : N;
  product<T, kFirst, true>(reinterpret_cast<float(&)[kFirst / 2]>(c[0]), a, full_descriptor(b), 1);
  if constexpr (N > kFirst)
    product<T, N - kFirst, true>(reinterpret_cast<float(&)[(N - kFirst) / 2]>(c[kFirst / 2]), a,
                                 full_descriptor(b + kFirst / 64 * (kPanelBytes / 16)), 1);
}

__device__ __forceinline__ float silu(float x) { return x * __fdividef(1, 1 + exp2_fast(-x * kLog2e)); }

// -------------------------------------------------------------------------------------------------------------- loader

template <class T, int D, int kColumns, bool kNarrow, class L = Layout<D, kColumns, kNarrow>>
__device__ __forceinline__ void load(const CompressWork& work, const MapPair& maps, Ring<L::kStages>& ring,
                                     std::uint32_t tokens, std::uint32_t weights) {
  const Geometry& p = work.problem[0].geometry;
  const int d = p.kernel_stride, overlap = p.kernel_size / d;
  const int residues = static_cast<int>((p.cu_q ? p.total_k : p.k_len) % d);  // those that have a token more
  Place<L::kStages> place;
  const auto next_stage = [&](int bytes) {
    wait(shared_address(&ring.free[place.stage]), place.parity ^ 1);
    const std::uint32_t full = shared_address(&ring.full[place.stage]);
    arrive_expecting(full, bytes);
    return full;
  };
  for (Walk walk(work); walk.next();) {
    const CompressArgs& args = work.problem[walk.problem];
    const Maps& of = maps.of[walk.problem];
    const CompressTile tile = work.tiles[walk.tile];
    const int set = args.shared ? 0 : walk.head;
    for (int r = 0; r < d; ++r) {
      const int step = (tile.token + r) / d, residue = (tile.token + r) % d;
      const CUtensorMap& map = residue < residues ? of.last_tokens : of.tokens;
      for (int column = 0; column < D; column += 64)
        for (int q = 0; q < overlap; ++q) {
          const std::uint32_t full = next_stage(L::kTokenBytes + L::kWidth * 128);
          load_box(tokens + place.stage * L::kTokenBytes, map, column, residue, step + q, walk.head, tile.batch, full);
#pragma unroll
          for (int n = 0; n < L::kWidth; n += 64)
            load_box(weights + place.stage * L::kWeightBytes + n * 128, of.w1, n, 0, (q * d + r) * D + column, set,
                     full);
          place.advance();
        }
    }
    if (!args.mlp) continue;
    for (int row = 0; row < L::kWidth; row += 64) {
      const std::uint32_t full = next_stage(D * 128);
#pragma unroll
      for (int n = 0; n < D; n += 64)
        load_box(weights + place.stage * L::kWeightBytes + n * 128, of.w2, n, 0, row, set, full);
      place.advance();
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- compute

/// A computing warpgroup.
template <class T, int D, int kColumns, bool kNarrow>
class Compute {
  using L = Layout<D, kColumns, kNarrow>;

 public:
  __device__ Compute(const CompressWork& work, Ring<L::kStages>& ring, std::uint32_t hidden, std::uint32_t tokens,
                     std::uint32_t weights)
      : work_(work),
        ring_(ring),
        group_(uniform(threadIdx.x / 128)),
        lane_(threadIdx.x % 32),
        row_(threadIdx.x / 32 % 4 * 16 + lane_ / 4),
        hidden_(hidden),
        a_(descriptor(tokens + (kNarrow ? 0 : group_ * 64 * 128), 16)),
        w1_(descriptor(weights + (kNarrow ? group_ * kColumns * 128 : 0), kPanelBytes)),
        w2_(descriptor(weights, kPanelBytes)) {}

  __device__ __forceinline__ void run() {
    const Geometry& p = work_.problem[0].geometry;
    const int steps = p.kernel_size * (D / 64);
    for (Walk walk(work_); walk.next();) {
      const CompressArgs& args = work_.problem[walk.problem];
      const CompressTile tile = work_.tiles[walk.tile];
      const int set = args.shared ? 0 : walk.head, first = kNarrow ? group_ * kColumns : 0;
      float z[kColumns / 2];
      const float* constant = args.constant + set * args.hidden;
      begin_sums<kColumns>(z, [&](int n) {
        return first + n < args.hidden ? *reinterpret_cast<const float2*>(constant + first + n) : float2{};
      });
      first_layer(z, steps);
      if constexpr (!kNarrow) {
        if (!args.mlp) {
          store<kColumns>(z, args, tile, walk.head);
          continue;
        }
      }
      std::uint32_t h[kColumns / 4];
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) h[i] = pack(T{}, silu(z[2 * i]), silu(z[2 * i + 1]));
      float out[D / 2];
      begin_sums<D>(out, [&](int n) {
        if (!args.b2.data) return float2{};
        return unpack(T{}, *reinterpret_cast<const std::uint32_t*>(args.b2.at<T>(set, 0, n)));
      });
      if constexpr (kNarrow) {
        share(h);
        if (group_ > 0) {
          skip(L::kWidth / 64);
          continue;
        }
        second_layer(out, [&](int k) { return descriptor(hidden_ + k / 4 * kPanelBytes, 16) + k % 4 * 2; });
      } else {
        second_layer(out, [&](int k) { return h + 4 * k; });
      }
      store<D>(out, args, tile, walk.head);
    }
  }

 private:
  __device__ __forceinline__ void wait_full() { wait(shared_address(&ring_.full[place_.stage]), place_.parity); }
  __device__ __forceinline__ void give_back(int stage) {
    if (lane_ == 0) arrive(shared_address(&ring_.free[stage]));
  }
  __device__ __forceinline__ void skip(int stages) {
    for (int i = 0; i < stages; ++i, place_.advance()) {
      wait_full();
      give_back(place_.stage);
    }
  }

  /// Every row of the sums c begins as a vector, of which pair(n) has columns n and n + 1.
  template <int N, class Pair>
  __device__ __forceinline__ void begin_sums(float (&c)[N / 2], const Pair& pair) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const float2 x = pair(j * 8 + 2 * (lane_ & 3));
      c[4 * j] = c[4 * j + 2] = x.x, c[4 * j + 1] = c[4 * j + 3] = x.y;
    }
#pragma unroll
    for (float& x : c) asm volatile("" : "+f"(x));  // in a register of its own before the products begin
  }

  /// z += x W1. A step's products are issued before the ones of the step before are waited for.
  __device__ __forceinline__ void first_layer(float (&z)[kColumns / 2], int steps) {
    for (int step = 0; step < steps; ++step) {
      wait_full();
      products_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        multiply<T, kColumns>(z, a_ + place_.stage * (L::kTokenBytes / 16) + k * 2,
                              w1_ + place_.stage * (L::kWeightBytes / 16) + k * 128);
      products_commit();
      products_wait<1>();
      if (step > 0) give_back(place_.before().stage);
      place_.advance();
    }
    products_wait<0>();
    give_back(place_.before().stage);
  }

  /// out += h W2; hidden(k): the operand for the hidden units 16 k and on.
  template <class Hidden>
  __device__ __forceinline__ void second_layer(float (&out)[D / 2], const Hidden& hidden) {
#pragma unroll
    for (int step = 0; step < L::kWidth / 64; ++step) {
      wait_full();
      products_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        multiply<T, D>(out, hidden(4 * step + k), w2_ + place_.stage * (L::kWeightBytes / 16) + k * 128);
      products_commit();
      products_wait<0>();
      give_back(place_.stage);
      place_.advance();
    }
  }

  /// Both warpgroups' halves of h into shared memory, as a tile of 64 rows.
  __device__ __forceinline__ void share(const std::uint32_t (&h)[kColumns / 4]) {
    named_sync(1, kGroups * 128);  // the first warpgroup is done with the tile before
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int piece = group_ * (kColumns / 8) + j;  // of 16 bytes
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row_ + 8 * i;
        const std::uint32_t to =
            hidden_ + piece / 8 * kPanelBytes + row * 128 + ((piece ^ row) & 7) * 16 + (lane_ & 3) * 4;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(h[2 * j + i]) : "memory");
      }
    }
    fence_async();
    named_sync(1, kGroups * 128);
  }

  /// Columns below D of this warpgroup's 64 rows, of which `tile.rows` say how many there are.
  template <int N>
  __device__ __forceinline__ void store(const float (&c)[N / 2], const CompressArgs& args, const CompressTile& tile,
                                        int head) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = (kNarrow ? 0 : group_ * 64) + row_ + 8 * i;
      T* to = args.out.at<T>(tile.batch, tile.row + row, head) + 8 * (lane_ & 3);
#pragma unroll
      for (int j = 0; j < std::min(N, D) / 32; ++j) {
        const uint4 piece = piece_of_row<T>(c, i, j, 1, lane_);
        if (row < tile.rows) *reinterpret_cast<uint4*>(to + 32 * j) = piece;
      }
    }
  }

  const CompressWork& work_;
  Ring<L::kStages>& ring_;
  const int group_, lane_, row_;
  const std::uint32_t hidden_, a_, w1_, w2_;
  Place<L::kStages> place_;
};

/// Packed: rows past the last block become zeros.
template <class T>
__device__ inline void clear_rest(const CompressWork& work) {
  const Geometry& p = work.problem[0].geometry;
  const int dim = work.problem[0].dim, pieces = dim / 8 * p.kv_heads;
  if (!p.cu_q) return;
  for (int row = work.totals[1] + static_cast<int>(blockIdx.x); row < work.problem[0].rows; row += gridDim.x)
    for (int i = threadIdx.x; i < pieces * work.problems; i += kGroups * 128) {
      const int problem = i / pieces, head = i % pieces / (dim / 8), column = i % (dim / 8) * 8;
      *reinterpret_cast<uint4*>(work.problem[problem].out.at<T>(0, row, head) + column) = uint4{};
    }
}

template <class T, int D, int kColumns, bool kNarrow>
__global__ void __launch_bounds__(kThreads, 1)
    compress(const __grid_constant__ MapPair maps, const __grid_constant__ CompressWork work) {
  using L = Layout<D, kColumns, kNarrow>;
  extern __shared__ __align__(1024) char memory[];
  __shared__ Ring<L::kStages> ring;
  const std::uint32_t hidden = (shared_address(memory) + 1023) & ~1023u;
  const std::uint32_t tokens = hidden + L::kHiddenBytes, weights = tokens + L::kStages * L::kTokenBytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(shared_address(&ring.full[i]), 1);
      barrier_init(shared_address(&ring.free[i]), kGroups * 4);
    }
    barriers_ready();
  }
  __syncthreads();
  const int warp = uniform(threadIdx.x / 32);
  if (warp < kGroups * 4) {
    more_registers<kComputeRegisters>();
    Compute<T, D, kColumns, kNarrow>(work, ring, hidden, tokens, weights).run();
    clear_rest<T>(work);
  } else {
    fewer_registers<kLoadRegisters>();
    if (threadIdx.x == kGroups * 128) load<T, D, kColumns, kNarrow>(work, maps, ring, tokens, weights);
  }
}

// ---------------------------------------------------------------------------------------------------------------- host

template <class T, int D, int kColumns, bool kNarrow>
cudaError_t run(const CompressWork& work, cudaStream_t stream) {
  using L = Layout<D, kColumns, kNarrow>;
  const Geometry& g = work.problem[0].geometry;
  MapPair maps{};
  cudaError_t error = cudaSuccess;
  const auto make = [&](cudaError_t result) { error = error == cudaSuccess ? result : error; };
  for (int i = 0; i < work.problems; ++i) {
    const CompressArgs& args = work.problem[i];
    const std::int64_t rows = g.cu_q ? g.total_k : g.k_len;
    const int sets = args.shared ? 1 : g.kv_heads;
    const auto weights = [&](CUtensorMap& map, const portable::Weights& w, int columns, int count) {
      make(make_map(map, {w.data, w.head, w.row, 0}, columns, 1, count, sets, 1, 64));
    };
    for (const bool last : {false, true})
      make(make_step_map(last ? maps.of[i].last_tokens : maps.of[i].tokens, args.k, D, g.kv_heads, rows,
                         tensor_batches(g), g.kernel_stride, L::kRows, last));
    weights(maps.of[i].w1, args.w1, args.hidden, g.kernel_size * D);
    if (args.mlp) weights(maps.of[i].w2, args.w2, D, args.hidden);
  }
  int processors = 0;
  make(multiprocessors(processors));
  if (error != cudaSuccess) return error;
  const std::int64_t items = CompressWork::max_tiles(work.problem[0], L::kRows) * g.kv_heads * work.problems;
  const auto blocks = static_cast<unsigned>(std::clamp<std::int64_t>(items, 1, processors));
  return portable::launch(compress<T, D, kColumns, kNarrow>, blocks, kThreads, L::kMemory, stream, maps, work);
}

}  // namespace

template <>
cudaError_t launch_compress<NSA_ELEMENT, NSA_KEY_DIM>(const CompressWork& work, cudaStream_t stream) {
  using T = NSA_ELEMENT;
  constexpr int D = NSA_KEY_DIM;
  const CompressArgs& args = work.problem[0];
  if (args.rows == 0) return cudaSuccess;
  const dim3 grid(1 + static_cast<unsigned>(portable::tiles(args.hidden, 16)), args.shared ? 1 : args.geometry.kv_heads,
                  work.problems);
  if (const cudaError_t error = portable::launch(prepare<T>, grid, kPrepareThreads, 0, stream, work);
      error != cudaSuccess)
    return error;
  if (work.tile_rows == CompressWork::kNarrowRows)
    return args.hidden <= 128   ? run<T, D, 64, true>(work, stream)
           : args.hidden <= 256 ? run<T, D, 128, true>(work, stream)
           : args.hidden <= 384 ? run<T, D, 192, true>(work, stream)
                                : run<T, D, 256, true>(work, stream);
  return args.hidden <= 128 ? run<T, D, 128, false>(work, stream) : run<T, D, 256, false>(work, stream);
}

}  // namespace nsa::cuda::sm90
