// What attention kernels need to know of a call, and how they find their rows in it.
#pragma once

#include <cstdint>

#include "cuda/common/tile.cuh"

namespace nsa::cuda {

/// A (B, S, heads, D) or (total, heads, D) tensor; batch = 0 when packed. Strides in elements, the last is 1.
struct Strided {
  void* data = nullptr;
  std::int64_t batch = 0, row = 0, head = 0;

  template <class T>
  __device__ T* at(int b, std::int64_t r, int h) const {
    return static_cast<T*>(data) + b * batch + r * row + h * head;
  }
};

/// lse and other float32 per row and head: (B, H, S) or (H, total).
struct PerRow {
  float* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0;

  __device__ float& at(int b, std::int64_t r, int h) const { return data[b * batch + h * head + r * row]; }
};

/// Division of 0 <= x < 2^32 / divisor by a divisor of the host's choice.
struct FastDivmod {
  unsigned divisor = 1, factor = 0;

  FastDivmod() = default;
  __host__ __device__ explicit FastDivmod(int d)
      : divisor(static_cast<unsigned>(d)), factor(d > 1 ? 0xffffffffu / static_cast<unsigned>(d) + 1 : 0) {}
  __device__ int divide(int x) const {
    return divisor > 1 ? static_cast<int>(__umulhi(static_cast<unsigned>(x), factor)) : x;
  }
};

/// How the query and key rows of a call are cut into sequences and groups.
struct Geometry {
  int batches = 0;   // sequences
  int heads = 0;     // H
  int kv_heads = 0;  // Hkv
  int group = 0;     // G
  FastDivmod by_group;
  int q_len = 0;              // batched: Sq of every sequence; packed: an upper bound of it
  int k_len = 0;              // batched: Sk of every sequence; packed: an upper bound of it
  const int* cu_q = nullptr;  // packed: offsets (batches + 1); null: batched
  const int* cu_k = nullptr;
  std::int64_t total_q = 0, total_k = 0;  // packed: rows of the tensors, to which offsets are clamped
  int kernel_size = 32, kernel_stride = 16;
};

/// One sequence. Rows count from the start of batch `batch` of a batched tensor, or of a packed tensor (batch = 0).
struct DeviceSequence {
  int index, batch;
  int q_begin, q_len, k_begin, k_len;

  __device__ int position(int i) const { return i + k_len - q_len; }
};

/// Offsets are sanitized before (sanitize_offsets of core/backend.h). Without this ptxas spills in selected_forward.
__device__ inline int clamp_offset(int x, std::int64_t total) {
  return x < 0 ? 0 : x > total ? static_cast<int>(total) : x;
}

__device__ inline DeviceSequence sequence_of(const Geometry& p, int b) {
  if (!p.cu_q) return {.index = b, .batch = b, .q_begin = 0, .q_len = p.q_len, .k_begin = 0, .k_len = p.k_len};
  const int q0 = clamp_offset(p.cu_q[b], p.total_q), q1 = clamp_offset(p.cu_q[b + 1], p.total_q);
  const int k0 = clamp_offset(p.cu_k[b], p.total_k), k1 = clamp_offset(p.cu_k[b + 1], p.total_k);
  const int k_len = min(max(k1 - k0, 0), p.k_len);
  const int q_len = min(min(max(q1 - q0, 0), p.q_len), k_len);
  return {.index = b, .batch = 0, .q_begin = q0, .q_len = q_len, .k_begin = k0, .k_len = k_len};
}

/// N_c(length).
__host__ __device__ inline int num_compressed(const Geometry& p, int length) {
  return length < p.kernel_size ? 0 : (length - p.kernel_size) / p.kernel_stride + 1;
}

/// Compressed rows of the packed sequences first, first + step, ... before sequence b.
__device__ inline int compressed_before(const Geometry& p, int b, int first, int step) {
  int rows = 0;
  for (int i = first; i < b; i += step) rows += num_compressed(p, p.cu_k[i + 1] - p.cu_k[i]);
  return rows;
}

/// First compressed row of sequence b: the compressed tokens of packed sequences follow each other. All threads of the
/// block call it; it ends with a barrier.
__device__ inline int compressed_begin(const Geometry& p, int b) {
  if (!p.cu_q) return 0;
  __shared__ int sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  const int mine = compressed_before(p, b, threadIdx.x, blockDim.x);
  if (mine) atomicAdd(&sum, mine);  // integers: the order does not matter
  __syncthreads();
  return sum;
}

/// The same for the threads of one warp.
__device__ inline int compressed_begin_in_warp(const Geometry& p, int b) {
  if (!p.cu_q) return 0;
  return __reduce_add_sync(0xffffffffu, compressed_before(p, b, threadIdx.x % 32, 32));
}

/// Keys or values of one head of a sequence, the first of which is row `begin`, on their way into tiles.
template <class T, int D, int kRows, int kThreads>
__device__ inline RowStream<T, D, kRows, kThreads> key_stream(const Strided& t, const DeviceSequence& s, int begin,
                                                              int head, int thread) {
  return {t.at<T>(s.batch, begin, head), t.row, thread};
}

/// What scores of a head's keys are multiplied by beside the softmax scale.
__device__ __forceinline__ float key_scale(const Strided&, int) { return 1; }

/// Keys [first, last) that a query sees.
struct KeyRange {
  int first, last;
};

/// The rule of the sliding window (window > 0) or of the compressed branch (window == 0).
__device__ inline KeyRange visible_keys(const Geometry& p, int window, int position) {
  if (window > 0) return {max(position - window + 1, 0), position + 1};
  return {0, num_compressed(p, position + 1)};
}

/// Query rows of a tile: row r of a sequence and KV head is query r / G, head r % G of the group.
struct Row {
  int query, head;
  bool valid;
};
__device__ inline Row row_of(const Geometry& p, const DeviceSequence& s, int kv_head, std::int64_t r) {
  const bool valid = r < static_cast<std::int64_t>(s.q_len) * p.group;
  const int query = valid ? static_cast<int>(r / p.group) : 0;
  return {query, kv_head * p.group + (valid ? static_cast<int>(r - static_cast<std::int64_t>(query) * p.group) : 0),
          valid};
}

}  // namespace nsa::cuda
