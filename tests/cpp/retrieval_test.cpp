// Retrieval tasks: key-value lines, associative recall with one and several hops, needle positions; score intervals.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "lm/data/key_value_lines.h"
#include "lm/probes/needle.h"
#include "lm/probes/recall.h"

namespace nsa::lm {
namespace {

std::vector<std::int64_t> numbers(const at::Tensor& tensor) {
  const auto* const data = tensor.const_data_ptr<std::int64_t>();
  return {data, data + tensor.numel()};
}

/// Two long sequences of dots and a short one.
TrainingBatch dots() {
  const std::vector<Document> documents = {{"dots", std::vector<std::int32_t>(4001, '.')}};
  return make_batch(documents, {{{0, 0, 4000}}, {{0, 0, 12}, {0, 5, 2000}}});
}

TEST(KeyValueLines, EachLineHasSixteenCopiesInItsSequence) {
  const auto tokenizer = make_tokenizer("bytes");
  auto batch = dots();
  insert_key_value_lines(batch, 0.2, 0, *tokenizer, 1);
  const auto tokens = numbers(batch.batch.tokens), targets = numbers(batch.targets);
  ASSERT_EQ(tokens.size(), 6012u);
  const std::vector<std::size_t> offsets = {0, 4000, 4012, 6012};
  const std::regex line("\n([A-Z]{8}) = ([1-9][0-9]{4})\n");
  std::set<std::string> seen;
  for (std::size_t b = 0; b < 3; ++b) {
    std::string text;
    for (std::size_t i = offsets[b]; i < offsets[b + 1]; ++i) {
      text += static_cast<char>(tokens[i]);
      ASSERT_EQ(targets[i], i + 1 < offsets[b + 1] ? tokens[i + 1] : '.') << i;
    }
    std::map<std::string, std::vector<std::string>> found;
    double lines = 0;
    int fewer = 0;
    for (std::sregex_iterator match(text.begin(), text.end(), line), end; match != end; ++match) {
      found[(*match)[1]].push_back((*match)[2]);
    }
    for (const auto& [key, values] : found) {
      EXPECT_EQ(values, std::vector(values.size(), values.front()));
      EXPECT_TRUE(values.size() >= 2 && values.size() <= 16) << values.size();
      fewer += values.size() < 16 ? 1 : 0;
      lines += static_cast<double>(values.size());
      EXPECT_TRUE(seen.insert(key).second) << "in two sequences";
    }
    EXPECT_NEAR(lines, 0.2 * static_cast<double>(text.size()) / 18, 2);
    EXPECT_LE(fewer, 1) << "the last one has what is left";
    const auto rest = std::regex_replace(text, line, "");
    EXPECT_EQ(rest, std::string(rest.size(), '.'));
  }
}

TEST(KeyValueLines, ShortSequencesHoldAsManyCopiesAsFit) {
  const auto tokenizer = make_tokenizer("bytes");
  const std::vector<Document> documents = {{"dots", std::vector<std::int32_t>(131, '.')}};
  for (const auto& [length, most] : {std::pair(130, 4), std::pair(100, 3), std::pair(66, 2), std::pair(60, 0)}) {
    std::int64_t seen = 0;
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      auto batch = make_batch(documents, {{{0, 0, length}}});
      insert_key_value_lines(batch, 0.5, 0, *tokenizer, seed);
      const auto tokens = numbers(batch.batch.tokens);
      const auto lines = std::count(tokens.begin(), tokens.end(), '=');
      EXPECT_NE(lines, 1) << "a single copy cannot be recalled";
      seen = std::max(seen, lines);
    }
    EXPECT_EQ(seen, most) << length;
  }
}

/// Statistics of the lines that insert_key_value_lines() writes into 40 sequences of 65536.
struct Placement {
  double names = 0, pairs = 0, repeats = 0;  // `repeats`: copies after the first
  double near = 0, far = 0,
         at_the_start = 0;          // repeats within 512 of the last copy, beyond 8192 of the first; sequences
  std::array<double, 64> phases{};  // lines by where they begin, modulo 64
};

Placement insert_into_sequences(double fraction, double pairs) {
  const auto tokenizer = make_tokenizer("bytes");
  const std::vector<Document> documents = {{"dots", std::vector<std::int32_t>(65537, '.')}};
  const std::regex line("[A-Z]{8}");
  Placement placed;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    auto batch = make_batch(documents, {{{0, 0, 65536}}});
    insert_key_value_lines(batch, fraction, pairs, *tokenizer, seed);
    const auto tokens = numbers(batch.batch.tokens);
    const std::string text(tokens.begin(), tokens.end());
    std::map<std::string, std::vector<std::ptrdiff_t>> places;
    for (std::sregex_iterator match(text.begin(), text.end(), line), end; match != end; ++match) {
      places[match->str()].push_back(match->position());
    }
    for (const auto& [key, at] : places) {
      ++placed.names;
      placed.pairs += at.size() == 2 ? 1 : 0;
      for (const auto begin : at) ++placed.phases[static_cast<std::size_t>(begin) % 64];
      for (std::size_t i = 1; i < at.size(); ++i, ++placed.repeats) {
        placed.near += at[i] - at[i - 1] < 512 ? 1 : 0;
        placed.far += at[i] - at[0] > 8192 ? 1 : 0;
      }
    }
    placed.at_the_start += text.substr(0, 32).find('=') != std::string::npos ? 1 : 0;
  }
  return placed;
}

