#include "lm/data/corpus.h"

#include <ATen/Parallel.h>
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
namespace {

Corpus load(const DataConfig& config, const Tokenizer& tokenizer, bool train) {
  auto texts = read_texts(config);
  std::vector<Document> documents(texts.size());
  std::vector<std::uint64_t> hashes(texts.size());
  const auto held_out = [&](std::size_t i) {
    return hashes[i] % 100 < static_cast<std::uint64_t>(config.held_out_percent);
  };
  const auto count = static_cast<std::int64_t>(texts.size());
  at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      hashes[i] = base::hash(texts[i].text);
      if (!train && !held_out(i)) continue;
      documents[i] = {std::move(texts[i].name), {tokenizer.start_of_document()}};
      auto& tokens = documents[i].tokens;
      const auto encoded = tokenizer.encode(texts[i].text);
      tokens.insert(tokens.end(), encoded.begin(), encoded.end());
      tokens.push_back(tokenizer.end_of_document());
    }
  });
  Corpus corpus;
  corpus.fingerprint = base::mix(static_cast<std::uint64_t>(config.held_out_percent));
  for (std::size_t i = 0; i < texts.size(); ++i) {
    corpus.fingerprint = base::mix(corpus.fingerprint ^ hashes[i]);
    corpus.bytes += static_cast<std::int64_t>(texts[i].text.size());
    if (held_out(i)) {
      corpus.held_out.push_back(std::move(documents[i]));
    } else if (train) {
      corpus.train.push_back(std::move(documents[i]));
    }
  }
  return corpus;
}

}  // namespace

Corpus load_corpus(const DataConfig& config, const Tokenizer& tokenizer) { return load(config, tokenizer, true); }
Corpus load_held_out(const DataConfig& config, const Tokenizer& tokenizer) { return load(config, tokenizer, false); }

std::vector<Document> load_ids(const std::string& path, int vocab_size) {
  std::vector<Document> documents;
  std::istringstream lines(base::read_text(path, base::kMaxTextBytes));
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
