#include "lm/train/trainer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/device.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/json.h"
#include "base/progress.h"
#include "base/random.h"
#include "bridge/compression.h"
#include "lm/data/key_value_lines.h"
#include "lm/data/loader.h"
#include "lm/model/counts.h"
#include "lm/model/selector_loss.h"
#include "lm/run/folder.h"
#include "lm/run/pretrained.h"
#include "lm/run/state.h"
#include "lm/train/evaluate.h"
#include "lm/train/optimizer.h"
#include "lm/train/run_ahead.h"
#include "lm/train/throughput_meter.h"
#include "lm/train/watchdog.h"

namespace nsa::lm {
namespace {

using Clock = std::chrono::steady_clock;

// The speed shown is that of so many steps.
constexpr std::size_t kShownSteps = 20;

// Fractions of the run between which key-value lines become pairs.
constexpr double kPairsFrom = 0.35;
constexpr double kPairsAlone = 0.6;

// A run waits this long for a device after a signal to stop, and twice the longest of the last steps besides. torchrun
// kills after 30 s.
constexpr std::chrono::seconds kPatience{5};

/// True if the CPU multiplies bfloat16. Where it does not, torch's bfloat16 matmuls are slower than those of float32.
bool has_bfloat16_matmul() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

at::ScalarType dtype_of(const std::string& name, at::Device device) {
  if (name == "auto") return device.is_cuda() || has_bfloat16_matmul() ? at::kBFloat16 : at::kFloat;
  return name == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

/// KL(uniform || mean gate shares), summed over the layers.
at::Tensor gate_imbalance(const std::vector<LayerTrace>& trace) {
  std::vector<at::Tensor> layers;
  for (const LayerTrace& layer : trace) {
    if (!layer.gates.defined()) continue;
    const auto gates = layer.gates.to(at::kFloat);
    const auto shares = (gates / gates.sum(-1, true)).mean(at::IntArrayRef{0, 1});
    layers.push_back(-(shares * 3).log().mean());
  }
  return layers.empty() ? at::zeros({}) : at::stack(layers).sum();
}

Model make_model(const RunConfig& config, at::Device device) {
  Model model(config.model, config.train.seed);
  model.place(device, dtype_of(config.train.dtype, device));
  return model;
}

class Trainer {
 public:
  /// The first rank has a `folder`, the others have none.
  Trainer(std::optional<RunFolder> folder, RunConfig config, const Tokenizer* tokenizer, Corpus corpus,
          at::Device device, const Execution& execution)
      : folder_(std::move(folder)),
        ranks_(execution.ranks),
        config_(std::move(config)),
        tokenizer_(tokenizer),
        corpus_(std::move(corpus)),
        rows_(corpus_.train, config_.train.context, config_.train.seed),
        eval_rows_(choose_rows(pack_documents(corpus_.held_out, config_.train.context), config_.train.eval_tokens)),
        model_(make_model(config_, device)),
        optimizer_(model_.parameters(),
                   {.beta1 = config_.train.beta1,
                    .beta2 = config_.train.beta2,
                    .weight_decay = config_.train.weight_decay,
                    .clip = config_.train.clip,
                    .phi_lr_scale = config_.train.phi_lr_scale},
                   ranks_, execution.shard_optimizer),
        metrics_(device),
        throttle_(device) {
    if (rows_.empty()) throw base::Error("data: no document is left to train on");
    base::make_torch_deterministic(device);
  }

  void print_summary(const base::DeviceChoice& device) const;
  /// Begins a new run in the folder. `options`: see RunFolder::begin().
  void begin(const std::string& options);
  /// Resumes the run in the folder.
  void load();
  TrainResult run(const std::string& out);

 private:
  /// One of the batches of a step. Each of them is on one rank.
  struct NextBatch {
    TrainingBatch rows;
    std::uint64_t number = 0;  // in the step
  };
  std::vector<NextBatch> next_batches(std::int64_t& tokens);
  TrainResult run_steps();
  void share_weights();
  void plan();
  void agree();
  at::Tensor sum_over_ranks(const at::Tensor& loss_sum);
  void train_step(double rate);
  void show_progress();
  void sync();
  void log(const nlohmann::json& line) const {
    if (folder_) folder_->log(line);
  }
  void log_step(double rate, double norm);
  void evaluate_now();
  void save();
  double noise() const;
  double pair_fraction() const;
  std::string lost(const std::string& why) const;
  void begin_on_device();
  void end_on_device() {
    if (watchdog_) watchdog_->end();
  }

  base::InterruptGuard interrupt_;  // from before the first checkpoint on
  std::optional<RunFolder> folder_;
  Ranks ranks_;
  RunConfig config_;
  const Tokenizer* tokenizer_;  // null where the data are token numbers
  Corpus corpus_;
  DataLoader rows_;
  std::vector<PackedSequence> eval_rows_;
  Model model_;
  AdamW optimizer_;
  TrainState state_;
  DeferredMetrics metrics_;  // state_.loss_sum is as of the last sync()
  StepThrottle throttle_;
  std::string shown_loss_;
  std::vector<LayerScalars> layers_;
  base::Progress progress_{0};
  Clock::time_point step_start_;
  ThroughputMeter meter_;         // of this process's steps
  int signal_ = 0;                // that came to a rank
  std::int64_t saved_step_ = -1;  // of the last checkpoint
  std::string out_;
  std::optional<Watchdog> watchdog_;  // of several ranks
};

void Trainer::print_summary(const base::DeviceChoice& device) const {
  const auto counts = parameter_counts(config_.model);
  fmt::print("device: {}{}\n", device.text, ranks_.size() > 1 ? fmt::format(" and {} ranks", ranks_.size()) : "");
  fmt::print("model: attention {}, {} parameters: phi {}, gates {}, extra K/V {}, rest {}\n",
             name_of(config_.model.attention), counts.total(), counts.phi, counts.gates, counts.extra_kv, counts.rest);
  std::size_t tokens = 0;
  for (const auto* const documents : {&corpus_.train, &corpus_.held_out}) {
    for (const auto& document : *documents) tokens += document.tokens.size();
  }
  fmt::print("data: {}, {} documents to train on, {} held out\n",
             tokenizer_ ? fmt::format("{:.1f} MB of text", static_cast<double>(corpus_.bytes) / 1e6)
                        : fmt::format("{} tokens", tokens),
             corpus_.train.size(),
             corpus_.cuts_ends ? fmt::format("the ends of {}", corpus_.held_out.size())
                               : std::to_string(corpus_.held_out.size()));
  if (!corpus_.skipped.empty()) fmt::print("data: skipped {}\n", corpus_.skipped);
  std::fflush(stdout);
}

/// This rank's batches of the next step. `tokens` is set to the tokens of all ranks' batches.
std::vector<Trainer::NextBatch> Trainer::next_batches(std::int64_t& tokens) {
  const auto& train = config_.train;
  std::vector<NextBatch> batches;
  tokens = 0;
  const auto longest = train.sequence_limit(state_.step, state_.planned_steps);
  for (std::int64_t i = 0; i < train.grad_accum; ++i) {
    const auto first = (state_.step * train.grad_accum + i) * train.batch_size;
    const auto rows = cut_spans(rows_.rows(first, train.batch_size), longest);
    for (const PackedSequence& row : rows) {
      for (const Span& span : row) {
        tokens += span.length;
        state_.flops += training_flops(config_.model, span.length).rest;
      }
    }
    if (i % ranks_.size() != ranks_.rank()) continue;
    batches.push_back({make_batch(corpus_.train, rows), static_cast<std::uint64_t>(i)});
    if (train.retrieval_fraction == 0) continue;
    const auto seed = base::derive_seed({train.seed, 3, static_cast<std::uint64_t>(first)});
    insert_key_value_lines(batches.back().rows, train.retrieval_fraction, pair_fraction(), *tokenizer_, seed,
                           train.retrieval_kinds);
  }
  return batches;
}

/// Settles the number of steps on the first rank, where the configuration gives tokens or minutes.
void Trainer::plan() {
  const auto& train = config_.train;
  if (state_.planned_steps > 0 || !ranks_.first()) return;
  if (train.minutes == 0) {
    state_.planned_steps = train.planned_steps();
  } else {
    const auto left = meter_.steps_left(train.minutes * 60, state_.seconds);
    if (left) state_.planned_steps = state_.step + *left;
  }
}

/// The ranks agree on the number of steps and on a signal to stop.
void Trainer::agree() {
  std::vector<std::int64_t> values = {state_.planned_steps, interrupt_.signal()};
  ranks_.max(values);
  state_.planned_steps = values[0];
  signal_ = static_cast<int>(values[1]);
  progress_.set_total(state_.planned_steps);
}

/// Sums the gradients of the ranks' batches and, float64, their losses. A parameter has a gradient if it has one on any
/// rank. Gradients stay where they lie: on a GPU torch adds up the squares of a tensor in an order that depends on how
/// it is aligned, so that elsewhere their norm would have other bits than in one process.
at::Tensor Trainer::sum_over_ranks(const at::Tensor& loss_sum) {
  if (ranks_.size() == 1) return loss_sum;
  const at::NoGradGuard no_grad;
  const auto& parameters = model_.parameters();
  std::vector<std::int64_t> has_gradient;
  for (const auto& [name, parameter] : parameters) has_gradient.push_back(parameter.grad().defined() ? 1 : 0);
  end_on_device();
  ranks_.max(has_gradient);  // on the host, where a rank that is gone is seen at once
  begin_on_device();
  std::vector<at::Tensor> gradients, flat;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (has_gradient[i] == 0) continue;
    at::Tensor& gradient = parameters[i].second.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameters[i].second);
    gradients.push_back(gradient);
    flat.push_back(gradient.reshape({-1}));
  }
  const auto total = ranks_.sum(at::cat(flat));
  std::int64_t begin = 0;
  for (const at::Tensor& gradient : gradients) {
    gradient.copy_(total.narrow(0, begin, gradient.numel()).view_as(gradient));
    begin += gradient.numel();
  }
  return ranks_.sum(loss_sum.reshape({1}))[0];
}

/// `pairs` of insert_key_value_lines(): 0 in the first part of the run, 1 in the last.
double Trainer::pair_fraction() const {
  if (state_.planned_steps == 0) return 0;
  const double done = static_cast<double>(state_.step) / static_cast<double>(state_.planned_steps);
  return std::clamp((done - kPairsFrom) / (kPairsAlone - kPairsFrom), 0.0, 1.0);
}

double Trainer::noise() const {
  const auto& train = config_.train;
  if (state_.planned_steps == 0) return train.noise;
  const double end = train.noise_until * static_cast<double>(state_.planned_steps);
  return end > 0 ? train.noise * std::max(0.0, 1 - static_cast<double>(state_.step) / end) : 0;
}

void Trainer::train_step(double rate) {
  const bool log = (state_.step + 1) % config_.train.log_every == 0;
  const bool is_nsa = config_.model.attention == AttentionKind::kNsa;
  const bool trains_selector = is_nsa && config_.train.selector_loss > 0;
  begin_on_device();
  std::int64_t tokens = 0;
  const auto batches = next_batches(tokens);
  std::vector<LayerTrace> trace;
  auto loss_sum = at::zeros({}, at::TensorOptions(model_.device()).dtype(at::kDouble));
  for (const auto& [rows, number] : batches) {
    ForwardOptions options;
    options.noise = noise();
    options.recompute = config_.train.recompute;
    options.seed = base::derive_seed({config_.train.seed, 2, static_cast<std::uint64_t>(state_.step), number});
    if (trains_selector) {
      const auto wanted = config_.train.selector_queries;
      options.selector_queries =
          wanted > 0 ? wanted : default_selector_queries(rows.targets.numel(), config_.train.context);
    }
    if (is_nsa && (log || config_.train.gate_balance > 0 || trains_selector)) options.trace = &trace;
    const auto losses = token_losses(model_.forward(rows.batch, options), rows.targets).sum();
    auto loss = losses / static_cast<double>(tokens);
    const double share = static_cast<double>(rows.targets.numel()) / static_cast<double>(tokens);
    if (is_nsa && config_.train.gate_balance > 0) {
      loss = loss + gate_imbalance(trace) * (config_.train.gate_balance * share);
    }
    if (trains_selector) {
      loss = loss + selector_loss(trace) * (config_.train.selector_loss * share);
    }
    loss.backward();
    loss_sum.add_(losses.detach());
  }
  metrics_.add_loss(sum_over_ranks(loss_sum));
  const auto norm = optimizer_.step(rate);
  metrics_.add_norm(norm);
  ++state_.step;
  state_.tokens += tokens;
  state_.loss_tokens += tokens;
  throttle_.step();
  if (log || model_.device().is_cpu()) sync();
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - step_start_).count();
  step_start_ = now;
  meter_.add(seconds, tokens);
  state_.seconds += seconds;
  if (folder_) show_progress();
  if (log) {
    if (is_nsa && folder_) layers_ = layer_scalars(model_, batches.back().rows.batch, trace);
    log_step(rate, norm.item<double>());
  }
  end_on_device();
}

