// phi, both of its layers in one kernel: out = silu(x W1 + constant) W2 + b2, or x W1 + constant (linear), where x is a
// block of tokens, read in place, and constant = pe W1 + b1 is the same for all blocks. And the first part of its
// backward, which recomputes z = x W1 + constant: h = silu(z), d_z = (d_out W2^T) silu'(z).
//
//   prepare      the constants, and the segments of tiles: sixteen neighbouring compressed rows of a sequence
//   loader warp  per step 64 terms of the sums: 64 channels of a token for every row of the tile (tokens d apart, by a
//                tensor map) and the 64 rows of W1 that go with them; then W2, 64 rows a step. One ring, two barriers a
//                stage: `full` (bytes have come) and `empty` (every computing warp has arrived). Backward: the tile's
//                rows of d_out before W2
//   warpgroups   z in registers, then h, rounded to T, is an operand of out = h W2; backward: d_out W2^T for 64 hidden
//                units at a time, h and d_z to memory
//
// Thread blocks are persistent; an item is a tile, a KV head, and k or v. The steps of block j's token r + d and of
// block j + 1's token r, which are the same, follow each other, so that tokens come from memory once.
//
// Wide tiles have 128 rows, 64 for each of two warpgroups, and h never leaves the registers. Narrow ones have 64 rows,
// where there are few tiles or many hidden units: the warpgroups share the rows and have half of the units each, and h
// goes through shared memory. Every sum has the same order in both, so a row's bits depend on its own tokens only.
#include "cuda/sm90/compress/pipeline.cuh"

