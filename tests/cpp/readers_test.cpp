// Damaged files: every reader that needs no LibTorch takes them or refuses them, and nothing else. Meant for
// sanitizers.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"
#include "base/safetensors.h"
#include "bench/peers.h"
#include "lm/run/state.h"

namespace nsa::lm {
namespace {

constexpr int kFiles = 500;

/// A file of its own for the test.
class Place {
 public:
  Place() : path_(fmt::format("{}/nsa-readers-{}", std::filesystem::temp_directory_path().string(), ::getpid())) {}
  ~Place() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }
  void write(const std::string& text) const { base::replace_file(path_, text); }

 private:
  std::string path_;
};

/// `text` with up to four damages: bytes changed, cut out, repeated, or what readers stumble over put in.
std::string damaged(std::string text, std::mt19937& random) {
  static const std::vector<std::string> stones = {"[",
                                                  "]",
                                                  "{",
                                                  "}",
                                                  "\"",
                                                  ",",
                                                  ":",
                                                  "null",
                                                  "-1",
                                                  "1e999",
                                                  "-0.0",
                                                  "0",
                                                  "NaN",
                                                  "\\",
                                                  "\xff",
                                                  "\\ud800",
                                                  "\"a\":",
                                                  "true",
                                                  "18446744073709551616",
                                                  std::string(200, '['),
                                                  std::string(1, '\0')};
  const auto below = [&](std::size_t n) { return n == 0 ? 0 : random() % n; };
  for (auto times = 1 + below(4); times > 0; --times) {
    const auto at = below(text.size());
    switch (below(6)) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        if (!text.empty()) text[at] = static_cast<char>(below(256));
        break;
      case 2:
        text.erase(at, below(1 + text.size() / 4));
        break;
      case 3:
        text.resize(at);
        break;
      case 4:
        text.insert(at, text.substr(below(text.size()), below(40)));
        break;
      default:
        text.replace(at, below(8), stones[below(stones.size())]);
    }
  }
  return text;
}

/// Reads `sound`, which must do, and kFiles damaged versions of it.
void expect_taken_or_refused(const std::string& sound, const std::function<void(const std::string&)>& read) {
  ASSERT_NO_THROW(read(sound));
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < kFiles; ++i) {
    const std::string text = damaged(sound, random);
    try {
      read(text);
    } catch (const base::Error& error) {
      ++refused;
      EXPECT_LT(std::strlen(error.what()), 1000u);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "file " << i << ": " << error.what();
    }
  }
  EXPECT_GT(refused, kFiles / 3);
}

std::string safetensors() {
  const Place place;
  const std::vector<float> values(30, 1.5f);
  const auto bytes = [&](std::size_t n) { return std::as_bytes(std::span(values.data(), n)); };
  base::write_safetensors(place.path(), {{"a.weight", "F32", {2, 5}, bytes(10)}, {"b", "F32", {20}, bytes(20)}},
                          {{"format", "nsa-lm"}, {"step", "12"}, {"config", "{}"}});
  return base::read_text(place.path(), base::kMaxTextBytes);
}

TEST(Readers, Safetensors) {
  const Place place;
  std::size_t sum = 0;  // every byte that a tensor claims is there
  expect_taken_or_refused(safetensors(), [&](const std::string& text) {
    place.write(text);
    const auto file = base::SafetensorsFile::open(place.path(), base::Links::kFollow);
    for (const auto& tensor : file.tensors())
      for (const std::byte byte : tensor.bytes) sum += static_cast<std::size_t>(byte);
  });
  EXPECT_GT(sum, 0u);
}

TEST(Readers, ModelConfig) {
  expect_taken_or_refused(nlohmann::json(ModelConfig()).dump(1), [](const std::string& text) {
    ModelConfig config;
    from_json(base::parse_json(text, "config.json"), config);
    config.validate();
    nlohmann::json(config).dump();
  });
}

TEST(Readers, RunConfig) {
  RunConfig sound;
  sound.train.steps = 100;
  expect_taken_or_refused(text_of(sound),
                          [](const std::string& text) { text_of(parse_run_config(text, "config.json")); });
}

TEST(Readers, TrainState) {
  TrainConfig config;
  config.steps = 100;
  TrainState sound;
  sound.step = 12, sound.tokens = 12345, sound.planned_steps = 100, sound.seconds = 1.5, sound.loss_sum = 7.25;
  expect_taken_or_refused(nlohmann::json(sound).dump(), [&](const std::string& text) {
    const TrainState state = parse_train_state(text, "model.safetensors", config);
    EXPECT_LE(state.step, state.planned_steps);
    nlohmann::json(state).dump();
  });
}

TEST(Readers, MetricsLine) {
  const std::string line =
      R"({"kind": "train", "step": 12, "loss": [1.5, {"a": -2e3, "b": null}], "note": "\u00e9\n"})";
  expect_taken_or_refused(line, [](const std::string& text) { base::parse_json(text, "metrics.jsonl").dump(); });
}

TEST(Readers, Peers) {
  const Place place;
  const std::string sound =
      R"({"gpu": "a GPU", "settings": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "v_head_dim": 16,
          "dtype": "bfloat16"}, "lengths": {"64": {"stages": {"end to end, random": {
          "other": {"forward": 1.5, "backward": null}, "nsa": {"forward": 2}}}}, "96": {"stages": {}}}})";
  bench::Dims dims;
  dims.num_heads = 2, dims.num_kv_heads = 1, dims.head_dim = dims.v_head_dim = 16, dims.bfloat16 = true;
  expect_taken_or_refused(sound, [&](const std::string& text) {
    place.write(text);
    bench::Peers(place.path(), dims, "a GPU").best("forward", 64, bench::Selection::kRandom);
  });
}

TEST(Readers, Nesting) {
  const auto nested = [](int levels) { return std::string(levels, '[') + std::string(levels, ']'); };
  EXPECT_NO_THROW(base::parse_json(nested(64), "text"));
  for (const int levels : {65, 1000, 1000000}) EXPECT_THROW(base::parse_json(nested(levels), "text"), base::Error);
  EXPECT_THROW(base::parse_json(std::string(1000000, '{'), "text"), base::Error);
  EXPECT_THROW(base::parse_json(R"({"a": 1, "b": {"a": 2}, "a": 3})", "text"), base::Error);
  EXPECT_NO_THROW(base::parse_json(R"({"a": 1, "b": [{"a": 2}, {"a": 3}]})", "text"));
}

}  // namespace
}  // namespace nsa::lm
