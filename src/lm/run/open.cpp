#include "lm/run/open.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "base/error.h"
#include "lm/run/config.h"
#include "lm/run/pretrained.h"

namespace nsa::lm {

OpenedCheckpoint open_checkpoint(const std::string& path, const std::vector<std::string>& changes, at::Device device,
                                 bool with_tokenizer) {
  auto loaded = load_model(path, changes, device, at::kFloat);
  auto tokenizer = with_tokenizer && !loaded.trained_on_tokens ? tokenizer_of(path, loaded) : nullptr;
  return {std::move(loaded), std::move(tokenizer)};
}

OpenedTexts open_ids(const std::string& path, const Model& model) {
  return {load_ids(path, model.config().vocab_size), path};
}

OpenedTexts open_texts(const std::string& checkpoint, const std::vector<std::string>& paths,
                       const OpenedCheckpoint& opened) {
  const Tokenizer* const tokenizer = opened.tokenizer.get();
  if (!paths.empty()) {
    DataConfig data;
    data.paths = paths;
    data.held_out_percent = 100;
    data.vocab_size = tokenizer ? 0 : opened.model().config().vocab_size;
    return {load_held_out(data, tokenizer).held_out, fmt::format("{}", fmt::join(paths, ", "))};
  }
  if (is_pretrained(checkpoint)) {
    throw base::Error(
        fmt::format("{}: no run, which would have held out documents; name the texts with --data", checkpoint));
  }
  const std::filesystem::path given(checkpoint);
  const auto folder = std::filesystem::is_directory(given) ? given : given.parent_path();
  const std::string file = (folder / "config.json").string();
  const auto config = read_run_config(file);
  auto corpus = load_held_out(config.data, tokenizer);
  const auto fingerprint = fmt::format("{:016x}", corpus.fingerprint);
  if (fingerprint != config.fingerprint) {
    throw base::Error(fmt::format("{}: the data changed: fingerprint = {}, was {}; name the texts with --data", file,
                                  fingerprint, config.fingerprint));
  }
  if (corpus.held_out.empty()) {
    throw base::Error(fmt::format("{}: the run held out no documents; name the texts with --data", file));
  }
  return {std::move(corpus.held_out), fmt::format("held-out documents of {}", folder.string())};
}

}  // namespace nsa::lm