void Trainer::show_progress() {
  const auto step = meter_.mean_of_last(kShownSteps);
  const double left = state_.planned_steps > 0 ? static_cast<double>(state_.planned_steps - state_.step) * step.seconds
                                               : config_.train.minutes * 60 - state_.seconds;
  progress_.update(state_.step, fmt::format("{}{:.0f} tokens/s", shown_loss_, step.tokens / step.seconds), left);
}

/// Waits for the steps so far and looks at what they left on the device.
void Trainer::sync() {
  state_.loss_sum = metrics_.sync(state_.step);
  if (state_.loss_tokens == 0) return;
  shown_loss_ = fmt::format("loss {:.3f}  ", state_.loss_sum / static_cast<double>(state_.loss_tokens));
}

void Trainer::log_step(double rate, double norm) {
  nlohmann::json line = {
      {"kind", "train"},
      {"step", state_.step},
      {"tokens", state_.tokens},
      {"seconds", state_.seconds},
      {"loss", state_.loss_sum / static_cast<double>(state_.loss_tokens)},
      {"lr", rate},
      {"grad_norm", norm},
      {"tokens_per_second", static_cast<double>(state_.loss_tokens) / (state_.seconds - state_.logged_seconds)},
      {"model_tflops", 1e-12 * state_.flops / (state_.seconds - state_.logged_seconds)},  // a second, without phi
      {"noise", noise()}};
  if (!layers_.empty()) line["layers"] = layers_;
  log(line);
  state_.loss_sum = 0;
  metrics_.restart(state_.step, 0);
  state_.loss_tokens = 0;
  state_.flops = 0;
  state_.logged_seconds = state_.seconds;
}

