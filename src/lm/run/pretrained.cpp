#include "lm/run/pretrained.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"
#include "base/json_fields.h"
#include "base/names.h"
#include "lm/model/counts.h"
#include "lm/run/checkpoint.h"

namespace nsa::lm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char *kIndex = "model.safetensors.index.json", *kSingle = "model.safetensors";

struct Architecture {
  const char* name;
  bool sparse, qk_norm;
};
constexpr Architecture kArchitectures[] = {{"LlamaForCausalLM", false, false},
                                           {"Qwen3ForCausalLM", false, true},
                                           {"NsaLlamaForCausalLM", true, false},
                                           {"NsaQwen3ForCausalLM", true, true}};

std::string in_folder(const std::string& folder, const std::string& name) { return (fs::path(folder) / name).string(); }

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

json read_object(const std::string& path) {
  auto object = base::parse_json(base::read_regular_text(path, base::Links::kFollow), path);
  if (!object.is_object()) throw base::Error(fmt::format("{}: must be a JSON object", path));
  return object;
}

/// The fields of an object of config.json, of which many may be missing or null.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)), reader_(object, where_) {}

  bool has(const char* name) const { return object_.contains(name) && !object_[name].is_null(); }
  template <class T>
  void required(const char* name, T& value) {
    reader_(name, value);
  }
  template <class T>
  void optional(const char* name, T& value) {
    if (has(name)) reader_(name, value);
  }
  /// Where it is there it must be what the program computes.
  void only(const char* name, const json& allowed) const {
    if (has(name) && object_[name] != allowed) {
      throw base::Error(
          fmt::format("{}: field '{}' = {}: must be {}", where_, name, base::shown(object_[name]), allowed.dump()));
    }
  }
  /// Null where it is not there.
  json object(const char* name) {
    json value;
    if (has(name)) reader_.object(name, value);
    return value;
  }

 private:
  const json& object_;
  std::string where_;
  base::FieldReader reader_;
};

/// Defaults and the factor of the attention are those of transformers.
void read_yarn(Fields& rope, std::int64_t context, RopeScaling& scaling) {
  rope.optional("beta_fast", scaling.beta_fast);
  rope.optional("beta_slow", scaling.beta_slow);
  rope.optional("truncate", scaling.truncate);
  scaling.original_context = static_cast<int>(std::min<std::int64_t>(context, 1 << 30));
  rope.optional("original_max_position_embeddings", scaling.original_context);
  const auto magnitude = [&](double mscale) {
    return scaling.factor <= 1 ? 1 : 0.1 * mscale * std::log(scaling.factor) + 1;
  };
  double mscale = 0, mscale_all_dim = 0;
  rope.optional("mscale", mscale);
  rope.optional("mscale_all_dim", mscale_all_dim);
  const bool both = mscale != 0 && mscale_all_dim != 0;
  scaling.attention_factor = both ? magnitude(mscale) / magnitude(mscale_all_dim) : magnitude(1);
  rope.optional("attention_factor", scaling.attention_factor);
}

/// `rope_parameters`, or the older `rope_scaling` with rope_theta outside of it.
void read_rope(Fields& fields, const std::string& where, std::int64_t context, ModelConfig& config) {
  fields.optional("rope_theta", config.rope_theta);
  fields.only("partial_rotary_factor", 1.0);
  const char* const name = fields.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const json object = fields.object(name);
  if (object.is_null()) return;
  Fields rope(object, fmt::format("{}: {}", where, name));
  rope.optional("rope_theta", config.rope_theta);
  std::string type = "default";
  rope.optional(rope.has("rope_type") ? "rope_type" : "type", type);
  if (type == "proportional") {
    rope.optional("partial_rotary_factor", config.rope.partial_rotary_factor);
    rope.optional("factor", config.rope.factor);
    config.rope.type = config.rope.factor == 1 ? RopeType::kDefault : RopeType::kLinear;
    return;
  }
  rope.only("partial_rotary_factor", 1.0);
  try {
    config.rope.type = rope_type(type);
  } catch (const base::Error& error) {
    throw base::Error(fmt::format("{}: {}: {}, or proportional", where, name, error.what()));
  }
  if (config.rope.type == RopeType::kDefault) return;
  rope.required("factor", config.rope.factor);
  if (config.rope.type == RopeType::kLinear) return;
  if (config.rope.type == RopeType::kYarn) return read_yarn(rope, context, config.rope);
  rope.required("low_freq_factor", config.rope.low_freq_factor);
  rope.required("high_freq_factor", config.rope.high_freq_factor);
  rope.required("original_max_position_embeddings", config.rope.original_context);
}

