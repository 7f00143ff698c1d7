#include "lm/generate/generate.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <span>
#include <tuple>

#include "base/device.h"
#include "base/error.h"
#include "base/random.h"
#include "lm/generate/decoder.h"

namespace nsa::lm {
namespace {

using Clock = std::chrono::steady_clock;
using Sequences = std::vector<std::vector<std::int64_t>>;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Where the logits behind each sequence come from, float32 (B, vocab_size) on the device.
class NextLogits {
 public:
  NextLogits(const Model& model, const Sequences& prompts, const GenerateOptions& options) : model_(model) {
    if (!options.cached) return;
    std::size_t longest = 0;
    for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
    decoder_.emplace(model, static_cast<std::int64_t>(prompts.size()),
                     static_cast<std::int64_t>(longest) + options.max_tokens);
  }

  at::Tensor of_prompts(const Sequences& prompts) {
    if (!decoder_) return of_all(prompts);
    std::vector<at::Tensor> rows;
    for (std::size_t b = 0; b < prompts.size(); ++b) {
      rows.push_back(decoder_->prefill(static_cast<std::int64_t>(b), prompts[b]));
    }
    return at::stack(rows);
  }

  /// After the last token of each, which is new in those that have not ended; `last`: these tokens on the device.
  at::Tensor of_next(const Sequences& sequences, const at::Tensor& last) {
    return decoder_ ? decoder_->step(last) : of_all(sequences);
  }

  void end(std::size_t sequence) {
    if (decoder_) decoder_->end(static_cast<std::int64_t>(sequence));
  }

 private:
  at::Tensor of_all(const Sequences& sequences) const {
    std::vector<std::int64_t> last;
    std::int64_t total = 0;
    for (const auto& sequence : sequences) {
      total += static_cast<std::int64_t>(sequence.size());
      last.push_back(total - 1);
    }
    return model_.forward(packed(sequences)).index_select(0, base::upload(at::tensor(last), model_.device()));
  }

  const Model& model_;
  std::optional<Decoder> decoder_;
};

/// The next token of every sequence.
struct Choice {
  at::Tensor on_device;  // int64 (B)
  std::vector<std::int64_t> tokens;
  std::vector<double> margins;
  std::vector<bool> finite;  // the logits it was chosen from
};

/// The most likely ones, of equals the first. Chosen on the device: what the host gets are three numbers a sequence.
Choice choose_most_likely(const at::Tensor& logits) {
  Choice choice{.on_device = logits.argmax(1)};
  const auto best = std::get<0>(logits.topk(std::min<std::int64_t>(2, logits.size(1)), 1)).to(at::kDouble);
  const auto second = best.size(1) > 1 ? best.select(1, 1) : at::full_like(best.select(1, 0), -INFINITY);
  const auto host = at::stack({choice.on_device.to(at::kDouble), best.select(1, 0) - second,
                               logits.isfinite().all(1).to(at::kDouble)})
                        .cpu();
  const auto* const values = host.const_data_ptr<double>();
  const auto count = static_cast<std::size_t>(logits.size(0));
  for (std::size_t b = 0; b < count; ++b) {
    choice.tokens.push_back(static_cast<std::int64_t>(values[b]));
    choice.margins.push_back(values[count + b]);
    choice.finite.push_back(values[2 * count + b] != 0);
  }
  return choice;
}

/// A draw for each sequence, by a seed of its own.
class SequenceSamplers {
 public:
  SequenceSamplers(const SamplerConfig& config, std::size_t count) : greedy_(config.temperature == 0) {
    for (std::size_t b = 0; b < count; ++b) {
      auto own = config;
      if (b > 0) own.seed = base::derive_seed({config.seed, b});
      samplers_.emplace_back(own);
    }
  }

  /// logits: float32 (B, vocab_size) on the device. Sequences that have ended draw nothing.
  Choice choose(const at::Tensor& logits, const std::vector<bool>& ended) {
    if (greedy_) return choose_most_likely(logits);
    Choice choice;
    const auto host = logits.cpu().contiguous();
    const auto size = static_cast<std::size_t>(host.size(1));
    for (std::size_t b = 0; b < samplers_.size(); ++b) {
      const std::span<const float> row(host.const_data_ptr<float>() + b * size, size);
      const bool finite = std::all_of(row.begin(), row.end(), [](float logit) { return std::isfinite(logit); });
      choice.tokens.push_back(finite && !ended[b] ? samplers_[b].sample(row) : 0);
      choice.margins.push_back(margin(row));
      choice.finite.push_back(finite);
    }
    choice.on_device = base::upload(at::tensor(choice.tokens), logits.device());
    return choice;
  }

 private:
  bool greedy_;
  std::vector<Sampler> samplers_;
};

}  // namespace

Generation generate(const Model& model, const Sequences& prompts, const GenerateOptions& options,
                    const OnToken& on_token) {
  const at::NoGradGuard no_grad;
  options.sampler.validate();
  Sequences sequences = prompts;
  Generation result;
  result.sequences.resize(prompts.size());
  SequenceSamplers samplers(options.sampler, prompts.size());
  NextLogits next(model, prompts, options);
  std::vector<bool> ended(prompts.size(), false);
  std::size_t left = prompts.size();

  auto start = Clock::now();
  auto choice = samplers.choose(next.of_prompts(sequences), ended);
  result.prefill_seconds = seconds_since(start);
  start = Clock::now();
  for (bool stopped = false; left > 0 && !stopped;) {
    for (std::size_t b = 0; b < sequences.size() && !stopped; ++b) {
      if (ended[b]) continue;
      if (!choice.finite[b]) {
        throw base::Failure(fmt::format("the logits behind token {} are not finite", sequences[b].size()));
      }
      const std::int64_t token = choice.tokens[b];
      auto& generated = result.sequences[b];
      generated.tokens.push_back(token);
      generated.margins.push_back(choice.margins[b]);
      sequences[b].push_back(token);
      const bool last =
          token == options.stop_token || static_cast<std::int64_t>(generated.tokens.size()) == options.max_tokens;
      if (last) {
        ended[b] = true;
        next.end(b);
        --left;
      }
      stopped = !on_token(b, token, last);
    }
    if (left > 0 && !stopped) choice = samplers.choose(next.of_next(sequences, choice.on_device), ended);
  }
  result.decode_seconds = seconds_since(start);
  return result;
}

}  // namespace nsa::lm
