// Quest: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", arXiv 2406.10774,
// section 3. Pages of 16 tokens; the least and the greatest value of every channel of a page's keys bound what a query
// can score there, and the pages of the highest bounds are read. The query's own page always is; the last page that is
// taken is cut where the budget ends. A KV head goes by the sum of its query heads' bounds. Simplified: every layer
// chooses, where the paper leaves the first two dense.
#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>

#include <algorithm>

#include "lm/baselines/baseline.h"

namespace nsa::lm {
namespace {

class Quest : public Baseline {
 public:
  Quest(const at::Tensor& k, std::int64_t budget) : page_(std::min<std::int64_t>(16, budget)) {
    const auto pages = whole_spans(k, page_);
    least_ = pages.amin(2).transpose(1, 2).unsqueeze(1);
    greatest_ = pages.amax(2).transpose(1, 2).unsqueeze(1);
  }

  at::Tensor priorities(const QueryBlock& block) override {
    const auto bounds = at::matmul(block.q.clamp_min(0), greatest_) + at::matmul(block.q.clamp_max(0), least_);
    const auto own_page = positions(block).floor_divide(page_) * page_;
    return read_in_any_case(of_tokens(bounds.sum(1), page_, block.end()), 0, own_page);
  }

 private:
  std::int64_t page_;            // tokens
  at::Tensor least_, greatest_;  // (Hkv, 1, Dk, pages)
};

}  // namespace

std::unique_ptr<Baseline> make_quest(const at::Tensor&, const at::Tensor& k, std::int64_t budget) {
  return std::make_unique<Quest>(k, budget);
}

}  // namespace nsa::lm
