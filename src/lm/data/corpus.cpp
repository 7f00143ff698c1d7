#include "lm/data/corpus.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "base/random.h"
#include "lm/data/sources.h"

namespace nsa::lm {

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