TEST(KeyValueLines, CopiesAreNearAndFar) {
  const auto placed = insert_into_sequences(0.05, 0);
  EXPECT_NEAR(placed.names, 40 * 182 / 16, 40);
  EXPECT_GT(placed.near / placed.repeats, .4);  // evenly over the sequence: .11
  EXPECT_GT(placed.far / placed.repeats, .2);
  EXPECT_GT(placed.at_the_start, 8);  // evenly: 3.6
}

TEST(KeyValueLines, PairPositionsAreUniform) {
  const auto placed = insert_into_sequences(0.05, 1);
  EXPECT_NEAR(placed.names, 40 * 182 / 2, 40);
  EXPECT_GE(placed.pairs, placed.names - 40) << "but for one of a sequence, with what is left";
  EXPECT_LT(placed.near / placed.repeats, .03);  // evenly over the sequence: .016
  EXPECT_GT(placed.far / placed.repeats, .7);    // .77
}

TEST(KeyValueLines, StartAtEveryOffsetOfABlock) {
  const auto placed = insert_into_sequences(0.2, 0.5);
  const double even = (placed.names + placed.repeats) / 64;
  EXPECT_GT(even, 400);
  for (std::size_t phase = 0; phase < placed.phases.size(); ++phase)
    EXPECT_NEAR(placed.phases[phase], even, even / 4) << phase;
}

TEST(KeyValueLines, PairsTakeTheGivenFractionOfTokens) {
  const auto placed = insert_into_sequences(0.05, 0.5);
  EXPECT_NEAR(2 * placed.pairs, 40 * 182 / 2, 40 * 182 / 10);
}

TEST(KeyValueLines, DependOnTheSeedAlone) {
  const auto tokenizer = make_tokenizer("bytes");
  const auto inserted = [&](double fraction, std::uint64_t seed) {
    auto batch = dots();
    insert_key_value_lines(batch, fraction, 0.5, *tokenizer, seed);
    return numbers(batch.batch.tokens);
  };
  EXPECT_EQ(inserted(0.1, 1), inserted(0.1, 1));
  EXPECT_NE(inserted(0.1, 1), inserted(0.1, 2));
  EXPECT_EQ(inserted(0, 1), numbers(dots().batch.tokens));
}

/// Keys and values of the lines in the order of a sequence of 4000 that holds lines of one kind.
std::vector<KeyValue> lines_of(const std::string& kind, double pairs) {
  const auto tokenizer = make_tokenizer("bytes");
  auto batch = dots();
  insert_key_value_lines(batch, 0.3, pairs, *tokenizer, 7, {kind});
  const auto tokens = numbers(batch.batch.tokens);
  const std::string text(tokens.begin(), tokens.begin() + 4000);
  const std::regex line("\n([A-Z]{8}) = ([A-Z]{8}|[1-9][0-9]{4})\n");
  std::vector<KeyValue> found;
  for (std::sregex_iterator match(text.begin(), text.end(), line), end; match != end; ++match) {
    found.push_back({(*match)[1], (*match)[2]});
  }
  EXPECT_NEAR(static_cast<double>(found.size()), 0.3 * 4000 / 18, 2);
  return found;
}

