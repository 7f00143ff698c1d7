#include "lm/run_config.h"

#include <fmt/core.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "lm/error.h"
#include "lm/json_fields.h"

namespace nsa::lm {
namespace {

constexpr const char* kRunFormat = "nsa-run";
constexpr int kRunVersion = 1;

template <class Config, class Visit>
void for_each_field(Config& config, Visit&& visit) {
  visit("context", config.context);
  visit("batch_size", config.batch_size);
  visit("accumulate", config.accumulate);
  visit("steps", config.steps);
  visit("tokens", config.tokens);
  visit("minutes", config.minutes);
  visit("lr", config.lr);
  visit("min_lr_ratio", config.min_lr_ratio);
  visit("warmup_steps", config.warmup_steps);
  visit("weight_decay", config.weight_decay);
  visit("beta1", config.beta1);
  visit("beta2", config.beta2);
  visit("clip", config.clip);
  visit("noise", config.noise);
  visit("noise_until", config.noise_until);
  visit("gate_balance", config.gate_balance);
  visit("seed", config.seed);
  visit("device", config.device);
  visit("dtype", config.dtype);
  visit("recompute", config.recompute);
  visit("threads", config.threads);
  visit("log_every", config.log_every);
  visit("eval_every", config.eval_every);
  visit("eval_tokens", config.eval_tokens);
  visit("save_every", config.save_every);
}

void at_least(const char* name, double value, double low) {
  if (!std::isfinite(value) || value < low) throw Error(fmt::format("{} = {}: must be >= {}", name, value, low));
}

}  // namespace

void TrainConfig::validate() const {
  at_least("context", static_cast<double>(context), 1);
  at_least("batch_size", static_cast<double>(batch_size), 1);
  at_least("accumulate", static_cast<double>(accumulate), 1);
  at_least("steps", static_cast<double>(steps), 0);
  at_least("tokens", static_cast<double>(tokens), 0);
  at_least("minutes", minutes, 0);
  at_least("lr", lr, 0);
  at_least("min_lr_ratio", min_lr_ratio, 0);
  at_least("warmup_steps", static_cast<double>(warmup_steps), 0);
  at_least("weight_decay", weight_decay, 0);
  at_least("clip", clip, 0);
  at_least("noise", noise, 0);
  at_least("noise_until", noise_until, 0);
  at_least("gate_balance", gate_balance, 0);
  at_least("threads", static_cast<double>(threads), 0);
  at_least("log_every", static_cast<double>(log_every), 1);
  at_least("eval_every", static_cast<double>(eval_every), 0);
  at_least("eval_tokens", static_cast<double>(eval_tokens), 0);
  at_least("save_every", static_cast<double>(save_every), 0);
  for (const auto& [name, beta] : {std::pair{"beta1", beta1}, std::pair{"beta2", beta2}}) {
    if (!(beta >= 0 && beta < 1)) throw Error(fmt::format("{} = {}: must be in [0, 1)", name, beta));
  }
  if (device != "cpu" && device != "cuda") throw Error(fmt::format("device = '{}': must be cpu or cuda", device));
  if (dtype != "auto" && dtype != "float32" && dtype != "bfloat16") {
    throw Error(fmt::format("dtype = '{}': must be auto, float32 or bfloat16", dtype));
  }
  if (batch_size > (std::int64_t{1} << 30) / context) {
    throw Error(fmt::format("batch_size = {}: batch_size * context must be <= 2^30", batch_size));
  }
  if ((steps > 0) + (tokens > 0) + (minutes > 0) != 1) {
    throw Error("exactly one of steps, tokens and minutes must say how long to train");
  }
}

void to_json(nlohmann::json& json, const TrainConfig& config) {
  json = nlohmann::json::object();
  for_each_field(config, [&](const char* name, const auto& value) { json[name] = value; });
}

void from_json(const nlohmann::json& json, TrainConfig& config) {
  FieldReader reader(json, "train");
  for_each_field(config, [&](const std::string& name, auto& value) {
    if (name == "device" && !json.contains(name)) return;  // a run from before there was a choice: on the CPU
    reader(name.c_str(), value);
  });
  reader.finish();
}

void to_json(nlohmann::json& json, const RunConfig& config) {
  const auto counts = parameter_counts(config.model);
  json = {{"format", kRunFormat},
          {"version", kRunVersion},
          {"model", config.model},
          {"parameters",
           {{"phi", counts.phi},
            {"gates", counts.gates},
            {"extra_kv", counts.extra_kv},
            {"rest", counts.rest},
            {"total", counts.total()}}},
          {"train", config.train},
          {"data", config.data},
          {"fingerprint", config.fingerprint}};
}

void from_json(const nlohmann::json& json, RunConfig& config) {
  FieldReader reader(json, "config");
  std::string format;
  int version = 0;
  nlohmann::json model, train, data, parameters;
  reader("format", format);
  if (format != kRunFormat) throw Error(fmt::format("config: field 'format' = '{}': must be {}", format, kRunFormat));
  reader("version", version);
  if (version != kRunVersion) {
    throw Error(fmt::format("config: field 'version' = {}: this program reads version {}", version, kRunVersion));
  }
  reader.object("model", model);
  reader.object("parameters", parameters);  // told for readers, follows from the model
  reader.object("train", train);
  reader.object("data", data);
  reader("fingerprint", config.fingerprint);
  reader.finish();
  from_json(model, config.model);
  from_json(train, config.train);
  from_json(data, config.data);
}

RunConfig default_run_config(at::Device device) {
  RunConfig config;
  if (!device.is_cuda()) return config;
  auto& model = config.model;  // 31 million parameters
  model.num_layers = 8;
  model.hidden_size = 512;
  model.num_heads = 8;
  model.num_kv_heads = 2;
  model.head_dim = model.v_head_dim = 64;
  model.ffn_size = 3 * model.hidden_size;
  auto& train = config.train;
  train.device = "cuda";
  train.context = 8192;
  train.batch_size = 4;
  train.lr = 1e-3;
  train.warmup_steps = 50;
  train.eval_tokens = 262144;
  return config;
}

RunConfig parse_run_config(const std::string& text, const std::string& where) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) throw Error(fmt::format("{}: not JSON", where));
  try {
    RunConfig config;
    from_json(json, config);
    config.model.validate();
    config.train.validate();
    return config;
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", where, error.what()));
  }
}

std::string first_difference(const nlohmann::json& now, const nlohmann::json& before) {
  for (const auto& [key, value] : before.items()) {
    if (!now.contains(key)) return fmt::format("{} is missing, was {}", key, value.dump());
    if (value.is_object() && now[key].is_object()) {
      const std::string inner = first_difference(now[key], value);
      if (!inner.empty()) return key + "." + inner;
    } else if (now[key] != value) {
      return fmt::format("{} = {}, was {}", key, now[key].dump(), value.dump());
    }
  }
  for (const auto& [key, value] : now.items()) {
    if (!before.contains(key)) return fmt::format("{} = {}, was not there", key, value.dump());
  }
  return {};
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(fmt::format("{}: cannot be read", path));
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace nsa::lm
