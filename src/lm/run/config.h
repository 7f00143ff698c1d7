// Everything that determines a training run: the content of config.json.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lm/data/config.h"
#include "lm/model/config.h"

namespace nsa::lm {

struct TrainConfig {
  std::string init;                 // folder of transformers that the weights came from; empty: they are random
  std::int64_t context = 4096;      // tokens
  std::int64_t context_warmup = 0;  // longest sequence at the start, see sequence_limit(); 0: context
  std::int64_t batch_size = 2;      // rows of `context` tokens that go through the model together
  std::int64_t grad_accum = 1;      // batches whose gradients make one step
  std::int64_t steps = 0;           // one of steps, tokens and minutes says how long the run is
  std::int64_t tokens = 0;          // 0: not given
  double minutes = 0;               // of training; the number of steps follows from the speed of the first tenth
  double lr = 3e-3;                 // peak
  double min_lr_ratio = 0.1;        // the cosine ends at lr * min_lr_ratio
  std::int64_t warmup_steps = 20;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double clip = 1.0;                  // 0: no clipping
  double phi_lr_scale = 0;            // the learning rate of phi's tensors over lr; 0: by fan-in
  double noise = 0;                   // exploration noise of the selection at the start
  double noise_until = 0.5;           // share of the run after which it is 0, linearly
  double gate_balance = 0;            // weight of sum over layers of KL(uniform || mean gate shares)
  double selector_loss = 0;           // weight of sum over layers of selector_loss()
  std::int64_t selector_queries = 0;  // that it asks of a batch; 0: default_selector_queries()
  double retrieval_fraction = 0;      // fraction of the tokens in key-value lines, see insert_key_value_lines()
  std::vector<std::string> retrieval_kinds = {"single"};  // of these lines
  std::uint64_t seed = 0;
  std::string device = "cpu";     // cpu or cuda, also when resuming
  std::string dtype = "auto";     // auto, float32, bfloat16
  bool recompute = false;         // layers keep their inputs alone and run again in the backward
  std::int64_t threads = 0;       // 0: as many as torch takes
  std::int64_t log_every = 10;    // steps
  std::int64_t eval_every = 100;  // steps; 0: at the end alone
  std::int64_t eval_tokens = 65536;
  std::int64_t save_every = 100;  // steps; 0: at the end alone

  void validate() const;
  /// What `steps` or `tokens` come to; 0 where `minutes` says how long.
  std::int64_t planned_steps() const;
  /// The longest sequence that step `step` of a run of `planned` steps trains on: from context_warmup on it doubles, in
  /// steps of equal length, until it is `context` for the second half of the run.
  std::int64_t sequence_limit(std::int64_t step, std::int64_t planned) const;
  std::int64_t tokens_per_step() const { return context * batch_size * grad_accum; }  // at most
};
/// The kinds of key-value lines that `retrieval_kinds` may have: single, multivalue, tracking.
const std::vector<std::string>& known_retrieval_kinds();
void to_json(nlohmann::json& json, const TrainConfig& config);
void from_json(const nlohmann::json& json, TrainConfig& config);

struct RunConfig {
  ModelConfig model;
  TrainConfig train;
  DataConfig data;
  std::string fingerprint;  // of the data
};
void to_json(nlohmann::json& json, const RunConfig& config);
void from_json(const nlohmann::json& json, RunConfig& config);

/// What a run is made of where nothing else is said. `device`: cpu or cuda; there a larger model and a longer context,
/// in few minutes.
RunConfig default_run_config(const std::string& device);

/// Parses config.json's text; `where` names it in messages. Throws Error.
RunConfig parse_run_config(const std::string& text, const std::string& where);
/// Reads the file. Throws Error.
RunConfig read_run_config(const std::string& path);
/// The text for config.json. Throws Error when a path in it is not UTF-8.
std::string text_of(const RunConfig& config);
/// Is it a config.json of this program, sound or not?
bool is_run_config(const std::string& text);

/// Is the field of `train` an interval of logging, evaluation or checkpoints? A resumed run may change it.
bool is_interval(const std::string& field);

/// The first field in which they differ, as "train.lr = 0.003, was 0.001"; empty when they agree.
std::string first_difference(const nlohmann::json& now, const nlohmann::json& before);

}  // namespace nsa::lm
