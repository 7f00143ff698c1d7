#include "lm/train/compare.h"

#include <cmath>
#include <nlohmann/json.hpp>

namespace nsa::lm {
namespace {

/// The 97.5 % quantile of Student's t: the normal one with Fisher's terms in 1/f, within 1 % from 3 degrees of freedom.
double student_quantile(double f) {
  const double z = 1.959964, z2 = z * z;
  return z + z * (z2 + 1) / (4 * f) + z * ((5 * z2 + 16) * z2 + 3) / (96 * f * f) +
         z * (((3 * z2 + 19) * z2 + 17) * z2 - 15) / (384 * f * f * f);
}

std::vector<LossSum> column(const Evaluation& evaluation, std::vector<LossSum> RowLosses::*parts, std::size_t i) {
  std::vector<LossSum> out;
  for (const RowLosses& row : evaluation.rows) out.push_back((row.*parts)[i]);
  return out;
}

double loss_from(const Evaluation& evaluation, std::int64_t from) {
  LossSum sum;
  for (const LossPart& part : evaluation.by_position) {
    if (part.from >= from && part.tokens > 0) sum.add(part.loss * static_cast<double>(part.tokens), part.tokens);
  }
  return sum.mean();
}

nlohmann::json json_of(const Difference& difference) {
  nlohmann::json json = {{"difference", difference.mean}, {"half_width", nullptr}};
  if (difference.half_width) json["half_width"] = *difference.half_width;
  return json;
}

}  // namespace

Difference paired_difference(const std::vector<LossSum>& ours, const std::vector<LossSum>& theirs) {
  double sum = 0, tokens = 0;
  int rows = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (ours[i].tokens == 0) continue;
    sum += ours[i].loss - theirs[i].loss;
    tokens += static_cast<double>(ours[i].tokens);
    ++rows;
  }
  if (rows == 0) return {};
  Difference out{.mean = sum / tokens};
  if (rows < 4) return out;
  double squares = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const double residual = ours[i].loss - theirs[i].loss - out.mean * static_cast<double>(ours[i].tokens);
    squares += residual * residual;
  }
  const double error = std::sqrt(squares * rows / (rows - 1)) / tokens;
  out.half_width = student_quantile(rows - 1) * error;
  return out;
}

Comparison compare(const Evaluation& ours, const Evaluation& theirs) {
  Comparison out{.all = paired_difference(row_losses(ours), row_losses(theirs))};
  const auto parts = [&](std::vector<LossSum> RowLosses::*of, std::size_t count) {
    std::vector<Difference> differences;
    for (std::size_t i = 0; i < count; ++i) {
      differences.push_back(paired_difference(column(ours, of, i), column(theirs, of, i)));
    }
    return differences;
  };
  out.by_position = parts(&RowLosses::by_position, ours.by_position.size());
  out.by_recurrence = parts(&RowLosses::by_recurrence, ours.by_recurrence.size());
  return out;
}

void to_json(nlohmann::json& json, const Comparison& comparison) {
  json = json_of(comparison.all);
  for (const auto& [name, parts] :
       {std::pair{"by_position", &comparison.by_position}, std::pair{"by_recurrence", &comparison.by_recurrence}}) {
    json[name] = nlohmann::json::array();
    for (const Difference& part : *parts) json[name].push_back(json_of(part));
  }
}

std::optional<double> retained_gain(const Evaluation& ours, const Evaluation& full, const Evaluation& window,
                                    std::int64_t from) {
  const double gain = loss_from(window, from) - loss_from(full, from);
  if (gain <= 0) return {};
  return (loss_from(window, from) - loss_from(ours, from)) / gain;
}

}  // namespace nsa::lm
