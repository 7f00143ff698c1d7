// Gradients of phi's weights and tokens from h and d_z (forward.cu; linear: d_z is d_out), as products that read
// tokens in place:
//
//   column_partials, column_totals   sums of d_z and d_out over compressed rows: d_z_sum, d_b1, d_b2
//   weight_gradients              d_w1 = x^T d_z + pe d_z_sum and d_w2 = h^T d_out: sums over the compressed rows of a
//                                 set's heads, 64 rows of a sequence a step; both operands are read along their columns
//   token_gradients               groups of d tokens are the rows: token j d + s is token q d + s of block j - q, so
//                                 d_k(j; s, channel) = sum over q and hidden units of d_z(j - q) W1(q d + s, channel)
//   position_gradient (portable)  d_pe = W1 d_z_sum
//
// The two large ones have a loader warp and two warpgroups of 64 rows each (of x^T: 64 channels of a token), like
// forward.cu. Copies come in whole boxes: rows behind a sequence's last block, or before its first, are cleared in
// shared memory by those who read them.
#include "cuda/common/position_gradient.cuh"
#include "cuda/sm90/compress/pipeline.cuh"

namespace nsa::cuda::sm90::compress {
namespace {

// --------------------------------------------------------------------------------------------------------- column sums

/// Columns of column_partials: of d_z, then of d_out unless that is the same.
__host__ __device__ inline int summed_columns(const CompressArgs& args) {
  return args.hidden + (args.mlp ? args.dim : 0);
}
__device__ inline int lines_of(const CompressWork& work) {
  return (work.totals->segments + work.kMaxSegments - 1) / work.kMaxSegments;
}
__device__ inline float* partials_of(const CompressWork& work, int problem, int head, int line) {
  const CompressArgs& args = work.problem[0];
  const std::int64_t lines = (static_cast<std::int64_t>(problem) * args.geometry.kv_heads + head) * lines_of(work);
  return work.column_partials + (lines + line) * summed_columns(args);
}

/// Grid: eights of segments, KV heads, problems. A warp has a segment, a lane eight columns at a time. z0 and z1: d_z
/// of the problems.
template <class T>
__global__ void __launch_bounds__(256)
    column_partials(const __grid_constant__ CompressWork work, const __grid_constant__ Strided z0,
                    const __grid_constant__ Strided z1) {
  __shared__ float of_warp[CompressWork::kMaxSegments][32 * 8];
  if (static_cast<int>(blockIdx.x) >= lines_of(work)) return;
  const CompressArgs& args = work.problem[blockIdx.z];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y, columns = summed_columns(args);
  const CompressSegment rows = work.segments[blockIdx.x * work.kMaxSegments + warp];
  float* to = partials_of(work, blockIdx.z, head, blockIdx.x);
  for (int first = 0; first < columns; first += 256) {
    const int column = first + lane * 8;
    const bool of_z = column < args.hidden;
    const Strided& from = of_z ? (blockIdx.z ? z1 : z0) : args.d_out;
    float sum[8] = {};
#pragma unroll 4
    for (int row = 0; row < rows.rows; ++row) {
      if (column >= columns) break;
      const uint4 x = *reinterpret_cast<const uint4*>(from.at<T>(rows.batch, rows.row + row, head) + column -
                                                      (of_z ? 0 : args.hidden));
      const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(T{}, words[i]);
        sum[2 * i] += pair.x, sum[2 * i + 1] += pair.y;
      }
    }
    __syncthreads();  // of_warp may still be read
#pragma unroll
    for (int i = 0; i < 8; ++i) of_warp[warp][lane * 8 + i] = sum[i];
    __syncthreads();
    float all = 0;
    for (int i = 0; i < work.kMaxSegments; ++i) all += of_warp[i][threadIdx.x];
    if (first + static_cast<int>(threadIdx.x) < columns) to[first + threadIdx.x] = all;
  }
}

/// Grid: 32 columns, sets, problems. A warp has every eighth line.
template <class T>
__global__ void __launch_bounds__(256) column_totals(const __grid_constant__ CompressWork work) {
  __shared__ float of_warp[8][32];
  const CompressArgs& args = work.problem[blockIdx.z];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, set = blockIdx.y;
  const int columns = summed_columns(args), n = static_cast<int>(blockIdx.x) * 32 + lane;
  float sum = 0;
  for (int head = args.shared ? 0 : set; n < columns && head < (args.shared ? args.geometry.kv_heads : set + 1); ++head)
    for (int line = warp; line < lines_of(work); line += 8) sum += partials_of(work, blockIdx.z, head, line)[n];
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || n >= columns) return;
  sum = 0;
  for (int i = 0; i < 8; ++i) sum += of_warp[i][lane];
  if (n >= args.hidden) {
    if (args.d_b2.data) *args.d_b2.at<T>(set, 0, n - args.hidden) = from_float<T>(sum);
    return;
  }
  args.d_z_sum[set * args.hidden + n] = sum;
  if (args.d_b1.data) *args.d_b1.at<T>(set, 0, n) = from_float<T>(sum);
}