/// The field `nsa` of the two sparse classes; what is missing there has the defaults of nsa.hf.
void read_sparse(const json& object, const std::string& where, ModelConfig& config) {
  static const std::set<std::string> names = {"kernel_size", "kernel_stride",   "block_size",  "topk",
                                              "init_blocks", "local_blocks",    "window_size", "share_kv",
                                              "phi_hidden",  "phi_per_kv_head", "phi"};
  for (const auto& item : object.items()) {
    if (!names.count(item.key())) throw base::Error(fmt::format("{}: nsa: field '{}' is not known", where, item.key()));
  }
  Fields nsa(object, where + ": nsa");
  nsa.optional("kernel_size", config.nsa.kernel_size);
  nsa.optional("kernel_stride", config.nsa.kernel_stride);
  nsa.optional("block_size", config.nsa.block_size);
  nsa.optional("topk", config.nsa.topk);
  nsa.optional("init_blocks", config.nsa.init_blocks);
  nsa.optional("local_blocks", config.nsa.local_blocks);
  nsa.optional("window_size", config.nsa.window_size);
  nsa.optional("share_kv", config.share_kv);
  nsa.optional("phi_hidden", config.phi_hidden);
  nsa.optional("phi_per_kv_head", config.phi_per_kv_head);
  std::string phi = "mlp";
  nsa.optional("phi", phi);
  config.phi = base::compression_kind(phi);
}

ModelConfig read_config(const json& object, const std::string& where, std::int64_t& context) {
  std::vector<std::string> names;
  for (const auto& known : kArchitectures) names.emplace_back(known.name);
  std::optional<Architecture> architecture;
  for (const auto& known : kArchitectures) {
    if (object.contains("architectures") && object["architectures"] == json({known.name})) architecture = known;
  }
  if (!architecture) {
    throw base::Error(fmt::format("{}: field 'architectures' = {}: must be one of {}", where,
                                  base::shown(object.contains("architectures") ? object["architectures"] : json()),
                                  fmt::join(names, ", ")));
  }
  ModelConfig config;
  Fields fields(object, where);
  config.attention = architecture->sparse ? AttentionKind::kNsa : AttentionKind::kFull;
  config.qk_norm = architecture->qk_norm;
  fields.required("vocab_size", config.vocab_size);
  fields.required("num_hidden_layers", config.num_layers);
  fields.required("hidden_size", config.hidden_size);
  fields.required("num_attention_heads", config.num_heads);
  fields.required("intermediate_size", config.ffn_size);
  config.num_kv_heads = config.num_heads;
  fields.optional("num_key_value_heads", config.num_kv_heads);
  config.head_dim = config.qk_norm ? 128 : config.num_heads > 0 ? config.hidden_size / config.num_heads : 0;
  fields.optional("head_dim", config.head_dim);
  config.v_head_dim = config.head_dim;
  fields.optional("rms_norm_eps", config.norm_eps);
  config.tied_head = false;
  fields.optional("tie_word_embeddings", config.tied_head);
  fields.optional("max_position_embeddings", context);
  for (const auto& [name, allowed] :
       std::initializer_list<std::pair<const char*, json>>{{"hidden_act", "silu"},
                                                           {"attention_bias", false},
                                                           {"mlp_bias", false},
                                                           {"use_sliding_window", false},
                                                           {"quantization_config", nullptr}}) {
    fields.only(name, allowed);
  }
  if (!architecture->sparse && fields.has("layer_types")) {
    std::vector<std::string> types;
    fields.optional("layer_types", types);
    for (const auto& type : types) {
      if (type != "full_attention") {
        throw base::Error(fmt::format("{}: field 'layer_types' holds '{}': must be full_attention", where, type));
      }
    }
  }
  read_rope(fields, where, context, config);
  if (architecture->sparse) {
    fields.optional("dense_layers", config.dense_layers);
    const json nsa = fields.object("nsa");
    read_sparse(nsa.is_null() ? json::object() : nsa, where, config);
  }
  return config;
}

/// The files that the index names, or the one there is.
std::set<std::string> weight_files(const std::string& folder, std::map<std::string, std::string>& places) {
  const auto index = in_folder(folder, kIndex);
  if (!is_there(index)) {
    if (is_there(in_folder(folder, kSingle))) return {kSingle};
    throw base::Error(fmt::format("{}: no {} and no {}", folder, kSingle, kIndex));
  }
  const auto object = read_object(index);
  Fields fields(object, index);
  const json map = fields.object("weight_map");
  if (map.is_null()) throw base::Error(fmt::format("{}: field 'weight_map' is missing", index));
  std::set<std::string> files;
  for (const auto& [tensor, file] : map.items()) {
    const auto name = file.is_string() ? file.get<std::string>() : std::string();
    if (!name.ends_with(".safetensors") || name.find_first_of(std::string("/\\\0", 3)) != std::string::npos) {
      throw base::Error(fmt::format("{}: weight_map: field '{}' = {}: must name a .safetensors file in the same folder",
                                    index, tensor.substr(0, 80), base::shown(file)));
    }
    places[tensor] = name;
    files.insert(name);
  }
  return files;
}

