#include "lm/model/config.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/json.h"
#include "base/json_fields.h"
#include "base/names.h"

namespace nsa::lm {
namespace {

/// The one list of fields: calls visit(name, reference) for each.
template <class Config, class Visit>
void for_each_field(Config& config, Visit&& visit) {
  visit("vocab_size", config.vocab_size);
  visit("num_layers", config.num_layers);
  visit("hidden_size", config.hidden_size);
  visit("num_heads", config.num_heads);
  visit("num_kv_heads", config.num_kv_heads);
  visit("head_dim", config.head_dim);
  visit("v_head_dim", config.v_head_dim);
  visit("ffn_size", config.ffn_size);
  visit("rope_theta", config.rope_theta);
  visit("norm_eps", config.norm_eps);
  visit("kernel_size", config.nsa.kernel_size);
  visit("kernel_stride", config.nsa.kernel_stride);
  visit("block_size", config.nsa.block_size);
  visit("topk", config.nsa.topk);
  visit("init_blocks", config.nsa.init_blocks);
  visit("local_blocks", config.nsa.local_blocks);
  visit("window_size", config.nsa.window_size);
  visit("phi_hidden", config.phi_hidden);
  visit("phi_per_kv_head", config.phi_per_kv_head);
  visit("share_kv", config.share_kv);
}

/// Fields that runs from before them lack.
template <class Config, class Visit>
void for_each_later_field(Config& config, Visit&& visit) {
  visit("tied_head", config.tied_head);
  visit("qk_norm", config.qk_norm);
  visit("gated", config.gated);
  visit("dense_layers", config.dense_layers);
  visit("rope_factor", config.rope.factor);
  visit("rope_low_freq_factor", config.rope.low_freq_factor);
  visit("rope_high_freq_factor", config.rope.high_freq_factor);
  visit("rope_original_context", config.rope.original_context);
  visit("rope_beta_fast", config.rope.beta_fast);
  visit("rope_beta_slow", config.rope.beta_slow);
  visit("rope_truncate", config.rope.truncate);
  visit("rope_attention_factor", config.rope.attention_factor);
  visit("partial_rotary_factor", config.rope.partial_rotary_factor);
}

void require(bool condition, const std::string& message) {
  if (!condition) throw base::Error(message);
}

}  // namespace

const char* name_of(AttentionKind kind) {
  switch (kind) {
    case AttentionKind::kNsa:
      return "nsa";
    case AttentionKind::kFull:
      return "full";
    case AttentionKind::kWindow:
      return "window";
  }
  return "unknown";
}

AttentionKind attention_kind(const std::string& name) {
  for (const auto kind : {AttentionKind::kNsa, AttentionKind::kFull, AttentionKind::kWindow}) {
    if (name == name_of(kind)) return kind;
  }
  throw base::Error(fmt::format("attention = '{}': must be nsa, full or window", name));
}

void ModelConfig::validate() const {
  const auto in_range = [](const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    require(value >= low && value <= high, fmt::format("{} = {}: must be {} ... {}", name, value, low, high));
  };
  in_range("vocab_size", vocab_size, 2, 1 << 20);
  in_range("num_layers", num_layers, 1, 1024);
  in_range("hidden_size", hidden_size, 4, 1 << 16);
  in_range("num_heads", num_heads, 1, 1024);
  in_range("num_kv_heads", num_kv_heads, 1, 1024);
  in_range("head_dim", head_dim, 8, 1024);
  in_range("v_head_dim", v_head_dim, 8, 1024);
  in_range("ffn_size", ffn_size, 1, 1 << 18);
  in_range("phi_hidden", phi_hidden, 0, 1 << 16);
  in_range("kernel_size", nsa.kernel_size, 1, 1 << 16);
  in_range("topk", nsa.topk, 1, 1 << 16);
  require(hidden_size % 4 == 0, fmt::format("hidden_size = {}: must be a multiple of 4", hidden_size));
  require(!gated || attention != AttentionKind::kNsa,
          "gated = true: must be false with attention nsa, whose branches have gates");
  require(head_dim % 8 == 0, fmt::format("head_dim = {}: must be a multiple of 8", head_dim));
  require(v_head_dim % 8 == 0, fmt::format("v_head_dim = {}: must be a multiple of 8", v_head_dim));
  require(num_heads % num_kv_heads == 0,
          fmt::format("num_kv_heads = {}: must divide num_heads = {}", num_kv_heads, num_heads));
  require(rope_theta > 1 && std::isfinite(rope_theta), fmt::format("rope_theta = {}: must be > 1, finite", rope_theta));
  require(rope.factor >= 1 && std::isfinite(rope.factor),
          fmt::format("rope_factor = {}: must be >= 1, finite", rope.factor));
  require(rope.low_freq_factor > 0 && std::isfinite(rope.low_freq_factor),
          fmt::format("rope_low_freq_factor = {}: must be > 0, finite", rope.low_freq_factor));
  require(rope.high_freq_factor > rope.low_freq_factor && std::isfinite(rope.high_freq_factor),
          fmt::format("rope_high_freq_factor = {}: must be > rope_low_freq_factor = {}, finite", rope.high_freq_factor,
                      rope.low_freq_factor));
  in_range("rope_original_context", rope.original_context, 1, 1 << 30);
  require(rope.partial_rotary_factor >= 0 && rope.partial_rotary_factor <= 1,
          fmt::format("partial_rotary_factor = {}: must be 0 ... 1", rope.partial_rotary_factor));
  require(rope.partial_rotary_factor == 1 || (rope.type != RopeType::kLlama3 && rope.type != RopeType::kYarn),
          fmt::format("partial_rotary_factor = {}: must be 1 with rope_type {}", rope.partial_rotary_factor,
                      name_of(rope.type)));
  require(rope.beta_slow > 0 && std::isfinite(rope.beta_slow),
          fmt::format("rope_beta_slow = {}: must be > 0, finite", rope.beta_slow));
  require(rope.beta_fast > rope.beta_slow && std::isfinite(rope.beta_fast),
          fmt::format("rope_beta_fast = {}: must be > rope_beta_slow = {}, finite", rope.beta_fast, rope.beta_slow));
  require(rope.attention_factor > 0 && std::isfinite(rope.attention_factor),
          fmt::format("rope_attention_factor = {}: must be > 0, finite", rope.attention_factor));
  require(rope.attention_factor == 1 || rope.type == RopeType::kYarn,
          fmt::format("rope_attention_factor = {}: must be 1 with rope_type {}", rope.attention_factor,
                      name_of(rope.type)));
  require(norm_eps > 0 && std::isfinite(norm_eps), fmt::format("norm_eps = {}: must be > 0, finite", norm_eps));
  if (const Status status = nsa.validate(); !status.ok()) throw base::Error(status.message());
  require(dense_layers.empty() || attention == AttentionKind::kNsa,
          fmt::format("dense_layers = {}: must be [] with attention {}", dense_layers, name_of(attention)));
  for (std::size_t i = 0; i < dense_layers.size(); ++i) {
    require(dense_layers[i] >= 0 && dense_layers[i] < num_layers && (i == 0 || dense_layers[i] > dense_layers[i - 1]),
            fmt::format("dense_layers = {}: must be ascending numbers 0 ... {}", dense_layers, num_layers - 1));
  }
}

ModelConfig ModelConfig::of_layer(int layer) const {
  ModelConfig config = *this;
  config.dense_layers.clear();
  if (std::binary_search(dense_layers.begin(), dense_layers.end(), layer)) config.attention = AttentionKind::kFull;
  return config;
}

void to_json(nlohmann::json& json, const ModelConfig& config) {
  json = {
      {"attention", name_of(config.attention)}, {"phi", name_of(config.phi)}, {"rope_type", name_of(config.rope.type)}};
  const auto write = [&](const char* name, const auto& value) { json[name] = value; };
  for_each_field(config, write);
  for_each_later_field(config, write);
}

void from_json(const nlohmann::json& json, ModelConfig& config) {
  base::FieldReader reader(json, "model");
  std::string attention, phi;
  reader("attention", attention);
  reader("phi", phi);
  for_each_field(config, reader);
  const auto if_there = [&](const char* name, auto& value) {
    if (json.contains(name)) reader(name, value);
  };
  for_each_later_field(config, if_there);
  std::string rope = name_of(config.rope.type);
  if_there("rope_type", rope);
  reader.finish();
  config.rope.type = rope_type(rope);
  config.attention = attention_kind(attention);
  config.phi = base::compression_kind(phi);
}

ModelConfig with_preset(ModelConfig config, const std::string& name) {
  if (name != "recipe" && name != "paper")
    throw base::Error(fmt::format("preset = '{}': must be recipe or paper", name));
  const bool recipe = name == "recipe";
  const ModelConfig paper;
  config.share_kv = recipe;
  config.rope_theta = recipe ? 500000 : paper.rope_theta;
  config.rope.partial_rotary_factor =
      recipe && config.attention == AttentionKind::kNsa ? 0.5 : paper.rope.partial_rotary_factor;
  config.nsa.kernel_size = recipe ? 8 : paper.nsa.kernel_size;
  config.nsa.kernel_stride = recipe ? 8 : paper.nsa.kernel_stride;
  config.nsa.block_size = recipe ? 32 : paper.nsa.block_size;
  config.nsa.topk = recipe ? 32 : paper.nsa.topk;
  return config;
}

ModelConfig with_changes(const ModelConfig& config, const std::vector<std::string>& changes) {
  nlohmann::json json = config;
  for (const std::string& change : changes) {
    const auto equals = change.find('=');
    const std::string name = change.substr(0, equals);
    const std::string text = equals == std::string::npos ? "" : change.substr(equals + 1);
    if (!json.contains(name)) {
      std::vector<std::string> names;
      for (const auto& item : json.items()) names.push_back(item.key());
      throw base::Error(fmt::format("--set {}: must be FIELD=VALUE, FIELD one of {}", change, fmt::join(names, ", ")));
    }
    const auto value = base::parse_json_or_null(text);
    json[name] = value.is_number() || value.is_boolean() || value.is_array() ? value : nlohmann::json(text);
  }
  try {
    ModelConfig changed;
    from_json(json, changed);
    changed.validate();
    return changed;
  } catch (const base::Error& error) {
    throw base::Error(fmt::format("--set {}: {}", fmt::join(changes, " --set "), error.what()));
  }
}

}  // namespace nsa::lm
