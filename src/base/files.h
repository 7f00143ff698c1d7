// Files that survive: what is written is on the disk, and a name is at any moment the old file or the new one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
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

/// Whether a path may end in a symbolic link. Files of a run folder may not: a link leads out of it.
enum class Links { kFollow, kRefuse };

/// How many names (hard links) a file that is written to may have. With several, another folder's file would change.
enum class Names { kOne, kAny };

/// Opens a regular file; makes one where `flags` have O_CREAT and none exists. A FIFO, which open() would wait for, a
/// device, a folder or a refused link is an Error. So is, for writing, a file with more than these names. Else throws
/// as throw_errno() does.
Descriptor open_regular(const std::string& path, int flags, Links links, Names names = Names::kOne);

/// Most bytes of a JSON file or a tokenizer: the limit that safetensors sets to its header.
inline constexpr std::size_t kMaxJsonBytes = 100'000'000;
/// Most bytes of a text that is not training data: prompts and token numbers.
inline constexpr std::size_t kMaxTextBytes = std::size_t{1} << 28;
inline constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

/// Reads a whole file that the user named, also a FIFO. Throws Error when it holds more than `limit` bytes, else as
/// throw_errno() does.
std::string read_text(const std::string& path, std::size_t limit);
/// The same of a file opened by open_regular().
std::string read_regular_text(const std::string& path, Links links, std::size_t limit = kMaxJsonBytes);
/// Unpacks gzip, of one member or several. `path` names it in messages. Throws Error when it is damaged or cut, or
/// unpacks to more than 64 MiB and 200 times its size.
std::string unpack_gzip(const std::string& packed, const std::string& path);
/// Lines without the byte order mark that editors on Windows write before them.
std::string without_byte_order_mark(std::string text);
/// The first `size` bytes of such a file, or fewer where it is shorter.
std::string read_prefix(const std::string& path, Links links, std::size_t size);

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

/// Appends to a file of a run folder, opened by open_regular() and made where none exists. Throws as throw_errno()
/// does.
void append_text(const std::string& path, const std::string& text, Names names = Names::kOne);

/// When they return, the bytes of this file of a run folder, or the names in this folder, are on the disk. Throw as
/// throw_errno() does.
void flush_file(const std::string& path);
void flush_folder(const std::string& path);

/// Nothing there is fine. Throws as throw_errno() does.
void remove_file(const std::string& path);

}  // namespace nsa::base