void Trainer::evaluate_now() {
  if (!folder_ || eval_rows_.empty()) return;
  begin_on_device();
  throttle_.finish();
  end_on_device();
  const auto evaluation = evaluate(model_, corpus_.held_out, eval_rows_, tokenizer_);
  nlohmann::json line = {
      {"kind", "eval"}, {"step", state_.step}, {"tokens", state_.tokens}, {"seconds", state_.seconds}};
  line.update(nlohmann::json(evaluation));
  log(line);
  progress_.print(fmt::format(
      "step {}: held-out loss {:.4f} nats/token{}", state_.step, evaluation.loss,
      evaluation.bits_per_byte ? fmt::format(" ({:.3f} bits/byte)", *evaluation.bits_per_byte) : std::string()));
}

void Trainer::save() {
  begin_on_device();
  sync();
  const auto optimizer = optimizer_.gather_state();
  end_on_device();
  if (folder_) folder_->save(config_, state_, model_.parameters(), optimizer);
  saved_step_ = state_.step;
}

/// Broadcasts the first rank's weights, for a new or a resumed run.
void Trainer::share_weights() {
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter] : model_.parameters()) ranks_.broadcast(parameter.detach(), 0);
}

void Trainer::begin(const std::string& options) {
  if (folder_ && !config_.train.init.empty()) PretrainedFolder(config_.train.init).load(model_.parameters());
  plan();
  agree();
  if (folder_) folder_->begin(config_, options);
  share_weights();
  save();
}

