#include "lm/data/corpus.h"

#include <ATen/Parallel.h>
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string_view>

#include "base/error.h"
#include "base/files.h"
#include "base/random.h"

namespace nsa::lm {
namespace {

namespace fs = std::filesystem;

struct Text {
  std::string name, text;
};

struct FoundFile {
  fs::path path;
  base::Links links;  // followed in what the user named, not in what a folder holds
  std::string group;  // files that may be concatenated into one document share it
  std::string name;
};

/// The Python whose sources are the default corpus: the one this program was built with, else the first in PATH. Empty
/// and relative folders of PATH are skipped: what lies in the working directory is never run.
std::string python() {
  std::error_code error;
  if (fs::exists(NSA_PYTHON, error)) return NSA_PYTHON;
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const auto found = fs::path(folder) / "python3";
    if (found.is_absolute() && ::access(found.c_str(), X_OK) == 0) return found.string();
  }
  return {};
}

/// One word of the shell.
std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

/// The folders of Python's standard library and of the packages that it finds.
std::vector<std::string> python_source_folders() {
  // -I: Python imports nothing from the working directory or PYTHONPATH.
  const std::string command =
      quoted(python()) +
      " -I -c \"import sys, sysconfig; print(sysconfig.get_paths()['stdlib'], *(folder for folder in sys.path "
      "if folder.endswith(('site-packages', 'dist-packages'))), sep='\\n')\" 2>/dev/null";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "r"), ::pclose);
  std::string output;
  std::array<char, 4096> buffer;
  while (pipe && std::fgets(buffer.data(), buffer.size(), pipe.get())) output += buffer.data();
  std::istringstream lines(output);
  std::vector<std::string> folders;
  for (std::string line; std::getline(lines, line);) {
    if (fs::path(line).is_absolute() && fs::is_directory(line)) folders.push_back(line);
  }
  if (folders.empty()) throw base::Error("no Python found for the default data; name files or folders with --data");
  return folders;
}

bool skipped_folder(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with(".") || name == "__pycache__" || name == "site-packages" || name == "dist-packages";
}

void find_files(const fs::path& root, const std::vector<std::string>& extensions, std::vector<FoundFile>& found) {
  std::error_code error;
  const auto first = found.size();
  fs::recursive_directory_iterator it(root, fs::directory_options::skip_permission_denied, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    if (it->is_symlink()) continue;
    if (it->is_directory()) {
      if (skipped_folder(it->path())) it.disable_recursion_pending();
      continue;
    }
    const std::string extension = it->path().extension().string();
    if (!it->is_regular_file() || it->path().filename().string().starts_with(".")) continue;
    if (!extensions.empty() && std::find(extensions.begin(), extensions.end(), extension) == extensions.end()) continue;
    const fs::path relative = it->path().lexically_relative(root);
    const bool in_folder = std::distance(relative.begin(), relative.end()) > 1;
    found.push_back({it->path(), base::Links::kRefuse,
                     (root / (in_folder ? *relative.begin() : fs::path("."))).string(), relative.string()});
  }
  if (error) {
    errno = error.value();
    base::throw_errno("data " + root.string(), "cannot be read");
  }
  std::sort(found.begin() + static_cast<std::ptrdiff_t>(first), found.end(),
            [](const auto& a, const auto& b) { return std::tie(a.group, a.name) < std::tie(b.group, b.name); });
}

/// Also of a file that no memory could hold: the beginning decides.
bool is_binary(const FoundFile& file) {
  return base::read_prefix(file.path.string(), file.links, 4096).find('\0') != std::string::npos;
}

