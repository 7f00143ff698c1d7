// How the lanes of a warp of selected_d_q_of_ds share the rows of indices of its queries.
#pragma once

namespace nsa::cuda::sm90::selected_attention {

/// Each query has as many lanes, a power of two; the ranks of its row go round them.
struct EntryLanes {
  static constexpr int kMax = 5;  // entries of a lane

  int log2 = 5;  // of the lanes of a query

  EntryLanes() = default;
  /// `together`: the queries of a warp, at most sixteen.
  __host__ __device__ explicit EntryLanes(int together) {
    while (together > 1) together = (together + 1) / 2, --log2;
  }
  __host__ __device__ int count() const { return 1 << log2; }
  __host__ __device__ int query(int lane) const { return lane >> log2; }
  __host__ __device__ int rank(int lane, int number) const { return (lane & (count() - 1)) + (number << log2); }
  /// The lanes of a query, a bit each.
  __host__ __device__ unsigned mask(int query) const { return (0xffffffffu >> (32 - count())) << (query << log2); }
};

}  // namespace nsa::cuda::sm90::selected_attention