TEST(KeyValueLines, ValuesOfAKeyRecurInOrder) {
  for (const double pairs : {0., 1.}) {
    std::map<std::string, std::vector<std::string>> values;
    for (const auto& [key, value] : lines_of("multivalue", pairs)) values[key].push_back(value);
    std::size_t several = 0;
    for (const auto& [key, found] : values) {
      const std::set<std::string> distinct(found.begin(), found.end());
      several += distinct.size() > 1 ? 1 : 0;
      EXPECT_LE(distinct.size(), 4u);
      for (std::size_t i = distinct.size(); i < found.size(); ++i) EXPECT_EQ(found[i], found[i - distinct.size()]);
      if (pairs == 1) {
        EXPECT_LE(found.size(), 2 * distinct.size());
      }
    }
    EXPECT_GE(several + 1, values.size());
  }
}

TEST(KeyValueLines, ChainsLeadToNumbers) {
  std::map<std::string, std::string> value;
  for (const auto& line : lines_of("tracking", 0.5)) {
    const auto [known, added] = value.emplace(line.key, line.value);
    EXPECT_EQ(known->second, line.value);
  }
  std::size_t names = 0;
  for (const auto& [key, first] : value) {
    auto found = first;
    int hops = 1;
    while (found.size() == 8 && value.contains(found) && hops <= 4) found = value[found], ++hops;
    EXPECT_EQ(found.size(), 5u) << key;
    EXPECT_LE(hops, 4);
    names += first.size() == 8 ? 1 : 0;
  }
  EXPECT_GE(2 * names, value.size() - 1);
}

/// Checks answers and their positions against plain loops over the tokens.
void check_recall(const RecallTask& task, int pairs) {
  const auto data = make_recall_batch(task, pairs, 3, 5);
  RecallTask shape = task;
  shape.pairs = pairs;
  const auto length = static_cast<std::size_t>(shape.length()), asked = static_cast<std::size_t>(shape.num_queries());
  const auto tokens = numbers(data.batch.tokens), queries = numbers(data.queries), answers = numbers(data.answers),
             distances = numbers(data.distances);
  ASSERT_EQ(tokens.size(), 3 * length);
  ASSERT_EQ(queries.size(), 3 * asked);
  for (std::size_t s = 0; s < 3; ++s) {
    const auto* const text = tokens.data() + s * length;
    std::map<std::int64_t, std::size_t> place;  // of a key
    for (std::size_t p = 0; p < static_cast<std::size_t>(pairs); ++p) {
      EXPECT_TRUE(place.emplace(text[p * task.slot], p * task.slot).second) << "the keys differ";
    }
    for (std::size_t i = 0; i < asked; ++i) {
      const auto row = static_cast<std::size_t>(queries[s * asked + i]) - s * length;
      EXPECT_EQ(row, length - asked + i);
      ASSERT_TRUE(place.contains(text[row]));
      const auto pair = place[text[row]];
      EXPECT_EQ(answers[s * asked + i], text[pair + 1]);
      EXPECT_EQ(distances[s * asked + i], static_cast<std::int64_t>(row - pair));
      EXPECT_GT(distances[s * asked + i], task.gap);
      const bool last = (i + 1) % static_cast<std::size_t>(task.hops) == 0;
      EXPECT_TRUE(last || answers[s * asked + i] == text[row + 1]) << "an answer is written out";
      EXPECT_EQ(answers[s * asked + i] <= task.num_values, last) << "the last one is a value";
    }
  }
}

TEST(RecallBatch, AnswersAreInTheContext) {
  check_recall({.pairs = 9, .slot = 4, .gap = 20, .num_values = 5}, 9);
  check_recall({.pairs = 9, .slot = 3, .gap = 20, .num_values = 5}, 4);
}