/// A parameter's name in transformers.
std::string pretrained_name(const std::string& name) {
  if (name == "head.weight") return "lm_head.weight";
  if (name == "embedding.weight") return "model.embed_tokens.weight";
  static const std::map<std::string, std::string> parts = {{"attention_norm", "input_layernorm"},
                                                           {"attention", "self_attn"},
                                                           {"ffn_norm", "post_attention_layernorm"},
                                                           {"ffn", "mlp"}};
  std::string renamed = "model." + name;
  if (!name.starts_with("layers.")) return renamed;
  const auto begin = renamed.find('.', std::strlen("model.layers.")) + 1, end = renamed.find('.', begin);
  return renamed.replace(begin, end - begin, parts.at(renamed.substr(begin, end - begin)));
}

bool is_left_out(const std::string& name, const ModelConfig& config) {
  return name.ends_with("rotary_emb.inv_freq") || (config.tied_head && name == "lm_head.weight");
}

std::optional<at::ScalarType> dtype_of(const std::string& name) {
  if (name == "F32") return at::kFloat;
  if (name == "BF16") return at::kBFloat16;
  if (name == "F16") return at::kHalf;
  return {};
}

}  // namespace

bool is_pretrained(const std::string& path) {
  std::error_code error;
  const auto file = in_folder(path, "config.json");
  if (!fs::is_regular_file(file, error)) return false;
  const auto object = base::parse_json_or_null(base::read_regular_text(file, base::Links::kFollow));
  return object.is_object() && !object.contains("format") &&
         (object.contains("architectures") || object.contains("model_type"));
}

PretrainedFolder::PretrainedFolder(const std::string& path) : path_(path) {
  const auto file = in_folder(path, "config.json");
  const auto object = read_object(file);
  config_ = read_config(object, file, context_);
  try {
    config_.validate();
    if (context_ < 1) throw base::Error(fmt::format("max_position_embeddings = {}: must be >= 1", context_));
  } catch (const base::Error& error) {
    throw base::Error(fmt::format("{}: {}", file, error.what()));
  }
  for (const auto* const name : {"tokenizer.json", "tokenizer.model"}) {
    if (is_there(in_folder(path, name))) tokenizer_ = in_folder(path, name);
  }
  std::map<std::string, std::string> places;
  const bool indexed = is_there(in_folder(path, kIndex));
  std::map<std::string, std::string> held;  // tensors and their files
  std::int64_t stored = 0;
  for (const auto& name : weight_files(path, places)) {
    const auto where = in_folder(path, name);
    files_.emplace_back(where, base::SafetensorsFile::open(where, base::Links::kFollow));
    for (const auto& tensor : files_.back().second.tensors()) {
      if (!held.emplace(tensor.name, where).second) {
        throw base::Error(fmt::format("{}: tensor '{}' is in {}, too", where, tensor.name, held[tensor.name]));
      }
      if (indexed && (!places.count(tensor.name) || places[tensor.name] != name)) {
        throw base::Error(fmt::format("{}: tensor '{}': {} does not list it in this file", where, tensor.name, kIndex));
      }
      stored += static_cast<std::int64_t>(tensor.bytes.size()) / 2;  // at least two bytes a value
    }
  }
  for (const auto& [tensor, name] : places) {
    if (!held.count(tensor) && !is_left_out(tensor, config_))
      throw base::Error(fmt::format("{}: tensor '{}' is missing", in_folder(path, name), tensor));
  }
  // Before memory is taken for a damaged configuration.
  if (const auto needed = parameter_counts(config_).total(); needed / 2 > stored) {
    throw base::Error(
        fmt::format("{}: describes a model of {} parameters, the files hold {} values at most", file, needed, stored));
  }
}

void PretrainedFolder::load(const NamedTensors& parameters) const {
  const at::NoGradGuard no_grad;
  std::map<std::string, std::pair<const base::StoredTensor*, std::string>> stored;
  for (const auto& [where, file] : files_) {
    for (const auto& tensor : file.tensors()) {
      if (!is_left_out(tensor.name, config_)) stored[tensor.name] = {&tensor, where};
    }
  }
  for (const auto& [name, parameter] : parameters) {
    const auto it = stored.find(pretrained_name(name));
    if (it == stored.end()) throw base::Error(fmt::format("{}: tensor '{}' is missing", path_, pretrained_name(name)));
    const auto& [from, where] = it->second;
    const auto dtype = dtype_of(from->dtype);
    if (!dtype || from->shape != parameter.sizes().vec()) {
      throw base::Error(fmt::format("{}: tensor '{}' is {} ({}), config.json needs F32, BF16 or F16 ({})", where,
                                    from->name, from->dtype, fmt::join(from->shape, ", "),
                                    fmt::join(parameter.sizes(), ", ")));
    }
    const auto host = at::empty(parameter.sizes(), *dtype);
    std::memcpy(host.mutable_data_ptr(), from->bytes.data(), from->bytes.size());
    base::SafetensorsFile::release(*from);
    parameter.copy_(host);
    if (const auto message = nonfinite_message(where, {{from->name, parameter}})) throw base::Error(*message);
    stored.erase(it);
  }
  if (!stored.empty()) {
    const auto& [name, place] = *stored.begin();
    throw base::Error(
        fmt::format("{}: tensor '{}' is not in the model that config.json describes", place.second, name));
  }
}

}  // namespace nsa::lm
