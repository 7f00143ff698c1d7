#include "lm/probes/needle.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "lm/train/evaluate.h"

namespace nsa::lm {
namespace {

using Tokens = std::vector<std::int64_t>;

std::string fill(std::string text, const std::string& key, const std::string& value) {
  for (const auto& [name, word] : {std::pair<std::string, std::string>("{key}", key), {"{value}", value}}) {
    for (auto at = text.find(name); at != std::string::npos; at = text.find(name, at + word.size())) {
      text.replace(at, name.size(), word);
    }
  }
  return text;
}

Tokens encode(const Tokenizer& tokenizer, const std::string& text) {
  const auto tokens = tokenizer.encode(text);
  return {tokens.begin(), tokens.end()};
}

/// Texts one after the other, read from a random position on.
class Haystack {
 public:
  explicit Haystack(const std::vector<Document>& texts) {
    for (const auto& text : texts) {
      tokens_.insert(tokens_.end(), text.tokens.begin(), text.tokens.end());
      if (tokens_.size() > kEnough) break;
    }
  }

  /// Throws if a context of so many tokens may not fit.
  void require(std::int64_t length) const {
    if (length <= static_cast<std::int64_t>(tokens_.size())) return;
    throw base::Error(fmt::format("length {}: the texts have {} tokens, too few", length, tokens_.size()));
  }

  Tokens stretch(std::int64_t length, base::Random& random) const {
    const auto start = random.below(tokens_.size() - static_cast<std::size_t>(length) + 1);
    const auto begin = tokens_.begin() + static_cast<std::ptrdiff_t>(start);
    return {begin, begin + length};
  }

 private:
  static constexpr std::size_t kEnough = 1 << 23;  // tokens
  Tokens tokens_;
};

/// A context with questions and answers at its end.
struct Probe {
  Tokens context;
  std::vector<std::pair<std::int64_t, Tokens>> answers;  // where each begins

  void ask(const Tokens& question, const Tokens& answer) {
    context.insert(context.end(), question.begin(), question.end());
    answers.emplace_back(context.size(), answer);
    context.insert(context.end(), answer.begin(), answer.end());
  }
};

struct Outcome {
  double right = 0, answers = 0, loss = 0;  // shares of tokens and of answers right, nats per token
};

/// How the model continues contexts with their answers, each token given those before. Contexts share a forward.
std::vector<Outcome> ask(const Model& model, ForwardOptions forward, const std::vector<Probe>& probes) {
  std::vector<Tokens> contexts;
  Tokens rows, targets;
  std::int64_t begin = 0;
  for (const Probe& probe : probes) {
    for (const auto& [place, answer] : probe.answers) {
      for (std::size_t i = 0; i < answer.size(); ++i) {
        rows.push_back(begin + place + static_cast<std::int64_t>(i) - 1);
        targets.push_back(answer[i]);
      }
    }
    contexts.emplace_back(probe.context.begin(), probe.context.end() - 1);
    begin += static_cast<std::int64_t>(contexts.back().size());
  }
  forward.logit_rows = single(rows).tokens;
  const auto wanted = single(targets).tokens;
  const auto logits = model.forward(packed(contexts), forward);
  const auto right = logits.argmax(-1).cpu().eq(wanted);
  const auto losses = token_losses(logits, wanted).cpu();
  std::vector<Outcome> outcomes;
  std::int64_t row = 0;
  for (const Probe& probe : probes) {
    const auto first = row;
    auto& outcome = outcomes.emplace_back();
    for (const auto& [place, answer] : probe.answers) {
      const auto size = static_cast<std::int64_t>(answer.size());
      if (right.narrow(0, row, size).all().item<bool>())
        outcome.answers += 1.0 / static_cast<double>(probe.answers.size());
      row += size;
    }
    outcome.right = right.narrow(0, first, row - first).to(at::kFloat).mean().item<float>();
    outcome.loss = losses.narrow(0, first, row - first).mean().item<float>();
  }
  return outcomes;
}

/// What the contexts of a sample share at all depths.
struct Sample {
  Tokens hay;
  std::int64_t room = 0;  // tokens of the haystack around the needles
  std::vector<Tokens> needles;
  std::vector<Tokens> questions, answers;
  std::vector<std::int64_t> places;  // in the haystack, of all needles but the first
  std::uint64_t draw = 0;            // see needle_place()
  bool in_order = false;

  Probe without() const { return finished(hay); }

  Probe at(double depth) const {
    auto all = places;
    all.insert(all.begin(), needle_place(depth, room, draw));
    if (in_order) std::sort(all.begin(), all.end());
    std::vector<std::size_t> order(needles.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return all[a] < all[b]; });
    Tokens context;
    auto from = hay.begin();
    for (const std::size_t i : order) {
      context.insert(context.end(), from, hay.begin() + all[i]);
      context.insert(context.end(), needles[i].begin(), needles[i].end());
      from = hay.begin() + all[i];
    }
    context.insert(context.end(), from, hay.begin() + room);
    return finished(std::move(context));
  }