void Trainer::load() {
  std::string text;  // of the state
  const auto optimizer = optimizer_.gather_state();
  if (folder_) {
    const auto state = folder_->load(config_, model_.parameters(), optimizer);
    if (state) text = nlohmann::json(*state).dump();
  }
  text = ranks_.broadcast(text);
  if (text.empty()) return begin("");
  state_ = parse_train_state(text, "the first rank's state", config_.train);
  share_weights();
  optimizer_.scatter_state(optimizer);
  metrics_.restart(state_.step, state_.loss_sum);
  saved_step_ = state_.step;
}

std::string Trainer::lost(const std::string& why) const {
  return fmt::format("step {}: {}; the last checkpoint, of step {}, is in {}; resume with --resume", state_.step, why,
                     saved_step_, out_);
}

/// From here to end_on_device() the host may wait for a device that waits for another rank.
void Trainer::begin_on_device() {
  if (watchdog_) watchdog_->begin(lost("stopped by a signal, but the device does not finish: another rank is gone"));
}

TrainResult Trainer::run(const std::string& out) {
  out_ = out;
  if (ranks_.size() > 1) {
    const auto on_timeout = [this](const std::string& message) {
      base::write_stderr(fmt::format("nsa: rank {}: {}\n", ranks_.rank(), message));
      ::_exit(128 + interrupt_.signal());
    };
    watchdog_.emplace([this] { return interrupt_.signal() != 0; }, on_timeout, kPatience);
  }
  try {
    return run_steps();
  } catch (const RankLost& gone) {
    throw base::Failure(lost(gone.what()));
  }
}

