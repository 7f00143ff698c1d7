// Tensors and models in files.
#pragma once

#include <string>

#include "lm/model.h"
#include "lm/safetensors.h"

namespace nsa::lm {

inline constexpr const char* kModelFormat = "nsa-lm";

void save_tensors(const std::string& path, const NamedTensors& tensors, const Metadata& metadata);

/// Copies the file's tensors into `tensors`. Throws Error naming the first that is missing, unknown, or of another
/// shape or dtype.
void load_tensors(const std::string& path, const SafetensorsFile& file, const NamedTensors& tensors);

/// Throws Error when the model would be more than twice as large as the file: before memory is taken for a damaged
/// configuration. Smaller differences are for load_tensors, which names the tensor.
void refuse_oversized(const std::string& path, const SafetensorsFile& file, const ModelConfig& config);

/// A model, and what its run folder says about it.
struct LoadedModel {
  Model model;
  std::string tokenizer;
  std::int64_t context = 0;  // it was trained with, tokens
  std::int64_t step = 0;     // of its training
};

/// `path`: a run folder, or the model.safetensors in it; `device` and `dtype`: as for Model::place, whatever the
/// training used. Throws Error when it is no sound checkpoint of this program.
LoadedModel load_model(const std::string& path, at::Device device, at::ScalarType dtype);

}  // namespace nsa::lm
