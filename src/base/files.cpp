#include "base/files.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>

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

Descriptor open_regular(const std::string& path, int flags, Links links, Names names) {
  const int own = O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (links == Links::kRefuse ? O_NOFOLLOW : 0);
  const bool writes = (flags & O_ACCMODE) != O_RDONLY;
  Descriptor file(::open(path.c_str(), flags | own, 0644));
  struct stat info {};
  if (file.get() < 0) {
    const int error = errno;
    const bool is_link = ::lstat(path.c_str(), &info) == 0 && S_ISLNK(info.st_mode);
    if (links == Links::kRefuse && is_link) throw Error(fmt::format("{}: not a regular file, but a link", path));
    if (error == ENXIO || error == EISDIR) throw Error(fmt::format("{}: not a regular file", path));
    errno = error;
    throw_errno(path, writes ? "cannot write" : "cannot be read");
  }
  if (::fstat(file.get(), &info) != 0) throw_errno(path, "cannot be read");
  if (!S_ISREG(info.st_mode)) throw Error(fmt::format("{}: not a regular file", path));
  if (writes && names == Names::kOne && info.st_nlink > 1) {
    throw Error(fmt::format("{}: has {} names (hard links): must have this one alone", path, info.st_nlink));
  }
  return file;
}

namespace {

std::string read_at_most(int fd, const std::string& path, std::size_t most) {
  std::string text;
  struct stat info {};
  // A size that no memory can hold fails here, before the machine swaps.
  if (::fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) {
    text.reserve(std::min(most, static_cast<std::size_t>(info.st_size)));
  }
  std::array<char, 65536> buffer;
  while (text.size() < most) {
    const ssize_t size = ::read(fd, buffer.data(), std::min(buffer.size(), most - text.size()));
    if (size == 0) break;
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) throw_errno(path, "cannot be read");
    text.append(buffer.data(), static_cast<std::size_t>(size));
  }
  return text;
}

std::string read_all(int fd, const std::string& path, std::size_t limit) {
  auto text = read_at_most(fd, path, limit == kNoLimit ? limit : limit + 1);
  if (text.size() > limit) throw Error(fmt::format("{}: too large: must be at most {} bytes", path, limit));
  return text;
}

}  // namespace

std::string read_text(const std::string& path, std::size_t limit) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NOCTTY | O_CLOEXEC));
  if (file.get() < 0) throw_errno(path, "cannot be read");
  return read_all(file.get(), path, limit);
}

std::string read_regular_text(const std::string& path, Links links, std::size_t limit) {
  return read_all(open_regular(path, O_RDONLY, links).get(), path, limit);
}

std::string unpack_gzip(const std::string& packed, const std::string& path) {
  const std::size_t limit = std::max(std::size_t{64} << 20, 200 * packed.size());
  z_stream stream{};
  if (inflateInit2(&stream, 15 + 16) != Z_OK) throw std::bad_alloc();  // 16: gzip alone
  const std::unique_ptr<z_stream, int (*)(z_stream*)> end(&stream, inflateEnd);
  std::string text;
  std::array<char, 65536> buffer;
  std::size_t taken = 0;  // of `packed`; zlib counts in 32 bits
  for (int result = Z_OK; result != Z_STREAM_END || taken - stream.avail_in < packed.size();) {
    if (result == Z_STREAM_END) inflateReset(&stream);
    if (stream.avail_in == 0) {
      const auto more = std::min(packed.size() - taken, std::size_t{1} << 30);
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data() + taken));
      stream.avail_in = static_cast<uInt>(more);
      taken += more;
    }
    stream.next_out = reinterpret_cast<Bytef*>(buffer.data());
    stream.avail_out = static_cast<uInt>(buffer.size());
    result = inflate(&stream, Z_NO_FLUSH);
    if (result == Z_MEM_ERROR) throw std::bad_alloc();
    if (result == Z_BUF_ERROR) throw Error(fmt::format("{}: gzip that ends too early", path));
    if (result != Z_OK && result != Z_STREAM_END) throw Error(fmt::format("{}: no gzip, or damaged", path));
    text.append(buffer.data(), buffer.size() - stream.avail_out);
    if (text.size() > limit) {
      throw Error(fmt::format("{}: gzip of {} bytes: must unpack to at most {}", path, packed.size(), limit));
    }
  }
  return text;
}

std::string without_byte_order_mark(std::string text) {
  constexpr std::string_view kMark = "\xef\xbb\xbf";
  if (text.starts_with(kMark)) text.erase(0, kMark.size());
  return text;
}

std::string read_prefix(const std::string& path, Links links, std::size_t size) {
  return read_at_most(open_regular(path, O_RDONLY, links).get(), path, size);
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
  flush_folder(folder_of(path).string());
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

void append_text(const std::string& path, const std::string& text, Names names) {
  const auto file = open_regular(path, O_WRONLY | O_APPEND | O_CREAT, Links::kRefuse, names);
  write_all(file.get(), bytes_of(text), path);
}

namespace {

void flush(int fd, const std::string& path) {
  if (fd < 0 || (::fsync(fd) != 0 && errno != EINVAL)) {  // EINVAL: a file system without this
    throw_errno(path, "cannot be flushed to the disk");
  }
}

}  // namespace

void flush_file(const std::string& path) { flush(open_regular(path, O_RDONLY, Links::kRefuse).get(), path); }

void flush_folder(const std::string& path) {
  const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  flush(folder.get(), path);
}

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) throw_errno(path, "cannot be removed");
}

}  // namespace nsa::base
