#include "cpu/kernels/block_selector.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "core/philox.h"

namespace nsa::cpu::NSA_ISA {
namespace {

/// y[i] = x[2 i] + x[2 i + 1]
void add_pairs(const float* __restrict x, float* __restrict y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = x[2 * i] + x[2 * i + 1];
}

/// out[i] = the sum of x[i * width ... i * width + width - 1]; x is used up. Both hold n * width values.
void sum_groups(float* x, float* out, std::int64_t n, std::int64_t width) {
  float* result = out;
  for (; width % 2 == 0; width /= 2) {
    add_pairs(x, out, n * width / 2);
    std::swap(x, out);
  }
  for (std::int64_t i = 0; width > 1 && i < n; ++i) {
    float sum = x[i * width];
    for (std::int64_t a = 1; a < width; ++a) sum += x[i * width + a];
    x[i] = sum;
  }
  if (x != result) std::copy_n(x, n, result);
}

}  // namespace

BlockSelector::BlockSelector(const NSAConfig& cfg, std::int64_t length) : cfg_(cfg) {
  const std::int64_t blocks = length / cfg.block_size + 1;
  const std::int64_t strides = (blocks - 1) * (cfg.block_size / cfg.kernel_stride);  // the last block is never ranked
  per_key_ = std::min<std::int64_t>(cfg.kernel_size / cfg.kernel_stride, strides + 2 * kWidth);
  margin_ = round_up(per_key_ - 1, kWidth);
  sums_ = Buffer<float>(static_cast<std::size_t>(margin_ + strides + 2 * kWidth));
  strides_ = Buffer<float>(static_cast<std::size_t>(strides + kWidth));
  importance_ = Buffer<float>(static_cast<std::size_t>(strides + kWidth));
  ranks_ = Buffer<std::int32_t>(static_cast<std::size_t>(blocks + kWidth));
  std::fill_n(sums_.data(), margin_, 0.0f);
}

void BlockSelector::select(const Probabilities& p, std::int64_t t, const Noise& noise, std::int32_t* indices) {
  const std::int64_t candidates = t / cfg_.block_size + 1;
  const bool all = candidates <= cfg_.topk;
  // the blocks that are not forced; more candidates than topk leave the first and the local ones apart
  const std::int64_t first = all ? candidates : cfg_.init_blocks,
                     last = all ? candidates : candidates - cfg_.local_blocks;
  const std::int64_t need = cfg_.topk - first - (candidates - last);
  std::int32_t *out = indices, *end = indices + cfg_.topk;
  for (std::int64_t j = 0; j < first; ++j) *out++ = static_cast<std::int32_t>(j);
  if (!all && need > 0) {
    importance(p, first, last);
    rank(first, last, t, noise, p.heads);
    out = top_k(first, last, need, out);
  }
  for (std::int64_t j = last; j < candidates; ++j) *out++ = static_cast<std::int32_t>(j);
  std::fill(out, end, -1);
}

/// Compression block i and selection block j share overlap(i, j) / d strides, so that the weighted sum over i is a sum
/// over the strides of j of a sum over the l / d compression blocks that contain the stride.
void BlockSelector::importance(const Probabilities& p, std::int64_t first, std::int64_t last) {
  const std::int64_t per_block = cfg_.block_size / cfg_.kernel_stride;
  const std::int64_t begin = first * per_block, end = last * per_block;
  const std::int64_t known = std::min(round_up(end, kWidth), p.columns);
  float *sums = sums_.data() + margin_, *strides = strides_.data();
  for (std::int64_t i = 0; i < known; i += kWidth) {
    Vec sum{};
    for (int h = 0; h < p.heads; ++h) sum = fma(load(p.data + h * p.stride + i), splat(p.factor[h]), sum);
    store(sums + i, sum);
  }
  for (std::int64_t i = known; i < end; ++i) sums[i] = 0;
  for (std::int64_t i = begin; i < end; i += kWidth) {
    Vec sum{};
    for (std::int64_t b = 0; b < per_key_; ++b) sum += load(sums + i - b);
    store(strides + i - begin, sum);
  }
  sum_groups(strides, importance_.data(), last - first, per_block);
}

void BlockSelector::rank(std::int64_t first, std::int64_t last, std::int64_t t, const Noise& noise, int heads) {
  if (noise.tau != 0) {
    const double largest = static_cast<double>(heads) * cfg_.kernel_size / cfg_.kernel_stride;
    for (std::int64_t j = first; j < last; ++j) {
      float& x = importance_[static_cast<std::size_t>(j - first)];
      x = static_cast<float>(std::log(x / largest + 1e-4) +
                             noise.tau * gumbel(noise.seed, j, t, noise.kv_head, noise.sequence));
    }
  }
  const float* x = importance_.data();
  std::int32_t* ranks = ranks_.data();
  for (std::int64_t j = 0; j < last - first; ++j) {
    std::int32_t bits;
    std::memcpy(&bits, x + j, 4);
    bits ^= (bits >> 31) & 0x7fffffff;  // negative floats order backwards
    ranks[j] = x[j] == x[j] ? bits : std::numeric_limits<std::int32_t>::min();
  }
}

/// The `need` highest ranks of the blocks first ... last - 1, a tie to the lower block: bisection for the lowest rank
/// taken, then one pass. need < last - first.
std::int32_t* BlockSelector::top_k(std::int64_t first, std::int64_t last, std::int64_t need,
                                   std::int32_t* indices) const {
  const std::int32_t* ranks = ranks_.data();
  const std::int64_t n = last - first;
  const auto count_from = [&](std::int64_t bound) {
    std::int32_t count = 0;
    for (std::int64_t j = 0; j < n; ++j) count += ranks[j] >= static_cast<std::int32_t>(bound);
    return count;
  };
  std::int32_t least = ranks[0], greatest = ranks[0];
  for (std::int64_t j = 1; j < n; ++j) {
    least = std::min(least, ranks[j]);
    greatest = std::max(greatest, ranks[j]);
  }
  std::int64_t low = least, high = std::int64_t{greatest} + 1;  // count_from(low) >= need > count_from(high)
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2, count = count_from(middle);
    (count >= need ? low : high) = middle;
    if (count == need) break;
  }
  std::int64_t ties = need;
  for (std::int64_t j = 0; j < n; ++j) ties -= ranks[j] > low;
  for (std::int64_t j = 0; j < n; ++j)
    if (ranks[j] > low || (ranks[j] == low && ties-- > 0)) *indices++ = static_cast<std::int32_t>(first + j);
  return indices;
}

}  // namespace nsa::cpu::NSA_ISA
