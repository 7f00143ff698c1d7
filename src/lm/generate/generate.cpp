#include "lm/generate/generate.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <span>

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

  /// After the last token of each, which is new in those that have not ended.
  at::Tensor of_next(const Sequences& sequences) {
    if (!decoder_) return of_all(sequences);
    std::vector<std::int64_t> last;
    for (const auto& sequence : sequences) last.push_back(sequence.back());
    return decoder_->step(base::upload(at::tensor(last), model_.device()));
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

std::vector<Sampler> make_samplers(const SamplerConfig& config, std::size_t count) {
  std::vector<Sampler> samplers;
  for (std::size_t b = 0; b < count; ++b) {
    auto own = config;
    if (b > 0) own.seed = base::derive_seed({config.seed, b});
    samplers.emplace_back(own);
  }
  return samplers;
}

}  // namespace

Generation generate(const Model& model, const Sequences& prompts, const GenerateOptions& options,
                    const OnToken& on_token) {
  const at::NoGradGuard no_grad;
  options.sampler.validate();
  Sequences sequences = prompts;
  Generation result;
  result.sequences.resize(prompts.size());
  auto samplers = make_samplers(options.sampler, prompts.size());
  NextLogits next(model, prompts, options);
  std::vector<bool> ended(prompts.size(), false);
  std::size_t left = prompts.size();

  auto start = Clock::now();
  at::Tensor logits = next.of_prompts(sequences).cpu();
  result.prefill_seconds = seconds_since(start);
  start = Clock::now();
  for (bool stopped = false; left > 0 && !stopped;) {
    for (std::size_t b = 0; b < sequences.size() && !stopped; ++b) {
      if (ended[b]) continue;
      const auto row = logits[static_cast<std::int64_t>(b)].contiguous();
      const std::span<const float> of_row(row.const_data_ptr<float>(), static_cast<std::size_t>(row.numel()));
      if (!std::all_of(of_row.begin(), of_row.end(), [](float logit) { return std::isfinite(logit); })) {
        throw base::Failure(fmt::format("the logits behind token {} are not finite", sequences[b].size()));
      }
      const std::int64_t token = samplers[b].sample(of_row);
      auto& generated = result.sequences[b];
      generated.tokens.push_back(token);
      generated.margins.push_back(margin(of_row));
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
    if (left > 0 && !stopped) logits = next.of_next(sequences).cpu();
  }
  result.decode_seconds = seconds_since(start);
  return result;
}

}  // namespace nsa::lm
