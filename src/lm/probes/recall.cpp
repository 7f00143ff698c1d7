#include "lm/probes/recall.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "base/device.h"
#include "base/error.h"
#include "base/random.h"
#include "lm/model/selector_loss.h"
#include "lm/train/evaluate.h"
#include "lm/train/optimizer.h"

namespace nsa::lm {
namespace {

constexpr int kFirstQueries = 4;
constexpr int kFirstSlot = 5;  // with 4, NSA may guess which of the two pairs of a compression block is meant, for good
constexpr double kSuccess = 0.97;    // of the queries
constexpr double kKeysWeight = 0.1;  // of their loss; more of it, and NSA learns no block selection
constexpr double kMemory = 0.8;      // of the running accuracy, per step
constexpr std::int64_t kWarmupSteps = 50, kHistoryEvery = 25;
constexpr std::int64_t kDecaySteps = 400;  // at the full length, down to a tenth of the learning rate
constexpr int kEvaluationSequences = 32;
constexpr int kDistances = 8;  // parts of the map

at::Tensor right_answers(const at::Tensor& logits, const at::Tensor& answers) {
  return logits.argmax(-1).cpu().eq(answers).to(at::kFloat);
}

at::Tensor all_hops(const at::Tensor& right, int hops) { return right.view({-1, hops}).prod(1); }

double share_of(const at::Tensor& right) { return right.mean().item<float>(); }

/// The distances from one question to the pairs, in equal parts.
std::vector<std::int64_t> distance_edges(const RecallTask& task) {
  std::vector<std::int64_t> edges;
  for (std::int64_t i = 0; i <= kDistances; ++i) {
    edges.push_back(task.gap + i * (task.length() - task.gap) / kDistances);
  }
  return edges;
}

class RecallTrainer {
 public:
  RecallTrainer(const RecallOptions& options, AttentionKind attention)
      : options_(options),
        model_(make_model(options, attention)),
        optimizer_(model_.parameters(), {.beta1 = 0.9, .beta2 = 0.98, .weight_decay = 0.01, .clip = 1}) {}

  struct Plan {
    int pairs = 0, slot = 0;  // of the sequences
    double lr = 0;
    bool keys_too = false;  // each value is asked for the key before it
  };

  struct Result {
    double loss = 0, accuracy = 0, exact = 0;  // of single answers, and of queries with all hops right
  };

  Result step(const Plan& plan) {
    RecallTask task = options_.task;
    task.slot = plan.slot;
    RecallTask shape = task;
    shape.pairs = plan.pairs;
    const auto sequences = std::max<std::int64_t>(1, options_.tokens_per_step / shape.length());
    const auto data = make_recall_batch(task, plan.pairs, static_cast<int>(sequences),
                                        base::derive_seed({options_.seed, 1, static_cast<std::uint64_t>(steps_)}));
    std::vector<LayerTrace> trace;
    ForwardOptions forward;
    if (model_.config().attention == AttentionKind::kNsa && options_.selector_loss > 0) {
      forward.trace = &trace, forward.selector_queries = kSelectorQueries;
      forward.seed = base::derive_seed({options_.seed, 3, static_cast<std::uint64_t>(steps_)});
    }
    const auto logits =
        logits_at(data.batch, at::cat({data.queries, data.values}), forward).split(data.queries.size(0));
    const auto loss = token_losses(logits[0], data.answers).mean();
    const auto keys = data.batch.tokens.index_select(0, data.values - 1);
    auto total = plan.keys_too ? loss + kKeysWeight * token_losses(logits[1], keys).mean() : loss;
    if (forward.trace) total = total + options_.selector_loss * selector_loss(trace);
    total.backward();
    optimizer_.step(plan.lr);
    ++steps_;
    const auto right = right_answers(logits[0].detach(), data.answers);
    return {loss.item<float>(), share_of(right), share_of(all_hops(right, task.hops))};
  }

