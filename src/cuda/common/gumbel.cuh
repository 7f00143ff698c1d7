// The scores that blocks are ranked by when they are chosen, with Gumbel noise or without.
#pragma once

#include "core/philox.h"

namespace nsa::cuda {

/// Bits that order like the floats; NaN comes first of all.
__device__ inline unsigned ordered(float x) {
  if (x != x) return 0xffffffffu;
  const unsigned u = __float_as_uint(x);
  return u >> 31 ? ~u : u | 0x80000000u;
}

/// Exploration: the rank of a block whose importance is the share `share` of all there is, for the query at `position`.
__device__ inline float perturbed(float share, float noise, unsigned long long seed, int block, int position,
                                  int kv_head, int sequence) {
  const float u = static_cast<float>(gumbel_uniform(seed, block, position, kv_head, sequence));  // exact: 23 bits
  return logf(share + 1e-4f) - noise * logf(-logf(u));
}

}  // namespace nsa::cuda
