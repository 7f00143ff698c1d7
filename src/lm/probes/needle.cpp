#include "lm/probes/needle.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

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

struct Answer {
  std::int64_t place = 0, source = 0;  // where it begins, and where its needle does
  Tokens tokens;
};

/// A context with questions and answers at its end.
struct Probe {
  Tokens context;
  std::vector<Answer> answers;

  void ask(const Tokens& question, const Tokens& answer, std::int64_t source) {
    context.insert(context.end(), question.begin(), question.end());
    answers.push_back({static_cast<std::int64_t>(context.size()), source, answer});
    context.insert(context.end(), answer.begin(), answer.end());
  }
};

struct Outcome {
  double right = 0, answers = 0, loss = 0;        // shares of tokens and of answers right, nats per token
  std::size_t wrong_answer = 0, wrong_token = 0;  // the first that is not right
};

/// How the model continues contexts with their answers, each token given those before. Contexts share a forward.
std::vector<Outcome> ask(const Model& model, ForwardOptions forward, const std::vector<Probe>& probes) {
  std::vector<Tokens> contexts;
  Tokens rows, targets;
  std::int64_t begin = 0;
  for (const Probe& probe : probes) {
    for (const Answer& answer : probe.answers) {
      for (std::size_t i = 0; i < answer.tokens.size(); ++i) {
        rows.push_back(begin + answer.place + static_cast<std::int64_t>(i) - 1);
        targets.push_back(answer.tokens[i]);
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
    bool all = true;
    for (std::size_t a = 0; a < probe.answers.size(); ++a) {
      const std::size_t size = probe.answers[a].tokens.size();
      std::size_t i = 0;
      while (i < size && right[row + static_cast<std::int64_t>(i)].item<bool>()) ++i;
      if (i == size) outcome.answers += 1.0 / static_cast<double>(probe.answers.size());
      if (i < size && all) outcome.wrong_answer = a, outcome.wrong_token = i;
      all = all && i == size;
      row += static_cast<std::int64_t>(size);
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

  Probe without() const { return finished(hay, std::vector<std::int64_t>(needles.size())); }

  Probe at(double depth) const {
    auto all = places;
    all.insert(all.begin(), needle_place(depth, room, draw));
    if (in_order) std::sort(all.begin(), all.end());
    std::vector<std::size_t> order(needles.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return all[a] < all[b]; });
    Tokens context;
    std::vector<std::int64_t> sources(needles.size());
    auto from = hay.begin();
    for (const std::size_t i : order) {
      context.insert(context.end(), from, hay.begin() + all[i]);
      sources[i] = static_cast<std::int64_t>(context.size());
      context.insert(context.end(), needles[i].begin(), needles[i].end());
      from = hay.begin() + all[i];
    }
    context.insert(context.end(), from, hay.begin() + room);
    return finished(std::move(context), sources);
  }

 private:
  Probe finished(Tokens context, const std::vector<std::int64_t>& sources) const {
    Probe probe{std::move(context), {}};
    for (std::size_t i = 0; i < questions.size(); ++i) probe.ask(questions[i], answers[i], sources[i]);
    return probe;
  }
};

/// How the query before the outcome's first wrong token reads the block that it must copy it from.
std::vector<BlockRead> read_source(const Model& model, const Probe& probe, const Outcome& outcome) {
  const Answer& answer = probe.answers[outcome.wrong_answer];
  const auto token = static_cast<std::int64_t>(outcome.wrong_token);
  // The value in the needle; its beginning where the tokenizer joins the value with what is around it.
  const auto needle = probe.context.begin() + answer.source;
  const auto end = probe.context.begin() + probe.answers[0].place;
  const auto value = std::search(needle, end, answer.tokens.begin(), answer.tokens.end());
  const auto source = value == end ? answer.source : value - probe.context.begin() + token;
  return read_block(model, {probe.context.begin(), probe.context.begin() + answer.place + token}, source);
}

/// Throws where the needle does not tell the answer, the question does, or a key is missing in one of them.
void check_templates(const NeedleOptions& options) {
  const auto has = [](const std::string& text, const char* name) { return text.find(name) != std::string::npos; };
  const bool keys = options.task != "single" || has(options.needle, "{key}") || has(options.question, "{key}");
  for (const auto& [name, text, wanted] :
       {std::tuple{"needle", &options.needle, true}, {"question", &options.question, false}}) {
    if (has(*text, "{value}") != wanted) {
      throw base::Error(fmt::format("{} '{}': must {}have {{value}}, the answer", name, *text, wanted ? "" : "not "));
    }
    if (keys && !has(*text, "{key}")) throw base::Error(fmt::format("{} '{}': must have {{key}}", name, *text));
  }
}

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
  drawn.lines = draw_key_value_lines(task, task == "single" ? 1 : static_cast<std::size_t>(lines), random);
  if (task != "multikey") drawn.asked = drawn.lines.size();
  drawn.in_order = task == "multivalue";
  return drawn;
}

NeedleReport run_needle(const OpenedCheckpoint& opened, const std::vector<Document>& texts,
                        const NeedleOptions& options,
                        const std::function<void(std::int64_t, const std::vector<NeedleCell>&)>& on_length) {
  // Tokens of a forward: fewer leave a GPU idle, more take memory alone on a CPU.
  const std::size_t together = opened.model().device().is_cuda() ? 1 << 16 : 1 << 12;
  const at::NoGradGuard no_grad;
  check_templates(options);
  const Haystack haystack(texts);
  NeedleReport report;
  for (const auto length : options.lengths) haystack.require(length);  // before the work begins
  if (options.diagnose) require_selection(opened.model());
  for (const auto length : options.lengths) {
    std::vector<Outcome> outcomes;  // of each sample without needles, then at each depth
    std::vector<Probe> probes;
    std::size_t tokens = 0, done = 0;
    const auto flush = [&] {
      if (probes.empty()) return;
      for (const auto& outcome : ask(opened.model(), options.forward, probes)) {
        const auto& probe = probes[outcomes.size() - done];
        const auto number = outcomes.size() / (options.depths.size() + 1),
                   d = outcomes.size() % (options.depths.size() + 1);
        outcomes.push_back(outcome);
        if (!options.diagnose || d == 0) continue;  // without needles
        report.reads.push_back({length, options.depths[d - 1], static_cast<int>(number), outcome.right == 1,
                                read_source(opened.model(), probe, outcome)});
      }
      done = outcomes.size();
      probes.clear(), tokens = 0;
    };
    const auto add = [&](Probe probe) {
      if (tokens + probe.context.size() > together) flush();
      tokens += probe.context.size();
      probes.push_back(std::move(probe));
    };
    for (int number = 0; number < options.samples; ++number) {
      const auto sample = draw_sample(options, length, number, *opened.tokenizer, haystack);
      add(sample.without());
      for (const double depth : options.depths) add(sample.at(depth));
    }
    flush();
    auto& row = report.cells.emplace_back(options.depths.size());
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
  return report;
}

std::vector<RetrievalHead> retrieval_heads(const std::vector<NeedleRead>& reads) {
  std::vector<RetrievalHead> heads;
  if (reads.empty()) return heads;
  double most = 0;
  for (std::size_t i = 0; i < reads[0].blocks.size(); ++i) {
    auto& head = heads.emplace_back();
    head.layer = reads[0].blocks[i].layer, head.kv_head = reads[0].blocks[i].kv_head;
    for (const bool exact : {true, false}) {
      auto& mean = exact ? head.hits : head.misses;
      std::vector<std::int64_t> ranks;
      for (const auto& read : reads) {
        if (read.exact != exact) continue;
        const BlockRead& block = read.blocks[i];
        mean.selected += block.selected, mean.mass += block.mass, mean.dense_mass += block.dense_mass;
        ranks.push_back(block.rank);
      }
      if (ranks.empty()) continue;
      for (double* const sum : {&mean.selected, &mean.mass, &mean.dense_mass})
        *sum /= static_cast<double>(ranks.size());
      const auto middle = ranks.begin() + static_cast<std::ptrdiff_t>(ranks.size() / 2);
      std::nth_element(ranks.begin(), middle, ranks.end());
      mean.median_rank = *middle;
    }
    most = std::max(most, head.hits.mass);
  }
  for (auto& head : heads) head.carries = most > 0 && head.hits.mass >= most / 2;
  return heads;
}

bool block_not_selected(const NeedleRead& miss, const std::vector<RetrievalHead>& heads) {
  const bool known = std::any_of(heads.begin(), heads.end(), [](const RetrievalHead& head) { return head.carries; });
  for (std::size_t i = 0; i < heads.size(); ++i) {
    if ((heads[i].carries || !known) && miss.blocks[i].selected) return false;
  }
  return true;
}

}  // namespace nsa::lm
