#include "lm/generate/generate.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <optional>
#include <span>

#include "base/device.h"
#include "base/error.h"
#include "base/random.h"
#include "lm/generate/decoder.h"
#include "lm/generate/step_ends.h"
#include "lm/generate/step_graph.h"

namespace nsa::lm {
namespace {

using Clock = std::chrono::steady_clock;
using Sequences = std::vector<std::vector<std::int64_t>>;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// The next token of every sequence.
struct Sampled {
  std::vector<std::int64_t> tokens;
  std::vector<double> margins;
  std::vector<bool> finite;  // the logits it was chosen from
};

/// A draw for each sequence, by a seed of its own.
class SequenceSamplers {
 public:
  SequenceSamplers(const SamplerConfig& config, std::size_t count) {
    for (std::size_t b = 0; b < count; ++b) {
      auto own = config;
      if (b > 0) own.seed = base::derive_seed({config.seed, b});
      samplers_.emplace_back(own);
    }
  }

  /// logits: float32 (B, vocab_size) in host memory. Sequences that have ended draw nothing.
  Sampled choose(const at::Tensor& logits, const std::vector<bool>& ended) {
    Sampled sampled;
    const auto size = static_cast<std::size_t>(logits.size(1));
    for (std::size_t b = 0; b < samplers_.size(); ++b) {
      const std::span<const float> row(logits.const_data_ptr<float>() + b * size, size);
      const bool finite = std::all_of(row.begin(), row.end(), [](float logit) { return std::isfinite(logit); });
      sampled.tokens.push_back(finite && !ended[b] ? samplers_[b].sample(row) : 0);
      sampled.margins.push_back(margin(row));
      sampled.finite.push_back(finite);
    }
    return sampled;
  }

 private:
  std::vector<Sampler> samplers_;
};

/// A batch of sequences that are continued together. Greedy tokens are computed on the device, as a part of the step,
/// which sends three numbers per sequence to the host. Sampling runs on the host.
class Continuation {
 public:
  Continuation(const Model& model, const Sequences& prompts, const GenerateOptions& options)
      : model_(model),
        greedy_(options.sampler.temperature == 0),
        samplers_(options.sampler, prompts.size()),
        tokens_(at::zeros({static_cast<std::int64_t>(prompts.size())},
                          at::TensorOptions(model.device()).dtype(at::kLong))) {
    if (!options.cached) return;
    decoder_.emplace(model, DecoderOptions{.sequences = tokens_.size(0),
                                           .capacity = capacity_of(prompts, options),
                                           .chunk = options.chunk,
                                           .fp8_cache = options.fp8_cache});
    if (!options.graph || !StepGraph::possible(model.device()) || !decoder_->steps_are_alike()) return;
    step();  // torch's matmuls allocate memory at their first call
    graph_.emplace(model.device(), [this] { step(); });
    graph_numbers_ = numbers_;
  }

  bool has_graph() const { return graph_.has_value(); }

  /// Whether steps may begin before the host has seen the tokens that they start with: on a GPU, which then needs not
  /// wait. A sequence that has ended has a step or two too many.
  bool runs_ahead() const { return greedy_ && decoder_ && model_.device().is_cuda(); }

  /// Starts to sample the tokens behind the prompts.
  void begin(const Sequences& prompts) {
    if (!decoder_) return go_on(prompts);
    std::vector<at::Tensor> rows;
    for (std::size_t b = 0; b < prompts.size(); ++b) {
      rows.push_back(decoder_->prefill(static_cast<std::int64_t>(b), prompts[b]));
    }
    choose(at::stack(rows));
    send();
  }

  /// And behind the tokens that were chosen last, which end these sequences unless it runs ahead.
  void go_on(const Sequences& sequences) {
    if (decoder_) decoder_->count_step();
    if (graph_) {
      graph_->replay();
      numbers_ = graph_numbers_;
    } else if (decoder_) {
      step();
    } else {
      choose(logits_of(sequences));
    }
    send();
  }

  /// Waits for the oldest samples.
  Sampled wait(const std::vector<bool>& ended) {
    const Sent sent = std::move(sent_.front());
    sent_.pop_front();
    if (sent.arrival) sent.arrival->synchronize();
    if (!greedy_) {
      Sampled sampled = samplers_.choose(sent.numbers, ended);
      tokens_.copy_(base::upload(at::tensor(sampled.tokens), tokens_.device()));
      return sampled;
    }
    Sampled sampled;
    const auto* const values = sent.numbers.const_data_ptr<double>();
    const auto count = static_cast<std::size_t>(sent.numbers.size(1));
    for (std::size_t b = 0; b < count; ++b) {
      sampled.tokens.push_back(static_cast<std::int64_t>(values[b]));
      sampled.margins.push_back(values[count + b]);
      sampled.finite.push_back(values[2 * count + b] != 0);
    }
    return sampled;
  }

