// A checkpoint with what is needed to look at it: its tokenizer and the texts it is tried on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lm/data/corpus.h"
#include "lm/data/tokenizer.h"
#include "lm/run/checkpoint.h"

namespace nsa::lm {

struct OpenedCheckpoint {
  LoadedModel loaded;
  std::unique_ptr<Tokenizer> tokenizer;  // null where the model was trained on token numbers

  const Model& model() const { return loaded.model; }
};

/// As load_model(), computing in float32. `with_tokenizer` false: null in its place.
OpenedCheckpoint open_checkpoint(const std::string& path, const std::vector<std::string>& changes, at::Device device,
                                 bool with_tokenizer = true);

struct OpenedTexts {
  std::vector<Document> documents;
  std::string source;  // for reports: the paths, or "held-out documents of RUN"
};

/// The documents of a file of tokens, see load_ids().
OpenedTexts open_ids(const std::string& path, const Model& model);

/// All documents of `paths` (files or folders); without paths those that the run at `checkpoint` held out. Throws Error
/// when there are none, or when the run's data changed since (then what it was trained on might be among them).
OpenedTexts open_texts(const std::string& checkpoint, const std::vector<std::string>& paths,
                       const OpenedCheckpoint& opened);

}  // namespace nsa::lm