// ---------------------------------------------------------------------------------------------------- weight gradients

template <int kColumns>
struct WeightLayout {
  static constexpr int kLeftBytes = kGroups * kPanelBytes, kRightBytes = kColumns * 128;
  static constexpr int kStages = std::min(8, (kSharedMemory - kReserved) / (kLeftBytes + kRightBytes));
  static constexpr int kMemory = 1024 + kStages * (kLeftBytes + kRightBytes);
};

constexpr int kStepRows = 64, kStepSegments = kStepRows / CompressWork::kSegment;
__device__ inline int steps_of(const CompressWork& work) {
  return (work.totals->segments + kStepSegments - 1) / kStepSegments;
}

struct WeightMaps {
  struct {
    TokenBoxes tokens;
    RowBoxes d_z, h, d_out;
  } of[2];
};

/// The items of a thread block: 128 rows and kColumns columns of a set's d_w1, or, transposed, of its d_w2.
template <int D, int kColumns>
class WeightTileScheduler {
 public:
  __device__ explicit WeightTileScheduler(const CompressWork& work)
      : work_(work), item_(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {}

  int problem = 0, set = 0;
  bool second = false;
  int panels = 0;  // of 64 rows that there are
  int panel = 0;   // the first of two
  int column = 0;

  __device__ __forceinline__ bool next() {
    item_ += static_cast<int>(gridDim.x);
    for (;; ++problem) {
      if (problem == work_.problems) return false;
      const CompressArgs& args = work_.problem[problem];
      const int across = (args.hidden + kColumns - 1) / kColumns;
      const int first_panels = args.geometry.kernel_size * (D / 64);
      const int of_first = args.d_w1.data ? (first_panels + 1) / 2 * across : 0;
      const int of_second = args.d_w2.data ? (D / 64 + 1) / 2 * across : 0;
      const int of_set = of_first + of_second, sets = args.shared ? 1 : args.geometry.kv_heads;
      const int item = item_ - before_;
      if (item < of_set * sets) {
        set = item / of_set;
        const int own = item - set * of_set;
        second = own >= of_first;
        panels = second ? D / 64 : first_panels;
        const int line = second ? own - of_first : own;
        panel = line / across * 2;
        column = line % across * kColumns;
        return true;
      }
      before_ += of_set * sets;
    }
  }

 private:
  const CompressWork& work_;
  int item_, before_ = 0;
};

template <int D, int kColumns, class L = WeightLayout<kColumns>>
__device__ __forceinline__ void load_weight_operands(const CompressWork& work, const WeightMaps& maps,
                                                     Ring<L::kStages>& barriers, std::uint32_t left,
                                                     std::uint32_t right) {
  const Geometry& p = work.problem[0].geometry;
  RingWriter<L::kStages> ring(barriers);
  for (WeightTileScheduler<D, kColumns> scheduler(work); scheduler.next();) {
    const auto& of = maps.of[scheduler.problem];
    const CompressArgs& args = work.problem[scheduler.problem];
    const int heads = args.shared ? p.kv_heads : 1, steps = steps_of(work);
    const auto segment_of = [&](int step) { return work.segments[step * kStepSegments + ring.lane % kStepSegments]; };
    CompressSegment next = segment_of(0);
    for (int head = scheduler.set * heads; head < (scheduler.set + 1) * heads; ++head)
      for (int step = 0; step < steps; ++step, ring.advance()) {
        const LaneSegments<kStepSegments> segments(next, p.kernel_stride);
        next = segment_of(step + 1 < steps ? step + 1 : 0);
        const unsigned rows =
            __reduce_or_sync(0xffffffffu, static_cast<unsigned>(segments.mine.rows) << 8 * (ring.lane % kStepSegments));
        const std::uint32_t full = ring.begin(L::kLeftBytes + L::kRightBytes, static_cast<int>(rows));
        for (int group = 0; group < kGroups; ++group) {
          const int panel = min(scheduler.panel + group, scheduler.panels - 1);
          const std::uint32_t to = left + ring.stage() * L::kLeftBytes + group * kPanelBytes;
          if (scheduler.second) {
            segments.load(of.d_out, to, panel * 64, head, full);
          } else {
            const int r = panel / (D / 64);
            segments.load(of.tokens, p, to, (panel - r * (D / 64)) * 64, r, head, full);
          }
        }
        for (int n = 0; n < kColumns; n += 64)
          segments.load(scheduler.second ? of.h : of.d_z, right + ring.stage() * L::kRightBytes + n * 128,
                        scheduler.column + n, head, full);
      }
  }
}

template <class T, int D, int kColumns, class L = WeightLayout<kColumns>>
__device__ __forceinline__ void sum_weight_gradients(const CompressWork& work, Ring<L::kStages>& barriers,
                                                     std::uint32_t left, std::uint32_t right) {
  const int group = warp_uniform(threadIdx.x / 128), lane = threadIdx.x % 32,
            row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const std::uint32_t a = descriptor(left + group * kPanelBytes, kPanelBytes), b = descriptor(right, kPanelBytes);
  RingReader<L::kStages> ring(barriers);
  for (WeightTileScheduler<D, kColumns> scheduler(work); scheduler.next();) {
    const CompressArgs& args = work.problem[scheduler.problem];
    const int steps = steps_of(work) * (args.shared ? args.geometry.kv_heads : 1);
    float c[kColumns / 2];
    begin_sums(c, [](int) { return float2{}; });
    ring.sum(
        steps,
        [&](int, int stage) {
          const int rows = barriers.rows[stage];
          if (rows == 0x10101010) return;
          // Each its own panel of the one operand and half of the panels of the other.
          for (int i = 0; i < kStepSegments; ++i) {
            const int first = i * CompressWork::kSegment + (rows >> 8 * i & 255),
                      last = (i + 1) * CompressWork::kSegment;
            const auto clear = [&](std::uint32_t panel) { clear_rows(panel, first, last, threadIdx.x % 128, 128); };
            clear(left + stage * L::kLeftBytes + group * kPanelBytes);
            for (int n = group * (kColumns / 2); n < (group + 1) * (kColumns / 2); n += 64)
              clear(right + stage * L::kRightBytes + n * 128);
          }
          fence_async();
          named_barrier_sync(CompressBarrier::kBoth, kGroups * 128);
        },
        [&](int stage, int k) {
          multiply<T, kColumns, true>(c, a + stage * (L::kLeftBytes / 16) + k * 128,
                                      b + stage * (L::kRightBytes / 16) + k * 128);
        });
    const int panel = scheduler.panel + group;
    if (panel >= scheduler.panels) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = panel * 64 + row + 8 * i;
      if (scheduler.second) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          const int n = scheduler.column + j * 8 + 2 * (lane & 3);
          if (n >= args.hidden) continue;
          *args.d_w2.at<T>(scheduler.set, n, m) = from_float<T>(c[4 * j + 2 * i]);
          *args.d_w2.at<T>(scheduler.set, n + 1, m) = from_float<T>(c[4 * j + 2 * i + 1]);
        }
        continue;
      }
      if (args.pe.data) {
        const float position = to_float(*args.pe.at<T>(scheduler.set, m / D, m % D));
        const float* sum = args.d_z_sum + scheduler.set * args.hidden;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          const int n = scheduler.column + j * 8 + 2 * (lane & 3);
          const float2 x = n < args.hidden ? *reinterpret_cast<const float2*>(sum + n) : float2{};
          c[4 * j + 2 * i] += position * x.x, c[4 * j + 2 * i + 1] += position * x.y;
        }
      }
