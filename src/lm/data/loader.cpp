#include "lm/data/loader.h"

#include <numeric>

#include "base/random.h"

namespace nsa::lm {

DataLoader::DataLoader(const std::vector<Document>& documents, std::int64_t context, std::uint64_t seed)
    : rows_(pack_documents(documents, context)), seed_(seed) {}

const std::vector<std::int32_t>& DataLoader::order_of(std::int64_t epoch) {
  if (epoch != epoch_) {
    order_.resize(rows_.size());
    std::iota(order_.begin(), order_.end(), 0);
    base::shuffle(order_, base::derive_seed({seed_, 1, static_cast<std::uint64_t>(epoch)}));
    epoch_ = epoch;
  }
  return order_;
}

std::vector<PackedSequence> DataLoader::rows(std::int64_t first, std::int64_t count) {
  const auto num_rows = static_cast<std::int64_t>(rows_.size());
  std::vector<PackedSequence> rows;
  for (std::int64_t at = first; at < first + count; ++at) {
    const auto row = order_of(at / num_rows)[static_cast<std::size_t>(at % num_rows)];
    rows.push_back(rows_[static_cast<std::size_t>(row)]);
  }
  return rows;
}

}  // namespace nsa::lm
