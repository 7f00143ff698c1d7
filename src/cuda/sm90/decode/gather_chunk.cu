#include "cuda/sm90/decode/gather_chunk.h"

#include "cuda/common/launch.cuh"

namespace nsa::cuda::sm90::decode {
namespace {

constexpr int kThreads = 256;
constexpr int kTogether = 8;  // copies of a thread on their way
constexpr int kRows = 64;     // of a thread block at a time

/// What sixteen bytes of T are stored as: themselves, or eight elements of e4m3.
template <class T, bool kFloat8>
struct StoredVector {
  uint4 words;
  __device__ uint4 read(float) const { return words; }
};
template <class T>
struct StoredVector<T, true> {
  uint2 words;
  /// In T, as x was before it was stored: so what T holds of x is enough for what is read of it.
  __device__ uint4 read(float scale) const {
    const auto pair = [&](std::uint32_t word, bool upper) {
      const float2 x = unpack(Half{}, to_half2(word, upper));
      return pack(T{}, x.x * scale, x.y * scale);
    };
    return {pair(words.x, false), pair(words.x, true), pair(words.y, false), pair(words.y, true)};
  }
};

/// Grid y: kind of tokens.
template <class T, bool kFloat8>
__global__ void __launch_bounds__(kThreads) gather_tokens(const __grid_constant__ GatherChunkArgs args) {
  using Stored = StoredVector<T, kFloat8>;
  const Gather& kind = args.kinds[blockIdx.y];
  const DeviceSequence s = sequence_of(args.geometry, args.sequence);
  const int before = s.k_len - s.q_len, window_begin = max(before - args.window + 1, 0);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    ChunkOffsets& to = *args.offsets;
    // Rows behind q[1] are filled: of packed ones, none that are another sequence's already.
    to.q[0] = s.q_len > 0 || !args.geometry.starts ? s.q_begin : args.geometry.rows;
    to.q[1] = to.q[0] + s.q_len;
    const int skipped = args.shares_window ? 0 : window_begin;  // rows before the window's
    if (s.q_len > 0) to.k[1] = s.k_len, to.window[0] = window_begin - skipped, to.window[1] = s.k_len - skipped;
  }
  const int first = kind.rows == Gather::kWindow ? window_begin : 0;
  const int tokens = s.q_len == 0                       ? 0
                     : kind.rows == Gather::kCompressed ? num_compressed(args.geometry, s.k_len)
                                                        : s.k_len - first;
  const int rows = tokens + kRowsBehind;
  const int row_vectors = args.geometry.kv_heads * kind.vectors, columns = min(row_vectors, kThreads);
  const int column = threadIdx.x % columns, own = threadIdx.x / columns, step = kThreads / columns;
  if (own >= step) return;
  std::uint32_t bad = 0;
  for (int tile = blockIdx.x * kRows; tile < rows; tile += gridDim.x * kRows)
    for (int vector = column; vector < row_vectors; vector += columns) {
      const int head = vector / kind.vectors, at = vector - head * kind.vectors, end = min(tile + kRows, rows);
      const float scale = kFloat8 ? kind.scales[head] : 1;
      for (int row = tile + own; row < end; row += step * kTogether) {
        Stored stored[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int r = row + i * step;
          stored[i] = r < min(end, tokens)
                          ? reinterpret_cast<const Stored*>(kind.tokens.at<char>(s, first + r, head))[at]
                          : Stored{};
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const uint4 w = stored[i].read(scale);
          const int r = row + i * step;
          if (r < end) reinterpret_cast<uint4*>(kind.to)[static_cast<std::int64_t>(r) * row_vectors + vector] = w;
          bad |=
              nonfinite_bits(T{}, w.x) | nonfinite_bits(T{}, w.y) | nonfinite_bits(T{}, w.z) | nonfinite_bits(T{}, w.w);
        }
      }
    }
  if (bad && kind.is_finite) args.offsets->nonfinite = 1;
}

}  // namespace

cudaError_t gather_chunk(DType dtype, const GatherChunkArgs& args, cudaStream_t stream) {
  const std::int64_t tiles = ceil_div(std::int64_t{args.geometry.k_len} + kRowsBehind, kRows);
  const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(tiles, 1024)), args.shares_window ? 4 : 6);
  const auto start = [&](auto* kernel) { return launch(kernel, grid, kThreads, 0, stream, args); };
  if (dtype == DType::kBFloat16) return start(args.float8 ? gather_tokens<Bf16, true> : gather_tokens<Bf16, false>);
  return start(args.float8 ? gather_tokens<Half, true> : gather_tokens<Half, false>);
}

}  // namespace nsa::cuda::sm90::decode