TEST(RecallBatch, EachHopsValueIsTheNextKey) {
  check_recall({.pairs = 12, .hops = 3, .slot = 4, .gap = 20, .num_values = 5}, 12);
  check_recall({.pairs = 11, .hops = 3, .slot = 2, .gap = 20, .num_values = 5}, 7);  // two pairs, one pair left over
}

TEST(RecallTask, StretchesToALength) {
  for (const int hops : {1, 2, 5}) {
    const RecallTask task{.pairs = 64, .hops = hops, .gap = 1023};
    for (const int length : {2048, 8191, 65536}) {
      const auto longer = task.stretched(length);
      EXPECT_EQ(longer.length(), length);
      EXPECT_GE(longer.gap, task.gap);
      auto next = longer;
      next.slot += 1, next.gap = task.gap;
      EXPECT_GT(next.length(), length) << "a longer slot fits as well";
    }
  }
  EXPECT_THROW((RecallTask{.pairs = 64, .gap = 1023}.stretched(1200)), base::Error);
}

TEST(NeedlePosition, SamplesOfADepthCoverEveryOffsetOfABlock) {
  for (const double depth : {0., .1, .5, 1.}) {
    std::set<std::int64_t> within;  // a block of 64
    for (std::uint64_t draw = 0; draw < 640; ++draw) {
      const std::int64_t place = needle_place(depth, 8157, draw);
      EXPECT_GE(place, 0);
      EXPECT_LE(place, 8157);
      EXPECT_NEAR(static_cast<double>(place), depth * 8157, 64);
      within.insert(place % 64);
    }
    EXPECT_EQ(within.size(), 64);
  }
  EXPECT_EQ(needle_place(0, 8157, 64), 0);
  EXPECT_EQ(needle_place(1, 8157, 63), 8157);
  // Little room.
  EXPECT_EQ(needle_place(.5, 0, 12345), 0);
  for (std::uint64_t draw = 0; draw < 10; ++draw) EXPECT_LE(needle_place(1, 4, draw), 4);
}

TEST(NeedleLines, KeysAndValuesFollowTheTask) {
  const auto drawn = [](const std::string& task) {
    base::Random random(3);
    return draw_needle_lines(task, 4, random);
  };
  const auto keys = [](const NeedleLines& drawn) {
    std::set<std::string> found;
    for (const auto& line : drawn.lines) found.insert(line.key);
    return found.size();
  };
  const std::map<std::string, std::array<std::size_t, 3>> wanted = {
      // lines, keys, asked
      {"single", {1, 1, 1}},     {"multikey", {4, 4, 1}}, {"multivalue", {4, 1, 4}},
      {"multiquery", {4, 4, 4}}, {"tracking", {4, 4, 4}},
  };
  ASSERT_EQ(wanted.size(), needle_tasks().size());
  for (const auto& task : needle_tasks()) {
    const auto found = drawn(task);
    const std::array<std::size_t, 3> counts = {found.lines.size(), keys(found), found.asked};
    EXPECT_EQ(counts, wanted.at(task)) << task;
    EXPECT_EQ(found.in_order, task == "multivalue") << task;
    for (std::size_t i = 0; i < found.lines.size(); ++i) {
      const bool chained = task == "tracking" && i + 1 < found.lines.size();
      EXPECT_EQ(found.lines[i].value.size(), chained ? 8 : 5);
      if (chained) {
        EXPECT_EQ(found.lines[i].value, found.lines[i + 1].key);
      }
    }
  }
  EXPECT_THROW(drawn("needles"), base::Error);
}

TEST(WilsonInterval, MatchesClosedForms) {
  const auto near = [](std::array<double, 2> interval, double low, double high) {
    EXPECT_NEAR(interval[0], low, 5e-4);
    EXPECT_NEAR(interval[1], high, 5e-4);
  };
  // At the ends n / (n + z^2) and z^2 / (n + z^2).
  near(wilson_interval(0, 10), 0, 0.2775);
  near(wilson_interval(10, 10), 0.7225, 1);
  near(wilson_interval(5, 10), 0.2366, 0.7634);
  near(wilson_interval(199, 200), 0.9722, 0.9991);
}

}  // namespace
}  // namespace nsa::lm