#pragma unroll
      for (int j = 0; j < kColumns / 32; ++j) {
        const int n = scheduler.column + j * 32 + 8 * (lane & 3);
        const uint4 vector = vector_of_row<T>(c, i, j, 1, lane);
        if (n < args.hidden) *reinterpret_cast<uint4*>(args.d_w1.at<T>(scheduler.set, m, n)) = vector;
      }
    }
  }
}

template <class T, int D, int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    weight_gradients(const __grid_constant__ WeightMaps maps, const __grid_constant__ CompressWork work) {
  using L = WeightLayout<kColumns>;
  extern __shared__ __align__(1024) char memory[];
  __shared__ Ring<L::kStages> ring;
  const std::uint32_t left = (shared_address(memory) + 1023) & ~1023u, right = left + L::kStages * L::kLeftBytes;
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  in_roles<224>([&] { load_weight_operands<D, kColumns>(work, maps, ring, left, right); },
                [&] { sum_weight_gradients<T, D, kColumns>(work, ring, left, right); });
}

// ----------------------------------------------------------------------------------------------------- token gradients

constexpr int kTokenColumns = 256;  // token of the group and channel

struct TokenLayout {
  static constexpr int kRows = CompressWork::kWideRows, kSegments = CompressWork::kMaxSegments;
  static constexpr int kLeftBytes = kRows * 128, kRightBytes = kTokenColumns * 128;
  static constexpr int kStages = (kSharedMemory - kReserved) / (kLeftBytes + kRightBytes);
  static constexpr int kMemory = 1024 + kStages * (kLeftBytes + kRightBytes);
};

