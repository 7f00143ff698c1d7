// phi: blocks of tokens squeezed into one, and its gradients, as products (gemm.cuh) that read the tokens in place.
//
// Compressed rows of all sequences are numbered m = 0, 1, ...; a table gives each one's first token (-1: the row is
// past the last block, zero). With x = tokens + pe: mlp z = x W1 + b1, h = silu(z), out = h W2 + b2; linear out = x W1
// + b1. pe never touches the tokens: pe W1 is one row of constants.
//
// Gradient of the tokens: token j*d + s of a sequence is token q*d + s of block j - q, q < l/d, so groups of d tokens
// are the rows of one product over (q, hidden unit), and every sum has one order.
#pragma once

#include "cuda/common/geometry.cuh"
#include "cuda/common/params.h"
#include "cuda/portable/gemm.cuh"

namespace nsa::cuda::portable {

/// Fills first_token and group. Grid x: sequence, y: problem.
template <class T>
__global__ void __launch_bounds__(256) compress_tables(const __grid_constant__ CompressPair pair) {
  const CompressArgs& args = pair.problem[blockIdx.y];
  const Geometry& p = args.geometry;
  const int b = blockIdx.x, d = p.kernel_stride;
  const DeviceSequence seq = sequence_of(p, b);
  const int c_begin = p.cu_q ? compressed_begin(p, b) : b * args.compressed_per_batch;
  const int blocks = args.completed ? args.completed[b * args.completed_step] : num_compressed(p, seq.k_len);
  for (int i = threadIdx.x; i < blocks; i += blockDim.x)
    args.first_token[c_begin + i] =
        seq.batch * args.k.batch + (seq.k_begin + static_cast<std::int64_t>(i) * d) * args.k.row;
  if (blocks > 0 && threadIdx.x == 0) args.first_token[args.rows] = 0;  // there are blocks
  if (!args.group) return;
  // Packed: sequence b's groups begin at floor(first token / d) + b, which leaves a slot for its last, partly filled
  // one.
  const int per_batch = (p.k_len + d - 1) / d, g_begin = p.cu_q ? seq.k_begin / d + b : b * per_batch;
  const int groups = (seq.k_len + d - 1) / d;
  for (int j = threadIdx.x; j < groups; j += blockDim.x)
    args.group[g_begin + j] = make_int4(b, j, min(seq.k_len - j * d, d), c_begin);
}

__device__ inline float sigmoid(float x) { return 1 / (1 + exp2_fast(-x * kLog2e)); }

/// A problem for gemm(): the arguments and the KV head (or set of weights) that blockIdx.z stands for.
struct CompressOp : CompressArgs {
  int m = 0, n = 0, outer = 1, inner = 0;
  int head = 0;

  __device__ int set() const { return shared ? 0 : head; }
};

/// One problem or two (k and v): blockIdx.z counts the heads of the first, then those of the second.
template <class Op>
struct OneOrTwo {
  static constexpr bool kARows = Op::kARows, kBRows = Op::kBRows;
  Op op[2];
  int heads;  // of the first

