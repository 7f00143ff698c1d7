// Documents packed into rows of a length, and rows into a batch for the model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lm/data/corpus.h"
#include "lm/model/model.h"

namespace nsa::lm {

/// A stretch of one document: reads tokens [begin, begin + length), predicts [begin + 1, begin + length + 1).
struct Span {
  std::int32_t document = 0;
  std::int64_t begin = 0, length = 0;
};
using PackedSequence = std::vector<Span>;

/// Cuts the documents into spans of at most `context` tokens: full ones get a row of their own, the ends of documents
/// share rows of at most `context` tokens.
std::vector<PackedSequence> pack_documents(const std::vector<Document>& documents, std::int64_t context);

/// The rows with spans of at most `longest` tokens: longer ones are cut.
std::vector<PackedSequence> cut_spans(std::vector<PackedSequence> rows, std::int64_t longest);

/// Rows packed for the model, in host memory, each span a sequence, with the tokens to predict.
struct TrainingBatch {
  Batch batch;
  at::Tensor targets;  // int64 (total)
};
TrainingBatch make_batch(const std::vector<Document>& documents, const std::vector<PackedSequence>& rows);

}  // namespace nsa::lm
