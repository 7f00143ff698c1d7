// nsa generate: text from a trained model, streamed to standard output.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "base/interrupt.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "lm/data/corpus.h"
#include "lm/data/tokenizer.h"
#include "lm/generate/generate.h"
#include "lm/generate/memory.h"
#include "lm/run/checkpoint.h"
#include "lm/run/pretrained.h"

namespace nsa::cli {
namespace {

struct GenerateArguments {
  CheckpointOptions checkpoint;
  std::string prompt, prompt_file, prompts, dtype, kv_cache_dtype = "auto";
  std::uint64_t max_memory = 0;  // bytes; 0: no limit
  JsonOption json;
  bool no_cache = false, no_graph = false, ignore_end = false, no_echo = false;
  lm::GenerateOptions options;
  MachineOptions machine;
};

at::ScalarType compute_dtype(const std::string& name, at::Device device) {
  if (name.empty()) return device.is_cuda() ? at::kBFloat16 : at::kFloat;
  return name == "bfloat16" ? at::kBFloat16 : name == "float16" ? at::kHalf : at::kFloat;
}

struct Prompt {
  std::string text;  // as it is printed
  std::vector<std::int64_t> tokens;
};

std::vector<Prompt> prompts_of(const GenerateArguments& arguments, const lm::Tokenizer* tokenizer, int vocab_size) {
  std::vector<Prompt> prompts;
  if (!tokenizer) {
    for (const auto& line : lm::load_ids(arguments.checkpoint.ids, vocab_size)) {
      prompts.push_back({fmt::format("{} ", fmt::join(line.tokens, " ")), {line.tokens.begin(), line.tokens.end()}});
    }
    return prompts;
  }
  std::vector<std::string> texts;
  if (!arguments.prompts.empty()) {
    std::istringstream lines(base::without_byte_order_mark(base::read_text(arguments.prompts, base::kMaxTextBytes)));
    for (std::string line; std::getline(lines, line);) {
      if (line.ends_with('\r')) line.pop_back();  // of a file from Windows
      texts.push_back(line);
    }
    if (texts.empty()) throw base::Error(fmt::format("{}: is empty; expected one prompt per line", arguments.prompts));
  } else {
    texts.push_back(arguments.prompt_file.empty() ? arguments.prompt
                                                  : base::read_text(arguments.prompt_file, base::kMaxTextBytes));
  }
  // In a folder of transformers as by its tokenizer, in a run as in its training.
  const bool begins = tokenizer->begins_prompts() || !lm::is_pretrained(arguments.checkpoint.path);
  for (const auto& text : texts) {
    const auto tokens = tokenizer->encode(text);
    prompts.push_back({text, {tokens.begin(), tokens.end()}});
    if (begins || tokens.empty()) {
      prompts.back().tokens.insert(prompts.back().tokens.begin(), tokenizer->start_of_document());
    }
  }
  return prompts;
}

/// Prints the texts of a batch in order: streams the first unfinished one and buffers the others.
class TextPrinter {
 public:
  TextPrinter(const std::vector<Prompt>& prompts, bool echo) : ended_(prompts.size(), false) {
    for (const auto& prompt : prompts) waiting_.push_back(echo ? prompt.text : "");
    flush();
  }

  /// Returns whether it could be printed.
  bool add(std::size_t sequence, const std::string& text, bool last) {
    waiting_[sequence] += text;
    ended_[sequence] = last;
    if (sequence == turn_) flush();
    return std::ferror(stdout) == 0;
  }

  /// Prints what is buffered, with a line break after each text.
  void finish() {
    std::fill(ended_.begin(), ended_.end(), true);
    flush();
  }

 private:
  void flush() {
    while (turn_ < waiting_.size()) {
      auto& text = waiting_[turn_];
      if (ended_[turn_]) text += "\n";
      std::fwrite(text.data(), 1, text.size(), stdout);
      text.clear();
      if (!ended_[turn_]) break;
      ++turn_;
    }
    std::fflush(stdout);
  }

