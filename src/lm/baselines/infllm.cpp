// InfLLM: Xiao et al., "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory",
// arXiv 2402.04617, section 3. A sixteenth of the budget (at most 128 tokens) goes to the first tokens, half of it to
// the last ones, the rest to blocks of 64 out of what lies between. Four tokens represent a block: those whose keys
// score highest with the queries of the local window behind them. The blocks are read whose representatives score
// highest with the query, summed over them and the query heads of the KV head; the last one is cut where the budget
// ends. Tokens that have left the window before their block is complete are read, too. Simplified: each query chooses
// for itself, as in the paper's decoding, not a chunk of queries together; one KV head by itself, not all heads of a
// layer together; and distant keys stay rotated by their position in the text, where the paper gives them all one
// distance, in the selection, too.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/matmul.h>

#include <algorithm>

#include "lm/baselines/baseline.h"

namespace nsa::lm {
namespace {

class InfLLM : public Baseline {
 public:
  InfLLM(const at::Tensor& q, const at::Tensor& k, std::int64_t budget)
      : sinks_(std::min<std::int64_t>(128, budget / 16)),
        local_(std::max<std::int64_t>(1, budget / 2)),
        block_(std::clamp<std::int64_t>(budget / 4, 1, 64)) {
    // Sum of the queries t + 1 ... t + local, by differences of running sums; a token is looked up only when all of
    // them have come.
    const std::int64_t length = k.size(1);
    const auto running = q.sum(1).cumsum(1);  // (Hkv, S, Dk)
    const auto last = (at::arange(length, k.options().dtype(at::kLong)) + local_).clamp_max(length - 1);
    const auto merit = ((running.index_select(1, last) - running) * k).sum(-1, /*keepdim=*/true);  // (Hkv, S, 1)
    const auto best = std::get<1>(whole_spans(merit, block_).topk(std::min<std::int64_t>(4, block_), 2));
    const auto keys = whole_spans(k, block_);
    representatives_ = keys.gather(2, best.expand({-1, -1, -1, keys.size(3)})).sum(2).transpose(1, 2);
  }

  at::Tensor priorities(const QueryBlock& block) override {
    const auto local_from = (positions(block) + 1 - local_).clamp_min(0).floor_divide(block_) * block_;
    const auto relevance = at::matmul(block.q.sum(1), representatives_);
    return read_in_any_case(of_tokens(relevance, block_, block.end()), sinks_, local_from);
  }

 private:
  std::int64_t sinks_, local_, block_;  // tokens
  at::Tensor representatives_;          // (Hkv, Dk, blocks): sums of their keys
};

}  // namespace

std::unique_ptr<Baseline> make_infllm(const at::Tensor& q, const at::Tensor& k, std::int64_t budget) {
  return std::make_unique<InfLLM>(q, k, budget);
}

}  // namespace nsa::lm
