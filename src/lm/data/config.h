// Which texts a run takes: the part "data" of config.json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace nsa::lm {

struct DataConfig {
  std::vector<std::string> paths;       // files or folders; empty: the Python sources of this machine
  std::vector<std::string> extensions;  // of files in folders, e.g. ".py"; empty: all files
  bool concat_by_folder = false;        // concatenate the files of each first-level folder into documents
  int document_bytes = 65536;           // with `concat_by_folder`: a document ends with the file that reaches this size
  int held_out_percent = 5;             // of the documents, by their hash
  std::string tokenizer = "bytes";      // empty where the data are token numbers
  int vocab_size = 0;                   // of token numbers; 0: the data are texts
  std::string ids;                      // file of load_ids(), in place of paths

  bool holds_tokens() const { return vocab_size > 0; }
  bool operator==(const DataConfig&) const = default;
};

void to_json(nlohmann::json& json, const DataConfig& config);
void from_json(const nlohmann::json& json, DataConfig& config);

}  // namespace nsa::lm