struct TokenGradientMaps {
  struct {
    RowBoxes d_z;
    CUtensorMap w1;
  } of[2];
};

/// The items of a thread block: a tile of tokens and kTokenColumns columns; tiles side by side.
class TokenTileScheduler {
 public:
  __device__ TokenTileScheduler(const CompressWork& work, int dim)
      : tiles_((work.totals->token_segments + TokenLayout::kSegments - 1) / TokenLayout::kSegments),
        heads_(work.problem[0].geometry.kv_heads),
        across_((work.problem[0].geometry.kernel_stride * dim + kTokenColumns - 1) / kTokenColumns),
        items_(tiles_ * across_ * heads_ * work.problems),
        item_(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)),
        work_(work) {}

  int problem = 0, head = 0, column = 0, tile = 0;

  __device__ __forceinline__ bool next() {
    do {
      item_ += static_cast<int>(gridDim.x);
      if (item_ >= items_) return false;
      int line = item_ / tiles_;
      tile = item_ - line * tiles_;
      column = line % across_ * kTokenColumns;
      line /= across_;
      problem = line / heads_;
      head = line - problem * heads_;
    } while (!work_.problem[problem].d_k.data);
    return true;
  }

 private:
  int tiles_, heads_, across_, items_, item_;
  const CompressWork& work_;
};

template <int D, class L = TokenLayout>
__device__ __forceinline__ void load_token_operands(const CompressWork& work, const TokenGradientMaps& maps,
                                                    Ring<L::kStages>& barriers, std::uint32_t left,
                                                    std::uint32_t right) {
  const Geometry& p = work.problem[0].geometry;
  const int overlap = p.kernel_size / p.kernel_stride, hidden = work.problem[0].hidden;
  RingWriter<L::kStages> ring(barriers);
  for (TokenTileScheduler scheduler(work, D); scheduler.next();) {
    const auto& of = maps.of[scheduler.problem];
    const TokenSegment tokens = work.token_segments[scheduler.tile * L::kSegments + ring.lane % L::kSegments];
    // The compressed rows that begin with these groups.
    const LaneSegments<L::kSegments> segments({tokens.batch, tokens.token, tokens.blocks, tokens.row + tokens.group},
                                              p.kernel_stride);
    const int set = work.problem[scheduler.problem].shared ? 0 : scheduler.head;
    for (int q = 0; q < overlap; ++q)
      for (int n = 0; n < hidden; n += 64, ring.advance()) {
        const std::uint32_t full = ring.begin(L::kLeftBytes + L::kRightBytes);
        segments.load(of.d_z, left + ring.stage() * L::kLeftBytes, n, scheduler.head, full, -q);
        if (ring.lane == L::kSegments)
          tma_load(right + ring.stage() * L::kRightBytes, of.w1, n, 0, q * p.kernel_stride * D + scheduler.column, set,
                   full);
      }
  }
}

