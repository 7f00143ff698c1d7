// Tensors and models in files.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/safetensors.h"
#include "lm/data/tokenizer.h"
#include "lm/model/model.h"
#include "lm/run/config.h"

namespace nsa::lm {

inline constexpr const char* kModelFormat = "nsa-lm";

/// Returns the file's checksum.
std::string save_tensors(const std::string& path, const NamedTensors& tensors, const base::Metadata& metadata);

/// Copies the file's tensors into `tensors`. Throws Error naming the first that is missing, unknown, or of another
/// shape or dtype, or holds NaN or infinity.
void load_tensors(const std::string& path, const base::SafetensorsFile& file, const NamedTensors& tensors);

/// A message naming the first tensor that holds NaN or infinity, and `where`; nothing when all values are finite.
std::optional<std::string> nonfinite_message(const std::string& where, const NamedTensors& tensors);

/// `name` in the metadata of the model's file at `path`. Throws Error when it is no checkpoint of this program.
std::string metadata_of(const std::string& path, const base::SafetensorsFile& file, const char* name);

/// The configuration that such a checkpoint was trained with, from its metadata. Throws Error.
RunConfig trained_config(const std::string& path, const base::SafetensorsFile& file);

/// Throws Error when the model would be more than twice as large as the file: before memory is taken for a damaged
/// configuration. Smaller differences are for load_tensors, which names the tensor.
void refuse_oversized(const std::string& path, const base::SafetensorsFile& file, const ModelConfig& config);

/// What config.json in the folder `path`, a run or one of transformers, says of the model. Throws Error.
ModelConfig read_model_config(const std::string& path);

/// A model for inference, which is fused, and what its folder says about it.
struct LoadedModel {
  Model model;
  std::string tokenizer;           // empty: none that this program reads
  bool pretrained = false;         // by transformers, or a run that began there
  bool trained_on_tokens = false;  // a run whose data were token numbers
  std::int64_t context = 0;        // it was trained with, tokens
};

/// `path`: a run folder, the model.safetensors in it, or a folder of transformers; `device` and `dtype`: as for
/// Model::place, whatever the training used; `changes`: "topk=32" for each field of the model that shall be other than
/// in training, which is noted on stderr. Throws Error when it is no sound checkpoint of this program, or when
/// config.json in the folder describes another model than was trained. `before`, if given, is called before memory is
/// taken for the model.
LoadedModel load_model(const std::string& path, const std::vector<std::string>& changes, at::Device device,
                       at::ScalarType dtype, const std::function<void(const ModelConfig&)>& before = {});

/// Of the model at `path`. Throws Error when it has none.
std::unique_ptr<Tokenizer> tokenizer_of(const std::string& path, const LoadedModel& loaded);

}  // namespace nsa::lm
