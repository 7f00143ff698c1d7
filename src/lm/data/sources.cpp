#include "lm/data/sources.h"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>

#include "base/error.h"
#include "base/files.h"

namespace nsa::lm {
namespace {

namespace fs = std::filesystem;

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

}  // namespace

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

}  // namespace nsa::lm
