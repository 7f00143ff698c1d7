// Documents for training and evaluation: where they come from, which are held out, and how they fill rows.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lm/data/tokenizer.h"

namespace nsa::lm {

struct DataConfig {
  std::vector<std::string> paths;       // files or folders; empty: the Python sources of this machine
  std::vector<std::string> extensions;  // of files in folders, e.g. ".py"; empty: all files
  bool join = false;                    // one document from the files of each first-level folder
  int document_bytes = 65536;           // with `join`: a document ends after the file with which it reaches this size
  int held_out_percent = 5;             // of the documents, by their hash
  std::string tokenizer = "bytes";

  bool operator==(const DataConfig&) const = default;
};

void to_json(nlohmann::json& json, const DataConfig& config);
void from_json(const nlohmann::json& json, DataConfig& config);

struct Document {
  std::string name;
  std::vector<std::int32_t> tokens;  // end-of-document, the text, end-of-document
};

struct Corpus {
  std::vector<Document> train, held_out;
  std::uint64_t fingerprint = 0;  // of all names and texts, and of the split
  std::int64_t bytes = 0;         // of text
};

/// Reads, splits and tokenizes. The side of a document depends on its text alone, so duplicates stay together. Throws
/// Error when a path cannot be read or nothing is found.
Corpus load_corpus(const DataConfig& config, const Tokenizer& tokenizer);

}  // namespace nsa::lm
