// Folders that transformers' save_pretrained writes, read as models of this program. They are never written to.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/safetensors.h"
#include "lm/model/model.h"

namespace nsa::lm {

/// Of a folder without tokenizer and of a run on token numbers.
inline constexpr const char* kNoTokenizer = "no tokenizer: give token numbers with --ids";

/// Is `path` a folder whose config.json names an architecture or a model_type of transformers, sound or not?
bool is_pretrained(const std::string& path);

/// A LlamaForCausalLM, Qwen3ForCausalLM (both with attention `full`), NsaLlamaForCausalLM or NsaQwen3ForCausalLM.
class PretrainedFolder {
 public:
  /// Reads config.json and maps the weights. Throws Error naming file and field that are damaged, or that ask for what
  /// this program lacks.
  explicit PretrainedFolder(const std::string& path);

  const ModelConfig& config() const { return config_; }
  std::int64_t context() const { return context_; }  // max_position_embeddings, tokens
  /// The path of tokenizer.model, else of tokenizer.json; empty where there is none.
  const std::string& tokenizer() const { return tokenizer_; }

  /// Copies the weights, F32, BF16 or F16, into the parameters of a model of this configuration. Throws Error naming
  /// the first tensor that is missing, unknown, of another shape or dtype, or holds NaN or infinity.
  void load(const NamedTensors& parameters) const;

 private:
  std::string path_;
  ModelConfig config_;
  std::int64_t context_ = 0;
  std::string tokenizer_;
  std::vector<std::pair<std::string, base::SafetensorsFile>> files_;
};

}  // namespace nsa::lm