  void end(std::size_t sequence) {
    if (decoder_) decoder_->end(static_cast<std::int64_t>(sequence));
  }

 private:
  struct Sent {
    at::Tensor numbers;  // of most_likely_tokens, or the logits
    std::optional<c10::Event> arrival;
  };

  void step() { choose(decoder_->enqueue_step(tokens_)); }

  void choose(const at::Tensor& logits) {
    numbers_ = greedy_ ? most_likely_tokens(logits, tokens_) : logits.to(at::kFloat);
  }

  /// Puts the numbers on their way to the host.
  void send() {
    if (!model_.device().is_cuda()) return sent_.push_back({numbers_.contiguous(), {}});
    const auto host = at::empty(numbers_.sizes(), at::TensorOptions(numbers_.scalar_type()).pinned_memory(true));
    host.copy_(numbers_, /*non_blocking=*/true);
    sent_.push_back({host, c10::Event(at::kCUDA)});
    sent_.back().arrival->record(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(model_.device()));
  }

  at::Tensor logits_of(const Sequences& sequences) const {
    std::vector<std::int64_t> last;
    std::int64_t total = 0;
    for (const auto& sequence : sequences) {
      total += static_cast<std::int64_t>(sequence.size());
      last.push_back(total - 1);
    }
    return model_.forward(packed(sequences)).index_select(0, base::upload(at::tensor(last), model_.device()));
  }

  const Model& model_;
  bool greedy_;
  SequenceSamplers samplers_;
  at::Tensor tokens_;         // int64 (B) on the device: what the next step starts with
  at::Tensor numbers_;        // on the device: what the last step came to
  at::Tensor graph_numbers_;  // where it lies after a replay
  std::optional<Decoder> decoder_;
  std::optional<StepGraph> graph_;
  std::deque<Sent> sent_;
};

}  // namespace

std::int64_t capacity_of(const Sequences& prompts, const GenerateOptions& options) {
  std::size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  return static_cast<std::int64_t>(longest) + options.max_tokens;
}

Generation generate(const Model& model, const Sequences& prompts, const GenerateOptions& options,
                    const OnToken& on_token) {
  const at::NoGradGuard no_grad;
  options.sampler.validate();
  Sequences sequences = prompts;
  Generation result;
  result.sequences.resize(prompts.size());
  const OwnStream stream(model.device());
  Continuation next(model, prompts, options);
  result.graph = next.has_graph();
  std::vector<bool> ended(prompts.size(), false);
  std::size_t left = prompts.size();

  auto start = Clock::now();
  next.begin(sequences);
  auto sampled = next.wait(ended);
  result.prefill_seconds = seconds_since(start);
  start = Clock::now();
  std::int64_t begun = 0;                   // steps
  for (std::int64_t count = 1;; ++count) {  // tokens of the sequences that have not ended, with these
    // Two steps are on their way: the device has the next one while the host takes the result of the last.
    for (; next.runs_ahead() && begun < std::min(count + 1, options.max_tokens - 1); ++begun) next.go_on(sequences);
    bool stopped = false;
    for (std::size_t b = 0; b < sequences.size() && !stopped; ++b) {
      if (ended[b]) continue;
      if (!sampled.finite[b]) {
        throw base::Failure(fmt::format("the logits behind token {} are not finite", sequences[b].size()));
      }
      const std::int64_t token = sampled.tokens[b];
      auto& generated = result.sequences[b];
      generated.tokens.push_back(token);
      generated.margins.push_back(sampled.margins[b]);
      sequences[b].push_back(token);
      const bool last = token == options.stop_token || count == options.max_tokens;
      if (last) {
        ended[b] = true;
        next.end(b);
        --left;
      }
      stopped = !on_token(b, token, last);
    }
    if (left == 0 || stopped) break;
    if (!next.runs_ahead()) next.go_on(sequences);
    sampled = next.wait(ended);
  }
  result.decode_seconds = seconds_since(start);
  return result;
}

}  // namespace nsa::lm