  /// On fresh sequences of the task; `forward` as the model is to be run.
  RecallScore evaluate(const RecallTask& task, const ForwardOptions& forward = {}) const {
    const at::NoGradGuard no_grad;
    const auto data = make_recall_batch(task, task.pairs, kEvaluationSequences, base::derive_seed({options_.seed, 2}));
    const std::int64_t length = task.length(), asked = task.num_queries();
    const auto at_once = std::max<std::int64_t>(1, options_.tokens_per_step / length);  // sequences
    std::vector<at::Tensor> parts;
    for (std::int64_t first = 0; first < kEvaluationSequences; first += at_once) {
      const auto end = std::min<std::int64_t>(first + at_once, kEvaluationSequences);
      const Batch batch{data.batch.tokens.slice(0, first * length, end * length),
                        data.batch.cu_seqlens.slice(0, 0, end - first + 1)};
      const auto queries = data.queries.slice(0, first * asked, end * asked) - first * length;
      const auto answers = data.answers.slice(0, first * asked, end * asked);
      parts.push_back(right_answers(logits_at(batch, queries, forward), answers));
    }
    const auto right = at::cat(parts);
    RecallScore score;
    score.accuracy = share_of(all_hops(right, task.hops));
    for (int hop = 0; hop < task.hops; ++hop) {
      score.by_hop.push_back(share_of(right.view({-1, task.hops}).select(1, hop)));
    }
    const auto edges = distance_edges(task);
    for (std::size_t i = 0; i + 1 < edges.size(); ++i) {
      const auto there = data.distances.ge(edges[i]).logical_and(data.distances.lt(edges[i + 1]));
      score.by_distance.push_back(share_of(right.masked_select(there)));
    }
    return score;
  }

  /// The same at every length that is asked for, too.
  RecallScore evaluate_all(const ForwardOptions& forward = {}) const {
    auto score = evaluate(options_.task, forward);
    for (const int length : options_.lengths) {
      score.by_length.push_back(evaluate(options_.task.stretched(length), forward).accuracy);
    }
    return score;
  }

 private:
  static Model make_model(const RecallOptions& options, AttentionKind attention) {
    ModelConfig config = options.model;
    config.attention = attention;
    config.vocab_size = options.task.vocab_size();
    Model model(config, options.seed);
    // Embeddings as large as the first layer's output, which would otherwise dominate them.
    const at::NoGradGuard no_grad;
    for (const auto& [name, tensor] : model.parameters()) {
      if (name == "embedding.weight") tensor.mul_(std::sqrt(static_cast<double>(config.hidden_size)));
    }
    model.place(options.device, options.dtype);
    return model;
  }

  at::Tensor logits_at(const Batch& batch, const at::Tensor& rows, const ForwardOptions& options) const {
    return model_.forward(batch, options).index_select(0, base::upload(rows, options_.device));
  }

  const RecallOptions& options_;
  Model model_;
  AdamW optimizer_;
  std::int64_t steps_ = 0;
};

/// A model whose sequences grow as it learns: first in number of pairs, then in their distance.
struct Learner {
  const RecallOptions& options;
  RecallTrainer trainer;
  std::vector<RecallTrainer::Plan> plans = {};  // of each step
  int first_pairs = std::min(kFirstQueries * options.task.hops, options.task.pairs);
  int pairs = first_pairs, slot = std::min(kFirstSlot, options.task.slot);
  double running = 0, running_exact = 0;  // means since the last change of size, of which they begin at 0
  double weight = 0;                      // of what they have taken in
  std::int64_t at_full_length = 0, left = options.max_steps;
  RecallStep::Model last = {};

  Learner(const RecallOptions& of, AttentionKind attention) : options(of), trainer(of, attention) {}

  bool done() const { return left <= 0; }

