// The rotation of a step's new tokens, whose positions follow from lengths on the device.
#include "core/strided.h"
#include "cuda/operations/branch.h"
#include "cuda/operations/operations.h"

namespace nsa::cuda {
namespace {

/// Copies of q, k_slc and k_swa: as many as `tensors`, (B, rows, heads, D) each.
struct RotateTokensArgs {
  Strided from[3], to[3];
  int heads[3];
  int tensors, rows, half;  // D / 2
  Rotation rotation;
  const int* lengths;  // (B)
  const int* num_new;  // (B); null: all rows
  const int* starts;   // packed: (B + 1) rows where sequences begin, of a batch of one; null: a batch
  int sequences;       // B
  bool counted;        // lengths count the new tokens already
};

/// The position of row r of batch b, within the tables; -1: the row is padding. Offsets and lengths are not trusted.
__device__ std::int64_t position_of(const RotateTokensArgs& args, int b, int r) {
  int begin = 0, added = args.rows;
  if (args.starts) {
    if (r >= args.starts[args.sequences]) return -1;
    int end = args.sequences;
    for (b = 0; end - b > 1;) {
      const int middle = (b + end) / 2;
      (args.starts[middle] <= r ? b : end) = middle;
    }
    begin = args.starts[b], added = args.starts[b + 1] - begin;
  } else if (args.num_new) {
    added = min(max(args.num_new[b], 0), args.rows);
  }
  if (r - static_cast<std::int64_t>(begin) >= added) return -1;
  const std::int64_t before = static_cast<std::int64_t>(args.lengths[b]) - (args.counted ? added : 0);
  return min(max(before + r - begin, std::int64_t{0}), static_cast<std::int64_t>(args.rotation.positions) - 1);
}

constexpr int kThreads = 128;
constexpr int kHeads = 5;  // of a thread: with 128 channels a thread block has those of 64 query and of 4 KV heads

/// Grid x: rows, through the batches; y: heads of all tensors. A thread has 16 bytes of each half of kHeads rows, for
/// which it reads angles once. Each product and each sum is rounded to float32, as torch does it on both devices.
template <class T>
__global__ void __launch_bounds__(kThreads) rotate_rows(const __grid_constant__ RotateTokensArgs args) {
  griddepcontrol_wait();
  launch_dependents();
  constexpr int kPairs = 16 / sizeof(T);
  const int vectors = args.half / kPairs, side = kThreads / vectors, own = threadIdx.x / vectors;
  const int column = static_cast<int>(threadIdx.x) % vectors * kPairs;
  if (own >= side) return;
  const int b = blockIdx.x / args.rows, r = blockIdx.x % args.rows;
  const std::int64_t position = position_of(args, b, r);
  union Vector {
    uint4 bits;
    T x[kPairs];
    __device__ Vector() : bits{} {}
  } low[kHeads], high[kHeads];
  T* to[kHeads];
#pragma unroll
  for (int u = 0; u < kHeads; ++u) {
    int head = (static_cast<int>(blockIdx.y) * kHeads + u) * side + own, tensor = 0;
    while (tensor < args.tensors && head >= args.heads[tensor]) head -= args.heads[tensor++];
    to[u] = tensor < args.tensors ? args.to[tensor].at<T>(b, r, head) + column : nullptr;
    if (!to[u] || position < 0) continue;
    const T* const from = args.from[tensor].at<T>(b, r, head) + column;
    low[u].bits = *reinterpret_cast<const uint4*>(from);
    high[u].bits = *reinterpret_cast<const uint4*>(from + args.half);
  }
  if (position >= 0) {
    const float* const cosines = args.rotation.cos + position * args.rotation.cos_row + column;
    const float* const sines = args.rotation.sin + position * args.rotation.sin_row + column;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float cos = cosines[j], sin = sines[j];
#pragma unroll
      for (int u = 0; u < kHeads; ++u) {
        const float x = to_float(low[u].x[j]), y = to_float(high[u].x[j]);
        low[u].x[j] = from_float<T>(__fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin)));
        high[u].x[j] = from_float<T>(__fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin)));
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kHeads; ++u) {
    if (!to[u]) continue;
    *reinterpret_cast<uint4*>(to[u]) = low[u].bits;
    *reinterpret_cast<uint4*>(to[u] + args.half) = high[u].bits;
  }
}

}  // namespace

Status rotate_tokens(DecodeParams& p, Execution& e) {
  if (!p.rotate) return {};
  RotateTokensArgs args{};
  std::int64_t heads = 0;
  const auto copy = [&](TensorView& tokens) {
    const TensorView from = tokens;
    tokens = take_like(e.arena, from, from.dtype);
    if (from.stride[0] == 0) tokens.stride[0] = 0;  // packed rows are those of every sequence
    args.from[args.tensors] = strided(from), args.to[args.tensors] = strided(tokens);
    args.heads[args.tensors++] = to_int(from.size(2));
    heads += from.size(2);
  };
  const bool shared = same_view(p.k_swa, p.k_slc);
  copy(p.q), copy(p.k_slc);
  if (shared) {
    p.k_swa = p.k_slc;
  } else {
    copy(p.k_swa);
  }
  args.rotation = rotation_of(p.rope_cos, p.rope_sin);
  if (e.arena.measuring() || args.rotation.positions == 0) return {};
  args.rows = to_int(p.q.size(1)), args.half = to_int(p.q.size(3) / 2);
  args.lengths = p.cache.cache_seqlens.as<const int>();
  args.num_new = p.num_new.as<const int>(), args.starts = p.query_start_loc.as<const int>();
  args.sequences = to_int(p.cache.cache_seqlens.size(0)), args.counted = !p.cache.advance;
  const auto vectors = args.half * static_cast<std::int64_t>(size_of(p.q.dtype)) / 16;
  const dim3 grid(static_cast<unsigned>(p.q.size(0) * p.q.size(1)),
                  static_cast<unsigned>(ceil_div(heads, kThreads / vectors * kHeads)));
  const auto kernel = p.q.dtype == DType::kBFloat16  ? rotate_rows<Bf16>
                      : p.q.dtype == DType::kFloat16 ? rotate_rows<Half>
                                                     : rotate_rows<float>;
  return status_of(launch_dependent(kernel, grid, kThreads, 0, e.stream, args), "rotate_rows");
}

}  // namespace nsa::cuda
