// How the queries of a backward call are cut into spans, and the memory that dS takes: of the compressed branch
// (DsBuffer), of the selection (SelectedDs).
#pragma once

#include <optional>
#include <vector>

#include "core/support.h"
#include "cuda/operations/branch.h"

namespace nsa::cuda {

/// Some queries of some sequences; all of a packed call.
struct QuerySpan {
  int sequence, sequences;  // the first of them, how many
  int first, count;         // queries

  /// The same queries, counted from the first ones of another span.
  QuerySpan from(const QuerySpan& other) const {
    return {sequence - other.sequence, sequences, first - other.first, count};
  }
};

/// These queries, and of the keys those that they can see.
inline Geometry span_of(Geometry g, const QuerySpan& span) {
  g.batches = span.sequences;
  g.k_len -= g.q_len - (span.first + span.count);
  g.q_len = span.count;
  return g;
}

/// The spans of a call. A span has few enough queries that the float32 sum of their dQ over the branches takes little
/// memory, and that their dS, if it is stored, fits into its budget. Where a sequence is cut does not depend on the
/// others.
inline std::vector<QuerySpan> spans_of(const Geometry& g, std::optional<std::int64_t> ds_budget) {
  constexpr int kMax = 16384;
  const int step = small_chunk(g.q_len);
  if (g.cu_q) return {{.sequence = 0, .sequences = g.batches, .first = 0, .count = g.q_len}};
  std::vector<QuerySpan> spans;
  for (int first = 0, next; first < g.q_len; first = next) {
    const auto bytes = [&](int end) {
      return DsBuffer::bytes(span_of(g, {.sequence = 0, .sequences = 1, .first = first, .count = end - first}));
    };
    const std::int64_t left = g.q_len - first, count = ceil_div(left, kMax);
    const int most = first + to_int(count == 1 ? left : ceil_div(left, count * step) * step);
    next = ds_budget ? std::min(first + step, most) : most;
    while (next < most && bytes(std::min(next + step, most)) <= *ds_budget) next = std::min(next + step, most);
    int together = g.batches;
    if (ds_budget)
      together = to_int(std::clamp<std::int64_t>(*ds_budget / std::max<std::int64_t>(bytes(next), 1), 1, together));
    for (int b = 0; b < g.batches; b += together)
      spans.push_back(
          {.sequence = b, .sequences = std::min(together, g.batches - b), .first = first, .count = next - first});
  }
  return spans;
}

/// Bytes that dS of the selection takes for a query.
inline std::int64_t selected_ds_row(const Geometry& g, int topk, int block_size) {
  return std::min<std::int64_t>(topk, ceil_div(g.k_len, block_size)) * block_size * g.heads * 2;
}
/// The memory for dS of the selection. Of a batched call as much for each head, so that windows, and with them the
/// order in which dK and dV are added up, are the same with any number of heads in a call; a packed call is in as few
/// as can be.
inline std::int64_t selected_ds_budget(const Geometry& g) {
  constexpr std::int64_t kPacked = std::int64_t{2} << 30, kHead = std::int64_t{32} << 20;
  return g.cu_q ? kPacked : g.heads * kHead;
}
/// The windows of a call whose dS of the selection is stored: queries of a sequence or of several, rows of a packed
/// call. About as many in each as fit; none where that is too few for the kernels.
inline std::vector<QuerySpan> selected_windows(const Geometry& g, std::int64_t row_bytes, std::int64_t budget) {
  constexpr std::int64_t kStep = 128, kMin = 1024;
  const std::int64_t length = g.cu_q ? g.total_q : g.q_len;
  if (length == 0 || row_bytes == 0 || g.batches == 0) return {};
  std::int64_t most = budget / row_bytes;
  if (most < std::min(length, kMin)) return {};
  std::vector<QuerySpan> windows;
  if (length > most) {
    most = most / kStep * kStep;
    const std::int64_t even = ceil_div(ceil_div(length, ceil_div(length, most)), kStep) * kStep;
    for (int b = 0; b < (g.cu_q ? 1 : g.batches); ++b)
      for (std::int64_t first = 0; first < length; first += even)
        windows.push_back({.sequence = b,
                           .sequences = g.cu_q ? g.batches : 1,
                           .first = to_int(first),
                           .count = to_int(std::min(even, length - first))});
    return windows;
  }
  const int together = g.cu_q ? g.batches : to_int(std::min<std::int64_t>(most / length, g.batches));
  for (int b = 0; b < g.batches; b += together)
    windows.push_back(
        {.sequence = b, .sequences = std::min(together, g.batches - b), .first = 0, .count = to_int(length)});
  return windows;
}

/// The memory for dS of a call's compressed branch: about that of two of its inputs q, within bounds in which less
/// costs time and more brings none. None: dS is not stored. A packed call is one span: its dS fits or is not
/// stored.
inline std::optional<std::int64_t> ds_budget_of(const Geometry& g, DType dtype, std::int64_t key_dim) {
  if (size_of(dtype) != 2 || g.q_len == 0) return {};
  std::optional<std::int64_t> ds_budget = wanted_d_s_bytes();
  if (!ds_budget) {
    const std::int64_t rows = (g.cu_q ? g.total_q : g.q_len) * std::int64_t{g.heads};
    ds_budget = std::clamp(2 * rows * key_dim * 2, std::int64_t{640} << 20, std::int64_t{2048} << 20);
  }
  if (g.cu_q && DsBuffer::bytes(g) > *ds_budget) return {};
  return ds_budget;
}

/// What a span of a batched call whose dS is stored changes in the work of d_kv.
inline void cut(BackwardArgs& args) {
  const int key_tiles = DsBuffer::key_tiles(args.geometry);
  args.chunks = to_int(ceil_div(args.geometry.q_len, small_chunk(args.ds_buffer.q_len)));
  args.items = args.items_before(end_prefix(args.geometry));
  args.partial_items = std::int64_t{args.geometry.batches} * key_tiles * args.chunks;
}

/// Takes memory for dS, and of a batched call for the sums over its spans; sets the partial sums that a span needs.
inline void take_ds_buffer(BackwardArgs& args, std::int64_t width, std::int64_t ds_budget, Arena& arena) {
  const Geometry& g = args.geometry;
  DsBuffer& stored = args.ds_buffer;
  if (g.cu_q) {
    stored.tiles = arena.take<char>(DsBuffer::bytes(g));
    return;
  }
  stored.q_len = g.q_len;
  std::int64_t bytes = 0, partial_items = 0;
  for (const QuerySpan& span : spans_of(g, ds_budget)) {
    BackwardArgs some = args;
    some.geometry = span_of(g, span);
    cut(some);
    bytes = std::max(bytes, DsBuffer::bytes(some.geometry));
    partial_items = std::max(partial_items, some.partial_items);
  }
  args.partial_items = partial_items;
  stored.tiles = arena.take<char>(bytes);
  stored.sums_sequence = std::int64_t{DsBuffer::key_tiles(g)} * kKeyTile * width;
  stored.sums_head = stored.sums_sequence * g.batches;
  const std::int64_t sums = stored.sums_head * g.kv_heads;
  stored.sums = arena.take<float>(2 * sums);
  if (stored.sums) stored.chunk_sums = stored.sums + sums;
}

}  // namespace nsa::cuda
