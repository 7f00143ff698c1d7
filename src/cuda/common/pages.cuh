// Page tables and rows of a cache on the device: what the kernels of a step and of a fork share.
#pragma once

#include "cuda/common/cache.cuh"

namespace nsa::cuda {

/// Whether page number `page` of sequence b exists.
__device__ inline bool has_page(const PageTable& t, int b, int page) {
  return static_cast<unsigned>(t.pages[b * t.row + page]) < static_cast<unsigned>(t.num_pages);
}

__device__ inline int pages_for(const PageTable& t, int tokens) {
  return tokens / t.page_size + (tokens % t.page_size > 0);
}

/// Whether good(page) holds for this thread's share of the pages of the tokens begin ... tokens - 1, which are no more
/// than there can be.
template <class Good>
__device__ inline bool own_pages(const PageTable& t, int tokens, const Good& good, int begin = 0) {
  const int pages = pages_for(t, tokens);
  bool all = pages <= t.max_pages;
  if (all)
    for (int page = begin / t.page_size + threadIdx.x; page < pages; page += blockDim.x) all &= good(page);
  return all;
}
/// The same of all of them. All threads of the block call it.
template <class Good>
__device__ inline bool all_pages(const PageTable& t, int tokens, const Good& good, int begin = 0) {
  return __syncthreads_and(own_pages(t, tokens, good, begin));
}

/// What a step is to add to a sequence, before its pages are checked. Lengths come from the device.
struct StepRequest {
  int before, added;     // tokens; 0 added: idle
  int completed, first;  // compression blocks that the new tokens complete, and the first of them
  int q_begin;           // row of its first new token: in its batch, or of packed ones
  bool possible;         // within the capacity, the rotation's angles and the packed rows

  __device__ StepRequest(const StepGeometry& p, const int* lengths, const int* num_new, int positions, int b) {
    before = lengths[b];
    q_begin = p.starts ? p.starts[b] : 0;
    added = p.starts ? p.starts[b + 1] - q_begin : num_new ? min(max(num_new[b], 0), p.q_len) : p.q_len;
    if (p.counted) before -= added;
    possible = added > 0 && before >= 0 && before <= p.k_len - added;
    if (p.starts) possible &= added <= p.q_len && q_begin >= 0 && q_begin <= p.rows - added;
    const int blocks = possible ? num_compressed(p, after()) : 0;
    first = possible ? num_compressed(p, before) : 0;
    completed = blocks - first;
    possible &= static_cast<std::int64_t>(blocks - 1) * p.kernel_stride < positions;
  }
  __device__ int after() const { return before + added; }
};

/// Whether the pages of one table that a possible request needs exist: this thread's share of them.
__device__ inline bool own_capacity(const PlanArgs& args, const StepRequest& request, int b, int table) {
  const PageTable& t = args.tables[table];
  if (!t.pages) return true;
  const int begin = table == kWindowTable ? max(request.before - args.window_size + 1, 0)
                    : table == kRawTable  ? request.first * args.geometry.kernel_stride
                                          : 0;
  const int end = table == kCompressedTable ? request.first + request.completed : request.after();
  return own_pages(
      t, end, [&](int page) { return has_page(t, b, page); }, begin);
}
/// The same of all tables.
__device__ inline bool own_capacity(const PlanArgs& args, const StepRequest& request, int b) {
  bool all = true;
#pragma unroll 1
  for (int table = 0; table < kTables; ++table) all &= own_capacity(args, request, b, table);
  return all;
}

/// What a step adds to sequence b, for the kernels behind; `overflow` where that does not fit. One thread.
__device__ __forceinline__ void write_plan(const PlanArgs& args, const StepRequest& request, int b, bool fits) {
  args.plan[b] = {.before = max(request.before, 0),
                  .added = fits ? request.added : 0,
                  .sequence = b,
                  .completed = fits ? request.completed : 0,
                  .served = 0,
                  .q_begin = request.q_begin};
  if (request.added > 0 && !fits) *args.overflow = 1;
}

/// Rows of heads of tokens, in 16-byte vectors: from(token, head) to to(token, head), nothing where that is
/// null. The grid's x is over tokens.
template <class From, class To>
__device__ inline void copy_rows(int tokens, int heads, int vectors, const From& from, const To& to) {
  constexpr int kTogether = 4;  // copies of a thread on their way
  const int all = heads * vectors, columns = min(all, static_cast<int>(blockDim.x));
  const int side = static_cast<int>(blockDim.x) / columns, own = static_cast<int>(threadIdx.x) / columns;
  if (own >= side) return;
  const int step = static_cast<int>(gridDim.x) * side;
  for (int i = static_cast<int>(threadIdx.x) % columns; i < all; i += columns) {
    const int head = i / vectors, vector = i - head * vectors;
    for (int token = static_cast<int>(blockIdx.x) * side + own; token < tokens; token += step * kTogether) {
      uint4 words[kTogether];
      uint4* targets[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int at = token + u * step;
        char* const target = at < tokens ? to(at, head) : nullptr;
        targets[u] = target ? reinterpret_cast<uint4*>(target) + vector : nullptr;
        if (target) words[u] = reinterpret_cast<const uint4*>(from(at, head))[vector];
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (targets[u]) *targets[u] = words[u];
    }
  }
}

}  // namespace nsa::cuda