namespace nsa::cuda::sm90::compress {
namespace {

constexpr int kPrepareThreads = 512;

/// kColumns: hidden units (or channels of the output, for linear) of a warpgroup.
template <int D, int kColumns, bool kNarrow, bool kBackward>
struct Layout {
  static constexpr int kRows = kNarrow ? CompressWork::kNarrowRows : CompressWork::kWideRows;
  static constexpr int kWidth = kNarrow ? kGroups * kColumns : kColumns;
  static constexpr int kTokenBytes = kRows * 128, kWeightBytes = std::max(kWidth, D) * 128;
  static constexpr int kOperandBytes = kBackward ? kRows * D * 2 : kNarrow ? kRows * kWidth * 2 : 0;  // d_out or h
  static constexpr int kStages =
      std::min(8, (kSharedMemory - kReserved - kOperandBytes) / (kTokenBytes + kWeightBytes));
  static constexpr int kMemory = 1024 + kOperandBytes + kStages * (kTokenBytes + kWeightBytes);
  static_assert(kStages >= 2);
};

struct Maps {
  struct {
    TokenBoxes tokens;
    RowBoxes d_out;
    CUtensorMap w1, w2;
  } of[2];
};

template <int kStages>
struct Barriers {
  Ring<kStages> ring;
  std::uint64_t d_out_full, d_out_empty;
};

/// The items of a thread block: tiles of one head, which share weights, side by side.
class CompressTileScheduler {
 public:
  __device__ explicit CompressTileScheduler(const CompressWork& work)
      : tiles_((work.totals->segments * work.kSegment + work.tile_rows - 1) / work.tile_rows),
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
__device__ inline int4 running_sums(int4 x) {
  __shared__ int4 of_warp[kPrepareThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto add = [&](const int4& y) { x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w; };
  for (int offset = 1; offset < 32; offset *= 2) {
    const int4 y = make_int4(__shfl_up_sync(0xffffffffu, x.x, offset), __shfl_up_sync(0xffffffffu, x.y, offset),
                             __shfl_up_sync(0xffffffffu, x.z, offset), __shfl_up_sync(0xffffffffu, x.w, offset));
    if (lane >= offset) add(y);
  }
  __syncthreads();  // of_warp may still be read
  if (lane == 31) of_warp[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; ++i) add(of_warp[i]);
  return x;
}

/// Sequences in order, a round of kPrepareThreads at a time: what lies before each, by running sums, then a warp writes
/// the segments of one.
__device__ inline void write_segments(const CompressWork& work) {
  const CompressArgs& args = work.problem[0];
  const Geometry& p = args.geometry;
  struct Sequence {
    int batch, token, tokens, row, rows;
    int segment, token_segment;
  };
  __shared__ Sequence of_round[kPrepareThreads];
  __shared__ CompressTotals before;  // of the rounds before
  const int lane = threadIdx.x % 32, d = p.kernel_stride;
  const auto segments_of = [](int rows) { return (rows + CompressWork::kSegment - 1) / CompressWork::kSegment; };
  if (threadIdx.x == 0) before = {};
  for (int first = 0; first < p.batches; first += kPrepareThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    DeviceSequence seq{};
    if (b < p.batches) seq = sequence_of(p, b);
    const int blocks = b < p.batches ? num_compressed(p, seq.k_len) : 0;
    const int token_segments = segments_of((seq.k_len + d - 1) / d);
    const int4 all = running_sums(make_int4(0, blocks, token_segments, 0));
    const int segments = segments_of(blocks);
    const int end = running_sums(make_int4(segments, 0, 0, 0)).x;
    of_round[threadIdx.x] = {seq.batch,
                             seq.k_begin,
                             seq.k_len,
                             p.cu_q ? before.rows + all.y - blocks : 0,
                             blocks,
                             before.segments + end - segments,
                             before.token_segments + all.z - token_segments};
    __syncthreads();
    for (int i = threadIdx.x / 32; i < min(kPrepareThreads, p.batches - first); i += kPrepareThreads / 32) {
      const Sequence s = of_round[i];
      for (int k = lane, at = k * work.kSegment; at < s.rows; k += 32, at += 32 * work.kSegment)
        work.segments[s.segment + k] = {s.batch, s.token + at * d, min(work.kSegment, s.rows - at), s.row + at};
      if (!work.token_segments) continue;
      for (int k = lane, at = k * work.kSegment; at * d < s.tokens; k += 32, at += 32 * work.kSegment)
        work.token_segments[s.token_segment + k] = {s.batch, s.token + at * d, s.tokens - at * d, at, s.row, s.rows};
    }
    if (threadIdx.x == kPrepareThreads - 1)
      before = {before.segments + end, before.rows + all.y, before.token_segments + all.z};
    __syncthreads();
  }
  __syncthreads();
  const int segments = before.segments, token_segments = before.token_segments;
  if (threadIdx.x == 0) *work.totals = {segments, before.rows, token_segments};
  if (threadIdx.x >= work.kMaxSegments) return;
  work.segments[segments + threadIdx.x] = {};
  if (work.token_segments) work.token_segments[token_segments + threadIdx.x] = {};
}

/// Sixteen columns of a set's constants: a thread has eight of them and every 256th row of W1.
template <class T>
__device__ inline void write_constants(const CompressArgs& args, int set, int first_column) {
  constexpr int kLanes = kPrepareThreads / 2;
  __shared__ float partials[kPrepareThreads / 32][16];
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
    if (lane < 2) partials[warp][mine + i] = sum[i];
  }
  __syncthreads();
  const int n = first_column + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= 16 || n >= args.hidden) return;
  float all = args.b1.data ? to_float(*args.b1.at<T>(set, 0, n)) : 0;
  for (int i = 0; i < kPrepareThreads / 32; ++i) all += partials[i][threadIdx.x];
  args.constant[set * args.hidden + n] = all;
}

/// Grid: 1 + sixteens of hidden units, sets of weights, problems.
template <class T>
__global__ void __launch_bounds__(kPrepareThreads) prepare(const __grid_constant__ CompressWork work) {
  if (blockIdx.x > 0) {
    write_constants<T>(work.problem[blockIdx.z], blockIdx.y, (static_cast<int>(blockIdx.x) - 1) * 16);
  } else if (blockIdx.y == 0 && blockIdx.z == 0) {
    write_segments(work);
  }
}

// -------------------------------------------------------------------------------------------------------------- loader

template <class T, int D, int kColumns, bool kNarrow, bool kBackward, class L = Layout<D, kColumns, kNarrow, kBackward>>
__device__ __forceinline__ void load(const CompressWork& work, const Maps& maps, Barriers<L::kStages>& barriers,
                                     std::uint32_t operand, std::uint32_t tokens, std::uint32_t weights) {
  const Geometry& p = work.problem[0].geometry;
  const int d = p.kernel_stride, overlap = p.kernel_size / d;
  RingWriter<L::kStages> ring(barriers.ring);
  std::uint32_t phase = 1;
  for (CompressTileScheduler scheduler(work); scheduler.next(); phase ^= 1) {
    const CompressArgs& args = work.problem[scheduler.problem];
    const auto& of = maps.of[scheduler.problem];
    constexpr int kSegments = L::kRows / CompressWork::kSegment;
    const LaneSegments<kSegments> segments(work.segments[scheduler.tile * kSegments + ring.lane % kSegments], d);
    const int set = args.shared ? 0 : scheduler.head;
    for (int r = 0; r < d; ++r)
      for (int column = 0; column < D; column += 64)
        for (int q = 0; q < overlap; ++q, ring.advance()) {
          const std::uint32_t full = ring.begin(L::kTokenBytes + L::kWidth * 128);
          segments.load(of.tokens, p, tokens + ring.stage() * L::kTokenBytes, column, q * d + r, scheduler.head, full);
          const int n = (ring.lane - kSegments) * 64;  // other lanes than those
          if (n >= 0 && n < L::kWidth)
            tma_load(weights + ring.stage() * L::kWeightBytes + n * 128, of.w1, n, 0, (q * d + r) * D + column, set,
                     full);
        }
    if (!args.mlp) continue;
    if constexpr (kBackward) {
      const std::uint32_t full = shared_address(&barriers.d_out_full);
      if (ring.lane == 0) {
        mbarrier_wait(shared_address(&barriers.d_out_empty), phase);
        mbarrier_arrive_expect_tx(full, L::kOperandBytes);
      }
      __syncwarp();
#pragma unroll
      for (int column = 0; column < D; column += 64)
        segments.load(of.d_out, operand + column * L::kRows * 2, column, scheduler.head, full);
    }
    for (int row = 0; row < L::kWidth; row += 64, ring.advance()) {
      const std::uint32_t full = ring.begin(D * 128);
      const int n = ring.lane * 64;
      if (n < D) tma_load(weights + ring.stage() * L::kWeightBytes + n * 128, of.w2, n, 0, row, set, full);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- compute

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1, 1 + exp2_fast(-x * kLog2e)); }

/// A computing warpgroup.
template <class T, int D, int kColumns, bool kNarrow, bool kBackward>
class Compute {
  using L = Layout<D, kColumns, kNarrow, kBackward>;

 public:
  __device__ Compute(const CompressWork& work, Barriers<L::kStages>& barriers, std::uint32_t operand,
                     std::uint32_t tokens, std::uint32_t weights)
      : work_(work),
        barriers_(barriers),
        ring_(barriers.ring),
        group_(warp_uniform(threadIdx.x / 128)),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32 % (kNarrow ? 4 : 8)),
        operand_(operand),
        a_(descriptor(tokens + (kNarrow ? 0 : group_ * kPanelBytes), 16)),
        w1_(descriptor(weights + (kNarrow ? group_ * kColumns * 128 : 0), kPanelBytes)),
        w2_(weights) {}

  __device__ __forceinline__ void run() {
    const Geometry& p = work_.problem[0].geometry;
    const int steps = p.kernel_size * (D / 64), first = kNarrow ? group_ * kColumns : 0;
    std::uint32_t phase = 0;
    for (CompressTileScheduler scheduler(work_); scheduler.next(); phase ^= 1) {
      const CompressArgs& args = work_.problem[scheduler.problem];
      const CompressSegment rows = work_.segments[scheduler.tile * (L::kRows / CompressWork::kSegment) + warp_];
      const int set = args.shared ? 0 : scheduler.head;
      float z[kColumns / 2];
      const float* constant = args.constant + set * args.hidden;
      begin_sums(z, [&](int n) {
        return first + n < args.hidden ? *reinterpret_cast<const float2*>(constant + first + n) : float2{};
      });
      ring_.sum(
          steps, [](int, int) {},
          [&](int stage, int k) {
            multiply<T, kColumns, false>(z, a_ + stage * (L::kTokenBytes / 16) + k * 2,
                                         w1_ + stage * (L::kWeightBytes / 16) + k * 128);
          });
      if constexpr (kBackward) {
        hidden_gradient(z, args, rows, scheduler.head, first, phase);
      } else {
        if constexpr (kNarrow || kColumns <= CompressWork::wide_hidden(D)) {
          if (kNarrow || args.mlp) {
            second_layer(z, args, rows, scheduler.head, set);
            continue;
          }
        }
        store<kColumns>(z, args, rows, scheduler.head);
      }
    }
  }

 private:
  /// out = silu(z) W2 + b2.
  __device__ __forceinline__ void second_layer(const float (&z)[kColumns / 2], const CompressArgs& args,
                                               const CompressSegment& rows, int head, int set) {
    std::uint32_t h[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i)
      h[i] = pack(T{}, z[2 * i] * sigmoid(z[2 * i]), z[2 * i + 1] * sigmoid(z[2 * i + 1]));
    if constexpr (kNarrow) {
      share(h);
      if (group_ > 0) {
        ring_.skip(L::kWidth / 64);
        return;
      }
    }
    float out[D / 2];
    begin_sums(out, [&](int n) {
      if (!args.b2.data) return float2{};
      return unpack(T{}, *reinterpret_cast<const std::uint32_t*>(args.b2.at<T>(set, 0, n)));
    });
#pragma unroll
    for (int step = 0; step < L::kWidth / 64; ++step, ring_.advance()) {
      ring_.wait_full();
      wgmma_fence();
      const std::uint32_t w2 = descriptor(w2_ + ring_.stage() * L::kWeightBytes, kPanelBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kNarrow) {
          multiply<T, D, false>(out, descriptor(operand_ + step * kPanelBytes, 16) + k * 2, w2 + k * 128);
        } else {
          multiply<T, D>(out, h + 16 * step + 4 * k, w2 + k * 128);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      ring_.consumer_release(ring_.stage());
    }
    store<D>(out, args, rows, head);
  }

  /// Both warpgroups' halves of h into shared memory, as a tile of 64 rows.
  __device__ __forceinline__ void share(const std::uint32_t (&h)[kColumns / 4]) {
    named_barrier_sync(CompressBarrier::kBoth, kGroups * 128);  // the first warpgroup is done with the tile before
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int vector = group_ * (kColumns / 8) + j;  // of 16 bytes
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = warp_ * CompressWork::kSegment + lane_ / 4 + 8 * i;
        const std::uint32_t to =
            operand_ + vector / 8 * kPanelBytes + row * 128 + ((vector ^ row) & 7) * 16 + (lane_ & 3) * 4;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(h[2 * j + i]) : "memory");
      }
    }
    fence_async();
    named_barrier_sync(CompressBarrier::kBoth, kGroups * 128);
  }

