#include "lm/run/checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "lm/generate/memory.h"
#include "lm/model/counts.h"
#include "lm/run/config.h"
#include "lm/run/pretrained.h"

namespace nsa::lm {

std::string save_tensors(const std::string& path, const NamedTensors& tensors, const base::Metadata& metadata) {
  std::vector<base::StoredTensor> stored;
  std::vector<at::Tensor> on_host;  // until they are written
  for (const auto& [name, on_device] : tensors) {
    const auto& tensor = on_host.emplace_back(on_device.detach().cpu());
    TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.is_contiguous(), name,
                ": only contiguous float32 is saved");
    stored.push_back(
        {name, "F32", tensor.sizes().vec(),
         std::as_bytes(std::span(tensor.const_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())))});
  }
  return base::write_safetensors(path, stored, metadata);
}

void load_tensors(const std::string& path, const base::SafetensorsFile& file, const NamedTensors& tensors) {
  const at::NoGradGuard no_grad;
  std::map<std::string, const base::StoredTensor*> stored;
  for (const auto& tensor : file.tensors()) stored[tensor.name] = &tensor;
  for (const auto& [name, tensor] : tensors) {
    const auto it = stored.find(name);
    if (it == stored.end()) throw base::Error(fmt::format("{}: tensor '{}' is missing", path, name));
    const base::StoredTensor& from = *it->second;
    if (from.dtype != "F32" || from.shape != tensor.sizes().vec()) {
      throw base::Error(fmt::format("{}: tensor '{}' is {} ({}), the configuration needs F32 ({})", path, name,
                                    from.dtype, fmt::join(from.shape, ", "), fmt::join(tensor.sizes(), ", ")));
    }
    if (!from.bytes.empty()) {
      const auto host = at::empty(tensor.sizes(), at::kFloat);
      std::memcpy(host.data_ptr<float>(), from.bytes.data(), from.bytes.size());
      base::SafetensorsFile::release(from);
      tensor.copy_(host);
    }
    stored.erase(it);
  }
  if (!stored.empty()) {
    throw base::Error(fmt::format("{}: tensor '{}' is not in the configured model", path, stored.begin()->first));
  }
  if (const auto message = nonfinite_message(path, tensors)) throw base::Error(*message);
}

std::optional<std::string> nonfinite_message(const std::string& where, const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    for (const at::Tensor& values : tensor.detach().flatten().split(kCheckedValues)) {
      if (!values.isfinite().all().item<bool>()) {
        return fmt::format("{}: tensor '{}' holds values that are not finite", where, name);
      }
    }
  }
  return {};
}

std::string metadata_of(const std::string& path, const base::SafetensorsFile& file, const char* name) {
  const auto find = [&](const char* field) {
    const auto it = file.metadata().find(field);
    if (it == file.metadata().end()) {
      throw base::Error(fmt::format("{}: not a checkpoint of this program: metadata '{}' is missing", path, field));
    }
    return it->second;
  };
  if (find("format") != kModelFormat) {
    throw base::Error(
        fmt::format("{}: not a checkpoint of this program: metadata 'format' is not {}", path, kModelFormat));
  }
  return find(name);
}

RunConfig trained_config(const std::string& path, const base::SafetensorsFile& file) {
  return parse_run_config(metadata_of(path, file, "config"), path + ": config");
}

void refuse_oversized(const std::string& path, const base::SafetensorsFile& file, const ModelConfig& config) {
  std::int64_t stored = 0;
  for (const auto& tensor : file.tensors()) stored += static_cast<std::int64_t>(tensor.bytes.size() / sizeof(float));
  const std::int64_t needed = parameter_counts(config).total();
  if (needed / 2 > stored) {
    throw base::Error(
        fmt::format("{}: holds {} values, the configuration describes a model of {} parameters", path, stored, needed));
  }
}

namespace {

std::string plain(const nlohmann::json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

void note_changes(const nlohmann::json& trained, const nlohmann::json& now) {
  for (const auto& [name, value] : now.items()) {
    if (trained[name] == value) continue;
    base::write_stderr(
        fmt::format("note: {} = {} by --set, trained with {}\n", name, plain(value), plain(trained[name])));
  }
}

}  // namespace

ModelConfig read_model_config(const std::string& path) {
  if (is_pretrained(path)) return PretrainedFolder(path).config();
  return read_run_config((std::filesystem::path(path) / "config.json").string()).model;
}

LoadedModel load_model(const std::string& path, const std::vector<std::string>& changes, at::Device device,
                       at::ScalarType dtype, const std::function<void(const ModelConfig&)>& before) {
  namespace fs = std::filesystem;
  if (is_pretrained(path)) {
    const PretrainedFolder folder(path);
    const auto model = with_changes(folder.config(), changes);
    if (before) before(model);
    LoadedModel loaded{.model = Model(model, std::nullopt, dtype),
                       .tokenizer = folder.tokenizer(),
                       .pretrained = true,
                       .context = folder.context()};
    loaded.model.place(device, dtype);
    folder.load(loaded.model.parameters());
    loaded.model.fuse();
    note_changes(folder.config(), model);
    return loaded;
  }
  std::error_code error;
  const bool is_folder = fs::is_directory(path, error);
  const fs::path file_path = is_folder ? fs::path(path) / "model.safetensors" : fs::path(path);
  const auto file = base::SafetensorsFile::open(file_path.string(), base::Links::kRefuse);
  const auto trained = trained_config(file_path.string(), file);
  const std::string config_path = (file_path.parent_path() / "config.json").string();
  const auto config = read_run_config(config_path);
  const auto model = with_changes(trained.model, changes);
  const nlohmann::json former = trained.model, now = model, described = with_changes(config.model, changes);
  for (const auto& [name, value] : now.items()) {
    if (described[name] != value) {
      throw base::Error(
          fmt::format("{0}: model.{1} = {2}, but the weights were trained with {3}; --set {1}={2} uses it anyway",
                      config_path, name, plain(described[name]), plain(value)));
    }
  }
  refuse_oversized(file_path.string(), file, model);
  if (before) before(model);
  LoadedModel loaded{.model = Model(model, std::nullopt, dtype),
                     .tokenizer = config.data.tokenizer,
                     .pretrained = !config.train.init.empty(),
                     .trained_on_tokens = config.data.holds_tokens(),
                     .context = config.train.context};
  loaded.model.place(device, dtype);
  load_tensors(file_path.string(), file, loaded.model.parameters());
  loaded.model.fuse();
  note_changes(former, now);
  return loaded;
}

std::unique_ptr<Tokenizer> tokenizer_of(const std::string& path, const LoadedModel& loaded) {
  if (loaded.tokenizer.empty()) throw base::Error(fmt::format("{}: {}", path, kNoTokenizer));
  return make_tokenizer(loaded.tokenizer, loaded.model.config().vocab_size, loaded.pretrained);
}

}  // namespace nsa::lm
