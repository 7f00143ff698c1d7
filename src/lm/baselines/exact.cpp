// Exact top-n: the tokens that full attention weighs most, the bound with which NSA's paper compares block selection
// (Yuan et al., arXiv 2502.11089, section 4, "Exact-Top"). A KV head selects by the sum of its query heads' weights.
#include "lm/baselines/baseline.h"

namespace nsa::lm {
namespace {

class Exact : public Baseline {
 public:
  at::Tensor priorities(const QueryBlock& block) override { return block.scores.softmax(-1).sum(1); }
};

}  // namespace

std::unique_ptr<Baseline> make_exact(const at::Tensor&, const at::Tensor&, std::int64_t) {
  return std::make_unique<Exact>();
}

}  // namespace nsa::lm