  __device__ Op at(int z) const { return z < heads ? op[0].at(z) : op[1].at(z - heads); }
};

/// constant = pe W1 + b1, one row for every set of weights.
template <class T>
struct Constants : CompressOp {
  static constexpr bool kARows = false, kBRows = true;
  __device__ Constants at(int z) const {
    Constants op = *this;
    op.head = z;
    return op;
  }
  __device__ const T* a(int, int, int k) const { return pe.at<T>(head, token_of(k), channel_of(k)); }
  __device__ const T* b(int, int k, int n) const { return w1.at<T>(head, k, n); }
  __device__ bool zero(int) const { return !pe.data || first_token[rows] < 0; }
  __device__ void write(int, int n, float x, float y) const {
    if (b1.data) x += to_float(*b1.at<T>(head, 0, n)), y += to_float(*b1.at<T>(head, 0, n + 1));
    store_pair(constant + head * hidden + n, x, y);
  }
};

/// z = x W1 + constant: written as h = silu(z) (and z, for the backward), or as the output of `linear`.
template <class T>
struct FirstLayer : CompressOp {
  static constexpr bool kARows = false, kBRows = true;
  __device__ FirstLayer at(int z) const {
    FirstLayer op = *this;
    op.head = z;
    return op;
  }
  __device__ const T* a(int m, int, int k) const {
    const std::int64_t first = first_token[m];
    if (first < 0) return nullptr;
    return static_cast<const T*>(this->k.data) + first + token_of(k) * this->k.row + head * this->k.head +
           channel_of(k);
  }
  __device__ const T* b(int, int k, int n) const { return w1.at<T>(set(), k, n); }
  __device__ bool zero(int m) const { return first_token[m] < 0; }
  __device__ void write(int m, int n, float x, float y) const {
    const bool none = first_token[m] < 0;
    x = none ? 0 : x + constant[set() * hidden + n];
    y = none ? 0 : y + constant[set() * hidden + n + 1];
    if (!mlp) {
      store_pair(out.at<T>(batch_of(m), row_of(m), head) + n, x, y);
      return;
    }
    if (z) store_pair(z + buffer(head, m) + n, x, y);
    store_pair(static_cast<T*>(h) + buffer(head, m) + n, x * sigmoid(x), y * sigmoid(y));
  }
};

/// out = h W2 + b2.
template <class T>
struct SecondLayer : CompressOp {
  static constexpr bool kARows = false, kBRows = true;
  __device__ SecondLayer at(int z) const {
    SecondLayer op = *this;
    op.head = z;
    return op;
  }
  __device__ const T* a(int m, int, int k) const { return static_cast<const T*>(h) + buffer(head, m) + k; }
  __device__ const T* b(int, int k, int n) const { return w2.at<T>(set(), k, n); }
  __device__ bool zero(int m) const { return first_token[m] < 0; }
  __device__ void write(int m, int n, float x, float y) const {
    const bool none = first_token[m] < 0;
    x = none ? 0 : x + (b2.data ? to_float(*b2.at<T>(set(), 0, n)) : 0);
    y = none ? 0 : y + (b2.data ? to_float(*b2.at<T>(set(), 0, n + 1)) : 0);
    store_pair(out.at<T>(batch_of(m), row_of(m), head) + n, x, y);
  }
};

/// d_z = (d_out W2^T) * silu'(z).
template <class T>
struct HiddenGradient : CompressOp {
  static constexpr bool kARows = false, kBRows = false;
  __device__ HiddenGradient at(int z) const {
    HiddenGradient op = *this;
    op.head = z;
    return op;
  }
  __device__ const T* a(int m, int, int k) const {
    return first_token[m] < 0 ? nullptr : d_out.at<T>(batch_of(m), row_of(m), head) + k;
  }
  __device__ const T* b(int, int k, int n) const { return w2.at<T>(set(), n, k); }
  __device__ void write(int m, int n, float x, float y) const {
    const float* at = z + buffer(head, m) + n;
    const auto slope = [](float z) {
      const float s = sigmoid(z);
      return s * (1 + z * (1 - s));
    };
    store_pair(static_cast<T*>(d_z) + buffer(head, m) + n, x * slope(at[0]), y * slope(at[1]));
  }
};

/// d_k: rows are groups of d tokens, columns (token of the group, channel), the reduction runs over (q, hidden unit).
template <class T>
struct TokenGradient : CompressOp {
  static constexpr bool kARows = false, kBRows = false;
  __device__ TokenGradient at(int z) const {
    TokenGradient op = *this;
    op.head = z;
    return op;
  }
  __device__ const T* a(int m, int o, int k) const {
    const int4 g = group[m];
    const int i = g.y - o;  // the block of which these are the tokens o*d ...
    if (g.z == 0 || i < 0 || i >= num_compressed(geometry, sequence_of(geometry, g.x).k_len)) return nullptr;
    return static_cast<const T*>(d_z) + buffer(head, g.w + i) + k;
  }
  __device__ const T* b(int o, int k, int n) const {
    return w1.at<T>(set(), static_cast<std::int64_t>(o) * geometry.kernel_stride * dim + n, k);
  }
  __device__ void write(int m, int n, float x, float y) const {
    const int4 g = group[m];
    if (token_of(n) >= g.z) return;
    const DeviceSequence seq = sequence_of(geometry, g.x);
    const std::int64_t token = seq.k_begin + static_cast<std::int64_t>(g.y) * geometry.kernel_stride + token_of(n);
    store_pair(d_k.at<T>(seq.batch, token, head) + channel_of(n), x, y);
  }
};

/// d_w1 = x^T d_z, over the compressed rows of one KV head, or of all of them when the weights are shared.
template <class T>
struct FirstWeightGradient : CompressOp {
  static constexpr bool kARows = true, kBRows = true;
  __device__ FirstWeightGradient at(int z) const {
    FirstWeightGradient op = *this;
    op.head = z;
    return op;
  }
  __device__ const T* a(int m, int o, int k) const {
    const std::int64_t first = first_token[k];
    if (first < 0) return nullptr;
    return static_cast<const T*>(this->k.data) + first + token_of(m) * this->k.row + (head + o) * this->k.head +
           channel_of(m);
  }
  __device__ const T* b(int o, int k, int n) const { return static_cast<const T*>(d_z) + buffer(head + o, k) + n; }
  __device__ void write(int m, int n, float x, float y) const {
    const float position = pe.data ? to_float(*pe.at<T>(set(), token_of(m), channel_of(m))) : 0;
    const float* sum = d_z_sum + set() * hidden + n;
    store_pair(d_w1.at<T>(set(), m, n), x + position * sum[0], y + position * sum[1]);
  }
};

/// d_w2 = h^T d_out.
template <class T>
struct SecondWeightGradient : CompressOp {
  static constexpr bool kARows = true, kBRows = true;
  __device__ SecondWeightGradient at(int z) const {
    SecondWeightGradient op = *this;
    op.head = z;
    return op;
  }
  __device__ const T* a(int m, int o, int k) const { return static_cast<const T*>(h) + buffer(head + o, k) + m; }
  __device__ const T* b(int o, int k, int n) const {
    return first_token[k] < 0 ? nullptr : d_out.at<T>(batch_of(k), row_of(k), head + o) + n;
  }
  __device__ void write(int m, int n, float x, float y) const { store_pair(d_w2.at<T>(set(), m, n), x, y); }
};

/// Column sums over compressed rows (and KV heads when shared), 32 columns of 8 strided partial sums per thread block.
/// value(head, m, column) must be 0 for rows past the last block.
template <class Value, class Write>
__device__ inline void column_sums(const CompressArgs& args, int columns, const Value& value, const Write& write) {
  __shared__ float partials[8][32];
  const int n = blockIdx.x * 32 + threadIdx.x, set = blockIdx.y;
  float sum = 0;
  if (n < columns)
    for (int head = args.shared ? 0 : set; head < (args.shared ? args.geometry.kv_heads : set + 1); ++head)
      for (int m = threadIdx.y; m < args.rows; m += 8) sum += value(head, m, n);
  partials[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || n >= columns) return;
  sum = 0;
  for (int i = 0; i < 8; ++i) sum += partials[i][threadIdx.x];
  write(set, n, sum);
}

/// d_z_sum, d_b1 (the same, rounded) and, for mlp, nothing else.
template <class T>
__global__ void __launch_bounds__(256) hidden_sums(const __grid_constant__ CompressArgs args) {
  column_sums(
      args, args.hidden,
      [&](int head, int m, int n) { return to_float(static_cast<const T*>(args.d_z)[args.buffer(head, m) + n]); },
      [&](int set, int n, float sum) {
        args.d_z_sum[set * args.hidden + n] = sum;
        if (args.d_b1.data) *args.d_b1.at<T>(set, 0, n) = from_float<T>(sum);
      });
}
/// d_b2.
template <class T>
__global__ void __launch_bounds__(256) output_sums(const __grid_constant__ CompressArgs args) {
  column_sums(
      args, args.dim,
      [&](int head, int m, int n) {
        return args.first_token[m] < 0 ? 0 : to_float(args.d_out.at<T>(args.batch_of(m), args.row_of(m), head)[n]);
      },
      [&](int set, int n, float sum) { *args.d_b2.at<T>(set, 0, n) = from_float<T>(sum); });
}
/// linear: d_z is d_out, with zeros past the last block. A thread per element.
template <class T>
__global__ void __launch_bounds__(256) copy_output_gradient(const __grid_constant__ CompressArgs args) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int head = blockIdx.y;
  if (i >= static_cast<std::int64_t>(args.rows) * args.hidden) return;
  const int m = static_cast<int>(i / args.hidden), n = static_cast<int>(i % args.hidden);
  static_cast<T*>(args.d_z)[args.buffer(head, m) + n] =
      args.first_token[m] < 0 ? from_float<T>(0) : args.d_out.at<T>(args.batch_of(m), args.row_of(m), head)[n];
}

