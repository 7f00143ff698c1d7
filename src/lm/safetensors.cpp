#include "lm/safetensors.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "lm/error.h"

namespace nsa::lm {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's own limit

std::uint64_t bytes_of(const std::string& dtype) {
  static const std::map<std::string, std::uint64_t> sizes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"I16", 2}, {"U16", 2}, {"F16", 2}, {"BF16", 2},
      {"I32", 4},  {"U32", 4}, {"F32", 4}, {"I64", 8}, {"U64", 8}, {"F64", 8}};
  const auto it = sizes.find(dtype);
  return it == sizes.end() ? 0 : it->second;
}

/// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

std::shared_ptr<const void> map_file(const std::string& path, std::uint64_t& size) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (file.get() < 0 || ::fstat(file.get(), &info) != 0) {
    throw Error(fmt::format("{}: {}", path, std::strerror(errno)));
  }
  if (!S_ISREG(info.st_mode)) throw Error(fmt::format("{}: not a regular file", path));
  size = static_cast<std::uint64_t>(info.st_size);
  if (size < 8) throw Error(fmt::format("{}: truncated: {} bytes are no safetensors file", path, size));
  const void* const data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) throw Error(fmt::format("{}: {}", path, std::strerror(errno)));
  return {data, [size](const void* p) { ::munmap(const_cast<void*>(p), size); }};
}

[[noreturn]] void bad_header(const std::string& path, const std::string& what) {
  throw Error(fmt::format("{}: not a sound safetensors file: {}", path, what));
}

StoredTensor read_entry(const std::string& path, const std::string& name, const nlohmann::json& entry,
                        std::span<const std::byte> data, std::uint64_t& begin) {
  const auto bad = [&](const char* what) {
    bad_header(path, fmt::format("tensor '{}': {}", name.substr(0, 80), what));
  };
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string()) bad("no dtype");
  if (!entry.contains("shape") || !entry["shape"].is_array()) bad("no shape");
  if (!entry.contains("data_offsets") || !entry["data_offsets"].is_array() || entry["data_offsets"].size() != 2) {
    bad("no data_offsets");
  }
  StoredTensor tensor{name, entry["dtype"].get<std::string>(), {}, {}};
  std::uint64_t bytes = bytes_of(tensor.dtype);
  if (bytes == 0) bad("unknown dtype");
  for (const auto& size : entry["shape"]) {
    if (!size.is_number_unsigned()) bad("shape must hold non-negative integers");
    std::int64_t value = 0;
    if (size.get<std::uint64_t>() > INT64_MAX || __builtin_mul_overflow(bytes, size.get<std::uint64_t>(), &bytes)) {
      bad("shape too large");
    }
    value = size.get<std::int64_t>();
    tensor.shape.push_back(value);
  }
  for (const auto& offset : entry["data_offsets"]) {
    if (!offset.is_number_unsigned()) bad("data_offsets must hold non-negative integers");
  }
  begin = entry["data_offsets"][0].get<std::uint64_t>();
  const auto end = entry["data_offsets"][1].get<std::uint64_t>();
  if (end < begin || end - begin != bytes) bad("data_offsets do not match the shape");
  if (end > data.size()) bad("truncated: its data reach past the end of the file");
  tensor.bytes = data.subspan(begin, bytes);
  return tensor;
}

void write_all(int fd, const void* data, std::size_t size, const std::string& path) {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::write(fd, bytes, size);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw Error(fmt::format("{}: cannot write: {}", path, std::strerror(errno)));
    bytes += written;
    size -= static_cast<std::size_t>(written);
  }
}

void write_parts(const std::string& path, const std::vector<std::span<const std::byte>>& parts) {
  const std::string temporary = path + ".tmp";
  {
    const Descriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (file.get() < 0) throw Error(fmt::format("{}: cannot write: {}", temporary, std::strerror(errno)));
    for (const auto part : parts) write_all(file.get(), part.data(), part.size(), temporary);
    if (::fsync(file.get()) != 0) throw Error(fmt::format("{}: cannot write: {}", temporary, std::strerror(errno)));
  }
  std::error_code error;
  std::filesystem::rename(temporary, path, error);
  if (error) throw Error(fmt::format("{}: {}", path, error.message()));
}

std::span<const std::byte> bytes_of_text(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  SafetensorsFile file;
  std::uint64_t size = 0;
  file.mapping_ = map_file(path, size);
  const auto* const bytes = static_cast<const std::byte*>(file.mapping_.get());
  std::uint64_t header_size = 0;
  std::memcpy(&header_size, bytes, 8);
  if (header_size > kMaxHeader) bad_header(path, fmt::format("header of {} bytes", header_size));
  if (header_size > size - 8) throw Error(fmt::format("{}: truncated within its header", path));
  const auto* const text = reinterpret_cast<const char*>(bytes) + 8;
  const auto header = nlohmann::json::parse(text, text + header_size, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) bad_header(path, "the header is no JSON object");

  const std::span<const std::byte> data(bytes + 8 + header_size, size - 8 - header_size);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) bad_header(path, "__metadata__ is no object");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) bad_header(path, "__metadata__ must hold strings");
        file.metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    std::uint64_t begin = 0;
    file.tensors_.push_back(read_entry(path, name, entry, data, begin));
    ranges.emplace_back(begin, begin + file.tensors_.back().bytes.size());
  }
  std::sort(ranges.begin(), ranges.end());
  std::uint64_t covered = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != covered) bad_header(path, "the tensors' data leave gaps or overlap");
    covered = end;
  }
  if (covered != data.size()) bad_header(path, fmt::format("{} bytes follow the tensors", data.size() - covered));
  return file;
}

void write_safetensors(const std::string& path, const std::vector<StoredTensor>& tensors, const Metadata& metadata) {
  nlohmann::ordered_json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const auto& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // the data start at a multiple of 8
  const std::uint64_t header_size = text.size();
  std::vector<std::span<const std::byte>> parts = {std::as_bytes(std::span(&header_size, 1)), bytes_of_text(text)};
  for (const auto& tensor : tensors) parts.push_back(tensor.bytes);
  write_parts(path, parts);
}

void write_atomically(const std::string& path, const std::string& text) { write_parts(path, {bytes_of_text(text)}); }

}  // namespace nsa::lm
