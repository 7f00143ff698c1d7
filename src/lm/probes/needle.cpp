#include "lm/probes/needle.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/random.h"
#include "lm/data/key_value_lines.h"
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

struct Answer {
  double right = 0, loss = 0;  // share of tokens right, nats per token
};

/// How the model ends `context` with `answer`, each token given those before.
Answer ask(const Model& model, const ForwardOptions& forward, Tokens context, const Tokens& answer) {
  const auto first = static_cast<std::int64_t>(context.size()) - 1;
  context.insert(context.end(), answer.begin(), answer.end() - 1);
  const auto targets = single(answer).tokens;
  const auto logits = model.forward(single(context), forward).narrow(0, first, targets.size(0));
  return {logits.argmax(-1).cpu().eq(targets).to(at::kFloat).mean().item<float>(),
          token_losses(logits, targets).mean().item<float>()};
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

std::vector<std::vector<NeedleCell>> run_needle(
    const OpenedCheckpoint& opened, const std::vector<Document>& texts, const NeedleOptions& options,
    const std::function<void(std::int64_t, const std::vector<NeedleCell>&)>& on_length) {
  const at::NoGradGuard no_grad;
  const Haystack haystack(texts);
  const auto& tokenizer = *opened.tokenizer;
  std::vector<std::vector<NeedleCell>> rows;
  for (const auto length : options.lengths) haystack.require(length);  // before the work begins
  for (const auto length : options.lengths) {
    auto& row = rows.emplace_back(options.depths.size());
    for (int sample = 0; sample < options.samples; ++sample) {
      base::Random random(
          base::derive_seed({options.seed, static_cast<std::uint64_t>(length), static_cast<std::uint64_t>(sample)}));
      const auto [key, value] = random_key_value(random);
      const auto needle = encode(tokenizer, fill(options.needle, key, value));
      const auto question = encode(tokenizer, fill(options.question, key, value));
      const auto answer = encode(tokenizer, value);
      const auto room = length - static_cast<std::int64_t>(needle.size() + question.size() + answer.size());
      if (room < 0) throw base::Error(fmt::format("length {}: too short for needle, question and answer", length));
      const auto hay = haystack.stretch(room + static_cast<std::int64_t>(needle.size()), random);
      const auto draw = random.next();

      auto without = hay;
      without.insert(without.end(), question.begin(), question.end());
      const double guess = ask(opened.model(), options.forward, without, answer).loss;
      for (std::size_t d = 0; d < options.depths.size(); ++d) {
        const auto place = needle_place(options.depths[d], room, draw);
        Tokens context(hay.begin(), hay.begin() + place);
        context.insert(context.end(), needle.begin(), needle.end());
        context.insert(context.end(), hay.begin() + place, hay.begin() + room);
        context.insert(context.end(), question.begin(), question.end());
        const auto [right, loss] = ask(opened.model(), options.forward, std::move(context), answer);
        row[d].accuracy += right / options.samples;
        row[d].exact += right == 1;
        row[d].loss += loss / options.samples;
        row[d].loss_without += guess / options.samples;
      }
    }
    on_length(length, row);
  }
  return rows;
}

}  // namespace nsa::lm
