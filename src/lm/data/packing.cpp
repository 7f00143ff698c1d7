#include "lm/data/packing.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace nsa::lm {

std::vector<PackedSequence> pack_documents(const std::vector<Document>& documents, std::int64_t context) {
  std::vector<PackedSequence> full, shared;
  std::int64_t room = 0;  // in the last shared row
  for (std::size_t d = 0; d < documents.size(); ++d) {
    const auto predictions = static_cast<std::int64_t>(documents[d].tokens.size()) - 1;
    for (std::int64_t begin = 0; begin < predictions; begin += context) {
      const Span span{static_cast<std::int32_t>(d), begin, std::min(context, predictions - begin)};
      if (span.length == context) {
        full.push_back({span});
        continue;
      }
      if (span.length > room) {
        shared.emplace_back();
        room = context;
      }
      shared.back().push_back(span);
      room -= span.length;
    }
  }
  full.insert(full.end(), std::make_move_iterator(shared.begin()), std::make_move_iterator(shared.end()));
  return full;
}

std::vector<PackedSequence> cut_spans(std::vector<PackedSequence> rows, std::int64_t longest) {
  for (PackedSequence& row : rows) {
    PackedSequence cut;
    for (const Span& span : row) {
      for (std::int64_t at = 0; at < span.length; at += longest) {
        cut.push_back({span.document, span.begin + at, std::min(longest, span.length - at)});
      }
    }
    row = std::move(cut);
  }
  return rows;
}

TrainingBatch make_batch(const std::vector<Document>& documents, const std::vector<PackedSequence>& rows) {
  std::vector<std::int32_t> offsets = {0};
  for (const PackedSequence& row : rows) {
    for (const Span& span : row) offsets.push_back(offsets.back() + static_cast<std::int32_t>(span.length));
  }
  TrainingBatch out;
  out.batch.tokens = at::empty({offsets.back()}, at::kLong);
  out.targets = at::empty({offsets.back()}, at::kLong);
  out.batch.cu_seqlens = at::tensor(c10::ArrayRef<std::int32_t>(offsets), at::kInt);
  auto* tokens = out.batch.tokens.mutable_data_ptr<std::int64_t>();
  auto* targets = out.targets.mutable_data_ptr<std::int64_t>();
  for (const PackedSequence& row : rows) {
    for (const Span& span : row) {
      const auto* from = documents[static_cast<std::size_t>(span.document)].tokens.data() + span.begin;
      tokens = std::copy(from, from + span.length, tokens);
      targets = std::copy(from + 1, from + span.length + 1, targets);
    }
  }
  return out;
}

}  // namespace nsa::lm