inline constexpr int kMeanTokens = 4;  // of a thread of mean_backward
inline constexpr int kMeanRows = 32;   // that a thread of mean_blocks has on their way

/// Neighbouring elements that are loaded and stored at once, and their sum over rows: sixteen bytes, at multiples of
/// which every row begins (supports_layout).
template <class T>
struct Vector {
  static constexpr int kSize = sizeof(uint4) / sizeof(T);
  union Elements {
    uint4 bits;
    T x[kSize];
    __device__ Elements() {}
  };
  float sum[kSize] = {};

  __device__ static uint4 load(const T* p) { return *reinterpret_cast<const uint4*>(p); }
  __device__ void add(const uint4& bits) {
    Elements row;
    row.bits = bits;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] += to_float(row.x[i]);
  }
  __device__ uint4 mean(int count) const {
    Elements row;
#pragma unroll
    for (int i = 0; i < kSize; ++i) row.x[i] = from_float<T>(sum[i] / count);
    return row.bits;
  }
};

/// mean: the average of a block's tokens. A thread per vector of a compressed row, vectors and heads of a row side by
/// side, through the thread's own shared memory, where all loads are on their way. Grid x: row, z: problem.
template <class T>
__global__ void __launch_bounds__(256) mean_blocks(const __grid_constant__ CompressPair pair) {
  using P = Vector<T>;
  const CompressArgs& args = pair.problem[blockIdx.z];
  const int vectors = args.dim / P::kSize, i = blockIdx.y * blockDim.x + threadIdx.x;
  const int m = blockIdx.x, head = i / vectors, c = (i - head * vectors) * P::kSize, l = args.geometry.kernel_size;
  if (head >= args.geometry.kv_heads) return;
  const std::int64_t token = static_cast<std::int64_t>(args.row_of(m)) * args.geometry.kernel_stride;
  const std::int64_t first =
      args.first_token ? args.first_token[m] : args.batch_of(m) * args.k.batch + token * args.k.row;
  P vector;
  if (first >= 0) {
    const T* at = static_cast<const T*>(args.k.data) + first + head * args.k.head + c;
    extern __shared__ uint4 own[];
    for (int begin = 0; begin < l; begin += kMeanRows) {
      const int rows = min(l - begin, kMeanRows);
#pragma unroll 8
      for (int r = 0; r < rows; ++r)
        copy16(shared_address(own + r * blockDim.x + threadIdx.x), at + (begin + r) * args.k.row, true);
      commit_copies();
      wait_copies<0>();
#pragma unroll 8
      for (int r = 0; r < rows; ++r) vector.add(own[r * blockDim.x + threadIdx.x]);
    }
  }
  *reinterpret_cast<uint4*>(args.out.at<T>(args.batch_of(m), args.row_of(m), head) + c) = vector.mean(l);
}