  std::vector<std::string> waiting_;
  std::vector<bool> ended_;
  std::size_t turn_ = 0;
};

void run(GenerateArguments& arguments) {
  arguments.json.open();
  // torch reads this at its first tensor: huge pages for tensors from 2 MiB on, where the system leaves the choice to
  // programs. Each step reads all weights, and processors prefetch within a page.
  setenv("THP_MEM_ALLOC_ENABLE", "1", /*overwrite=*/0);
  const auto device = arguments.machine.choose();
  const auto dtype = compute_dtype(arguments.dtype, device.device);
  const auto limit = static_cast<std::int64_t>(arguments.max_memory);
  arguments.options.fp8_cache = arguments.kv_cache_dtype == "fp8";
  if (limit > 0 && device.device.is_cuda()) throw base::Error("--max-memory: limits host memory: needs --device cpu");
  const auto loaded = lm::load_model(arguments.checkpoint.path, arguments.checkpoint.changes, device.device, dtype,
                                     [&](const lm::ModelConfig& config) {
                                       if (arguments.options.fp8_cache) lm::require_fp8_cache(config);
                                       if (limit > 0) lm::require_memory_to_load(limit, config, dtype);
                                     });
  const bool by_ids = !arguments.checkpoint.ids.empty();
  const auto tokenizer = by_ids ? nullptr : lm::tokenizer_of(arguments.checkpoint.path, loaded);
  const auto prompts = prompts_of(arguments, tokenizer.get(), loaded.model.config().vocab_size);
  std::vector<std::vector<std::int64_t>> sequences;
  for (const auto& prompt : prompts) sequences.push_back(prompt.tokens);

  auto options = arguments.options;
  options.sampler.validate();
  if (limit > 0) {
    options.chunk = lm::chunk_within(limit, loaded.model.config(), dtype,
                                     {.sequences = static_cast<std::int64_t>(sequences.size()),
                                      .capacity = lm::capacity_of(sequences, options),
                                      .fp8_cache = options.fp8_cache});
  }
  base::write_stderr(fmt::format("device: {}\n", device.text));
  options.cached = !arguments.no_cache;
  options.graph = !arguments.no_graph;
  if (tokenizer && !arguments.ignore_end) options.stop_token = tokenizer->end_of_document();
  TextPrinter printer(prompts, !arguments.no_echo);
  const base::InterruptGuard interrupt;
  const auto result =
      lm::generate(loaded.model, sequences, options, [&](std::size_t sequence, std::int64_t token, bool last) {
        const std::string text =
            tokenizer ? tokenizer->decode(static_cast<std::int32_t>(token)) : fmt::format("{} ", token);
        return printer.add(sequence, text, last) && interrupt.signal() == 0;
      });
  printer.finish();
  std::size_t read = 0, generated = 0;
  auto reports = nlohmann::json::array();
  for (std::size_t b = 0; b < prompts.size(); ++b) {
    const auto& [tokens, margins] = result.sequences[b];
    read += prompts[b].tokens.size();
    generated += tokens.size();
    reports.push_back({{"prompt_tokens", prompts[b].tokens.size()}, {"tokens", tokens}, {"margins", margins}});
  }
  const auto decoded = static_cast<double>(generated) - static_cast<double>(prompts.size());
  base::write_stderr(fmt::format("{}: {} tokens, {:.0f} tokens/s; generated: {} tokens, {:.1f} tokens/s\n",
                                 prompts.size() == 1 ? "prompt" : fmt::format("{} prompts", prompts.size()), read,
                                 static_cast<double>(read) / result.prefill_seconds, generated,
                                 decoded > 0 ? decoded / result.decode_seconds : 0.0));
  arguments.json.write({{"kind", "nsa-generate"},
                        {"checkpoint", arguments.checkpoint.path},
                        {"set", arguments.checkpoint.changes},
                        {"cached", options.cached},
                        {"kv_cache_dtype", arguments.kv_cache_dtype},
                        {"graph", result.graph},
                        {"sequences", reports},
                        {"prefill_seconds", result.prefill_seconds},
                        {"decode_seconds", result.decode_seconds}},
                       -1);
  if (interrupt.signal() != 0) throw Exit{128 + interrupt.signal()};
}

/// CLI11's transform of an amount of memory into bytes: 1GiB, 0.5 GiB, 512MB or a number of bytes.
std::string to_bytes(std::string& text) {
  double number = -1;
  const char* const end = text.data() + text.size();
  const auto behind = std::from_chars(text.data(), end, number).ptr;
  auto unit = CLI::detail::to_lower(CLI::detail::trim_copy(std::string(behind, end)));
  if (unit.ends_with('b')) unit.pop_back();
  const double base = unit.size() == 2 && unit.ends_with('i') ? 1024 : 1000;
  if (base == 1024) unit.pop_back();
  const auto power = std::string_view("kmgtpe").find(unit);
  if (!unit.empty()) number *= std::pow(base, static_cast<double>(power + 1));
  if (unit.size() > 1 || power == std::string_view::npos || !(number >= 0 && number < 0x1p63)) {
    return fmt::format("{}: must be bytes, or a number with a unit: kB, MB, GB ... or KiB, MiB, GiB ...", text);
  }
  text = fmt::format("{:.0f}", std::floor(number));
  return "";
}

}  // namespace

void add_generate(CLI::App& app) {
  auto* const command = app.add_subcommand("generate", "Generate text with a trained model.");
  const auto arguments = std::make_shared<GenerateArguments>();
  auto& options = arguments->options;
  arguments->checkpoint.add(*command);
  auto* const prompt =
      command->add_option("-p,--prompt", arguments->prompt, "Text to continue; empty: start a new document");
  auto* const file = command->add_option("--prompt-file", arguments->prompt_file, "File with the text to continue");
  file->excludes(prompt);
  auto* const lines = command->add_option("--prompts", arguments->prompts,
                                          "File with one prompt per line, generated as a batch and printed in order");
  lines->excludes(prompt)->excludes(file);
  arguments->checkpoint
      .add_ids(*command,
               "File with one prompt per line, as token ids. The output is token ids; generation does not stop at the "
               "end of "
               "a document")
      ->excludes(prompt)
      ->excludes(file)
      ->excludes(lines);
  command->add_option("-n,--tokens", options.max_tokens, "Maximum number of tokens to generate per prompt")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30));
  command->add_option("--temperature", options.sampler.temperature, "Sampling temperature; 0: greedy decoding");
  command->add_option("--top-k", options.sampler.top_k, "Sample from the k most likely tokens; 0: all");
  command->add_option("--top-p", options.sampler.top_p,
                      "Sample from the smallest set of tokens with this total probability, 0 to 1");
  command->add_option("--seed", options.sampler.seed, "Seed of the sampler");
  command
      ->add_option(
          "--dtype", arguments->dtype,
          "Data type of matmuls and attention: float32, bfloat16, on cuda also float16; default: float32, on cuda "
          "bfloat16")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}));
  auto* const cache_dtype = command->add_option(
      "--kv-cache-dtype", arguments->kv_cache_dtype,
      "Data type of the KV cache: auto (that of --dtype) or fp8 (e4m3, half of bfloat16's memory; attention nsa only)");
  cache_dtype->check(CLI::IsMember({"auto", "fp8"}));
  auto* const limit = command->add_option("--max-memory", arguments->max_memory,
                                          "Limit of resident memory on the CPU, in bytes or with a unit (0.5GiB). "
                                          "Prompts are read in shorter chunks to keep "
                                          "it; what cannot keep it is refused. 0: no limit");
  limit->transform(CLI::Validator(to_bytes, "SIZE"));
  arguments->machine.add(*command);
  command
      ->add_flag("--no-cache", arguments->no_cache,
                 "Recompute the whole sequence for each token instead of using the KV cache, for comparison")
      ->excludes(cache_dtype)
      ->excludes(limit);
  command->add_flag("--no-graph", arguments->no_graph,
                    "Launch kernels one by one on cuda instead of as a CUDA graph, for comparison");
  command->add_flag("--ignore-end", arguments->ignore_end, "Continue past the end of a document");
  command->add_flag("--no-echo", arguments->no_echo, "Print only the generated text, without the prompt");
  arguments->json.add(*command, "tokens, logit margins and times");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace nsa::cli
