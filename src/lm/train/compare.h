// Two models on the same rows: by how much their losses differ, and how sure that is.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "lm/train/evaluate.h"

namespace nsa::lm {

/// Ours minus theirs, nats per token.
struct Difference {
  double mean = 0;
  /// The 95 % interval is mean -+ this, from the differences of the rows (Student's t; a ratio of sums, since rows have
  /// different numbers of tokens). None for less than four rows.
  std::optional<double> half_width;
};

/// Row by row. The two have the same tokens in each row; rows without tokens do not count.
Difference paired_difference(const std::vector<LossSum>& ours, const std::vector<LossSum>& theirs);

struct Comparison {
  Difference all;
  std::vector<Difference> by_position, by_recurrence;  // as those of the evaluations
};

/// Compares two evaluations on the same rows.
Comparison compare(const Evaluation& ours, const Evaluation& theirs);
void to_json(nlohmann::json& json, const Comparison& comparison);

/// Retained long-range gain, (L_window - L_ours) / (L_window - L_full), over positions >= `from`; none if full
/// attention is not ahead of the window, or without tokens.
std::optional<double> retained_gain(const Evaluation& ours, const Evaluation& full, const Evaluation& window,
                                    std::int64_t from = 0);

}  // namespace nsa::lm