/// The d tokens of a group are in the same blocks. A thread per vector of some of their rows. Grid x: group.
template <class T>
__global__ void __launch_bounds__(256) mean_backward(const __grid_constant__ CompressArgs args) {
  using P = Vector<T>;
  const Geometry& p = args.geometry;
  const int l = p.kernel_size, d = p.kernel_stride, vectors = args.dim / P::kSize, lines = p.kv_heads * vectors;
  const int i = blockIdx.y * blockDim.x + threadIdx.x, begin = i / lines * kMeanTokens;
  const int line = i % lines, head = line / vectors, c = (line - head * vectors) * P::kSize;
  int4 g;  // as compress_tables has it
  if (args.group) {
    g = args.group[blockIdx.x];
  } else {
    const int per_batch = (p.k_len + d - 1) / d, b = blockIdx.x / per_batch, j = blockIdx.x - b * per_batch;
    g = make_int4(b, j, min(p.k_len - j * d, d), b * args.compressed_per_batch);
  }
  if (begin >= g.z) return;
  const DeviceSequence seq = sequence_of(p, g.x);
  const int first = max(g.y - l / d + 1, 0), last = min(g.y, num_compressed(p, seq.k_len) - 1);
  P vector;
#pragma unroll 2
  for (int m = g.w + first; m <= g.w + last; ++m)
    vector.add(P::load(args.d_out.at<T>(args.batch_of(m), args.row_of(m), head) + c));
  const uint4 mean = vector.mean(l);
  const std::int64_t token = seq.k_begin + static_cast<std::int64_t>(g.y) * d + begin;
  T* to = args.d_k.at<T>(seq.batch, token, head) + c;
  for (int s = 0; s < min(g.z - begin, kMeanTokens); ++s) *reinterpret_cast<uint4*>(to + s * args.d_k.row) = mean;
}

}  // namespace nsa::cuda::portable