  /// h = silu(z) and d_z = (d_out W2^T) silu'(z), to memory. `first`: this warpgroup's first hidden unit.
  __device__ __forceinline__ void hidden_gradient(float (&z)[kColumns / 2], const CompressArgs& args,
                                                  const CompressSegment& rows, int head, int first,
                                                  std::uint32_t phase) {
    const std::uint32_t d_out = descriptor(operand_ + (kNarrow ? 0 : group_ * kPanelBytes), 16);
    mbarrier_wait_warp(shared_address(&barriers_.d_out_full), phase);
    ring_.skip(first / 64);
#pragma unroll
    for (int step = 0; step < kColumns / 64; ++step, ring_.advance()) {
      float d[32];
      ring_.wait_full();
      gemm_ss<T, D, 64>(d, d_out, L::kRows, descriptor(w2_ + ring_.stage() * L::kWeightBytes, 16), 64);
      wgmma_wait<0>();
      ring_.consumer_release(ring_.stage());
      float(&h)[32] = reinterpret_cast<float(&)[32]>(z[32 * step]);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float s = sigmoid(h[i]);
        d[i] *= s * (1 + h[i] * (1 - s));
        h[i] *= s;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane_ / 4 + 8 * i;
        const int m = rows.batch * args.compressed_per_batch + rows.row + row;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int n = first + step * 64 + j * 32 + 8 * (lane_ & 3);
          const std::int64_t at = args.buffer(head, m) + n;
          const uint4 hidden = vector_of_row<T>(h, i, j, 1, lane_), gradient = vector_of_row<T>(d, i, j, 1, lane_);
          if (row >= rows.rows || n >= args.hidden) continue;
          *reinterpret_cast<uint4*>(static_cast<T*>(args.h) + at) = hidden;
          *reinterpret_cast<uint4*>(static_cast<T*>(args.d_z) + at) = gradient;
        }
      }
    }
    if (lane_ == 0) mbarrier_arrive(shared_address(&barriers_.d_out_empty));
    ring_.skip((L::kWidth - kColumns - first) / 64);
  }

  /// Columns below D of this warp's rows.
  template <int N>
  __device__ __forceinline__ void store(const float (&c)[N / 2], const CompressArgs& args, const CompressSegment& rows,
                                        int head) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane_ / 4 + 8 * i;
      T* to = args.out.at<T>(rows.batch, rows.row + row, head) + 8 * (lane_ & 3);
