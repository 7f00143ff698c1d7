#include "lm/generate/generate.h"

#include <ATen/core/grad_mode.h>
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <span>

#include "base/error.h"
#include "lm/generate/decoder.h"

namespace nsa::lm {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

Generated generate(const Model& model, const std::vector<std::int64_t>& prompt, const GenerateOptions& options,
                   const std::function<bool(std::int64_t)>& on_token) {
  const at::NoGradGuard no_grad;
  options.sampler.validate();
  std::vector<std::int64_t> sequence = prompt;
  std::optional<Decoder> decoder;
  if (options.cached) decoder.emplace(model, static_cast<std::int64_t>(prompt.size()) + options.max_tokens);
  const auto next_logits = [&](std::span<const std::int64_t> added) {
    const auto row = decoder ? decoder->append(added) : model.forward(single(sequence)).slice(0, -1).squeeze(0);
    return row.contiguous().cpu();
  };

  Generated result;
  Sampler sampler(options.sampler);
  auto start = Clock::now();
  at::Tensor logits = next_logits(prompt);
  result.prefill_seconds = seconds_since(start);
  start = Clock::now();
  while (static_cast<std::int64_t>(result.tokens.size()) < options.max_tokens) {
    const std::span<const float> row(logits.const_data_ptr<float>(), static_cast<std::size_t>(logits.numel()));
    if (!std::all_of(row.begin(), row.end(), [](float logit) { return std::isfinite(logit); })) {
      throw base::Failure(fmt::format("the logits behind token {} are not finite", sequence.size()));
    }
    const std::int64_t token = sampler.sample(row);
    result.tokens.push_back(token);
    result.margins.push_back(margin(row));
    sequence.push_back(token);
    if (!on_token(token) || token == options.stop_token) break;
    if (static_cast<std::int64_t>(result.tokens.size()) == options.max_tokens) break;
    logits = next_logits({&sequence.back(), 1});
  }
  result.decode_seconds = seconds_since(start);
  return result;
}

}  // namespace nsa::lm
