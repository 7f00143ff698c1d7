#include "lm/run/config.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"
#include "base/json_fields.h"
#include "lm/model/counts.h"
#include "nsa/backend.h"

namespace nsa::lm {
namespace {

constexpr const char* kRunFormat = "nsa-run";
constexpr int kRunVersion = 1;

template <class Config, class Visit>
void for_each_field(Config& config, Visit&& visit) {
  visit("init", config.init);
  visit("context", config.context);
  visit("context_warmup", config.context_warmup);
  visit("batch_size", config.batch_size);
  visit("grad_accum", config.grad_accum);
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
  visit("phi_lr_scale", config.phi_lr_scale);
  visit("noise", config.noise);
  visit("noise_until", config.noise_until);
  visit("gate_balance", config.gate_balance);
  visit("selector_loss", config.selector_loss);
  visit("selector_queries", config.selector_queries);
  visit("retrieval_fraction", config.retrieval_fraction);
  visit("retrieval_kinds", config.retrieval_kinds);
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
  if (!std::isfinite(value) || value < low) throw base::Error(fmt::format("{} = {}: must be >= {}", name, value, low));
}

void in_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high = std::int64_t{1} << 50) {
  if (value < low || value > high) throw base::Error(fmt::format("{} = {}: must be {} ... {}", name, value, low, high));
}

}  // namespace

const std::vector<std::string>& known_retrieval_kinds() {
  static const std::vector<std::string> names = {"single", "multivalue", "tracking"};
  return names;
}

void TrainConfig::validate() const {
  in_range("context", context, 1, std::int64_t{1} << 30);
  in_range("context_warmup", context_warmup, 0, context);
  in_range("batch_size", batch_size, 1);
  in_range("grad_accum", grad_accum, 1, 1 << 20);
  in_range("steps", steps, 0);
  in_range("tokens", tokens, 0);
  at_least("minutes", minutes, 0);
  at_least("lr", lr, 0);
  at_least("min_lr_ratio", min_lr_ratio, 0);
  in_range("warmup_steps", warmup_steps, 0);
  at_least("weight_decay", weight_decay, 0);
  at_least("clip", clip, 0);
  at_least("phi_lr_scale", phi_lr_scale, 0);
  at_least("noise", noise, 0);
  at_least("noise_until", noise_until, 0);
  at_least("gate_balance", gate_balance, 0);
  at_least("selector_loss", selector_loss, 0);
  in_range("selector_queries", selector_queries, 0, 1 << 16);
  if (!(retrieval_fraction >= 0 && retrieval_fraction <= 0.5))
    throw base::Error(fmt::format("retrieval_fraction = {}: must be 0 ... 0.5", retrieval_fraction));
  const auto& known = known_retrieval_kinds();
  const auto unknown = [&](const std::string& kind) {
    return std::find(known.begin(), known.end(), kind) == known.end();
  };
  if (retrieval_kinds.empty() || std::any_of(retrieval_kinds.begin(), retrieval_kinds.end(), unknown)) {
    throw base::Error(fmt::format("retrieval_kinds = {}: must be some of {}", fmt::join(retrieval_kinds, ", "),
                                  fmt::join(known, ", ")));
  }
  in_range("threads", threads, 0, kMaxThreads);
  in_range("log_every", log_every, 1);
  in_range("eval_every", eval_every, 0);
  in_range("eval_tokens", eval_tokens, 0);
  in_range("save_every", save_every, 0);
  for (const auto& [name, beta] : {std::pair{"beta1", beta1}, std::pair{"beta2", beta2}}) {
    if (!(beta >= 0 && beta < 1)) throw base::Error(fmt::format("{} = {}: must be in [0, 1)", name, beta));
  }
  if (device != "cpu" && device != "cuda") throw base::Error(fmt::format("device = '{}': must be cpu or cuda", device));
  if (dtype != "auto" && dtype != "float32" && dtype != "bfloat16") {
    throw base::Error(fmt::format("dtype = '{}': must be auto, float32 or bfloat16", dtype));
  }
  if (batch_size > (std::int64_t{1} << 30) / context) {
    throw base::Error(fmt::format("batch_size = {}: batch_size * context must be <= 2^30", batch_size));
  }
  if (minutes > 1e7) throw base::Error(fmt::format("minutes = {}: must be <= 1e7", minutes));
  if (static_cast<double>(steps) * static_cast<double>(tokens_per_step()) > 0x1p62) {
    throw base::Error(fmt::format("steps = {}: steps * grad_accum * batch_size * context must be <= 2^62", steps));
  }
  if ((steps > 0) + (tokens > 0) + (minutes > 0) != 1) {
    throw base::Error("exactly one of steps, tokens and minutes must say how long to train");
  }
  if (selector_queries > 0 && selector_loss == 0) {
    throw base::Error(fmt::format("selector_queries = {}: needs a selector_loss above 0", selector_queries));
  }
  if (context_warmup > 0 && minutes > 0) {
    throw base::Error(fmt::format("context_warmup = {}: needs steps or tokens, not minutes", context_warmup));
  }
}

