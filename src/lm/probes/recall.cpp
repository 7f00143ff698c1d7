#include "lm/probes/recall.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "base/device.h"
#include "base/error.h"
#include "base/random.h"
#include "lm/train/evaluate.h"
#include "lm/train/optimizer.h"

namespace nsa::lm {
namespace {

constexpr int kFirstPairs = 4;
constexpr double kGrowAt = 0.9, kSuccess = 0.97;  // accuracies
constexpr double kMemory = 0.8;                   // of the running accuracy, per step
constexpr std::int64_t kWarmupSteps = 50, kHistoryEvery = 25;
constexpr std::int64_t kDecaySteps = 400;  // at the full length, down to a tenth of the learning rate
constexpr int kEvaluationSequences = 32;

double accuracy(const at::Tensor& logits, const at::Tensor& answers) {
  return logits.argmax(-1).cpu().eq(answers).to(at::kFloat).mean().item<float>();
}

class RecallTrainer {
 public:
  RecallTrainer(const RecallOptions& options, AttentionKind attention)
      : options_(options),
        model_(make_model(options, attention)),
        optimizer_(model_.parameters(), {.beta1 = 0.9, .beta2 = 0.98, .weight_decay = 0.01, .clip = 1}) {}

  struct Plan {
    int pairs = 0;  // of the sequences
    double lr = 0;
  };

  /// One step; returns loss and accuracy.
  std::pair<double, double> step(const Plan& plan) {
    RecallTask shape = options_.task;
    shape.pairs = plan.pairs;
    const auto sequences = std::max<std::int64_t>(1, options_.tokens_per_step / shape.length());
    const auto data = make_recall_batch(options_.task, plan.pairs, static_cast<int>(sequences),
                                        derive_seed({options_.seed, 1, static_cast<std::uint64_t>(steps_)}));
    const auto logits = answered(data, {});
    const auto loss = token_losses(logits, data.answers).mean();
    loss.backward();
    optimizer_.step(plan.lr);
    ++steps_;
    return {loss.item<float>(), accuracy(logits.detach(), data.answers)};
  }

  double evaluate(std::array<double, 3> gate_scale = {1, 1, 1}) const {
    const at::NoGradGuard no_grad;
    const auto data =
        make_recall_batch(options_.task, options_.task.pairs, kEvaluationSequences, derive_seed({options_.seed, 2}));
    ForwardOptions forward;
    forward.gate_scale = gate_scale;
    return accuracy(answered(data, forward), data.answers);
  }

 private:
  static Model make_model(const RecallOptions& options, AttentionKind attention) {
    ModelConfig config = options.model;
    config.attention = attention;
    config.vocab_size = options.task.vocab_size();
    Model model(config, options.seed);
    model.place(options.device, at::kFloat);
    return model;
  }

  /// Logits where the sequences ask.
  at::Tensor answered(const RecallBatch& data, const ForwardOptions& options) const {
    return model_.forward(data.batch, options).index_select(0, upload(data.queries, options_.device));
  }

  const RecallOptions& options_;
  Model model_;
  AdamW optimizer_;
  std::int64_t steps_ = 0;
};

}  // namespace

RecallBatch make_recall_batch(const RecallTask& task, int pairs, int sequences, std::uint64_t seed) {
  RecallTask shape = task;
  shape.pairs = pairs;
  const std::int64_t length = shape.length(), total = length * sequences;
  const std::int64_t asked = shape.num_queries(), first_query = length - asked;
  RecallBatch data{{at::empty({total}, at::kLong), at::empty({sequences + 1}, at::kInt)},
                   at::empty({asked * sequences}, at::kLong),
                   at::empty({asked * sequences}, at::kLong)};
  auto* const tokens = data.batch.tokens.mutable_data_ptr<std::int64_t>();
  auto* const offsets = data.batch.cu_seqlens.mutable_data_ptr<int>();
  auto* queries = data.queries.mutable_data_ptr<std::int64_t>();
  auto* answers = data.answers.mutable_data_ptr<std::int64_t>();
  std::fill_n(tokens, total, 0);
  Random random(seed);
  std::vector<int> keys(static_cast<std::size_t>(task.pairs)), order(static_cast<std::size_t>(pairs));
  std::vector<std::int64_t> values(static_cast<std::size_t>(pairs));
  offsets[0] = 0;
  for (int s = 0; s < sequences; ++s) {
    const std::int64_t start = s * length;
    offsets[s + 1] = static_cast<int>(start + length);
    std::iota(keys.begin(), keys.end(), 1 + task.num_values);
    std::iota(order.begin(), order.end(), 0);
    shuffle(keys, random.next());
    shuffle(order, random.next());
    for (std::size_t p = 0; p < values.size(); ++p) {
      values[p] = 1 + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(task.num_values)));
      const auto at = start + static_cast<std::int64_t>(p) * task.slot;
      tokens[at] = keys[p];
      tokens[at + 1] = values[p];
    }
    for (std::int64_t i = 0; i < asked; ++i) {
      const auto p = static_cast<std::size_t>(order[static_cast<std::size_t>(i % pairs)]);
      tokens[start + first_query + i] = keys[p];
      *queries++ = start + first_query + i;
      *answers++ = values[p];
    }
  }
  return data;
}