TrainResult Trainer::run_steps() {
  const auto& train = config_.train;
  plan();
  agree();
  step_start_ = Clock::now();
  while (state_.planned_steps == 0 || state_.step < state_.planned_steps) {
    const std::int64_t steps = state_.planned_steps;
    train_step(
        learning_rate(state_.step, steps == 0 ? INT64_MAX : steps, train.warmup_steps, train.lr, train.min_lr_ratio));
    plan();
    agree();
    const bool last = state_.step == state_.planned_steps;
    const auto due = [&](std::int64_t every) { return last || (every > 0 && state_.step % every == 0); };
    const bool evaluates = due(train.eval_every), saves = signal_ != 0 || due(train.save_every);
    if (evaluates) evaluate_now();
    if (saves) save();
    if (evaluates || saves) step_start_ = Clock::now();  // neither is a part of the next step
    if (signal_ != 0 && !last) break;
  }
  const bool finished = state_.step == state_.planned_steps;
  log({{"kind", "end"},
       {"step", state_.step},
       {"tokens", state_.tokens},
       {"seconds", state_.seconds},
       {"reason", finished ? "finished" : "interrupted"}});
  return {state_.step, state_.tokens, finished ? 0 : signal_};
}

void note_the_start_of_phi(const ModelConfig& model) {
  if (model.attention != AttentionKind::kNsa || model.phi != CompressionKind::kMlp || model.phi_hidden == 0) return;
  const auto dim = std::max(model.head_dim, model.v_head_dim);
  if (bridge::starts_as_mean(model.phi_hidden, dim)) return;
  base::write_stderr(
      fmt::format("note: phi starts from Xavier weights, not as the mean: --phi-hidden {} is below 2 * {}\n",
                  model.phi_hidden, dim));
}

/// Null where the data are token numbers.
std::unique_ptr<Tokenizer> tokenizer_of(const RunConfig& config) {
  if (config.data.holds_tokens()) return nullptr;
  if (config.train.init.empty()) return make_tokenizer(config.data.tokenizer);
  return make_tokenizer(config.data.tokenizer, config.model.vocab_size, /*pretrained=*/true);
}

void require_batches_for_all(const TrainConfig& config, const Ranks& ranks) {
  if (config.grad_accum % ranks.size() == 0) return;
  throw base::Error(
      fmt::format("grad_accum = {}: must be a multiple of the {} ranks, which share the batches of a step",
                  config.grad_accum, ranks.size()));
}

/// Throws where a rank was given other options or has other data than the first.
void require_same(const RunConfig& config, const Ranks& ranks) {
  const auto first = base::parse_json(ranks.broadcast(text_of(config)), "the first rank's configuration");
  const std::string difference = first_difference(nlohmann::json(config), first);
  if (!difference.empty()) throw base::Error(fmt::format("not as on the first rank: {}", difference));
}