/// The texts that `config` asks for, in a fixed order, concatenated where it says so. Throws Error.
std::vector<Text> read_texts(const DataConfig& config) {
  const bool standard = config.paths.empty();
  const auto paths = standard ? python_source_folders() : config.paths;
  const auto extensions = standard ? std::vector<std::string>{".py"} : config.extensions;
  const bool concat = standard || config.concat_by_folder;

  std::vector<FoundFile> files;
  for (const std::string& path : paths) {
    std::error_code error;
    const auto type = fs::status(path, error).type();
    if (type == fs::file_type::directory) {
      find_files(fs::path(path).lexically_normal(), extensions, files);
    } else if (type == fs::file_type::regular) {
      files.push_back({path, base::Links::kFollow, path, fs::path(path).filename().string()});
    } else {
      throw base::Error(fmt::format("data {}: {}", path,
                                    type == fs::file_type::not_found || type == fs::file_type::none
                                        ? "no such file or folder"
                                        : "must be a regular file or a folder"));
    }
  }
  std::vector<Text> texts;
  std::string open_group;  // of the last text, while more may be appended to it
  for (const auto& file : files) {
    if (is_binary(file)) continue;
    std::string text = base::read_regular_text(file.path.string(), file.links, base::kNoLimit);
    if (text.empty()) continue;
    if (concat && file.group == open_group &&
        texts.back().text.size() < static_cast<std::size_t>(config.document_bytes)) {
      texts.back().text += "\n# " + file.name + "\n" + text;
    } else {
      texts.push_back({file.path.string(), concat ? "# " + file.name + "\n" + text : std::move(text)});
      open_group = file.group;
    }
  }
  if (texts.empty())
    throw base::Error(fmt::format(
        "data: no text found in {}{}", fmt::join(paths, ", "),
        extensions.empty() ? ""
                           : fmt::format(" with the extensions {} (with their dot)", fmt::join(extensions, ", "))));
  return texts;
}

Corpus load(const DataConfig& config, const Tokenizer& tokenizer, bool train) {
  auto texts = read_texts(config);
  std::vector<Document> documents(texts.size());
  std::vector<std::uint64_t> hashes(texts.size());
  const auto held_out = [&](std::size_t i) {
    return hashes[i] % 100 < static_cast<std::uint64_t>(config.held_out_percent);
  };
  const auto count = static_cast<std::int64_t>(texts.size());
  at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      hashes[i] = base::hash(texts[i].text);
      if (!train && !held_out(i)) continue;
      documents[i] = {std::move(texts[i].name), {tokenizer.start_of_document()}};
      auto& tokens = documents[i].tokens;
      const auto encoded = tokenizer.encode(texts[i].text);
      tokens.insert(tokens.end(), encoded.begin(), encoded.end());
      tokens.push_back(tokenizer.end_of_document());
    }
  });
  Corpus corpus;
  corpus.fingerprint = base::mix(static_cast<std::uint64_t>(config.held_out_percent));
  for (std::size_t i = 0; i < texts.size(); ++i) {
    corpus.fingerprint = base::mix(corpus.fingerprint ^ hashes[i]);
    corpus.bytes += static_cast<std::int64_t>(texts[i].text.size());
    if (held_out(i)) {
      corpus.held_out.push_back(std::move(documents[i]));
    } else if (train) {
      corpus.train.push_back(std::move(documents[i]));
    }
  }
  return corpus;
}

}  // namespace

Corpus load_corpus(const DataConfig& config, const Tokenizer& tokenizer) { return load(config, tokenizer, true); }
Corpus load_held_out(const DataConfig& config, const Tokenizer& tokenizer) { return load(config, tokenizer, false); }

std::vector<Document> load_ids(const std::string& path, int vocab_size) {
  std::vector<Document> documents;
  std::istringstream lines(base::read_text(path, base::kMaxTextBytes));
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    Document document{fmt::format("{}:{}", path, number), {}};
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      std::int32_t token = -1;
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), token);
      if (error != std::errc() || end != word.data() + word.size() || token < 0 || token >= vocab_size) {
        throw base::Error(fmt::format("{}: '{}': must be a token's number, 0 ... {}", document.name, word.substr(0, 20),
                                      vocab_size - 1));
      }
      document.tokens.push_back(token);
    }
    if (!document.tokens.empty()) documents.push_back(std::move(document));
  }
  if (documents.empty()) throw base::Error(fmt::format("{}: holds no tokens", path));
  return documents;
}

}  // namespace nsa::lm