  /// One step, unless it is done.
  void learn() {
    if (done()) return;
    --left;
    const auto& task = options.task;
    const bool full_length = pairs == task.pairs && slot == task.slot;
    if (full_length) ++at_full_length;
    const double warmup = std::min(1.0, static_cast<double>(plans.size() + 1) / kWarmupSteps);
    const double decay = std::max(0.1, 1 - static_cast<double>(at_full_length) / kDecaySteps);
    plans.push_back({pairs, slot, options.lr * warmup * decay, pairs == first_pairs});
    const auto [loss, accuracy, exact] = trainer.step(plans.back());
    running = kMemory * running + (1 - kMemory) * accuracy;
    running_exact = kMemory * running_exact + (1 - kMemory) * exact;
    weight = kMemory * weight + (1 - kMemory);
    last = {.pairs = pairs, .slot = slot, .loss = loss, .accuracy = running / weight};
    if (full_length) {
      if (running_exact > kSuccess) left = std::min(left, options.steps_after_success);
    } else if (running >= kRecallGrowsAt) {
      if (pairs < task.pairs) {
        pairs = std::min(2 * pairs, task.pairs);
      } else {
        slot = std::min(2 * slot, task.slot);
      }
      running = running_exact = weight = 0;
    }
  }
};

}  // namespace

RecallTask RecallTask::stretched(int tokens) const {
  RecallTask task = *this;
  const int room = tokens - gap;
  task.slot = hops == 1 ? (2 * room + 1) / (3 * pairs) : (room - num_queries()) / pairs;
  if (task.slot < 2) {
    task.slot = 2;
    throw base::Error(fmt::format("length = {}: must be at least {} for {} pairs and a gap of {}", tokens,
                                  task.length(), pairs, gap));
  }
  task.gap += tokens - task.length();
  return task;
}

RecallBatch make_recall_batch(const RecallTask& task, int pairs, int sequences, std::uint64_t seed) {
  RecallTask shape = task;
  shape.pairs = pairs;
  const std::int64_t length = shape.length(), total = length * sequences;
  const std::int64_t asked = shape.num_queries(), first_query = length - asked;
  RecallBatch data{.batch = {at::zeros({total}, at::kLong), at::empty({sequences + 1}, at::kInt)},
                   .queries = at::empty({asked * sequences}, at::kLong),
                   .answers = at::empty({asked * sequences}, at::kLong),
                   .distances = at::empty({asked * sequences}, at::kLong)};
  auto* const tokens = data.batch.tokens.mutable_data_ptr<std::int64_t>();
  auto* const offsets = data.batch.cu_seqlens.mutable_data_ptr<int>();
  auto* queries = data.queries.mutable_data_ptr<std::int64_t>();
  auto* answers = data.answers.mutable_data_ptr<std::int64_t>();
  auto* distances = data.distances.mutable_data_ptr<std::int64_t>();
  base::Random random(seed);
  std::vector<int> keys(static_cast<std::size_t>(task.pairs)), order(static_cast<std::size_t>(pairs));
  std::vector<std::int64_t> values(static_cast<std::size_t>(pairs)), values_at;
  offsets[0] = 0;
  for (int s = 0; s < sequences; ++s) {
    const std::int64_t start = s * length;
    offsets[s + 1] = static_cast<int>(start + length);
    std::iota(keys.begin(), keys.end(), 1 + task.num_values);
    std::iota(order.begin(), order.end(), 0);
    base::shuffle(keys, random.next());
    base::shuffle(order, random.next());
    for (auto& value : values) {
      value = 1 + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(task.num_values)));
    }
    const auto pair_asked = [&](std::int64_t i) {
      return static_cast<std::size_t>(order[static_cast<std::size_t>(i % pairs)]);
    };
    for (std::int64_t i = 0; task.hops > 1 && i < asked; ++i) {
      if ((i + 1) % task.hops != 0) values[pair_asked(i)] = keys[pair_asked(i + 1)];
    }
    for (std::size_t p = 0; p < values.size(); ++p) {
      const auto at = start + static_cast<std::int64_t>(p) * task.slot;
      tokens[at] = keys[p];
      tokens[at + 1] = values[p];
      if (values[p] <= task.num_values) values_at.push_back(at + 1);
    }
    for (std::int64_t i = 0; i < asked; ++i) {
      const auto p = pair_asked(i);
      tokens[start + first_query + i] = keys[p];
      *queries++ = start + first_query + i;
      *answers++ = values[p];
      *distances++ = first_query + i - static_cast<std::int64_t>(p) * task.slot;
    }
  }
  data.values = single(values_at).tokens;
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
  config.tied_head = false;
  config.qk_norm = true;
  config.nsa = {.kernel_size = 8,
                .kernel_stride = 4,
                .block_size = 16,
                .topk = 8,
                .init_blocks = 1,
                .local_blocks = 2,
                .window_size = 4};
  return config;
}