template <class T, int D, class L = TokenLayout>
__device__ __forceinline__ void sum_token_gradients(const CompressWork& work, Ring<L::kStages>& barriers,
                                                    std::uint32_t left, std::uint32_t right) {
  const Geometry& p = work.problem[0].geometry;
  const int group = warp_uniform(threadIdx.x / 128), lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32, first_segment = group * (L::kSegments / kGroups);
  const int d = p.kernel_stride, overlap = p.kernel_size / d, per_overlap = (work.problem[0].hidden + 63) / 64;
  const std::uint32_t a = descriptor(left + group * kPanelBytes, 16), b = descriptor(right, 16);
  RingReader<L::kStages> ring(barriers);
  for (TokenTileScheduler scheduler(work, D); scheduler.next();) {
    const CompressArgs& args = work.problem[scheduler.problem];
    const TokenSegment* segments = work.token_segments + scheduler.tile * L::kSegments;
    const TokenSegment of_lane = segments[first_segment + lane % 4], tokens = segments[warp];
    float c[kTokenColumns / 2];
    begin_sums(c, [](int) { return float2{}; });
    ring.sum(
        overlap * per_overlap,
        [&](int step, int stage) {
          // Row i of a segment is block group + i - q of its sequence, if there is one.
          const int begin = step / per_overlap - of_lane.group, end = begin + of_lane.blocks;
          if (!__any_sync(0xffffffffu, begin > 0 || end < CompressWork::kSegment)) return;
          const std::uint32_t panel = left + stage * L::kLeftBytes + group * kPanelBytes;
          for (int i = 0; i < 4; ++i) {
            const int first = i * CompressWork::kSegment, last = first + CompressWork::kSegment;
            const int exist = first + __shfl_sync(0xffffffffu, begin, i),
                      rest = first + __shfl_sync(0xffffffffu, end, i);
            clear_rows(panel, first, min(exist, last), threadIdx.x % 128, 128);
            clear_rows(panel, max(rest, first), last, threadIdx.x % 128, 128);
          }
          fence_async();
          named_barrier_sync(CompressBarrier::kGroup, 128, group);
        },
        [&](int stage, int k) {
          wgmma<T, kTokenColumns, false, false>(c, full_descriptor(a + stage * (L::kLeftBytes / 16) + k * 2),
                                                full_descriptor(b + stage * (L::kRightBytes / 16) + k * 2), 1);
        });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kTokenColumns / 32; ++j) {
        const int n = scheduler.column + j * 32, s = n / D, token = (lane / 4 + 8 * i) * d + s;
        const uint4 vector = vector_of_row<T>(c, i, j, 1, lane);
        if (s < d && token < tokens.tokens)
          *reinterpret_cast<uint4*>(args.d_k.at<T>(tokens.batch, tokens.token + token, scheduler.head) + n % D +
                                    8 * (lane & 3)) = vector;
      }
    }
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads, 1)
    token_gradients(const __grid_constant__ TokenGradientMaps maps, const __grid_constant__ CompressWork work) {
  using L = TokenLayout;
  extern __shared__ __align__(1024) char memory[];
  __shared__ Ring<L::kStages> ring;
  const std::uint32_t left = (shared_address(memory) + 1023) & ~1023u, right = left + L::kStages * L::kLeftBytes;
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  in_roles<224>([&] { load_token_operands<D>(work, maps, ring, left, right); },
                [&] { sum_token_gradients<T, D>(work, ring, left, right); });
}

// ---------------------------------------------------------------------------------------------------------------- host

/// Sums of columns, where something is made of them.
template <class T>
cudaError_t run_sums(const CompressWork& work, cudaStream_t stream) {
  const CompressArgs& args = work.problem[0];
  bool wanted = false;
  for (const CompressArgs& x : work.problem) wanted |= x.pe.data || x.d_pe.data || x.d_b1.data || x.d_b2.data;
  if (!wanted) return cudaSuccess;
  const int heads = args.geometry.kv_heads;
  const dim3 grid(static_cast<unsigned>(ceil_div(work.max_segments(args), work.kMaxSegments)), heads, work.problems);
  const cudaError_t error = launch(column_partials<T>, grid, 256, 0, stream, work, hidden_gradient(args),
                                   hidden_gradient(work.problem[work.problems - 1]));
  if (error != cudaSuccess) return error;
  const dim3 totals(static_cast<unsigned>(ceil_div(summed_columns(args), 32)), args.shared ? 1 : heads, work.problems);
  return launch(column_totals<T>, totals, 256, 0, stream, work);
}

