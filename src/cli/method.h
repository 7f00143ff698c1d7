// The method by which a model of full attention attends in the place of it.
#pragma once

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "lm/methods/method.h"
#include "lm/model/model.h"

namespace nsa::cli {

/// --method and --budget; `names`: a string, or several.
template <class Names>
CLI::Option* add_method(CLI::App& command, Names& names, std::int64_t& budget, const char* help) {
  auto* const method = command.add_option("--method", names, help)->check(CLI::IsMember(lm::method_names()));
  command
      .add_option(
          "--budget", budget,
          "Tokens that --method reads for a query; 0: as many as NSA with the model's hyperparameters (n l' + w "
          "and the compressed keys of the sequence)")
      ->check(CLI::Range(0, 1 << 24))
      ->needs(method);
  return method;
}

struct MethodOptions {
  std::string name;
  std::int64_t budget = 0;

  void add(CLI::App& command) {
    add_method(command, name, budget, "Run a model of full attention by a method that reads fewer tokens");
  }

  /// What the layers of a model of full attention are to call.
  lm::SequenceAttention attention(const NSAConfig& nsa) const {
    return [*this, nsa](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return lm::attend_by(name, tokens(nsa, q.size(0)), q, k, v);
    };
  }

  /// The same for the model of a checkpoint; empty without --method. Throws Error for other kinds of attention.
  lm::SequenceAttention of(const lm::ModelConfig& config) const {
    if (name.empty()) return {};
    if (config.attention != lm::AttentionKind::kFull) {
      throw base::Error(fmt::format("--method {}: needs a model of attention full, this one's is {}", name,
                                    lm::name_of(config.attention)));
    }
    return attention(config.nsa);
  }

  /// Read for a query in a sequence of that length.
  std::int64_t tokens(const NSAConfig& nsa, std::int64_t length) const {
    return budget > 0 ? budget : lm::nsa_budget(nsa, length);
  }

  /// One line, and what a report holds: the budgets in sequences of each of `lengths`. Nothing without --method.
  void print(const NSAConfig& nsa, std::int64_t length) const {
    if (name.empty()) return;
    fmt::print("method {}: {} tokens read for a query in a sequence of {}\n", name, tokens(nsa, length), length);
  }
  void describe(nlohmann::json& out, const NSAConfig& nsa, const std::vector<std::int64_t>& lengths) const {
    if (name.empty()) return;
    out["method"] = name;
    for (const auto length : lengths) out["budgets"].push_back(tokens(nsa, length));
  }
};

}  // namespace nsa::cli
