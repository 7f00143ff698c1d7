// Sliding window with sinks: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (StreamingLLM),
// arXiv 2309.17453, section 3.2. The first four tokens and the last ones. Simplified: keys stay rotated by their
// position in the text; the paper rotates them by their position in the cache, which matters beyond the lengths of the
// training.
#include <ATen/ops/arange.h>

#include <algorithm>
#include <limits>

#include "lm/baselines/baseline.h"

namespace nsa::lm {
namespace {

class Streaming : public Baseline {
 public:
  explicit Streaming(std::int64_t budget) : sinks_(std::min<std::int64_t>(4, budget / 2)) {}

  at::Tensor priorities(const QueryBlock& block) override {
    auto order = at::arange(block.end(), block.q.options());
    order.narrow(0, 0, std::min(sinks_, block.end())).fill_(std::numeric_limits<double>::infinity());
    return order.expand({block.q.size(0), block.q.size(2), block.end()});
  }

 private:
  std::int64_t sinks_;
};

}  // namespace

std::unique_ptr<Baseline> make_streaming(const at::Tensor&, const at::Tensor&, std::int64_t budget) {
  return std::make_unique<Streaming>(budget);
}

}  // namespace nsa::lm