ModelConfig recall_model(at::Device device) {
  ModelConfig config;
  config.num_layers = 2;
  config.hidden_size = 64;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.head_dim = config.v_head_dim = device.is_cuda() ? 64 : 32;
  config.ffn_size = 128;
  config.nsa = {.kernel_size = 8,
                .kernel_stride = 4,
                .block_size = 16,
                .topk = 8,
                .init_blocks = 1,
                .local_blocks = 2,
                .window_size = 16};
  return config;
}

bool RecallReport::as_expected() const {
  const double chance = options.task.chance();
  return nsa >= 0.95 && window <= 2 * chance && nsa_window_alone <= 2 * chance;
}

RecallReport run_recall(const RecallOptions& options, const std::function<void(const RecallStep&)>& on_step) {
  const auto& task = options.task;
  const int reach = options.model.num_layers * (options.model.nsa.window_size - 1);
  if (task.gap <= reach) {
    throw Error(fmt::format("gap = {}: must be more than layers * (window_size - 1) = {}", task.gap, reach));
  }
  const auto start = std::chrono::steady_clock::now();
  RecallReport report;
  report.options = options;
  RecallTrainer sparse(options, AttentionKind::kNsa);
  std::vector<RecallTrainer::Plan> plans;  // of each step
  std::int64_t at_full_length = 0;         // steps
  int pairs = std::min(kFirstPairs, options.task.pairs);
  double running = 0;
  std::int64_t left = options.most_steps;
  while (left-- > 0) {
    const double warmup = std::min(1.0, static_cast<double>(plans.size() + 1) / kWarmupSteps);
    if (pairs == task.pairs) ++at_full_length;
    const double decay = std::max(0.1, 1 - static_cast<double>(at_full_length) / kDecaySteps);
    plans.push_back({pairs, options.lr * warmup * decay});
    const auto [loss, share] = sparse.step(plans.back());
    running = kMemory * running + (1 - kMemory) * share;
    const auto step = static_cast<std::int64_t>(plans.size());
    if (step % kHistoryEvery == 0 || left == 0) {
      report.history.push_back({step, pairs, loss, running});
      on_step(report.history.back());
    }
    if (pairs < options.task.pairs) {
      if (running < kGrowAt) continue;
      pairs = std::min(2 * pairs, options.task.pairs);
      running = 0;
    } else if (running > kSuccess) {
      left = std::min(left, options.steps_after_success);
    }
  }
  report.nsa = sparse.evaluate();
  report.nsa_window_alone = sparse.evaluate({0, 0, 1});
  report.nsa_without_cmp = sparse.evaluate({0, 1, 1});
  report.nsa_without_slc = sparse.evaluate({1, 0, 1});

  RecallTrainer window(options, AttentionKind::kWindow);
  for (const auto& plan : plans) window.step(plan);
  report.window = window.evaluate();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

void to_json(nlohmann::json& json, const RecallReport& report) {
  json = {{"kind", "nsa-recall"},
          {"seed", report.options.seed},
          {"length", report.options.task.length()},
          {"pairs", report.options.task.pairs},
          {"chance", report.options.task.chance()},
          {"steps", report.history.empty() ? 0 : report.history.back().step},
          {"seconds", report.seconds},
          {"nsa", report.nsa},
          {"window", report.window},
          {"nsa_window_gate_only", report.nsa_window_alone},
          {"nsa_without_cmp", report.nsa_without_cmp},
          {"nsa_without_slc", report.nsa_without_slc}};
  for (const auto& step : report.history) {
    json["history"].push_back(
        {{"step", step.step}, {"pairs", step.pairs}, {"loss", step.loss}, {"accuracy", step.accuracy}});
  }
}

}  // namespace nsa::lm
