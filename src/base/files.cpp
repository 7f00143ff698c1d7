#include "base/files.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "base/error.h"

namespace nsa::base {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = ".nsa-", kSuffix = ".tmp";

void write_all(int fd, Bytes bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw_errno(path, "cannot write");
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

Bytes bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : "."; }

/// Creates a new file in the folder of `path` under a new name; follows neither a file nor a link.
Descriptor create_temporary(const std::string& path, std::string& temporary) {
  for (std::int64_t number = ::getpid();; ++number) {
    const auto stem = fs::path(path).filename().string().substr(0, 200);  // names end at 255 bytes
    const auto name = fmt::format("{}{}.{}{}", kPrefix, stem, number, kSuffix);
    temporary = (folder_of(path) / name).string();
    Descriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (file.get() >= 0) return file;
    if (errno != EEXIST) throw_errno(path, "cannot write");
  }
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

void throw_errno(const std::string& path, const char* what) {
  const int error = errno;
  const std::string message = fmt::format("{}: {}: {}", path, what, std::strerror(error));
  if (is_users_fault(error)) throw Error(message);
  throw Failure(message);
}

bool is_users_fault(int error) {
  const auto faults = {ENOENT, ENOTDIR, EISDIR, EEXIST, EACCES, EPERM, EROFS, ENAMETOOLONG, ELOOP, EINVAL};
  return std::find(faults.begin(), faults.end(), error) != faults.end();
}

std::string read_text(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) throw_errno(path, "cannot be read");
  std::string text;
  std::array<char, 65536> buffer;
  for (;;) {
    const ssize_t size = ::read(file.get(), buffer.data(), buffer.size());
    if (size == 0) return text;
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) throw_errno(path, "cannot be read");
    text.append(buffer.data(), static_cast<std::size_t>(size));
  }
}

std::string read_regular_text(const std::string& path) {
  std::error_code error;
  const auto type = std::filesystem::status(path, error).type();
  if (type != std::filesystem::file_type::regular && type != std::filesystem::file_type::not_found) {
    throw Error(fmt::format("{}: not a regular file", path));
  }
  return read_text(path);
}

void replace_file(const std::string& path, const std::vector<Bytes>& parts) {
  std::string temporary;
  const Descriptor file = create_temporary(path, temporary);
  try {
    for (const auto part : parts) write_all(file.get(), part, temporary);
    struct stat former {};
    if (::lstat(path.c_str(), &former) == 0 && S_ISREG(former.st_mode)) ::fchmod(file.get(), former.st_mode & 0777);
    if (::fsync(file.get()) != 0) throw_errno(temporary, "cannot write");
    if (::rename(temporary.c_str(), path.c_str()) != 0) throw_errno(path, "cannot be replaced");
  } catch (...) {
    ::unlink(temporary.c_str());  // the disk may be full: leave nothing on it
    throw;
  }
  flush_to_disk(folder_of(path).string());
}

void replace_file(const std::string& path, const std::string& text) { replace_file(path, {bytes_of(text)}); }

OutputFile::OutputFile(const std::string& path) : path_(path) {
  struct stat info {};
  const bool there = ::stat(path.c_str(), &info) == 0;
  if (!there && errno != ENOENT) throw_errno(path, "cannot write");
  if (there && S_ISDIR(info.st_mode)) throw Error(fmt::format("{}: cannot write: a folder", path));
  std::error_code error;
  if (there && S_ISREG(info.st_mode)) {
    if (::access(path.c_str(), W_OK) != 0) throw_errno(path, "cannot write");
    path_ = fs::canonical(path, error).string();
  } else if (there || fs::is_symlink(fs::symlink_status(path, error))) {
    direct_ = Descriptor(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
    if (direct_.get() < 0) throw_errno(path, "cannot write");
    return;
  }
  if (fs::path(path_).filename().string().size() > NAME_MAX) {
    errno = ENAMETOOLONG;
    throw_errno(path, "cannot write");
  }
  std::string temporary;
  create_temporary(path_, temporary);
  ::unlink(temporary.c_str());
}

void OutputFile::write(const std::string& text) const {
  if (direct_.get() < 0) return replace_file(path_, text);
  write_all(direct_.get(), bytes_of(text), path_);
}

bool is_temporary(const std::string& name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix) || name.size() < kPrefix.size() + kSuffix.size()) {
    return false;
  }
  const auto inner = name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
  const auto dot = inner.rfind('.');
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  return dot != std::string::npos && dot > 0 && dot + 1 < inner.size() &&
         std::all_of(inner.begin() + static_cast<std::ptrdiff_t>(dot) + 1, inner.end(), is_digit);
}

void append_text(const std::string& path, const std::string& text) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644));
  if (file.get() < 0) throw_errno(path, "cannot write");
  write_all(file.get(), bytes_of(text), path);
}

void flush_to_disk(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0 || (::fsync(file.get()) != 0 && errno != EINVAL)) {  // EINVAL: a file system without this
    throw_errno(path, "cannot be flushed to the disk");
  }
}

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) throw_errno(path, "cannot be removed");
}

}  // namespace nsa::base
