#include "lm/corpus.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>

#include "lm/error.h"
#include "lm/json_fields.h"
#include "lm/random.h"
#include "lm/sources.h"

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

std::vector<Row> make_rows(const std::vector<Document>& documents, std::int64_t context) {
  std::vector<Row> full, shared;
  std::int64_t room = 0;  // in the last shared row
  for (std::size_t d = 0; d < documents.size(); ++d) {
    const auto predictions = static_cast<std::int64_t>(documents[d].tokens.size()) - 1;
    for (std::int64_t begin = 0; begin < predictions; begin += context) {
      const Piece piece{static_cast<std::int32_t>(d), begin, std::min(context, predictions - begin)};
      if (piece.length == context) {
        full.push_back({piece});
        continue;
      }
      if (piece.length > room) {
        shared.emplace_back();
        room = context;
      }
      shared.back().push_back(piece);
      room -= piece.length;
    }
  }
  full.insert(full.end(), std::make_move_iterator(shared.begin()), std::make_move_iterator(shared.end()));
  return full;
}

TrainingBatch make_batch(const std::vector<Document>& documents, const std::vector<Row>& rows) {
  std::vector<std::int32_t> offsets = {0};
  for (const Row& row : rows) {
    for (const Piece& piece : row) offsets.push_back(offsets.back() + static_cast<std::int32_t>(piece.length));
  }
  TrainingBatch out;
  out.batch.tokens = at::empty({offsets.back()}, at::kLong);
  out.targets = at::empty({offsets.back()}, at::kLong);
  out.batch.cu_seqlens = at::tensor(c10::ArrayRef<std::int32_t>(offsets), at::kInt);
  auto* tokens = out.batch.tokens.mutable_data_ptr<std::int64_t>();
  auto* targets = out.targets.mutable_data_ptr<std::int64_t>();
  for (const Row& row : rows) {
    for (const Piece& piece : row) {
      const auto* from = documents[static_cast<std::size_t>(piece.document)].tokens.data() + piece.begin;
      tokens = std::copy(from, from + piece.length, tokens);
      targets = std::copy(from + 1, from + piece.length + 1, targets);
    }
  }
  return out;
}

}  // namespace nsa::lm
