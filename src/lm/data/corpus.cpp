#include "lm/data/corpus.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <sstream>
#include <string_view>

#include "base/error.h"
#include "base/files.h"
#include "base/random.h"
#include "lm/data/sources.h"

namespace nsa::lm {

Corpus load_corpus(const DataConfig& config, const Tokenizer& tokenizer) {
  Corpus corpus;
  corpus.fingerprint = base::mix(static_cast<std::uint64_t>(config.held_out_percent));
  for (auto& [name, text] : read_texts(config)) {
    const std::uint64_t text_hash = base::hash(text);
    corpus.fingerprint = base::mix(corpus.fingerprint ^ text_hash);
    corpus.bytes += static_cast<std::int64_t>(text.size());
    Document document{std::move(name), {tokenizer.start_of_document()}};
    const auto tokens = tokenizer.encode(text);
    document.tokens.insert(document.tokens.end(), tokens.begin(), tokens.end());
    document.tokens.push_back(tokenizer.end_of_document());
    const bool held_out = text_hash % 100 < static_cast<std::uint64_t>(config.held_out_percent);
    (held_out ? corpus.held_out : corpus.train).push_back(std::move(document));
  }
  return corpus;
}

std::vector<Document> load_ids(const std::string& path, int vocab_size) {
  std::vector<Document> documents;
  std::istringstream lines(base::read_text(path));
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    Document document{fmt::format("{}:{}", path, number), {}};
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      std::int32_t token = -1;
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), token);
      if (error != std::errc() || end != word.data() + word.size() || token < 0 || token >= vocab_size) {
        throw base::Error(fmt::format("{}: '{}': must be a token's number, 0 ... {}", document.name, word.substr(0, 20),
                                      vocab_size - 1));
      }
      document.tokens.push_back(token);
    }
    if (!document.tokens.empty()) documents.push_back(std::move(document));
  }
  if (documents.empty()) throw base::Error(fmt::format("{}: holds no tokens", path));
  return documents;
}

}  // namespace nsa::lm
