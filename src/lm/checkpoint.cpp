#include "lm/checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cstring>
#include <filesystem>
#include <map>

#include "lm/error.h"
#include "lm/run_config.h"

namespace nsa::lm {

void save_tensors(const std::string& path, const NamedTensors& tensors, const Metadata& metadata) {
  std::vector<StoredTensor> stored;
  std::vector<at::Tensor> on_host;  // until they are written
  for (const auto& [name, on_device] : tensors) {
    const auto& tensor = on_host.emplace_back(on_device.detach().cpu());
    TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.is_contiguous(), name,
                ": only contiguous float32 is saved");
    stored.push_back(
        {name, "F32", tensor.sizes().vec(),
         std::as_bytes(std::span(tensor.const_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())))});
  }
  write_safetensors(path, stored, metadata);
}

void load_tensors(const std::string& path, const SafetensorsFile& file, const NamedTensors& tensors) {
  const at::NoGradGuard no_grad;
  std::map<std::string, const StoredTensor*> stored;
  for (const auto& tensor : file.tensors()) stored[tensor.name] = &tensor;
  for (const auto& [name, tensor] : tensors) {
    const auto it = stored.find(name);
    if (it == stored.end()) throw Error(fmt::format("{}: tensor '{}' is missing", path, name));
    const StoredTensor& from = *it->second;
    if (from.dtype != "F32" || from.shape != tensor.sizes().vec()) {
      throw Error(fmt::format("{}: tensor '{}' is {} ({}), the configuration needs F32 ({})", path, name, from.dtype,
                              fmt::join(from.shape, ", "), fmt::join(tensor.sizes(), ", ")));
    }
    if (!from.bytes.empty()) {
      const auto host = at::empty(tensor.sizes(), at::kFloat);
      std::memcpy(host.data_ptr<float>(), from.bytes.data(), from.bytes.size());
      tensor.copy_(host);
    }
    stored.erase(it);
  }
  if (!stored.empty()) {
    throw Error(fmt::format("{}: tensor '{}' is not in the configured model", path, stored.begin()->first));
  }
}

void refuse_oversized(const std::string& path, const SafetensorsFile& file, const ModelConfig& config) {
  std::int64_t stored = 0;
  for (const auto& tensor : file.tensors()) stored += static_cast<std::int64_t>(tensor.bytes.size() / sizeof(float));
  const std::int64_t needed = parameter_counts(config).total();
  if (needed / 2 > stored) {
    throw Error(
        fmt::format("{}: holds {} values, the configuration describes a model of {} parameters", path, stored, needed));
  }
}

LoadedModel load_model(const std::string& path, at::Device device, at::ScalarType dtype) {
  namespace fs = std::filesystem;
  const fs::path file_path = fs::is_directory(path) ? fs::path(path) / "model.safetensors" : fs::path(path);
  const auto file = SafetensorsFile::open(file_path.string());
  const auto format = file.metadata().find("format");
  if (format == file.metadata().end() || format->second != kModelFormat) {
    throw Error(fmt::format("{}: not a checkpoint of this program: metadata 'format' is not {}", file_path.string(),
                            kModelFormat));
  }
  const fs::path config_path = file_path.parent_path() / "config.json";
  const auto config = parse_run_config(read_text(config_path.string()), config_path.string());
  refuse_oversized(file_path.string(), file, config.model);
  LoadedModel loaded{Model(config.model, 0), config.data.tokenizer, config.train.context};
  loaded.model.place(device, dtype);
  load_tensors(file_path.string(), file, loaded.model.parameters());
  if (const auto step = file.metadata().find("step"); step != file.metadata().end()) {
    std::from_chars(step->second.data(), step->second.data() + step->second.size(), loaded.step);
  }
  return loaded;
}

}  // namespace nsa::lm