#pragma unroll
      for (int j = 0; j < std::min(N, D) / 32; ++j) {
        const uint4 vector = vector_of_row<T>(c, i, j, 1, lane_);
        if (row < rows.rows) *reinterpret_cast<uint4*>(to + 32 * j) = vector;
      }
    }
  }

  const CompressWork& work_;
  Barriers<L::kStages>& barriers_;
  RingReader<L::kStages> ring_;
  const int group_, lane_, warp_;  // the warp of the tile's rows
  const std::uint32_t operand_, a_, w1_, w2_;
};

/// Packed: rows past the last block become zeros.
template <class T>
__device__ inline void clear_rest(const CompressWork& work) {
  const Geometry& p = work.problem[0].geometry;
  const int dim = work.problem[0].dim, vectors = dim / 8 * p.kv_heads;
  if (!p.cu_q) return;
  for (int row = work.totals->rows + static_cast<int>(blockIdx.x); row < work.problem[0].rows; row += gridDim.x)
    for (int i = threadIdx.x; i < vectors * work.problems; i += kGroups * 128) {
      const int problem = i / vectors, head = i % vectors / (dim / 8), column = i % (dim / 8) * 8;
      *reinterpret_cast<uint4*>(work.problem[problem].out.at<T>(0, row, head) + column) = uint4{};
    }
}

