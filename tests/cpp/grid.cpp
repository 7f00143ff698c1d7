#include "grid.h"

#include <algorithm>
#include <array>
#include <functional>
#include <random>
#include <set>

namespace nsa::test {
namespace {

/// One value of an option: its name, and what it makes of a case. Applied in the order of the options.
struct Value {
  std::string name;
  std::function<void(Case&)> apply;
};
using Option = std::vector<Value>;

Value config(const char* name, NSAConfig cfg) {
  return {name, [cfg](Case& c) { c.cfg = cfg; }};
}

Value dims(std::int64_t dk, std::int64_t dv) {
  return {std::to_string(dk).append("x").append(std::to_string(dv)), [=](Case& c) { c.dk = dk, c.dv = dv; }};
}

Value group(std::int64_t group, std::int64_t kv_heads) {
  return {std::string("g").append(std::to_string(group)).append("kv").append(std::to_string(kv_heads)),
          [=](Case& c) { c.group = group, c.kv_heads = kv_heads; }};
}

Value phi(const char* name, CompressionKind kind, bool shared, bool optional, std::int64_t hidden = 0) {
  return {name,
          [=](Case& c) { c.kind = kind, c.shared_weights = shared, c.optional_weights = optional, c.hidden = hidden; }};
}

Value self(const char* name, std::function<std::vector<std::int64_t>(const NSAConfig&)> lengths, bool packed = false) {
  return {name, [=](Case& c) { c.q_lens = lengths(c.cfg), c.packed = packed, c.slack = packed ? 5 : 0; }};
}

Value cross(const char* name, std::vector<std::int64_t> q_lens, std::vector<std::int64_t> k_lens, bool packed) {
  return {name, [=](Case& c) { c.q_lens = q_lens, c.k_lens = k_lens, c.packed = packed, c.slack = packed ? 19 : 0; }};
}

Option configs() {
  return {config("small", small_config()),
          config("paper", {}),
          config("apart", {.kernel_size = 16, .kernel_stride = 16, .block_size = 32, .topk = 3, .window_size = 40}),
          config("wide", {.kernel_size = 32,
                          .kernel_stride = 8,
                          .block_size = 16,
                          .topk = 5,
                          .init_blocks = 2,
                          .local_blocks = 3,
                          .window_size = 17}),
          config("dense", {.kernel_size = 4,
                           .kernel_stride = 1,
                           .block_size = 16,
                           .topk = 2,
                           .init_blocks = 0,
                           .local_blocks = 1,
                           .window_size = 1}),
          config("many", {.kernel_size = 16,
                          .kernel_stride = 8,
                          .block_size = 48,
                          .topk = 40,
                          .init_blocks = 0,
                          .local_blocks = 2,
                          .window_size = 100})};
}

/// Edge lengths, lengths that are no multiple of anything, sequences of many lengths, fewer queries than keys. Of short
/// sequences there are many, so that the largest error of a tensor, which bounds are about, is not a matter of luck.
Option lengths() {
  const auto many = [](std::int64_t length) {
    return std::vector<std::int64_t>(static_cast<std::size_t>(std::max<std::int64_t>(1, 96 / length)), length);
  };
  const auto l_plus = [many](int offset) {
    return [many, offset](const NSAConfig& cfg) { return many(cfg.kernel_size + offset); };
  };
  const auto ragged = [](const NSAConfig& cfg) {
    return std::vector<std::int64_t>{0, 61, 1, 0, 130, cfg.kernel_size - 1, cfg.kernel_size, 0};
  };
  return {self("none", [](const NSAConfig&) { return std::vector<std::int64_t>{0}; }),
          self("one", [many](const NSAConfig&) { return many(1); }),
          self("l_minus_1", l_plus(-1)),
          self("l", l_plus(0)),
          self("l_plus_1", l_plus(1)),
          self("s77",
               [](const NSAConfig&) {
                 return std::vector<std::int64_t>{77, 77};
               }),
          self("s203", [](const NSAConfig&) { return std::vector<std::int64_t>{203}; }),
          self("ragged", ragged, true),
          cross("chunk", {13, 13}, {150, 150}, false),
          cross("last", {1}, {67}, false),
          cross("ragged_chunks", {0, 5, 33, 1, 0}, {40, 5, 129, 97, 0}, true)};
}

Option dtypes() {
  return {{"f32", [](Case& c) { c.dtype = DType::kFloat32; }}, {"bf16", [](Case& c) { c.dtype = DType::kBFloat16; }}};
}

Option layouts() {
  return {{"plain", [](Case&) {}},
          {"padded", [](Case& c) { c.layout = Layout::kPadded; }},
          {"heads_first", [](Case& c) { c.layout = Layout::kHeadsFirst; }}};
}

std::vector<Option> attention_options() {
  return {configs(),
          lengths(),
          {group(1, 3), group(2, 2), group(3, 2), group(4, 2), group(5, 1), group(7, 1), group(8, 2), group(16, 1)},
          {dims(64, 64), dims(128, 128), dims(192, 128), dims(8, 8), dims(24, 40), dims(72, 16)},
          dtypes(),
          layouts(),
          {{"", [](Case&) {}}, {"scaled", [](Case& c) { c.softmax_scale = 0.31; }}}};
}

std::vector<Option> compression_options() {
  return {configs(),
          lengths(),
          {phi("mean", CompressionKind::kMean, false, false), phi("linear", CompressionKind::kLinear, false, true),
           phi("linear_shared_bare", CompressionKind::kLinear, true, false),
           phi("mlp", CompressionKind::kMlp, false, true), phi("mlp_shared", CompressionKind::kMlp, true, true),
           phi("mlp_bare_e20", CompressionKind::kMlp, false, false, 20)},
          {group(1, 1), group(1, 2), group(1, 3)},
          {dims(64, 40), dims(24, 16), dims(8, 72)},
          dtypes(),
          layouts()};
}

/// phi with a rotation behind it, or phi alone. Only then it has biases: without a rotation they add the same to every
/// key, which changes no softmax, so that their gradients would be nothing but rounding.
Option compressions() {
  const auto turned = [](Value phi) {
    return Value{phi.name + "_rope", [=](Case& c) { phi.apply(c), c.rope = true; }};
  };
  return {phi("mean", CompressionKind::kMean, false, false), turned(phi("mean", CompressionKind::kMean, false, false)),
          phi("mlp_bare_e24", CompressionKind::kMlp, false, false, 24),
          turned(phi("mlp_e40", CompressionKind::kMlp, false, true, 40)),
          turned(phi("linear_shared", CompressionKind::kLinear, true, true))};
}

std::vector<Option> layer_options() {
  return {configs(), lengths(), compressions(), {group(1, 3), group(3, 1), group(8, 2)}, {dims(64, 64), dims(16, 8)},
          dtypes(),  layouts()};
}

using Pair = std::array<std::size_t, 4>;  // option a, its value, option b, its value

/// Rows of value numbers that contain every pair: greedily, each row starts from a pair not yet seen.
std::vector<std::vector<std::size_t>> pairwise(const std::vector<Option>& options) {
  std::set<Pair> open;
  for (std::size_t a = 0; a < options.size(); ++a)
    for (std::size_t b = a + 1; b < options.size(); ++b)
      for (std::size_t x = 0; x < options[a].size(); ++x)
        for (std::size_t y = 0; y < options[b].size(); ++y) open.insert({a, x, b, y});
  std::vector<std::vector<std::size_t>> rows;
  std::minstd_rand random;  // which value a tie goes to, so that values are spread
  while (!open.empty()) {
    const Pair seed = *open.begin();
    std::vector<std::size_t> row(options.size());
    std::set<std::size_t> chosen{seed[0], seed[2]};
    row[seed[0]] = seed[1], row[seed[2]] = seed[3];
    const auto covered = [&](std::size_t option, std::size_t value) {
      std::size_t count = 0;
      for (std::size_t other : chosen)
        count += open.contains(other < option ? Pair{other, row[other], option, value}
                                              : Pair{option, value, other, row[other]});
      return count;
    };
    for (std::size_t option = 0; option < options.size(); ++option) {
      if (chosen.contains(option)) continue;
      std::size_t best = random() % options[option].size();
      for (std::size_t value = 0; value < options[option].size(); ++value)
        if (covered(option, value) > covered(option, best)) best = value;
      row[option] = best;
      chosen.insert(option);
    }
    for (std::size_t a = 0; a < row.size(); ++a)
      for (std::size_t b = a + 1; b < row.size(); ++b) open.erase({a, row[a], b, row[b]});
    rows.push_back(row);
  }
  return rows;
}

std::vector<Case> cases_of(const std::vector<Option>& options) {
  std::vector<Case> cases;
  for (const auto& row : pairwise(options)) {
    Case c;
    for (std::size_t option = 0; option < row.size(); ++option) {
      const Value& value = options[option][row[option]];
      value.apply(c);
      if (!c.name.empty() && !value.name.empty()) c.name += "_";
      c.name += value.name;
    }
    cases.push_back(c);
  }
  return cases;
}

}  // namespace

std::vector<Case> attention_cases() { return cases_of(attention_options()); }

std::vector<Case> layer_cases() { return cases_of(layer_options()); }

std::vector<Case> compression_cases() {
  std::vector<Case> cases = cases_of(compression_options());
  // The sizes models have, too expensive for the whole grid.
  cases.push_back(
      {.name = "model_128", .dtype = DType::kBFloat16, .dk = 128, .dv = 128, .kind = CompressionKind::kMlp});
  cases.push_back({.name = "model_192", .dk = 192, .dv = 128, .kind = CompressionKind::kMlp, .shared_weights = true});
  return cases;
}

}  // namespace nsa::test
