#include "lm/train/trainer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/device.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/random.h"
#include "bridge/compression.h"
#include "lm/data/loader.h"
#include "lm/data/lookups.h"
#include "lm/model/flops.h"
#include "lm/model/parameter_counts.h"
#include "lm/run/folder.h"
#include "lm/run/pretrained.h"
#include "lm/run/state.h"
#include "lm/train/deferred_metrics.h"
#include "lm/train/evaluate.h"
#include "lm/train/optimizer.h"
#include "lm/train/throttle.h"

namespace nsa::lm {
namespace {

using Clock = std::chrono::steady_clock;

// A run of so many minutes settles its number of steps by the speed of its first steps: at least this many, and this
// share of the time.
constexpr std::size_t kTimedSteps = 10;
constexpr double kTimedShare = 0.1;

/// Without such instructions torch's bfloat16 products are slower than float32.
bool has_bfloat16_products() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

at::ScalarType dtype_of(const std::string& name, at::Device device) {
  if (name == "auto") return device.is_cuda() || has_bfloat16_products() ? at::kBFloat16 : at::kFloat;
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
  Trainer(RunFolder folder, RunConfig config, const Tokenizer& tokenizer, Corpus corpus, at::Device device)
      : folder_(std::move(folder)),
        config_(std::move(config)),
        tokenizer_(tokenizer),
        corpus_(std::move(corpus)),
        rows_(corpus_.train, config_.train.context, config_.train.seed),
        eval_rows_(choose_rows(pack_documents(corpus_.held_out, config_.train.context), config_.train.eval_tokens)),
        model_(make_model(config_, device)),
        optimizer_(model_.parameters(), {.beta1 = config_.train.beta1,
                                         .beta2 = config_.train.beta2,
                                         .weight_decay = config_.train.weight_decay,
                                         .clip = config_.train.clip,
                                         .phi_lr_scale = config_.train.phi_lr_scale}),
        metrics_(device),
        throttle_(device) {
    if (rows_.empty()) throw Error("data: no document is left to train on");
    make_torch_deterministic(device);
  }

  void print_summary(const DeviceChoice& device) const;
  /// A new run in the folder.
  void begin();
  /// On with the run in the folder.
  void load();
  TrainResult run();

 private:
  std::vector<TrainingBatch> next_batches();
  double training_flops(const Batch& batch) const;
  void plan();
  void train_step(double rate);
  void sync();
  void log_step(double rate, double norm);
  void evaluate_now();
  void save();
  double noise() const;

  InterruptGuard interrupt_;  // from before the first checkpoint on
  RunFolder folder_;
  RunConfig config_;
  const Tokenizer& tokenizer_;
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
  Progress progress_{0};
  Clock::time_point step_start_;
  std::vector<double> step_seconds_;  // of this process's steps
};

void Trainer::print_summary(const DeviceChoice& device) const {
  const auto counts = parameter_counts(config_.model);
  fmt::print("device: {}\n", device.text);
  fmt::print("model: attention {}, {} parameters: phi {}, gates {}, extra K/V {}, rest {}\n",
             name_of(config_.model.attention), counts.total(), counts.phi, counts.gates, counts.extra_kv, counts.rest);
  fmt::print("data: {:.1f} MB of text, {} documents to train on, {} held out\n",
             static_cast<double>(corpus_.bytes) / 1e6, corpus_.train.size(), corpus_.held_out.size());
  std::fflush(stdout);
}

std::vector<TrainingBatch> Trainer::next_batches() {
  const auto& train = config_.train;
  std::vector<TrainingBatch> batches;
  for (std::int64_t i = 0; i < train.accumulate; ++i) {
    const auto first = (state_.step * train.accumulate + i) * train.batch_size;
    batches.push_back(rows_.batch(first, train.batch_size));
    if (train.lookups == 0) continue;
    const auto seed = derive_seed({train.seed, 3, static_cast<std::uint64_t>(first)});
    plant_lookups(batches.back(), train.lookups, tokenizer_, seed);
  }
  return batches;
}

double Trainer::training_flops(const Batch& batch) const {
  const auto* const offsets = batch.cu_seqlens.const_data_ptr<int>();
  double flops = 0;
  for (std::int64_t b = 0; b + 1 < batch.cu_seqlens.numel(); ++b)
    flops += lm::training_flops(config_.model, offsets[b + 1] - offsets[b]).rest;
  return flops;
}

/// Settles the number of steps where the configuration gives tokens or minutes.
void Trainer::plan() {
  const auto& train = config_.train;
  if (state_.planned_steps > 0) return;
  if (train.minutes == 0) {
    state_.planned_steps = train.planned_steps();
  } else {
    const double budget = train.minutes * 60;
    if (step_seconds_.size() < kTimedSteps || state_.seconds < kTimedShare * budget) return;
    const auto median = step_seconds_.begin() + static_cast<std::ptrdiff_t>(step_seconds_.size() / 2);
    std::nth_element(step_seconds_.begin(), median, step_seconds_.end());
    const auto more = static_cast<std::int64_t>(std::max(0.0, budget - state_.seconds) / *median);
    state_.planned_steps = state_.step + std::max<std::int64_t>(1, more);
  }
  progress_.set_total(state_.planned_steps);
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
  const auto batches = next_batches();
  std::int64_t tokens = 0;
  for (const auto& batch : batches) tokens += batch.targets.numel(), state_.flops += training_flops(batch.batch);
  std::vector<LayerTrace> trace;
  for (std::size_t i = 0; i < batches.size(); ++i) {
    ForwardOptions options;
    options.noise = noise();
    options.recompute = config_.train.recompute;
    options.seed = derive_seed({config_.train.seed, 2, static_cast<std::uint64_t>(state_.step), i});
    if (is_nsa && (log || config_.train.gate_balance > 0)) options.trace = &trace;
    const auto loss_sum = token_losses(model_.forward(batches[i].batch, options), batches[i].targets).sum();
    auto loss = loss_sum / static_cast<double>(tokens);
    if (is_nsa && config_.train.gate_balance > 0) {
      const double share = static_cast<double>(batches[i].targets.numel()) / static_cast<double>(tokens);
      loss = loss + gate_imbalance(trace) * (config_.train.gate_balance * share);
    }
    loss.backward();
    metrics_.add_loss(loss_sum.detach());
  }
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
  step_seconds_.push_back(seconds);
  state_.seconds += seconds;
  const double left = state_.planned_steps > 0 ? static_cast<double>(state_.planned_steps - state_.step) * seconds
                                               : config_.train.minutes * 60 - state_.seconds;
  progress_.update(state_.step, fmt::format("{}{:.0f} tokens/s", shown_loss_, static_cast<double>(tokens) / seconds),
                   left);
  if (log) {
    if (is_nsa) layers_ = layer_scalars(model_, batches.back().batch, trace);
    log_step(rate, norm.item<double>());
  }
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
  folder_.log(line);
  state_.loss_sum = 0;
  metrics_.restart(state_.step, 0);
  state_.loss_tokens = 0;
  state_.flops = 0;
  state_.logged_seconds = state_.seconds;
}

void Trainer::evaluate_now() {
  if (eval_rows_.empty()) return;
  const auto evaluation = evaluate(model_, corpus_.held_out, eval_rows_, &tokenizer_);
  nlohmann::json line = {
      {"kind", "eval"}, {"step", state_.step}, {"tokens", state_.tokens}, {"seconds", state_.seconds}};
  line.update(nlohmann::json(evaluation));
  folder_.log(line);
  progress_.print(fmt::format(
      "step {}: held-out loss {:.4f} nats/token{}", state_.step, evaluation.loss,
      evaluation.bits_per_byte ? fmt::format(" ({:.3f} bits/byte)", *evaluation.bits_per_byte) : std::string()));
}

void Trainer::save() {
  sync();
  folder_.save(config_, state_, model_.parameters(), optimizer_.state());
}

void Trainer::begin() {
  if (!config_.train.init.empty()) PretrainedFolder(config_.train.init).load(model_.parameters());
  plan();
  folder_.begin(config_);
  save();
}

void Trainer::load() {
  const auto state = folder_.load(config_, model_.parameters(), optimizer_.state());
  if (!state) return begin();
  state_ = *state;
  metrics_.restart(state_.step, state_.loss_sum);
}

TrainResult Trainer::run() {
  const auto& train = config_.train;
  plan();
  if (state_.planned_steps > 0) progress_.set_total(state_.planned_steps);
  step_start_ = Clock::now();
  while (state_.planned_steps == 0 || state_.step < state_.planned_steps) {
    const std::int64_t steps = state_.planned_steps;
    train_step(
        learning_rate(state_.step, steps == 0 ? INT64_MAX : steps, train.warmup_steps, train.lr, train.min_lr_ratio));
    plan();
    const bool last = state_.step == state_.planned_steps;
    if (last || (train.eval_every > 0 && state_.step % train.eval_every == 0)) evaluate_now();
    if (last || interrupt_.signal() != 0 || (train.save_every > 0 && state_.step % train.save_every == 0)) save();
    step_start_ = Clock::now();
    if (interrupt_.signal() != 0 && !last) break;
  }
  const bool finished = state_.step == state_.planned_steps;
  folder_.log({{"kind", "end"},
               {"step", state_.step},
               {"tokens", state_.tokens},
               {"seconds", state_.seconds},
               {"reason", finished ? "finished" : "interrupted"}});
  return {state_.step, state_.tokens, finished ? 0 : interrupt_.signal()};
}

void note_the_start_of_phi(const ModelConfig& model) {
  if (model.attention != AttentionKind::kNsa || model.phi != CompressionKind::kMlp || model.phi_hidden == 0) return;
  const auto dim = std::max(model.head_dim, model.v_head_dim);
  if (starts_as_mean(model.phi_hidden, dim)) return;
  fmt::print(stderr, "note: phi starts from Xavier weights, not as the mean: --phi-hidden {} is below 2 * {}\n",
             model.phi_hidden, dim);
}

std::unique_ptr<Tokenizer> tokenizer_of(const RunConfig& config) {
  if (config.train.init.empty()) return make_tokenizer(config.data.tokenizer);
  return make_tokenizer(config.data.tokenizer, config.model.vocab_size, /*pretrained=*/true);
}

std::string hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

}  // namespace

TrainResult train(TrainRequest request) {
  auto& config = request.config;
  config.train.device = request.device.kind();
  const auto tokenizer = tokenizer_of(config);
  if (config.train.init.empty()) config.model.vocab_size = tokenizer->vocab_size();
  config.model.validate();
  config.train.validate();
  config.train.threads = set_threads(static_cast<int>(config.train.threads));
  auto folder = RunFolder::for_new_run(request.out, request.overwrite);
  auto corpus = load_corpus(config.data, *tokenizer);
  config.fingerprint = hex(corpus.fingerprint);
  Trainer trainer(std::move(folder), config, *tokenizer, std::move(corpus), request.device.device);
  trainer.begin();
  trainer.print_summary(request.device);
  note_the_start_of_phi(config.model);
  return trainer.run();
}

TrainResult resume(const std::string& out, const nlohmann::json& given) {
  auto folder = RunFolder::of_run(out);
  const auto config = folder.config();
  const nlohmann::json stored = config;
  const auto shown = [](const nlohmann::json& value) {  // whatever bytes it has
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  };
  for (const auto& [name, value] : given.items()) {
    for (const char* section : {"model", "train", "data"}) {
      if (stored[section].contains(name) && stored[section][name] != value) {
        throw Error(fmt::format("{}: cannot resume with another {}.{}: {}, was {}", out, section, name, shown(value),
                                shown(stored[section][name])));
      }
    }
  }
  const auto device = choose_device(config.train.device);
  set_threads(static_cast<int>(config.train.threads));
  const auto tokenizer = tokenizer_of(config);
  auto corpus = load_corpus(config.data, *tokenizer);
  if (hex(corpus.fingerprint) != config.fingerprint) {
    throw Error(fmt::format("{}: cannot resume: the data changed: fingerprint = {}, was {}", out,
                            hex(corpus.fingerprint), config.fingerprint));
  }
  Trainer trainer(std::move(folder), config, *tokenizer, std::move(corpus), device.device);
  trainer.print_summary(device);
  trainer.load();
  return trainer.run();
}

}  // namespace nsa::lm