template <class T, int D, int kColumns, bool kNarrow, bool kBackward>
__global__ void __launch_bounds__(kThreads, 1)
    compress(const __grid_constant__ Maps maps, const __grid_constant__ CompressWork work) {
  using L = Layout<D, kColumns, kNarrow, kBackward>;
  extern __shared__ __align__(1024) char memory[];
  __shared__ Barriers<L::kStages> barriers;
  const std::uint32_t operand = (shared_address(memory) + 1023) & ~1023u;
  const std::uint32_t tokens = operand + L::kOperandBytes, weights = tokens + L::kStages * L::kTokenBytes;
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&barriers.d_out_full), 1);
    mbarrier_init(shared_address(&barriers.d_out_empty), kGroups * 4);
    barriers.ring.init();
  }
  __syncthreads();
  in_roles<kBackward ? 224 : 232>(
      [&] { load<T, D, kColumns, kNarrow, kBackward>(work, maps, barriers, operand, tokens, weights); },
      [&] {
        Compute<T, D, kColumns, kNarrow, kBackward>(work, barriers, operand, tokens, weights).run();
        if constexpr (!kBackward) clear_rest<T>(work);
      });
}

// ---------------------------------------------------------------------------------------------------------------- host

template <class T, int D, int kColumns, bool kNarrow, bool kBackward>
cudaError_t run(const CompressWork& work, cudaStream_t stream) {
  using L = Layout<D, kColumns, kNarrow, kBackward>;
  const Geometry& g = work.problem[0].geometry;
  Maps maps{};
  FirstError first;
  for (int i = 0; i < work.problems; ++i) {
    const CompressArgs& args = work.problem[i];
    first(make_boxes(maps.of[i].tokens, args, L::kRows));
    first(make_tensor_map(maps.of[i].w1, args, args.w1, args.hidden, g.kernel_size * D, 64));
    if (args.mlp) first(make_tensor_map(maps.of[i].w2, args, args.w2, D, args.hidden, 64));
    if (kBackward) first(make_boxes(maps.of[i].d_out, args, args.d_out, D, L::kRows));
  }
  int num_sms = 0;
  first(sm_count(num_sms));
  if (first.error != cudaSuccess) return first.error;
  const std::int64_t rows = CompressWork::max_segments(work.problem[0]) * CompressWork::kSegment;
  const std::int64_t items = ceil_div(rows, L::kRows) * g.kv_heads * work.problems;
  const auto blocks = static_cast<unsigned>(std::clamp<std::int64_t>(items, 1, num_sms));
  return launch(compress<T, D, kColumns, kNarrow, kBackward>, blocks, kThreads, L::kMemory, stream, maps, work);
}

