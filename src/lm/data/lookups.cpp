#include "lm/data/lookups.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace nsa::lm {
namespace {

constexpr std::size_t kCopies = 16;  // of a line: with few a model learns late what a look-up is, or not at all

/// 1 ... most, evenly by its logarithm.
std::size_t log_even(std::size_t most, base::Random& random) {
  const auto drawn = std::pow(static_cast<double>(most) + 1, random.uniform());
  return std::clamp<std::size_t>(static_cast<std::size_t>(drawn), 1, most);
}

/// One of `count` places, but not `first`: how far away is drawn evenly by its logarithm.
std::size_t away_from(std::size_t first, std::size_t count, base::Random& random) {
  const std::size_t behind = count - 1 - first;
  const std::size_t distance = log_even(std::max(first, behind), random);
  const bool ahead = distance <= behind && (distance > first || random.below(2) == 1);
  return ahead ? first + distance : first - distance;
}

/// Takes the free cell that is next to `wanted`. There is one.
std::size_t take_near(std::size_t wanted, std::vector<bool>& taken) {
  for (std::size_t i = 0;; ++i) {
    for (const std::size_t place : {wanted + i, wanted - i}) {  // beyond either end: too large
      if (place >= taken.size() || taken[place]) continue;
      taken[place] = true;
      return place;
    }
  }
}

}  // namespace

Lookup random_lookup(base::Random& random) {
  Lookup lookup;
  for (int i = 0; i < 8; ++i) lookup.key += static_cast<char>('A' + random.below(26));
  lookup.value = std::to_string(10000 + random.below(90000));
  return lookup;
}

void plant_lookups(TrainingBatch& batch, double share, double pairs, const Tokenizer& tokenizer, std::uint64_t seed) {
  base::Random random(seed);
  // Of the lines: a line of many places has as many tokens as several of two.
  const double are_pairs = kCopies * pairs / (kCopies * pairs + 2 * (1 - pairs));
  const auto* const offsets = batch.batch.cu_seqlens.const_data_ptr<std::int32_t>();
  auto* const tokens = batch.batch.tokens.mutable_data_ptr<std::int64_t>();
  auto* const targets = batch.targets.mutable_data_ptr<std::int64_t>();
  const auto next_line = [&] {
    const auto [key, value] = random_lookup(random);
    return tokenizer.encode("\n" + key + " = " + value + "\n");
  };
  // Tokens of a line, and some within which it is moved: else how far back a line stands would tell what it says. Lines
  // of pieces differ a little. A cell is odd: so lines stand at every place of a block, and across its edges.
  const std::size_t width = next_line().size(), cell = (width + 13) | 1;
  for (std::int64_t b = 0; b + 1 < batch.batch.cu_seqlens.numel(); ++b) {
    const auto begin = static_cast<std::size_t>(offsets[b]);
    const auto length = static_cast<std::size_t>(offsets[b + 1]) - begin;
    std::vector<bool> taken(length / cell);  // each cell holds one line at most
    const double wanted = share * static_cast<double>(length) / static_cast<double>(width);
    auto left = std::min(static_cast<std::size_t>(wanted + random.uniform()), taken.size());
    while (left > 1) {
      const bool is_pair = random.uniform() < are_pairs;
      const std::size_t copies = std::min(is_pair ? 2 : kCopies, left);
      left -= copies;
      const std::size_t first = random.below(8) == 0 ? log_even(taken.size(), random) - 1 : random.below(taken.size());
      auto line = next_line();
      line.resize(std::min(line.size(), cell));
      for (std::size_t i = 0; i < copies; ++i) {
        const std::size_t other = is_pair ? random.below(taken.size()) : away_from(first, taken.size(), random);
        const std::size_t place = take_near(i == 0 ? first : other, taken);
        const auto at = begin + place * cell + random.below(cell - line.size() + 1);
        std::copy(line.begin(), line.end(), tokens + at);
        if (at > begin) targets[at - 1] = line.front();
        std::copy(line.begin() + 1, line.end(), targets + at);
      }
    }
  }
}

}  // namespace nsa::lm