/// Sets the tokenizer, or the vocabulary of data that are token numbers, and the model's vocabulary.
std::unique_ptr<Tokenizer> choose_vocabulary(RunConfig& config) {
  auto& data = config.data;
  if (!data.ids.empty() && !data.holds_tokens()) throw base::Error("--ids: needs --vocab-size or --init");
  if (data.holds_tokens()) {
    data.tokenizer.clear();
    if (config.train.retrieval_fraction > 0) {
      throw base::Error(fmt::format("retrieval_fraction = {}: must be 0 where the data are token numbers",
                                    config.train.retrieval_fraction));
    }
  }
  auto tokenizer = tokenizer_of(config);
  if (config.train.init.empty()) config.model.vocab_size = tokenizer ? tokenizer->vocab_size() : data.vocab_size;
  return tokenizer;
}

/// A path, or a list of them, as it is found from any folder; no path: `bytes`, the tokenizer, and nothing.
nlohmann::json absolute(const nlohmann::json& value) {
  const auto of = [](const nlohmann::json& path) {
    return std::filesystem::absolute(path.get<std::string>()).string();
  };
  if (value.is_string()) return value == "bytes" || value == "" ? value : nlohmann::json(of(value));
  auto paths = nlohmann::json::array();
  for (const auto& path : value) paths.push_back(of(path));
  return paths;
}

bool is_path(const std::string& field) { return field == "paths" || field == "ids" || field == "tokenizer"; }

std::string hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

}  // namespace

TrainResult train(TrainRequest request) {
  auto& config = request.config;
  const Ranks& ranks = request.execution.ranks;
  config.train.device = request.device.kind();
  config.data.paths = absolute(config.data.paths);
  config.data.ids = absolute(config.data.ids);
  config.data.tokenizer = absolute(config.data.tokenizer);
  const auto tokenizer = choose_vocabulary(config);
  config.model.validate();
  config.train.validate();
  require_a_selector(config.model, config.train.selector_loss);
  require_batches_for_all(config.train, ranks);
  config.train.threads = base::set_threads(static_cast<int>(config.train.threads));
  std::optional<RunFolder> folder;
  if (ranks.first()) folder.emplace(RunFolder::for_new_run(request.out, request.overwrite));
  auto corpus = load_corpus(config.data, tokenizer.get());
  config.fingerprint = hex(corpus.fingerprint);
  require_same(config, ranks);
  Trainer trainer(std::move(folder), config, tokenizer.get(), std::move(corpus), request.device.device,
                  request.execution);
  trainer.begin(request.options);
  if (ranks.first()) {
    trainer.print_summary(request.device);
    note_the_start_of_phi(config.model);
  }
  return trainer.run(request.out);
}

TrainResult resume(const std::string& out, const nlohmann::json& given, const Execution& execution) {
  const Ranks& ranks = execution.ranks;
  std::optional<RunFolder> folder;
  if (ranks.first()) folder.emplace(RunFolder::of_run(out));
  const nlohmann::json stored =
      parse_run_config(ranks.broadcast(folder ? text_of(folder->config()) : ""), out + "/config.json");
  nlohmann::json now = stored;
  const auto shown = [](const nlohmann::json& value) {  // whatever bytes it has
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  };
  for (const auto& [name, value] : given.items()) {
    for (const char* section : {"model", "train", "data"}) {
      if (!stored[section].contains(name) || stored[section][name] == value) continue;
      if (is_path(name) && absolute(stored[section][name]) == absolute(value)) continue;
      if (!is_interval(name)) {
        throw base::Error(fmt::format("{}: cannot resume with another {}.{}: {}, was {}", out, section, name,
                                      shown(value), shown(stored[section][name])));
      }
      now[section][name] = value;
    }
  }
  const auto config = now.get<RunConfig>();
  config.train.validate();
  require_same(config, ranks);
  require_batches_for_all(config.train, ranks);
  const auto device = base::choose_device(config.train.device);
  base::set_threads(static_cast<int>(config.train.threads));
  const auto tokenizer = tokenizer_of(config);
  auto corpus = load_corpus(config.data, tokenizer.get());
  if (hex(corpus.fingerprint) != config.fingerprint) {
    throw base::Error(fmt::format("{}: cannot resume: the data changed: fingerprint = {}, was {}", out,
                                  hex(corpus.fingerprint), config.fingerprint));
  }
  if (folder && now != stored) folder->update(config);
  Trainer trainer(std::move(folder), config, tokenizer.get(), std::move(corpus), device.device, execution);
  if (ranks.first()) trainer.print_summary(device);
  trainer.load();
  return trainer.run(out);
}

}  // namespace nsa::lm
