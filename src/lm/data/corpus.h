// Documents for training and evaluation: where they come from, which are held out, and how they fill rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lm/data/config.h"
#include "lm/data/tokenizer.h"

namespace nsa::lm {

struct Document {
  std::string name;
  std::vector<std::int32_t> tokens;  // start-of-document, the text, end-of-document
};

struct Corpus {
  std::vector<Document> train, held_out;
  std::uint64_t fingerprint = 0;  // of all names and texts, and of the split
  std::int64_t bytes = 0;         // of text
};

/// Reads, splits and tokenizes, the latter by torch's threads. The side of a document depends on its text alone, so
/// duplicates stay together. Throws Error when a path cannot be read or nothing is found.
Corpus load_corpus(const DataConfig& config, const Tokenizer& tokenizer);
/// The same without the documents to train on, which are read but not tokenized.
Corpus load_held_out(const DataConfig& config, const Tokenizer& tokenizer);

/// A document from each line that is not blank: tokens as decimal numbers with spaces between them, taken as they are.
/// Throws Error naming the line that holds anything else than numbers 0 ... vocab_size - 1, or when there is none.
std::vector<Document> load_ids(const std::string& path, int vocab_size);

}  // namespace nsa::lm
