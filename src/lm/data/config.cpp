#include "lm/data/config.h"

#include "base/json_fields.h"

namespace nsa::lm {
namespace {

template <class Config, class Visit>
void for_each_field(Config& config, Visit&& visit) {
  visit("paths", config.paths);
  visit("extensions", config.extensions);
  visit("concat_by_folder", config.concat_by_folder);
  visit("document_bytes", config.document_bytes);
  visit("held_out_percent", config.held_out_percent);
  visit("tokenizer", config.tokenizer);
}

}  // namespace

void to_json(nlohmann::json& json, const DataConfig& config) {
  json = nlohmann::json::object();
  for_each_field(config, [&](const char* name, const auto& value) { json[name] = value; });
  json["vocab_size"] = config.vocab_size;
  json["ids"] = config.ids;
}

void from_json(const nlohmann::json& json, DataConfig& config) {
  base::FieldReader reader(json, "data");
  for_each_field(config, reader);
  if (json.contains("vocab_size")) reader("vocab_size", config.vocab_size);  // not there in older runs
  if (json.contains("ids")) reader("ids", config.ids);
  reader.finish();
}

}  // namespace nsa::lm