bool RecallReport::as_expected() const {
  const double chance = options.task.chance();
  return nsa.accuracy >= 0.95 && nsa.accuracy >= full.accuracy - 0.01 && window.accuracy <= 2 * chance &&
         nsa_window_gate_only <= 2 * chance;
}

RecallReport run_recall(const RecallOptions& options, const std::function<void(const RecallStep&)>& on_step) {
  const auto& task = options.task;
  if (task.hops > task.pairs) {
    throw base::Error(fmt::format("hops = {}: must be at most pairs = {}", task.hops, task.pairs));
  }
  const int reach = options.model.num_layers * (options.model.nsa.window_size - 1);
  if (task.gap <= reach) {
    throw base::Error(fmt::format("gap = {}: must be more than layers * (window_size - 1) = {}", task.gap, reach));
  }
  for (const int length : options.lengths) task.stretched(length);  // refuses before the work begins
  require_a_selector(options.model, options.selector_loss);
  const auto start = std::chrono::steady_clock::now();
  RecallReport report;
  report.options = options;
  Learner sparse(options, AttentionKind::kNsa), full(options, AttentionKind::kFull);
  for (std::int64_t step = 1; !sparse.done() || !full.done(); ++step) {
    sparse.learn(), full.learn();
    if (step % kHistoryEvery != 0 && !(sparse.done() && full.done())) continue;
    report.history.push_back({.step = step, .nsa = sparse.last, .full = full.last});
    on_step(report.history.back());
  }
  report.distances = distance_edges(task);
  report.nsa = sparse.trainer.evaluate_all();
  const auto with_gates = [&](std::array<double, 3> scale) {
    ForwardOptions forward;
    forward.gate_scale = scale;
    return sparse.trainer.evaluate(task, forward).accuracy;
  };
  report.nsa_window_gate_only = with_gates({0, 0, 1});
  report.nsa_without_cmp = with_gates({0, 1, 1});
  report.nsa_without_slc = with_gates({1, 0, 1});

  report.full = full.trainer.evaluate_all();
  for (const auto& [name, baseline] : options.baselines) {
    ForwardOptions forward;
    forward.attention = baseline;
    report.baselines.push_back(full.trainer.evaluate_all(forward));
  }

  RecallTrainer window(options, AttentionKind::kWindow);
  for (const auto& plan : sparse.plans) window.step(plan);
  report.window = window.evaluate_all();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

void to_json(nlohmann::json& json, const RecallReport& report) {
  const auto& task = report.options.task;
  json = {{"kind", "nsa-recall"},
          {"seed", report.options.seed},
          {"length", task.length()},
          {"pairs", task.pairs},
          {"hops", task.hops},
          {"slot", task.slot},
          {"gap", task.gap},
          {"window_size", report.options.model.nsa.window_size},
          {"chance", task.chance()},
          {"steps", report.history.empty() ? 0 : report.history.back().step},
          {"seconds", report.seconds},
          {"distances", report.distances},
          {"lengths", report.options.lengths}};
  std::vector<std::pair<std::string, const RecallScore*>> scores = {
      {"nsa", &report.nsa}, {"full", &report.full}, {"window", &report.window}};
  for (std::size_t i = 0; i < report.baselines.size(); ++i) {
    scores.emplace_back(report.options.baselines[i].first, &report.baselines[i]);
  }
  for (const auto& [name, score] : scores) {
    json["scores"][name] = {{"accuracy", score->accuracy},
                            {"by_hop", score->by_hop},
                            {"by_distance", score->by_distance},  // NaN becomes null
                            {"by_length", score->by_length}};
  }
  for (const auto& [name, accuracy] : {std::pair{"nsa_window_gate_only", report.nsa_window_gate_only},
                                       {"nsa_without_cmp", report.nsa_without_cmp},
                                       {"nsa_without_slc", report.nsa_without_slc}}) {
    json["scores"][name] = {{"accuracy", accuracy}};
  }
  const auto of_model = [](const RecallStep::Model& model) -> nlohmann::json {
    return {{"pairs", model.pairs}, {"slot", model.slot}, {"loss", model.loss}, {"accuracy", model.accuracy}};
  };
  for (const auto& step : report.history) {
    json["history"].push_back({{"step", step.step}, {"nsa", of_model(step.nsa)}, {"full", of_model(step.full)}});
  }
}

}  // namespace nsa::lm
