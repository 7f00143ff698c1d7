// Importance of the selection blocks and the choice among them (eq. 8 to 12).
#include <cmath>
#include <limits>
#include <numeric>

#include "core/backend.h"
#include "core/philox.h"
#include "reference/attention.h"

namespace nsa::reference {

std::vector<double> importance(const SelectBlocksParams& p, const Sequence& s, std::int64_t kv_head, std::int64_t row) {
  const std::int64_t l = p.cfg.kernel_size, d = p.cfg.kernel_stride, block = p.cfg.block_size;
  const std::int64_t t = s.position(row), group = p.q.size(-2) / p.k_c.size(-2);
  const double scale = softmax_scale_of(p.softmax_scale, p.q);
  const std::int64_t visible = p.cfg.num_compressed(t + 1);  // the blocks i with i*d + l - 1 <= t
  const Matrix k_c = load(head_of(p.k_c, s.batch, s.c_begin, visible, kv_head));
  std::vector<double> result(static_cast<std::size_t>(t / block + 1));
  for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const Matrix q = load(head_of(p.q, s.batch, s.q_begin + row, 1, head));
    const std::int64_t stride = p.lse.stride[p.lse.rank - 2];
    const double lse = get_element(p.lse, lse_offset(p.lse, s.batch, s.q_begin + row) + head * stride);
    for (std::int64_t i = 0; i < visible; ++i) {
      const double p_cmp = std::exp(scale * dot(q[0], k_c[i], q.cols()) - lse);
      for (std::int64_t j = i * d / block; j <= (i * d + l - 1) / block; ++j) {
        const std::int64_t overlap = std::min(i * d + l, (j + 1) * block) - std::max(i * d, j * block);
        result[j] += p_cmp * static_cast<double>(overlap) / static_cast<double>(d);
      }
    }
  }
  return result;
}

std::vector<double> ranking(const SelectBlocksParams& p, const Sequence& s, std::int64_t kv_head, std::int64_t row,
                            const std::vector<double>& importance) {
  if (p.noise == 0) return importance;
  const std::int64_t group = p.q.size(-2) / p.k_c.size(-2);
  const double largest = static_cast<double>(group) * p.cfg.kernel_size / p.cfg.kernel_stride;
  std::vector<double> result;
  for (std::size_t j = 0; j < importance.size(); ++j)
    result.push_back(std::log(importance[j] / largest + 1e-4) +
                     p.noise * gumbel(p.seed, static_cast<std::int64_t>(j), s.position(row), kv_head, s.index));
  return result;
}

bool is_forced(const NSAConfig& cfg, std::int64_t j, std::int64_t t) {
  return j < cfg.init_blocks || j > t / cfg.block_size - cfg.local_blocks;
}

Status run(const SelectBlocksParams& p, const Context&) {
  fill(p.indices, -1);
  for (const Sequence& s : sequences_of(p.q, raw_length(p.q, p.seqlen_k), p.packed, p.cfg))
    for (std::int64_t kv_head = 0; kv_head < p.k_c.size(-2); ++kv_head)
      for (std::int64_t row = 0; row < s.q_len; ++row) {
        std::vector<double> rank = ranking(p, s, kv_head, row, importance(p, s, kv_head, row));
        for (std::size_t j = 0; j < rank.size(); ++j) {
          if (std::isnan(rank[j])) rank[j] = -std::numeric_limits<double>::infinity();  // keeps the order total
          if (is_forced(p.cfg, static_cast<std::int64_t>(j), s.position(row)))
            rank[j] = std::numeric_limits<double>::infinity();
        }
        std::vector<std::int32_t> blocks(rank.size());
        std::iota(blocks.begin(), blocks.end(), 0);
        std::stable_sort(blocks.begin(), blocks.end(), [&](auto a, auto b) { return rank[a] > rank[b]; });
        blocks.resize(std::min<std::size_t>(blocks.size(), static_cast<std::size_t>(p.cfg.topk)));
        std::sort(blocks.begin(), blocks.end());
        std::copy(blocks.begin(), blocks.end(), rows_of<std::int32_t>(p.indices, s.batch, s.q_begin).at(row, kv_head));
      }
  return {};
}

}  // namespace nsa::reference
