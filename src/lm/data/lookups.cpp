#include "lm/data/lookups.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace nsa::lm {
namespace {

constexpr std::size_t kPlaces = 8;  // of a line, at most

/// A cell some way from `first`, evenly by the logarithm of the distance, or the free one next to it.
std::size_t further_place(std::size_t first, const std::vector<bool>& taken, base::Random& random) {
  const std::size_t behind = taken.size() - 1 - first, reach = std::max(first, behind);
  const auto most = static_cast<double>(reach + 1);
  const auto distance = std::min(static_cast<std::size_t>(std::pow(most, random.uniform())), reach);
  const bool ahead = distance <= behind && (distance > first || random.below(2) == 1);
  const std::size_t place = ahead ? first + distance : first - distance;
  for (std::size_t i = 0;; ++i) {
    if (place + i < taken.size() && !taken[place + i]) return place + i;
    if (place >= i && !taken[place - i]) return place - i;
  }
}

}  // namespace

Lookup random_lookup(base::Random& random) {
  Lookup lookup;
  for (int i = 0; i < 8; ++i) lookup.key += static_cast<char>('A' + random.below(26));
  lookup.value = std::to_string(10000 + random.below(90000));
  return lookup;
}

void plant_lookups(TrainingBatch& batch, double share, const Tokenizer& tokenizer, std::uint64_t seed) {
  base::Random random(seed);
  const auto* const offsets = batch.batch.cu_seqlens.const_data_ptr<std::int32_t>();
  auto* const tokens = batch.batch.tokens.mutable_data_ptr<std::int64_t>();
  auto* const targets = batch.targets.mutable_data_ptr<std::int64_t>();
  const auto next_line = [&] {
    const auto [key, value] = random_lookup(random);
    return tokenizer.encode("\n" + key + " = " + value + "\n");
  };
  // Tokens of a line, and some within which it is moved: else how far back a line stands would tell what it says. Lines
  // of pieces differ a little.
  const std::size_t width = next_line().size(), cell = width + 14;
  for (std::int64_t b = 0; b + 1 < batch.batch.cu_seqlens.numel(); ++b) {
    const auto length = static_cast<std::size_t>(offsets[b + 1] - offsets[b]);
    if (length < cell) continue;
    // The sequence from its second token on in cells, of which each holds one line at most.
    std::vector<std::size_t> cells((length - 1) / cell);
    std::iota(cells.begin(), cells.end(), 0);
    base::shuffle(cells, random.next());
    const std::size_t copies = std::min(kPlaces, cells.size());  // of a line
    if (copies < 2) continue;
    const double wanted = share * static_cast<double>(length) / static_cast<double>(copies * width);
    auto count = std::min(static_cast<std::size_t>(wanted + random.uniform()), cells.size() / copies);
    std::vector<bool> taken(cells.size());
    for (const std::size_t first : cells) {
      if (count == 0) break;
      if (taken[first]) continue;
      --count;
      taken[first] = true;
      std::vector<std::size_t> places = {first};
      while (places.size() < copies) {
        places.push_back(further_place(first, taken, random));
        taken[places.back()] = true;
      }
      auto line = next_line();
      line.resize(std::min(line.size(), cell));
      for (const std::size_t place : places) {
        const auto within = random.below(cell - line.size() + 1);
        const auto at = static_cast<std::size_t>(offsets[b]) + 1 + place * cell + within;
        std::copy(line.begin(), line.end(), tokens + at);
        std::copy(line.begin(), line.end(), targets + at - 1);
      }
    }
  }
}

}  // namespace nsa::lm
