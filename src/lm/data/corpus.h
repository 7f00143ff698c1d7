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
  std::uint64_t fingerprint = 0;  // of all texts, the tokenizer and the split
  std::int64_t bytes = 0;         // of text; 0 where the data are token numbers
  bool cuts_ends = false;         // held_out has the ends of the documents to train on
  std::string skipped;            // files by kind, e.g. "3 binary files, 1 empty text"; empty: none
};

/// Reads, splits and tokenizes, the latter by torch's threads. The side of a document depends on its text alone, so
/// duplicates stay together. Where that would leave no document on one side, the end of each is held out. `tokenizer`:
/// null where the data are token numbers. Throws Error when a path cannot be read or nothing is found.
///
/// A name that ends in .gz is unpacked. Of the name without it, .jsonl has a text in the field "text" of each line;
/// .bin holds token numbers, uint16 for a vocabulary of at most 65536, else uint32; all else is text.
Corpus load_corpus(const DataConfig& config, const Tokenizer* tokenizer);
/// The same without the documents to train on, which are tokenized only where their ends are held out.
Corpus load_held_out(const DataConfig& config, const Tokenizer* tokenizer);

/// A document from each line that is not blank: tokens as decimal numbers with spaces between them, taken as they are.
/// Throws Error naming the line that holds anything else than numbers 0 ... vocab_size - 1, or when there is none.
std::vector<Document> load_ids(const std::string& path, int vocab_size);

}  // namespace nsa::lm
