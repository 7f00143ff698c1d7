// Files that survive: what is written is on the disk, and a name is at any moment the old file or the new one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace nsa::base {

/// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

/// Whether this errno blames a name or a permission, not the machine.
bool is_users_fault(int error);

/// Throws what errno says of `path`: Error where the user is at fault, Failure where the machine is.
[[noreturn]] void throw_errno(const std::string& path, const char* what);

/// Reads a file. Throws as throw_errno() does.
std::string read_text(const std::string& path);
/// The same of a file that the user did not name: a FIFO, which would block, a device or a folder is an Error.
std::string read_regular_text(const std::string& path);

using Bytes = std::span<const std::byte>;

/// Writes the parts to a new file in the same folder, `.nsa-NAME.NUMBER.tmp`, flushes it to the disk, renames it to
/// `path` and flushes the folder. Throws as throw_errno() does when one of these fails; `path` then is as it was,
/// unless it was the last.
void replace_file(const std::string& path, const std::vector<Bytes>& parts);
void replace_file(const std::string& path, const std::string& text);

/// A file that the user named for results. A regular one is replaced with its permissions kept, also through a link; a
/// FIFO or a device is written to.
class OutputFile {
 public:
  /// Throws as throw_errno() does when `path` cannot be written; waits for the reader of a FIFO. Changes nothing there.
  explicit OutputFile(const std::string& path);
  /// Throws as throw_errno() does.
  void write(const std::string& text) const;

 private:
  std::string path_;
  Descriptor direct_{-1};  // of what is not replaced
};

/// Is `name` that of a file that replace_file() leaves when the process ends within it?
bool is_temporary(const std::string& name);

/// Adds to the end of a file, which is made where it is not. Throws as throw_errno() does.
void append_text(const std::string& path, const std::string& text);

/// What was written to this file, or the names in this folder, are on the disk when it returns. Throws as throw_errno()
/// does.
void flush_to_disk(const std::string& path);

/// Nothing there is fine. Throws as throw_errno() does.
void remove_file(const std::string& path);

}  // namespace nsa::base
