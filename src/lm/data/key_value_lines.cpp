#include "lm/data/key_value_lines.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace nsa::lm {
namespace {

constexpr std::size_t kCopies = 16;  // copies of a line; with few, models learn associative recall late or never

/// 1 ... max, log-uniform.
std::size_t log_uniform(std::size_t max, base::Random& random) {
  const auto drawn = std::pow(static_cast<double>(max) + 1, random.uniform());
  return std::clamp<std::size_t>(static_cast<std::size_t>(drawn), 1, max);
}

/// One of `count` cells other than `first`, at a log-uniform distance from it.
std::size_t other_cell(std::size_t first, std::size_t count, base::Random& random) {
  const std::size_t behind = count - 1 - first;
  const std::size_t distance = log_uniform(std::max(first, behind), random);
  const bool ahead = distance <= behind && (distance > first || random.below(2) == 1);
  return ahead ? first + distance : first - distance;
}

/// Takes the free cell nearest to `wanted`. At least one is free.
std::size_t take_near(std::size_t wanted, std::vector<bool>& taken) {
  for (std::size_t i = 0;; ++i) {
    for (const std::size_t cell_index : {wanted + i, wanted - i}) {  // beyond either end: wraps to a large value
      if (cell_index >= taken.size() || taken[cell_index]) continue;
      taken[cell_index] = true;
      return cell_index;
    }
  }
}

}  // namespace

KeyValue random_key_value(base::Random& random) {
  KeyValue drawn;
  for (int i = 0; i < 8; ++i) drawn.key += static_cast<char>('A' + random.below(26));
  drawn.value = std::to_string(10000 + random.below(90000));
  return drawn;
}

std::vector<KeyValue> draw_key_value_lines(const std::string& kind, std::size_t count, base::Random& random) {
  std::vector<KeyValue> lines;
  for (std::size_t i = 0; i < count; ++i) lines.push_back(random_key_value(random));
  for (std::size_t i = 0; i + 1 < count; ++i) {
    if (kind == "multivalue") lines[i + 1].key = lines[0].key;
    if (kind == "tracking") lines[i].value = lines[i + 1].key;
  }
  return lines;
}

void insert_key_value_lines(TrainingBatch& batch, double fraction, double pairs, const Tokenizer& tokenizer,
                            std::uint64_t seed, const std::vector<std::string>& kinds) {
  base::Random random(seed);
  const auto* const offsets = batch.batch.cu_seqlens.const_data_ptr<std::int32_t>();
  auto* const tokens = batch.batch.tokens.mutable_data_ptr<std::int64_t>();
  auto* const targets = batch.targets.mutable_data_ptr<std::int64_t>();
  const auto next_lines = [&](const std::string& kind, std::size_t count) {
    std::vector<std::vector<std::int32_t>> lines;
    for (const auto& [key, value] : draw_key_value_lines(kind, count, random)) {
      lines.push_back(tokenizer.encode("\n" + key + " = " + value + "\n"));
    }
    return lines;
  };
  // A cell is a line and some slack in which it is shifted: otherwise a copy's distance would reveal its value. The
  // length in BPE tokens varies a little. Cells are odd, so that lines start at every offset of a block.
  const std::size_t width = next_lines("single", 1)[0].size(), cell = (width + 13) | 1;
  for (std::int64_t b = 0; b + 1 < batch.batch.cu_seqlens.numel(); ++b) {
    const auto begin = static_cast<std::size_t>(offsets[b]);
    const auto length = static_cast<std::size_t>(offsets[b + 1]) - begin;
    std::vector<bool> taken(length / cell);  // each cell holds one line at most
    const double wanted = fraction * static_cast<double>(length) / static_cast<double>(width);
    auto left = std::min(static_cast<std::size_t>(wanted + random.uniform()), taken.size());
    while (left > 1) {
      // One kind takes no draw, so that the lines of a seed do not depend on the others' existence.
      const std::string& kind = kinds.size() == 1 ? kinds[0] : kinds[random.below(kinds.size())];
      const std::size_t count = kind == "single" ? 1 : std::min(2 + random.below(3), left / 2);
      // Probability that lines are pairs: lines of many copies have as many tokens as several pairs.
      const double many = kCopies * pairs, two = 2 * static_cast<double>(count) * (1 - pairs);
      const bool is_pair = random.uniform() < many / (many + two);
      const std::size_t copies = std::min(is_pair ? 2 * count : kCopies, left);
      left -= copies;
      const std::size_t first =
          random.below(8) == 0 ? log_uniform(taken.size(), random) - 1 : random.below(taken.size());
      auto lines = next_lines(kind, count);
      std::size_t longest = 0;
      for (auto& line : lines) {
        line.resize(std::min(line.size(), cell));
        longest = std::max(longest, line.size());
      }
      std::vector<std::size_t> places;
      for (std::size_t i = 0; i < copies; ++i) {
        const std::size_t other = is_pair ? random.below(taken.size()) : other_cell(first, taken.size(), random);
        const std::size_t target = take_near(i == 0 ? first : other, taken);
        places.push_back(begin + target * cell + random.below(cell - longest + 1));
      }
      if (kind == "multivalue") std::sort(places.begin(), places.end());  // values recur in order
      for (std::size_t i = 0; i < copies; ++i) {
        const auto at = places[i];
        const auto& line = lines[i % count];
        std::copy(line.begin(), line.end(), tokens + at);
        if (at > begin) targets[at - 1] = line.front();
        std::copy(line.begin() + 1, line.end(), targets + at);
      }
    }
  }
}

}  // namespace nsa::lm
