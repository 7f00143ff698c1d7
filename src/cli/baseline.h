// --baseline: run a full-attention model with training-free sparse attention.
#pragma once

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "lm/baselines/baseline.h"
#include "lm/model/model.h"

namespace nsa::cli {

/// Adds --baseline and --budget; `names`: a string or a list of them.
template <class Names>
CLI::Option* add_baseline(CLI::App& command, Names& names, std::int64_t& budget, const char* help) {
  auto* const baseline = command.add_option("--baseline", names, help)->check(CLI::IsMember(lm::baseline_names()));
  command
      .add_option(
          "--budget", budget,
          "Number of tokens that each query reads with --baseline; 0: as many as NSA, n l' + w + compressed keys")
      ->check(CLI::Range(0, 1 << 24))
      ->needs(baseline);
  return baseline;
}

struct BaselineOptions {
  std::string name;
  std::int64_t budget = 0;

  void add(CLI::App& command) {
    add_baseline(command, name, budget, "Training-free sparse attention of a full-attention model");
  }

  /// The attention that the layers of a full-attention model call.
  lm::SequenceAttention attention(const NSAConfig& nsa) const {
    return [*this, nsa](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return lm::baseline_attention(name, tokens(nsa, q.size(0)), q, k, v);
    };
  }

  /// The attention for the model of a checkpoint; empty without --baseline. Throws Error unless the model has full
  /// attention.
  lm::SequenceAttention of(const lm::ModelConfig& config) const {
    if (name.empty()) return {};
    if (config.attention != lm::AttentionKind::kFull) {
      throw base::Error(
          fmt::format("--baseline {}: needs a model with attention full, got {}", name, lm::name_of(config.attention)));
    }
    return attention(config.nsa);
  }

  /// Tokens read per query in a sequence of that length.
  std::int64_t tokens(const NSAConfig& nsa, std::int64_t length) const {
    return budget > 0 ? budget : lm::nsa_budget(nsa, length);
  }

  /// Prints the budget, or adds it to a report for each of `lengths`; nothing without --baseline.
  void print(const NSAConfig& nsa, std::int64_t length) const {
    if (name.empty()) return;
    fmt::print("baseline {}: {} tokens per query at length {}\n", name, tokens(nsa, length), length);
  }
  void describe(nlohmann::json& out, const NSAConfig& nsa, const std::vector<std::int64_t>& lengths) const {
    if (name.empty()) return;
    out["baseline"] = name;
    for (const auto length : lengths) out["budgets"].push_back(tokens(nsa, length));
  }
};

}  // namespace nsa::cli