template <class T, int D, bool kBackward>
cudaError_t run(const CompressWork& work, cudaStream_t stream) {
  const int hidden = work.problem[0].hidden;
  if (work.tile_rows == CompressWork::kNarrowRows)
    return hidden <= 128   ? run<T, D, 64, true, kBackward>(work, stream)
           : hidden <= 256 ? run<T, D, 128, true, kBackward>(work, stream)
           : hidden <= 384 ? run<T, D, 192, true, kBackward>(work, stream)
                           : run<T, D, 256, true, kBackward>(work, stream);
  // The backward has no linear layer of D columns.
  if constexpr (kBackward && CompressWork::wide_hidden(D) <= 128) {
    return run<T, D, 128, false, true>(work, stream);
  } else {
    return hidden <= 128 ? run<T, D, 128, false, kBackward>(work, stream)
                         : run<T, D, 256, false, kBackward>(work, stream);
  }
}

template <class T>
cudaError_t run_prepare(const CompressWork& work, cudaStream_t stream) {
  const CompressArgs& args = work.problem[0];
  const dim3 grid(1 + static_cast<unsigned>(ceil_div(args.hidden, 16)), args.shared ? 1 : args.geometry.kv_heads,
                  work.problems);
  return launch(prepare<T>, grid, kPrepareThreads, 0, stream, work);
}

}  // namespace

template <>
cudaError_t launch_compress<NSA_ELEMENT, NSA_KEY_DIM>(const CompressWork& work, cudaStream_t stream) {
  if (work.problem[0].rows == 0) return cudaSuccess;
  const cudaError_t error = run_prepare<NSA_ELEMENT>(work, stream);
  return error == cudaSuccess ? run<NSA_ELEMENT, NSA_KEY_DIM, false>(work, stream) : error;
}
template <>
cudaError_t launch_compress_hidden<NSA_ELEMENT, NSA_KEY_DIM>(const CompressWork& work, cudaStream_t stream) {
  const cudaError_t error = run_prepare<NSA_ELEMENT>(work, stream);
  if (error != cudaSuccess || !work.problem[0].mlp) return error;
  return run<NSA_ELEMENT, NSA_KEY_DIM, true>(work, stream);
}

}  // namespace nsa::cuda::sm90::compress
