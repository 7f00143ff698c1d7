#include "lm/model/selection_stats.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/device.h"

namespace nsa::lm {
namespace {

/// Of integers in `counts`, their number `total`.
double entropy_of(std::span<const std::int64_t> counts, std::int64_t total) {
  double entropy = 0;
  for (const std::int64_t count : counts) {
    if (count == 0) continue;
    const double p = static_cast<double>(count) / static_cast<double>(total);
    entropy -= p * std::log(p);
  }
  return entropy;
}

/// bool (total - 1, Hkv, topk): is the block of a query among those of the one before? Both are ascending.
at::Tensor in_the_row_before(const at::Tensor& indices) {
  const auto before = indices.slice(0, 0, -1), after = indices.slice(0, 1).contiguous();
  const auto padded_last = before.masked_fill(before < 0, std::numeric_limits<std::int32_t>::max());
  const auto place = at::searchsorted(padded_last, after).clamp_max(indices.size(-1) - 1);
  return padded_last.gather(-1, place) == after;
}

}  // namespace

at::Tensor is_eligible(const at::Tensor& block, const at::Tensor& t, const NSAConfig& cfg) {
  const auto last = at::floor_divide(t, cfg.block_size) - cfg.local_blocks;
  return (block >= cfg.init_blocks).logical_and(block <= last);
}

std::vector<SelectionStats> selection_stats(const at::Tensor& indices, std::span<const std::int32_t> offsets,
                                            const NSAConfig& cfg) {
  const std::int64_t total = indices.size(0), heads = indices.size(1);
  // A sequence's blocks have counters of their own, one behind another; the last one is for what is not counted.
  std::vector<std::int64_t> first = {0};
  const auto host = at::empty({2, total}, at::kInt);
  auto* const position = host.data_ptr<std::int32_t>();
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b) {
    for (std::int32_t t = offsets[b]; t < offsets[b + 1]; ++t) {
      position[t] = t - offsets[b];
      position[total + t] = static_cast<std::int32_t>(first[b]);
    }
    first.push_back(first[b] + (offsets[b + 1] - offsets[b]) / cfg.block_size + 1);
  }
  const std::int64_t counters = first.back() + 1;
  const auto of_token = base::upload(host, indices.device());
  const auto t = of_token[0].view({-1, 1, 1}), start = of_token[1].view({-1, 1, 1});
  const auto picked = indices >= 0;
  const auto unforced = picked.logical_and(is_eligible(indices, t, cfg));
  const auto choice = picked.logical_and(t >= std::int64_t{cfg.topk} * cfg.block_size);  // more blocks than it takes
  const auto head = at::arange(heads, indices.options()).view({-1, 1}) * counters;
  const auto counter = at::where(unforced, indices + start, counters - 1) + head;
  const auto shared = choice.slice(0, 1).logical_and(in_the_row_before(indices));
  const auto of_head = [](const at::Tensor& flags) { return flags.sum(at::IntArrayRef{0, 2}).unsqueeze(1); };
  const auto counted = at::cat({at::bincount(counter.flatten(), {}, heads * counters).view({heads, counters}),
                                of_head(picked), of_head(choice), of_head(shared)},
                               1)
                           .cpu();

  const std::span<const std::int64_t> all_counts(counted.const_data_ptr<std::int64_t>(),
                                                 static_cast<std::size_t>(counted.numel()));
  std::vector<SelectionStats> all(static_cast<std::size_t>(heads));
  for (std::int64_t h = 0; h < heads; ++h) {
    SelectionStats& stats = all[static_cast<std::size_t>(h)];
    const std::span<const std::int64_t> counts =
        all_counts.subspan(static_cast<std::size_t>(h * counted.size(1)), static_cast<std::size_t>(counted.size(1)));
    std::int64_t unforced_picks = 0;
    for (std::size_t b = 0; b + 1 < offsets.size(); ++b) {
      const auto blocks =
          counts.subspan(static_cast<std::size_t>(first[b]), static_cast<std::size_t>(first[b + 1] - first[b]));
      const std::int64_t here = std::accumulate(blocks.begin(), blocks.end(), std::int64_t{0});
      if (here == 0) continue;
      unforced_picks += here;
      const std::int64_t length = offsets[b + 1] - offsets[b];
      const std::int64_t eligible = (length - 1) / cfg.block_size + 1 - cfg.init_blocks - cfg.local_blocks;
      stats.entropy += static_cast<double>(here) * entropy_of(blocks, here);
      stats.entropy_max +=
          static_cast<double>(here) * std::log(static_cast<double>(std::max<std::int64_t>(1, eligible)));
    }
    const auto tail = counts.last(3);
    const auto picks = static_cast<double>(tail[0]), chosen = static_cast<double>(tail[1]);
    if (picks > 0) stats.unforced_share = static_cast<double>(unforced_picks) / picks;
    if (unforced_picks > 0) {
      stats.entropy /= static_cast<double>(unforced_picks);
      stats.entropy_max /= static_cast<double>(unforced_picks);
    }
    if (chosen > 0) stats.neighbour_overlap = static_cast<double>(tail[2]) / chosen;
  }
  return all;
}

}  // namespace nsa::lm