template <class T, int D, int kColumns>
cudaError_t run_weight_gradients(const CompressWork& work, int num_sms, cudaStream_t stream) {
  WeightMaps maps{};
  FirstError first;
  std::int64_t items = 0;
  for (int i = 0; i < work.problems; ++i) {
    const CompressArgs& args = work.problem[i];
    const Geometry& g = args.geometry;
    auto& of = maps.of[i];
    const std::int64_t of_set =
        (args.d_w1.data ? ceil_div(g.kernel_size * (D / 64), 2) : 0) + (args.d_w2.data ? ceil_div(D / 64, 2) : 0);
    items += of_set * ceil_div(args.hidden, kColumns) * (args.shared ? 1 : g.kv_heads);
    Strided h = hidden_gradient(args);
    h.data = args.h;
    first(make_boxes(of.tokens, args, kStepRows));
    first(make_boxes(of.d_z, args, hidden_gradient(args), args.hidden, kStepRows));
    first(make_boxes(of.d_out, args, args.d_out, D, kStepRows));
    if (args.mlp) first(make_boxes(of.h, args, h, args.hidden, kStepRows));
  }
  if (first.error != cudaSuccess) return first.error;
  return launch(weight_gradients<T, D, kColumns>, static_cast<unsigned>(std::min<std::int64_t>(items, num_sms)),
                kThreads, WeightLayout<kColumns>::kMemory, stream, maps, work);
}

template <class T, int D>
cudaError_t run_token_gradients(const CompressWork& work, int num_sms, cudaStream_t stream) {
  TokenGradientMaps maps{};
  FirstError first;
  bool wanted = false;
  for (int i = 0; i < work.problems; ++i) {
    const CompressArgs& args = work.problem[i];
    wanted |= args.d_k.data != nullptr;
    first(make_boxes(maps.of[i].d_z, args, hidden_gradient(args), args.hidden, TokenLayout::kRows));
    first(make_tensor_map(maps.of[i].w1, args, args.w1, args.hidden, args.geometry.kernel_size * D, kTokenColumns));
  }
  if (first.error != cudaSuccess || !wanted) return first.error;
  const Geometry& g = work.problem[0].geometry;
  const std::int64_t items = ceil_div(work.max_token_segments, TokenLayout::kSegments) *
                             ceil_div(g.kernel_stride * D, kTokenColumns) * g.kv_heads * work.problems;
  return launch(token_gradients<T, D>, static_cast<unsigned>(std::min<std::int64_t>(items, num_sms)), kThreads,
                TokenLayout::kMemory, stream, maps, work);
}

template <class T, int D>
cudaError_t run(const CompressWork& work, cudaStream_t stream) {
  int num_sms = 0;
  FirstError first;
  first(sm_count(num_sms));
  first(run_sums<T>(work, stream));
  if (first.error != cudaSuccess) return first.error;
  // Fewer columns where more would be empty.
  const int hidden = work.problem[0].hidden;
  first(hidden <= 128 || (hidden > 256 && hidden <= 384) ? run_weight_gradients<T, D, 128>(work, num_sms, stream)
                                                         : run_weight_gradients<T, D, 256>(work, num_sms, stream));
  first(run_token_gradients<T, D>(work, num_sms, stream));
  for (int i = 0; i < work.problems; ++i) {
    const CompressArgs& args = work.problem[i];
    const dim3 grid(static_cast<unsigned>(ceil_div(args.geometry.kernel_size * D, 8)),
                    args.shared ? 1 : args.geometry.kv_heads);
    if (args.d_pe.data) first(launch(position_gradient<T>, grid, 256, 0, stream, args));
  }
  return first.error;
}

}  // namespace

template <>
cudaError_t launch_compress_gradients<NSA_ELEMENT, NSA_KEY_DIM>(const CompressWork& work, cudaStream_t stream) {
  return run<NSA_ELEMENT, NSA_KEY_DIM>(work, stream);
}

}  // namespace nsa::cuda::sm90::compress
