// dS of the selection on its way from d_kv to d_q (kernels of sm90), a window of the queries at a time.
#pragma once

#include "cuda/common/geometry.cuh"

namespace nsa::cuda {

/// dS of the selection in 16-bit types: without it d_q would have to make the scores and dP a second time. A row is a
/// head of a query and an entry of the inverse index, in the order of its lists, for each slice of a group's heads
/// (HeadPacking); a plane has sixteen keys of all rows, block_size / 16 planes the keys of a block.
///
/// Two rows of a plane, 64 bytes, as the accumulators of d_kv have them, whose rows are keys: eight vectors of eight
/// bytes, of the keys k and k + 8: {key k, row 0}, {k, 1}, {k + 8, 0}, {k + 8, 1}. An even number of heads never shares
/// such a pair with another query.
struct SelectedDs {
  static constexpr int kPlaneKeys = 16, kRow = 32;  // bytes of a row in a plane

  char* data = nullptr;                // null: not wanted
  std::int64_t entries = 0, rows = 0;  // of the lists of all KV heads, an upper bound; times G

  SelectedDs() = default;
  SelectedDs(std::int64_t list_entries, int group) : entries(list_entries), rows(list_entries * group) {}

  /// Of two rows and two keys: where a lane of d_kv has what it stores, of the pair lane % 4; what a lane of d_q loads,
  /// twice as much, of the pair lane / 4, whose slot is the row's (offset).
  __host__ __device__ static int stored_vector(int lane) { return lane % 4 * (2 * kRow) + lane / 4 * 8; }
  __host__ __device__ static int loaded_vector(int lane) { return lane % 4 * 16; }

  __host__ __device__ std::int64_t plane() const { return rows * kRow; }
  std::int64_t bytes(int block_size) const { return block_size / kPlaneKeys * plane(); }
  /// Where a row lies in a plane; heads: of a slice.
  __host__ __device__ std::int64_t offset(int heads, int slice, std::int64_t entry, int head) const {
    return ((slice * entries + entry) * heads + head) * kRow;
  }
};

/// The windows of a call, one after the other: queries of a sequence may be in several.
struct SelectedWindows {
  static constexpr int kBefore = 1, kAfter = 2;  // of a sequence: other windows have some of its queries

  bool stored = false;        // dS is
  bool several = false;       // some sequence is in several windows
  Strided sums;               // float32 (rows of keys, KV head, Dk + Dv): dK and dV of the windows so far
  int cut = 0;                // of every sequence: kBefore, kAfter
  const int* cuts = nullptr;  // packed: of each

  __device__ int of(int sequence) const { return cuts ? cuts[sequence] : cut; }
};

}  // namespace nsa::cuda
