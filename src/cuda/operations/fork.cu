// fork of the portable backend: what two sequences cannot share is copied on the device.
#include "cuda/common/pages.cuh"
#include "cuda/operations/cache_views.h"

namespace nsa::cuda {
namespace {

using namespace portable;  // all kernels of a cache are

/// Pages of both sequences must be there; a shared page must be full, as the child will write behind it.
__device__ inline bool can_fork(const ForkArgs& args, const PageTable& t, int begin, int tokens) {
  if (!t.pages) return true;
  const auto good = [&](int page) {
    const bool shared = t.pages[args.child * t.row + page] == t.pages[args.parent * t.row + page];
    const bool full = (page + 1ll) * t.page_size <= tokens;
    return has_page(t, args.parent, page) && has_page(t, args.child, page) && (full || !shared);
  };
  return all_pages(t, tokens, good, begin);
}

/// One thread block.
__global__ void __launch_bounds__(256) plan_fork(const __grid_constant__ ForkArgs args) {
  const int length = args.lengths[args.parent];
  bool good = args.length <= length && (!args.rings || length - args.length <= kRollback);
  good &= can_fork(args, args.tokens, 0, args.length);
  good &= can_fork(args, args.compressed, 0, args.blocks);
  good &= can_fork(args, args.window, args.window_begin, args.length);
  good &= can_fork(args, args.raw, args.raw_begin, args.length);
  for (int b = threadIdx.x; b < args.sequences; b += blockDim.x) args.numbers[b] = b;
  if (threadIdx.x > 0) return;
  *args.parent_length = good ? length : -1;
  if (good) {
    if (args.advance) args.lengths[args.child] = args.length;
  } else {
    *args.overflow = 1;
  }
}

/// Grid y: kind of tokens.
__global__ void __launch_bounds__(128) copy_tokens(const __grid_constant__ ForkCopyArgs args) {
  const ForkArgs& f = args.fork;
  const ForkCopy& copy = args.copies[blockIdx.y];
  const int parent_length = *f.parent_length;
  if (parent_length < 0) return;
  // A ring holds the parent's last tokens only.
  const int first = !copy.slots.ring ? copy.begin : max(parent_length - copy.slots.size, 0);
  copy_rows(
      copy.tokens - first, f.kv_heads, copy.vectors,
      [&](int token, int head) { return copy.slots.at<char>(f.parent, first + token, head); },
      [&](int token, int head) {
        char* to = copy.slots.at<char>(f.child, first + token, head);
        return to == copy.slots.at<char>(f.parent, first + token, head) ? nullptr : to;  // a shared page
      });
}

}  // namespace

Status run(const ForkParams& p, Execution& e) {
  const KVCacheView& cache = p.cache;
  ForkCopyArgs args{};
  ForkArgs& f = args.fork;
  const std::int64_t sequences = cache.cache_seqlens.size(0);
  f.parent_length = e.arena.take<int>(1);
  f.numbers = e.arena.take<int>(sequences);
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  if (p.length > std::min<std::int64_t>(cache.block_table.size(1) * cache.k_slc.size(1), INT32_MAX))
    return Status::out_of_capacity("length = " + std::to_string(p.length) + ": no page for the child's tokens");
  f.sequences = to_int(sequences);
  f.kv_heads = to_int(cache.k_slc.size(2));
  f.parent = to_int(p.parent), f.child = to_int(p.child);
  f.length = to_int(p.length), f.blocks = to_int(p.cfg.num_compressed(p.length));
  f.lengths = cache.cache_seqlens.as<int>();
  f.overflow = cache.overflow.as<int>();
  f.tokens = page_table(cache.k_slc, cache.block_table);
  f.compressed = page_table(cache.k_c, cache.block_table_c);
  f.window = page_table(cache.k_swa_ring, cache.block_table_swa);
  f.raw = page_table(cache.k_cmp_ring, cache.block_table_cmp);
  f.window_begin = std::max(f.length - window_size(p.cfg) + 1, 0);
  f.raw_begin = f.blocks * p.cfg.kernel_stride;
  f.advance = cache.advance;
  f.rings = !f.window.pages || !f.raw.pages;
  if (Status s = status_of(launch(plan_fork, 1, 256, 0, e.stream, f), "plan_fork"); !s.ok()) return s;

  int count = 0;
  const auto add = [&](const TensorView& t, const Slots& slots, int begin, int tokens) {
    args.copies[count++] = {in_bytes(slots, t.dtype), begin, tokens, vectors_of(t)};
  };
  for (const TensorView& t : {cache.k_slc, cache.v_slc}) add(t, paged(t, cache.block_table), 0, f.length);
  for (const TensorView& t : {cache.k_c, cache.v_c}) add(t, compressed(t, cache, p.cfg), 0, f.blocks);
  for (const TensorView& t : {cache.k_swa_ring, cache.v_swa_ring})
    add(t, recent(t, cache.block_table_swa, f.numbers, 1), f.window_begin, f.length);
  for (const TensorView& t : {cache.k_cmp_ring, cache.v_cmp_ring})
    add(t, recent(t, cache.block_table_cmp, f.numbers, 1), f.raw_begin, f.length);
  const dim3 grid(static_cast<unsigned>(std::clamp<std::int64_t>(p.length, 1, 1024)), count);
  return status_of(launch(copy_tokens, grid, 128, 0, e.stream, args), "copy_tokens");
}

}  // namespace nsa::cuda