std::int64_t TrainConfig::planned_steps() const {
  return steps > 0 ? steps : (tokens + tokens_per_step() - 1) / tokens_per_step();
}

std::int64_t TrainConfig::sequence_limit(std::int64_t step, std::int64_t planned) const {
  if (context_warmup == 0 || 2 * step >= planned) return context;
  std::int64_t doublings = 0;
  while (context_warmup << doublings < context) ++doublings;
  return std::min(context, context_warmup << (2 * step * doublings / planned));
}

void to_json(nlohmann::json& json, const TrainConfig& config) {
  json = nlohmann::json::object();
  for_each_field(config, [&](const char* name, const auto& value) { json[name] = value; });
}

void from_json(const nlohmann::json& json, TrainConfig& config) {
  base::FieldReader reader(json, "train");
  for_each_field(config, [&](const std::string& name, auto& value) {
    if (!json.contains(name)) {  // a run older than the field keeps its behaviour
      if (name == "device" || name == "init" || name == "retrieval_fraction" || name == "retrieval_kinds" ||
          name == "selector_loss" || name == "selector_queries" || name == "context_warmup")
        return;
      if (name == "phi_lr_scale") return void(config.phi_lr_scale = 1);
    }
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
  base::FieldReader reader(json, "config");
  std::string format;
  int version = 0;
  nlohmann::json model, train, data, parameters;
  reader("format", format);
  if (format != kRunFormat)
    throw base::Error(fmt::format("config: field 'format' = '{}': must be {}", format, kRunFormat));
  reader("version", version);
  if (version != kRunVersion) {
    throw base::Error(fmt::format("config: field 'version' = {}: this program reads version {}", version, kRunVersion));
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

RunConfig default_run_config(const std::string& device) {
  RunConfig config;
  config.model = with_preset(config.model, "recipe");
  if (device != "cuda") return config;
  auto& model = config.model;  // 26 million parameters
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
  train.save_every = 500;
  return config;
}

RunConfig parse_run_config(const std::string& text, const std::string& where) {
  const auto json = base::parse_json(text, where);
  try {
    RunConfig config;
    from_json(json, config);
    config.model.validate();
    config.train.validate();
    const auto& data = config.data;
    if (data.vocab_size != (data.holds_tokens() ? config.model.vocab_size : 0)) {
      throw base::Error(fmt::format("data.vocab_size = {}: must be 0 or that of the model", data.vocab_size));
    }
    if (!data.ids.empty() && !data.holds_tokens()) throw base::Error("data.ids: needs a vocab_size");
    return config;
  } catch (const base::Error& error) {
    throw base::Error(fmt::format("{}: {}", where, error.what()));
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
    if (!before.contains(key)) return fmt::format("{} = {}, was missing", key, value.dump());
  }
  return {};
}

bool is_interval(const std::string& field) {
  return field == "log_every" || field == "eval_every" || field == "save_every";
}

RunConfig read_run_config(const std::string& path) {
  return parse_run_config(base::read_regular_text(path, base::Links::kRefuse), path);
}

std::string text_of(const RunConfig& config) {
  try {
    return nlohmann::json(config).dump(2) + "\n";
  } catch (const nlohmann::json::type_error&) {
    throw base::Error("the path of data or tokenizer is not UTF-8: config.json cannot hold it");
  }
}

bool is_run_config(const std::string& text) {
  const auto json = base::parse_json_or_null(text);
  return json.is_object() && json.contains("format") && json["format"] == kRunFormat;
}

}  // namespace nsa::lm
