// How the keys and queries of a call are cut: key tiles, chunks of queries, what lies before a sequence.
#pragma once

#include "cuda/common/geometry.cuh"

namespace nsa::cuda {

inline constexpr int kKeyTile = 64;  // keys of a thread block of d_kv

/// The queries that may see a key tile of a range are cut into items, short enough to fill the device, long enough to
/// make partial sums rare. The cut depends on the sequence alone, so that its bits do not depend on the others.
inline constexpr int kRangeChunk = 512, kMaxRangeChunks = 16;
__host__ __device__ inline int range_queries(int window, int q_len) {
  return window > 0 && window < q_len - 64 ? window + 64 : q_len;
}
__host__ __device__ inline int least_range_chunk(int window) { return window > 0 ? 2 * kRangeChunk : kRangeChunk; }
__host__ __device__ inline int range_chunk(int window, int q_len) {
  const int even = (range_queries(window, q_len) + kMaxRangeChunks * 256 - 1) / (kMaxRangeChunks * 256) * 256;
  const int least = least_range_chunk(window);
  return even > least ? even : least;
}
/// In 16-bit types the compressed branch's chunks are sums of smaller ones: they are items of their own where dS is
/// stored (DsBuffer), so that few queries at a time fill the device.
__host__ __device__ inline int small_chunk(int q_len) {
  return q_len <= 4096 ? kRangeChunk : q_len <= 16384 ? 128 : 256;
}
/// Of sequences with up to q_len queries.
__host__ __device__ inline int max_range_chunks(int window, int q_len) {
  const int least = least_range_chunk(window), chunks = (range_queries(window, q_len) + least - 1) / least;
  return chunks < 1 ? 1 : chunks < kMaxRangeChunks ? chunks : kMaxRangeChunks;
}

/// What lies before a sequence of a call, in rows of the tensors: where its share begins of an array that holds
/// something for every row. Before the end of the last sequence lies the whole call, so the same functions give sizes.
/// Shares begin at rounded down multiples of these numbers and are never shorter than what they hold, so no sum over
/// sequences is needed and memory follows the rows, however uneven the sequences are.
struct RowPrefix {
  std::int64_t q, k;
  int sequences;
};
__host__ __device__ inline RowPrefix end_prefix(const Geometry& g) {
  if (g.cu_q) return {g.total_q, g.total_k, g.batches};
  return {static_cast<std::int64_t>(g.batches) * g.q_len, static_cast<std::int64_t>(g.batches) * g.k_len, g.batches};
}
__host__ __device__ inline RowPrefix row_prefix(const Geometry& g, const DeviceSequence& seq) {
  // Of each two summands one is 0.
  return {seq.q_begin + static_cast<std::int64_t>(seq.batch) * g.q_len,
          seq.k_begin + static_cast<std::int64_t>(seq.batch) * g.k_len, seq.index};
}

/// The sequence in whose share element x lies: the last one before which there are first(before) <= x.
template <class First>
__device__ inline int sequence_at(const Geometry& g, std::int64_t x, const First& first) {
  int low = 0, high = g.batches;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first(row_prefix(g, sequence_of(g, middle))) <= x ? low : high) = middle;
  }
  return low;
}

/// Partial sums for ranges: a sequence of more than `least` queries, cut into at most `chunks` of at least `least`, has
/// one for each chunk and `tile` raw tokens; the others have none.
__host__ __device__ inline std::int64_t range_partials(const RowPrefix& at, int tile, int least, int chunks) {
  const std::int64_t ends = 2 * at.q / least, most = static_cast<std::int64_t>(at.sequences) * chunks;
  return at.k * chunks / tile + (ends < most ? ends : most);
}

/// Queries of an item of a list (kept in shared memory).
inline constexpr int kListChunk = 1024;

}  // namespace nsa::cuda
