// H2O, eviction by accumulated attention: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of
// Large Language Models", arXiv 2306.14048, section 4 and algorithm 1. Half of the cache holds the last tokens; of the
// others the one with the least attention so far leaves for good whenever there is one too many. Every token is treated
// as one that was generated: the paper's code reads a prompt with full attention first. A KV head adds up the weights
// of its query heads.
#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "lm/baselines/baseline.h"

namespace nsa::lm {
namespace {

class H2O : public Baseline {
 public:
  H2O(const at::Tensor& k, std::int64_t budget)
      : budget_(budget),
        recent_(budget - budget / 2),
        kept_(at::zeros({k.size(0), k.size(1)}, k.options().dtype(at::kBool))),
        attention_(at::zeros({k.size(0), k.size(1)}, k.options())) {}

  at::Tensor priorities(const QueryBlock& block) override {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const auto kept = kept_.narrow(1, 0, block.end()), attention = attention_.narrow(1, 0, block.end());
    std::vector<at::Tensor> rows;
    for (std::int64_t i = 0; i < block.q.size(2); ++i) {
      const std::int64_t t = block.begin + i, old = t + 1 - recent_;
      kept.select(1, t).fill_(true);
      if (t >= budget_) {
        const auto candidates = attention.narrow(1, 0, old).masked_fill(~kept.narrow(1, 0, old), kInfinity);
        kept.scatter_(1, candidates.argmin(1, /*keepdim=*/true), false);
      }
      const auto scores = block.scores.select(2, i).masked_fill(~kept.unsqueeze(1), -kInfinity);
      attention.add_(scores.softmax(-1).sum(1));
      rows.push_back(kept.to(block.q.scalar_type()));
    }
    return at::stack(rows, 1);
  }

 private:
  std::int64_t budget_, recent_;  // tokens
  at::Tensor kept_, attention_;   // (Hkv, S): in the cache, weights received so far
};

}  // namespace

std::unique_ptr<Baseline> make_h2o(const at::Tensor&, const at::Tensor& k, std::int64_t budget) {
  return std::make_unique<H2O>(k, budget);
}

}  // namespace nsa::lm
