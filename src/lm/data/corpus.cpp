#include "lm/data/corpus.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/error.h"
#include "base/json_fields.h"
#include "base/random.h"
#include "lm/data/sources.h"

namespace nsa::lm {
namespace {

template <class Config, class Visit>
void for_each_field(Config& config, Visit&& visit) {
  visit("paths", config.paths);
  visit("extensions", config.extensions);
  visit("join", config.join);
  visit("document_bytes", config.document_bytes);
  visit("held_out_percent", config.held_out_percent);
  visit("tokenizer", config.tokenizer);
}

}  // namespace

void to_json(nlohmann::json& json, const DataConfig& config) {
  json = nlohmann::json::object();
  for_each_field(config, [&](const char* name, const auto& value) { json[name] = value; });
}

void from_json(const nlohmann::json& json, DataConfig& config) {
  FieldReader reader(json, "data");
  for_each_field(config, reader);
  reader.finish();
}

Corpus load_corpus(const DataConfig& config, const Tokenizer& tokenizer) {
  Corpus corpus;
  corpus.fingerprint = mix(static_cast<std::uint64_t>(config.held_out_percent));
  for (auto& [name, text] : read_texts(config)) {
    const std::uint64_t text_hash = hash(text);
    corpus.fingerprint = mix(corpus.fingerprint ^ text_hash);
    corpus.bytes += static_cast<std::int64_t>(text.size());
    Document document{std::move(name), {tokenizer.end_of_document()}};
    const auto tokens = tokenizer.encode(text);
    document.tokens.insert(document.tokens.end(), tokens.begin(), tokens.end());
    document.tokens.push_back(tokenizer.end_of_document());
    const bool held_out = text_hash % 100 < static_cast<std::uint64_t>(config.held_out_percent);
    (held_out ? corpus.held_out : corpus.train).push_back(std::move(document));
  }
  return corpus;
}

}  // namespace nsa::lm
