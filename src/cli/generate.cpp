// nsa generate: text from a trained model, printed as it comes.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.h"
#include "base/files.h"
#include "base/interrupt.h"
#include "cli/checkpoint.h"
#include "cli/commands.h"
#include "cli/exit.h"
#include "cli/machine.h"
#include "cli/output.h"
#include "lm/data/corpus.h"
#include "lm/data/tokenizer.h"
#include "lm/generate/generate.h"
#include "lm/run/checkpoint.h"

namespace nsa::cli {
namespace {

struct GenerateArguments {
  CheckpointOptions checkpoint;
  std::string prompt, prompt_file, dtype = "float32";
  JsonOption json;
  bool no_cache = false, ignore_end = false, no_echo = false;
  lm::GenerateOptions options;
  MachineOptions machine;
};

at::ScalarType compute_dtype(const std::string& name) {
  return name == "bfloat16" ? at::kBFloat16 : name == "float16" ? at::kHalf : at::kFloat;
}

void run(GenerateArguments& arguments) {
  arguments.json.open();
  const auto device = arguments.machine.choose();
  const auto loaded = lm::load_model(arguments.checkpoint.path, arguments.checkpoint.changes, device.device,
                                     compute_dtype(arguments.dtype));
  const bool by_ids = !arguments.checkpoint.ids.empty();
  const auto tokenizer = by_ids ? nullptr : lm::tokenizer_of(arguments.checkpoint.path, loaded);
  std::string prompt = arguments.prompt_file.empty() ? arguments.prompt : base::read_text(arguments.prompt_file);
  std::vector<std::int64_t> tokens;
  if (by_ids) {
    const auto prompts = lm::load_ids(arguments.checkpoint.ids, loaded.model.config().vocab_size);
    if (prompts.size() > 1) throw base::Error(fmt::format("{}: must be one line, the prompt", prompts[1].name));
    tokens.assign(prompts[0].tokens.begin(), prompts[0].tokens.end());
    prompt = fmt::format("{} ", fmt::join(tokens, " "));
  } else {
    tokens.push_back(tokenizer->start_of_document());
    for (const std::int32_t token : tokenizer->encode(prompt)) tokens.push_back(token);
  }

  auto options = arguments.options;
  options.sampler.validate();
  fmt::print(stderr, "device: {}\n", device.text);
  options.cached = !arguments.no_cache;
  if (tokenizer && !arguments.ignore_end) options.stop_token = tokenizer->end_of_document();
  if (!arguments.no_echo) fmt::print("{}", prompt);
  std::fflush(stdout);
  const base::InterruptGuard interrupt;
  const auto result = lm::generate(loaded.model, tokens, options, [&](std::int64_t token) {
    const std::string text =
        tokenizer ? tokenizer->decode(static_cast<std::int32_t>(token)) : fmt::format("{} ", token);
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    return interrupt.signal() == 0 && std::ferror(stdout) == 0;
  });
  fmt::print("\n");
  std::fflush(stdout);
  const auto generated = static_cast<double>(result.tokens.size());
  fmt::print(stderr, "prompt: {} tokens, {:.0f} tokens/s; generated: {} tokens, {:.1f} tokens/s\n", tokens.size(),
             static_cast<double>(tokens.size()) / result.prefill_seconds, result.tokens.size(),
             generated > 1 ? (generated - 1) / result.decode_seconds : 0.0);
  arguments.json.write({{"kind", "nsa-generate"},
                        {"checkpoint", arguments.checkpoint.path},
                        {"set", arguments.checkpoint.changes},
                        {"cached", options.cached},
                        {"prompt_tokens", tokens.size()},
                        {"tokens", result.tokens},
                        {"margins", result.margins},
                        {"prefill_seconds", result.prefill_seconds},
                        {"decode_seconds", result.decode_seconds}},
                       -1);
  if (interrupt.signal() != 0) throw Exit{128 + interrupt.signal()};
}

}  // namespace

void add_generate(CLI::App& app) {
  auto* const command = app.add_subcommand("generate", "Continue a text with a trained model.");
  const auto arguments = std::make_shared<GenerateArguments>();
  auto& options = arguments->options;
  arguments->checkpoint.add(*command);
  auto* const prompt = command->add_option("-p,--prompt", arguments->prompt, "Text to continue; empty: a new document");
  auto* const file = command->add_option("--prompt-file", arguments->prompt_file, "File with the text to continue");
  file->excludes(prompt);
  arguments->checkpoint
      .add_ids(
          *command,
          "File with the prompt as numbers of tokens on one line; the new ones are printed as numbers, and the end "
          "of a document does not stop it")
      ->excludes(prompt)
      ->excludes(file);
  command->add_option("-n,--tokens", options.max_tokens, "Tokens to generate at most")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30));
  command->add_option("--temperature", options.sampler.temperature, "0: always the most likely token");
  command->add_option("--top-k", options.sampler.top_k, "Choose among the k most likely tokens; 0: all");
  command->add_option("--top-p", options.sampler.top_p,
                      "Choose among the fewest tokens whose probabilities reach this, 0 ... 1");
  command->add_option("--seed", options.sampler.seed, "Of the choices");
  command
      ->add_option("--dtype", arguments->dtype, "Of matrix products and attention: float32, bfloat16, on cuda float16")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}));
  arguments->machine.add(*command);
  command->add_flag("--no-cache", arguments->no_cache, "Run the whole model again for each token, to compare");
  command->add_flag("--ignore-end", arguments->ignore_end, "Do not stop at the end of a document");
  command->add_flag("--no-echo", arguments->no_echo, "Print the new text alone, without the prompt");
  arguments->json.add(*command, "tokens, margins of the choices and times");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace nsa::cli
