// Page tables and rows of a cache on the device: what a step and a fork share.
#pragma once

#include "cuda/portable/decode/step_params.h"

namespace nsa::cuda::portable {

/// Whether page number `page` of sequence b exists.
__device__ inline bool has_page(const PageTable& t, int b, int page) {
  return static_cast<unsigned>(t.pages[b * t.row + page]) < static_cast<unsigned>(t.num_pages);
}

__device__ inline int pages_for(const PageTable& t, int tokens) {
  return tokens / t.page_size + (tokens % t.page_size > 0);
}

/// Whether good(page) holds for every page of `tokens` tokens. All threads of the block call it.
template <class Good>
__device__ inline bool all_pages(const PageTable& t, int tokens, const Good& good) {
  const int pages = pages_for(t, tokens);
  bool all = pages <= t.max_pages;
  if (all)
    for (int page = threadIdx.x; page < pages; page += blockDim.x) all &= good(page);
  return __syncthreads_and(all);
}

/// Rows of heads of tokens, in pieces of sixteen bytes: from(token, head) to to(token, head), nothing where that is
/// null. The grid's x is over tokens.
template <class From, class To>
__device__ inline void copy_rows(int tokens, int heads, int pieces, const From& from, const To& to) {
  for (int token = blockIdx.x; token < tokens; token += gridDim.x)
    for (int i = threadIdx.x; i < heads * pieces; i += blockDim.x) {
      const int head = i / pieces, piece = i % pieces;
      char* target = to(token, head);
      if (target) reinterpret_cast<uint4*>(target)[piece] = reinterpret_cast<const uint4*>(from(token, head))[piece];
    }
}

}  // namespace nsa::cuda::portable
