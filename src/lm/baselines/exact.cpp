// Exact top-n: the tokens that full attention weighs most, the bound that NSA's paper sets its choice against (Yuan et
// al., arXiv 2502.11089, section 4, "Exact-Top"). A KV head's choice goes by the sum of its query heads' weights.
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
