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
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string_view>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"
#include "base/random.h"

namespace nsa::lm {
namespace {

namespace fs = std::filesystem;

/// A document as it was read: a text or token numbers.
struct Source {
  std::string name, text;
  std::vector<std::int32_t> tokens;
};

struct FoundFile {
  fs::path path;
  base::Links links;
  std::string group;  // files that may be concatenated into one document share it
  std::string name;

  bool is_packed() const { return path.extension() == ".gz"; }
  /// Of what is packed.
  std::string extension() const { return (is_packed() ? path.stem() : path).extension().string(); }
};

/// How many files of each kind were left out.
class Skipped {
 public:
  void add(const std::string& kind) { ++counts_[kind]; }
  std::string text() const {
    std::string text;
    for (const auto& [kind, count] : counts_) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, kind);
    return text;
  }

 private:
  std::map<std::string, std::int64_t> counts_;
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

/// Files of the folder `root`. Links to files outside of it are followed if `follows`; the other ones lead to files
/// that are found anyway, or to nothing.
void find_files(const fs::path& root, const std::vector<std::string>& extensions, bool follows,
                std::vector<FoundFile>& found, Skipped& skipped) {
  std::error_code error, ignored;
  const auto first = found.size();
  const std::string inside = (fs::canonical(root, ignored) / "").string();
  fs::recursive_directory_iterator it(root, fs::directory_options::skip_permission_denied, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    const bool is_link = it->is_symlink();
    if (it->is_directory()) {
      if (is_link) skipped.add("links to folders");
      if (!is_link && skipped_folder(it->path())) {
        skipped.add("hidden or installed folders");
        it.disable_recursion_pending();
      }
      continue;
    }
    const fs::path relative = it->path().lexically_relative(root);
    const bool in_folder = std::distance(relative.begin(), relative.end()) > 1;
    FoundFile file{it->path(), is_link ? base::Links::kFollow : base::Links::kRefuse,
                   (root / (in_folder ? *relative.begin() : fs::path("."))).string(), relative.string()};
    const auto names = {file.path.extension().string(), file.extension()};
    const auto is_wanted = [&](const std::string& extension) {
      return std::find(names.begin(), names.end(), extension) != names.end();
    };
    if (!it->is_regular_file(ignored)) {
      skipped.add(is_link ? "broken links" : "special files");
    } else if (file.path.filename().string().starts_with(".")) {
      skipped.add("hidden files");
    } else if (is_link && (!follows || fs::canonical(file.path, ignored).string().starts_with(inside))) {
      skipped.add("links to files of the folder");
    } else if (!extensions.empty() && std::none_of(extensions.begin(), extensions.end(), is_wanted)) {
      skipped.add("files of other extensions");
    } else {
      found.push_back(std::move(file));
    }
  }
  if (error) {
    errno = error.value();
    base::throw_errno("data " + root.string(), "cannot be read");
  }
  std::sort(found.begin() + static_cast<std::ptrdiff_t>(first), found.end(),
            [](const auto& a, const auto& b) { return std::tie(a.group, a.name) < std::tie(b.group, b.name); });
}

/// The files of `config`, in a fixed order.
std::vector<FoundFile> find_files(const std::vector<std::string>& paths, const std::vector<std::string>& extensions,
                                  bool follows, Skipped& skipped) {
  std::vector<FoundFile> files;
  for (const std::string& path : paths) {
    std::error_code error;
    const auto type = fs::status(path, error).type();
    if (type == fs::file_type::directory) {
      find_files(fs::path(path).lexically_normal(), extensions, follows, files, skipped);
    } else if (type == fs::file_type::regular) {
      files.push_back({path, base::Links::kFollow, path, fs::path(path).filename().string()});
    } else {
      throw base::Error(fmt::format("data {}: {}", path,
                                    type == fs::file_type::not_found || type == fs::file_type::none
                                        ? "no such file or folder"
                                        : "must be a regular file or a folder"));
    }
  }
  return files;
}

bool is_binary(std::string_view text) { return text.substr(0, 4096).find('\0') != std::string_view::npos; }

/// The content, unpacked. A file that no memory could hold is refused or found to be binary by its beginning.
std::optional<std::string> read_content(const FoundFile& file, bool may_be_binary) {
  const std::string path = file.path.string(), beginning = base::read_prefix(path, file.links, 4096);
  if (file.is_packed() && !beginning.starts_with("\x1f\x8b")) {
    throw base::Error(fmt::format("{}: no gzip, or damaged", path));
  }
  if (!file.is_packed() && !may_be_binary && is_binary(beginning)) return {};
  auto text = base::read_regular_text(path, file.links, base::kNoLimit);
  if (file.is_packed()) text = base::unpack_gzip(text, path);
  if (!may_be_binary && is_binary(text)) return {};
  return text;
}

/// The texts of a .jsonl file.
void read_lines(const FoundFile& file, std::string_view content, std::vector<Source>& sources, Skipped& skipped) {
  for (std::size_t number = 1; !content.empty(); ++number) {
    const auto line = content.substr(0, content.find('\n'));
    content.remove_prefix(std::min(content.size(), line.size() + 1));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto name = fmt::format("{}:{}", file.path.string(), number);
    const auto json = base::parse_json_or_null(line);
    if (!json.is_object() || !json.contains("text") || !json["text"].is_string()) {
      throw base::Error(fmt::format("{}: must be a JSON object with a string \"text\"", name));
    }
    auto text = json["text"].get<std::string>();
    if (text.empty()) {
      skipped.add("empty texts");
    } else {
      sources.push_back({name, std::move(text), {}});
    }
  }
}

/// The token numbers of a .bin file.
std::vector<std::int32_t> numbers_of(const FoundFile& file, const std::string& content, int vocab_size) {
  const std::size_t width = vocab_size <= 65536 ? 2 : 4;
  if (content.size() % width != 0) {
    throw base::Error(fmt::format("{}: {} bytes: must be a multiple of {}, as numbers below {} are uint{}",
                                  file.path.string(), content.size(), width, vocab_size, 8 * width));
  }
  std::vector<std::int32_t> tokens(content.size() / width);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::uint32_t token = 0;
    for (std::size_t byte = width; byte-- > 0;) {
      token = token << 8 | static_cast<unsigned char>(content[i * width + byte]);
    }
    if (token >= static_cast<std::uint32_t>(vocab_size)) {
      throw base::Error(
          fmt::format("{}: token {} = {}: must be 0 ... {}", file.path.string(), i, token, vocab_size - 1));
    }
    tokens[i] = static_cast<std::int32_t>(token);
  }
  return tokens;
}

std::vector<Document> parse_ids(const std::string& text, const std::string& path, int vocab_size) {
  std::vector<Document> documents;
  std::istringstream lines(base::without_byte_order_mark(text));
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

std::vector<Source> read_ids(const DataConfig& config) {
  const FoundFile file{config.ids, base::Links::kFollow, {}, {}};
  std::vector<Source> sources;
  for (auto& document : parse_ids(*read_content(file, true), config.ids, config.vocab_size)) {
    sources.push_back({std::move(document.name), {}, std::move(document.tokens)});
  }
  return sources;
}

/// What `config` asks for, in a fixed order, texts concatenated where it says so. Throws Error.
std::vector<Source> read_sources(const DataConfig& config, Skipped& skipped) {
  if (!config.ids.empty()) return read_ids(config);
  const bool standard = config.paths.empty();
  const auto paths = standard ? python_source_folders() : config.paths;
  const auto extensions = standard ? std::vector<std::string>{".py"} : config.extensions;
  const bool concat = standard || config.concat_by_folder;
  const auto files = find_files(paths, extensions, !standard, skipped);

  std::vector<Source> sources;
  std::string open_group;  // of the last text, while more may be appended to it
  for (const auto& file : files) {
    const bool is_numbers = file.extension() == ".bin";
    if (is_numbers != config.holds_tokens()) {
      skipped.add(is_numbers ? ".bin files without --vocab-size" : "files not named .bin");
      continue;
    }
    auto content = read_content(file, is_numbers);
    if (!content || content->empty()) {
      skipped.add(content ? "empty files" : "binary files");
    } else if (is_numbers) {
      sources.push_back({file.path.string(), {}, numbers_of(file, *content, config.vocab_size)});
    } else if (file.extension() == ".jsonl") {
      read_lines(file, *content, sources, skipped);
      open_group.clear();
    } else if (concat && file.group == open_group &&
               sources.back().text.size() < static_cast<std::size_t>(config.document_bytes)) {
      sources.back().text += "\n# " + file.name + "\n" + *content;
    } else {
      sources.push_back({file.path.string(), concat ? "# " + file.name + "\n" + *content : std::move(*content), {}});
      open_group = file.group;
    }
  }
  if (sources.empty()) {
    const auto left_out = skipped.text();
    throw base::Error(fmt::format(
        "data: no text found in {}{}{}", fmt::join(paths, ", "),
        extensions.empty() ? "" : fmt::format(" with the extensions {} (with their dot)", fmt::join(extensions, ", ")),
        left_out.empty() ? "" : fmt::format("; skipped: {}", left_out)));
  }
  return sources;
}

std::uint64_t hash_of(const Source& source) {
  const auto* const bytes = reinterpret_cast<const char*>(source.tokens.data());
  return source.tokens.empty() ? base::hash(source.text)
                               : base::hash({bytes, source.tokens.size() * sizeof(std::int32_t)});
}

Document document_of(Source& source, const Tokenizer* tokenizer) {
  if (!tokenizer) return {std::move(source.name), std::move(source.tokens)};
  Document document{std::move(source.name), {tokenizer->start_of_document()}};
  const auto encoded = tokenizer->encode(source.text);
  document.tokens.insert(document.tokens.end(), encoded.begin(), encoded.end());
  document.tokens.push_back(tokenizer->end_of_document());
  return document;
}

/// Cuts the last `percent` of the tokens off, and at least what can be predicted; a document too short for it is left.
Document cut_end(Document& document, int percent) {
  const auto size = document.tokens.size();
  const auto end = std::max<std::size_t>(2, (size * static_cast<std::size_t>(percent) + 99) / 100);
  if (size < end + 2) return {};
  const auto cut = document.tokens.end() - static_cast<std::ptrdiff_t>(end);
  Document held_out{document.name, {cut, document.tokens.end()}};
  document.tokens.erase(cut, document.tokens.end());
  return held_out;
}

Corpus load(const DataConfig& config, const Tokenizer* tokenizer, bool train) {
  Skipped skipped;
  auto sources = read_sources(config, skipped);
  std::vector<Document> documents(sources.size());
  std::vector<std::uint64_t> hashes(sources.size());
  const auto in_parallel = [count = sources.size()](const auto& work) {
    at::parallel_for(0, static_cast<std::int64_t>(count), 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) work(i);
    });
  };
  in_parallel([&](std::size_t i) { hashes[i] = hash_of(sources[i]); });
  const auto is_held_out = [&](std::uint64_t hash) {
    return hash % 100 < static_cast<std::uint64_t>(config.held_out_percent);
  };
  const bool splits = config.held_out_percent > 0 && config.held_out_percent < 100;
  Corpus corpus;
  corpus.cuts_ends = splits && (std::all_of(hashes.begin(), hashes.end(), is_held_out) ||
                                std::none_of(hashes.begin(), hashes.end(), is_held_out));
  corpus.skipped = skipped.text();
  corpus.fingerprint = base::mix(static_cast<std::uint64_t>(config.held_out_percent));
  for (std::size_t i = 0; i < sources.size(); ++i) {
    corpus.fingerprint = base::mix(corpus.fingerprint ^ hashes[i]);
    corpus.bytes += static_cast<std::int64_t>(sources[i].text.size());
  }
  if (corpus.cuts_ends) corpus.fingerprint = base::mix(corpus.fingerprint ^ 1);
  if (tokenizer && tokenizer->fingerprint() != 0) {
    corpus.fingerprint = base::mix(corpus.fingerprint ^ tokenizer->fingerprint());
  }
  in_parallel([&](std::size_t i) {
    if (train || corpus.cuts_ends || is_held_out(hashes[i])) documents[i] = document_of(sources[i], tokenizer);
  });
  for (std::size_t i = 0; i < documents.size(); ++i) {
    if (corpus.cuts_ends) {
      auto end = cut_end(documents[i], config.held_out_percent);
      if (!end.tokens.empty()) corpus.held_out.push_back(std::move(end));
      if (train) corpus.train.push_back(std::move(documents[i]));
    } else if (is_held_out(hashes[i])) {
      corpus.held_out.push_back(std::move(documents[i]));
    } else if (train) {
      corpus.train.push_back(std::move(documents[i]));
    }
  }
  return corpus;
}

}  // namespace

Corpus load_corpus(const DataConfig& config, const Tokenizer* tokenizer) { return load(config, tokenizer, true); }
Corpus load_held_out(const DataConfig& config, const Tokenizer* tokenizer) { return load(config, tokenizer, false); }

std::vector<Document> load_ids(const std::string& path, int vocab_size) {
  return parse_ids(base::read_text(path, base::kMaxTextBytes), path, vocab_size);
}

}  // namespace nsa::lm
