// Documents cut into spans, and the length that spans have in the course of a run.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "lm/data/packing.h"
#include "lm/run/config.h"

namespace nsa::lm {
namespace {

using Spans = std::vector<std::array<std::int64_t, 3>>;

Spans spans(const PackedSequence& row) {
  Spans out;
  for (const Span& span : row) out.push_back({span.document, span.begin, span.length});
  return out;
}

TEST(PackDocuments, FullSpansHaveRowsOfTheirOwn) {
  const std::vector<Document> documents = {{"a", std::vector<std::int32_t>(24)}, {"b", std::vector<std::int32_t>(6)}};
  const auto rows = pack_documents(documents, 10);  // 23 and 5 predictions
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(spans(rows[0]), (Spans{{0, 0, 10}}));
  EXPECT_EQ(spans(rows[1]), (Spans{{0, 10, 10}}));
  EXPECT_EQ(spans(rows[2]), (Spans{{0, 20, 3}, {1, 0, 5}}));
}

TEST(CutSpans, LosesNoToken) {
  const std::vector<PackedSequence> rows = {{{0, 20, 3}, {1, 0, 5}}, {{2, 7, 8}}};
  const auto cut = cut_spans(rows, 4);
  ASSERT_EQ(cut.size(), 2u);
  EXPECT_EQ(spans(cut[0]), (Spans{{0, 20, 3}, {1, 0, 4}, {1, 4, 1}}));
  EXPECT_EQ(spans(cut[1]), (Spans{{2, 7, 4}, {2, 11, 4}}));
  for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(spans(cut_spans(rows, 8)[i]), spans(rows[i]));
}

TEST(SequenceLimit, DoublesUntilHalfOfTheRun) {
  TrainConfig config;
  config.context = 8192, config.first_context = 1024;  // three doublings in 500 of 1000 steps
  for (const auto& [step, longest] : {std::pair(0, 1024),
                                      {166, 1024},
                                      {167, 2048},
                                      {333, 2048},
                                      {334, 4096},
                                      {499, 4096},
                                      {500, 8192},
                                      {999, 8192}}) {
    EXPECT_EQ(config.sequence_limit(step, 1000), longest) << step;
  }
  config.context = 3000;  // no power of two times the first
  EXPECT_EQ(config.sequence_limit(0, 1000), 1024);
  EXPECT_EQ(config.sequence_limit(250, 1000), 2048);
  EXPECT_EQ(config.sequence_limit(500, 1000), 3000);
  config.first_context = 3000;
  EXPECT_EQ(config.sequence_limit(0, 1000), 3000);
  config.first_context = 0;
  EXPECT_EQ(config.sequence_limit(0, 1000), 3000);
}

}  // namespace
}  // namespace nsa::lm
