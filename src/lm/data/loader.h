// The rows that a training run sees, one after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "lm/data/packing.h"

namespace nsa::lm {

/// All rows of the documents, in an order of its own in every epoch. Which row comes when is a function of the seed.
class DataLoader {
 public:
  DataLoader(const std::vector<Document>& documents, std::int64_t context, std::uint64_t seed);

  bool empty() const { return rows_.empty(); }
  /// Rows first ... first + count - 1 of the run.
  std::vector<PackedSequence> rows(std::int64_t first, std::int64_t count);

 private:
  const std::vector<std::int32_t>& order_of(std::int64_t epoch);

  std::vector<PackedSequence> rows_;
  std::uint64_t seed_;
  std::int64_t epoch_ = -1;  // of order_
  std::vector<std::int32_t> order_;
};

}  // namespace nsa::lm