 private:
  Probe finished(Tokens context) const {
    Probe probe{std::move(context), {}};
    for (std::size_t i = 0; i < questions.size(); ++i) probe.ask(questions[i], answers[i]);
    return probe;
  }
};

Sample draw_sample(const NeedleOptions& options, std::int64_t length, int number, const Tokenizer& tokenizer,
                   const Haystack& haystack) {
  base::Random random(
      base::derive_seed({options.seed, static_cast<std::uint64_t>(length), static_cast<std::uint64_t>(number)}));
  const auto drawn = draw_needle_lines(options.task, options.lines, random);
  Sample sample;
  sample.in_order = drawn.in_order;
  std::size_t needles = 0, rest = 0;
  for (const auto& [key, value] : drawn.lines) {
    needles += sample.needles.emplace_back(encode(tokenizer, fill(options.needle, key, value))).size();
    if (sample.questions.size() == drawn.asked) continue;
    rest += sample.questions.emplace_back(encode(tokenizer, fill(options.question, key, value))).size();
    rest += sample.answers.emplace_back(encode(tokenizer, value)).size();
  }
  sample.room = length - static_cast<std::int64_t>(needles + rest);
  if (sample.room < 0) throw base::Error(fmt::format("length {}: too short for needle, question and answer", length));
  sample.hay = haystack.stretch(sample.room + static_cast<std::int64_t>(needles), random);
  sample.draw = random.next();
  for (std::size_t i = 1; i < drawn.lines.size(); ++i) {
    sample.places.push_back(static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(sample.room) + 1)));
  }
  return sample;
}

}  // namespace

std::int64_t needle_place(double depth, std::int64_t room, std::uint64_t draw) {
  const std::int64_t spread = std::min<std::int64_t>(64, room + 1);
  const auto moved = static_cast<std::int64_t>(draw % static_cast<std::uint64_t>(spread));
  return std::llround(depth * static_cast<double>(room + 1 - spread)) + moved;
}

std::array<double, 2> wilson_interval(int count, int samples) {
  constexpr double z = 1.959964;  // of the normal distribution
  const double n = samples, share = count / n;
  const double middle = share + z * z / (2 * n);
  const double reach = z * std::sqrt(share * (1 - share) / n + z * z / (4 * n * n));
  const double scale = 1 / (1 + z * z / n);
  return {std::max(0.0, (middle - reach) * scale), std::min(1.0, (middle + reach) * scale)};
}

const std::vector<std::string>& needle_tasks() {
  static const std::vector<std::string> names = {"single", "multikey", "multivalue", "multiquery", "tracking"};
  return names;
}

NeedleLines draw_needle_lines(const std::string& task, int lines, base::Random& random) {
  const auto& known = needle_tasks();
  if (std::find(known.begin(), known.end(), task) == known.end()) {
    throw base::Error(fmt::format("task '{}': must be one of {}", task, fmt::join(known, ", ")));
  }
  NeedleLines drawn;
  for (int i = 0; i < (task == "single" ? 1 : lines); ++i) drawn.lines.push_back(random_key_value(random));
  if (task == "multivalue" || task == "multiquery" || task == "tracking") drawn.asked = drawn.lines.size();
  drawn.in_order = task == "multivalue";
  for (std::size_t i = 0; i + 1 < drawn.lines.size(); ++i) {
    if (task == "multivalue") drawn.lines[i + 1].key = drawn.lines[0].key;
    if (task == "tracking") drawn.lines[i].value = drawn.lines[i + 1].key;
  }
  return drawn;
}

std::vector<std::vector<NeedleCell>> run_needle(
    const OpenedCheckpoint& opened, const std::vector<Document>& texts, const NeedleOptions& options,
    const std::function<void(std::int64_t, const std::vector<NeedleCell>&)>& on_length) {
  constexpr std::size_t kTogether = 1 << 16;  // tokens of a forward; a GPU is not busy with much fewer
  const at::NoGradGuard no_grad;
  const Haystack haystack(texts);
  std::vector<std::vector<NeedleCell>> rows;
  for (const auto length : options.lengths) haystack.require(length);  // before the work begins
  for (const auto length : options.lengths) {
    std::vector<Outcome> outcomes;  // of each sample without needles, then at each depth
    std::vector<Probe> probes;
    std::size_t tokens = 0;
    const auto flush = [&] {
      if (probes.empty()) return;
      for (const auto& outcome : ask(opened.model(), options.forward, probes)) outcomes.push_back(outcome);
      probes.clear(), tokens = 0;
    };
    const auto add = [&](Probe probe) {
      if (tokens + probe.context.size() > kTogether) flush();
      tokens += probe.context.size();
      probes.push_back(std::move(probe));
    };
    for (int number = 0; number < options.samples; ++number) {
      const auto sample = draw_sample(options, length, number, *opened.tokenizer, haystack);
      add(sample.without());
      for (const double depth : options.depths) add(sample.at(depth));
    }
    flush();
    auto& row = rows.emplace_back(options.depths.size());
    auto outcome = outcomes.begin();
    for (int number = 0; number < options.samples; ++number) {
      const double guess = (outcome++)->loss;
      for (NeedleCell& cell : row) {
        cell.accuracy += outcome->right / options.samples;
        cell.answers += outcome->answers / options.samples;
        cell.exact += outcome->right == 1;
        cell.loss += outcome->loss / options.samples;
        cell.loss_without += guess / options.samples;
        ++outcome;
      }
    }
    on_length(length, row);
  }
  return rows;
}

}  // namespace nsa::lm
