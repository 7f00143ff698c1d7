// Documents, cut into spans, and the length that spans have in the course of a run.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

#include "lm/data/corpus.h"
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

TEST(LoadHeldOut, IsTheCorpusWithoutItsDocumentsToTrainOn) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "held_out";
  std::filesystem::create_directories(folder);
  for (int i = 0; i < 100; ++i) std::ofstream(folder / fmt::format("{}.txt", i)) << "the text of " << i * i;
  DataConfig data;
  data.paths = {folder.string()};
  data.held_out_percent = 20;
  const auto tokenizer = make_tokenizer("bytes");
  const auto corpus = load_corpus(data, tokenizer.get()), held_out = load_held_out(data, tokenizer.get());
  std::filesystem::remove_all(folder);
  EXPECT_EQ(corpus.train.size() + corpus.held_out.size(), 100u);
  EXPECT_EQ(held_out.fingerprint, corpus.fingerprint);
  EXPECT_EQ(held_out.bytes, corpus.bytes);
  EXPECT_TRUE(held_out.train.empty());
  ASSERT_GT(corpus.held_out.size(), 5u);
  ASSERT_EQ(held_out.held_out.size(), corpus.held_out.size());
  for (std::size_t i = 0; i < corpus.held_out.size(); ++i) {
    EXPECT_EQ(held_out.held_out[i].name, corpus.held_out[i].name);
    EXPECT_EQ(held_out.held_out[i].tokens, corpus.held_out[i].tokens);
  }
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
  config.context = 8192, config.context_warmup = 1024;  // three doublings in 500 of 1000 steps
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
  config.context_warmup = 3000;
  EXPECT_EQ(config.sequence_limit(0, 1000), 3000);
  config.context_warmup = 0;
  EXPECT_EQ(config.sequence_limit(0, 1000), 3000);
}

}  // namespace
}  // namespace nsa::lm
