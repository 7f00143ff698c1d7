#include "base/safetensors.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"
#include "base/random.h"

namespace nsa::base {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr std::uint64_t kMaxHeader = kMaxJsonBytes;  // the format's own limit
constexpr const char* kChecksum = "nsa-checksum";    // in the metadata; files of other programs have none

std::uint64_t bytes_of(const std::string& dtype) {
  static const std::map<std::string, std::uint64_t> sizes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
      {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},     {"I64", 8}, {"U64", 8}, {"F64", 8}};
  const auto it = sizes.find(dtype);
  return it == sizes.end() ? 0 : it->second;
}

std::shared_ptr<const void> map_file(const std::string& path, Links links, std::uint64_t& size) {
  const auto file = open_regular(path, O_RDONLY, links);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) throw_errno(path, "cannot be read");
  size = static_cast<std::uint64_t>(info.st_size);
  if (size < 8) throw Error(fmt::format("{}: truncated: {} bytes are no safetensors file", path, size));
  const void* const data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) throw_errno(path, "cannot be read");
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
  StoredTensor tensor{.name = name, .dtype = entry["dtype"].get<std::string>(), .shape = {}, .bytes = {}};
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

std::string_view text_of(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

/// Of metadata, names and data, in any order of the tensors. Calls `done` after each tensor.
template <class Done>
std::string checksum_of(const std::vector<StoredTensor>& tensors, const Metadata& metadata, const Done& done) {
  std::uint64_t sum = hash(nlohmann::json(metadata).dump());
  for (const auto& tensor : tensors) {
    sum += hash(text_of(tensor.bytes), hash(tensor.name));
    done(tensor);
  }
  return fmt::format("{:016x}", sum);
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::string& path, Links links) {
  SafetensorsFile file;
  std::uint64_t size = 0;
  file.mapping_ = map_file(path, links, size);
  const auto* const bytes = static_cast<const std::byte*>(file.mapping_.get());
  std::uint64_t header_size = 0;
  std::memcpy(&header_size, bytes, 8);
  if (header_size > kMaxHeader) bad_header(path, fmt::format("header of {} bytes", header_size));
  if (header_size > size - 8) throw Error(fmt::format("{}: truncated within its header", path));
  const auto header = parse_json({reinterpret_cast<const char*>(bytes) + 8, header_size},
                                 path + ": not a sound safetensors file: header");
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
  if (const auto stored = file.metadata_.extract(kChecksum); !stored.empty()) {
    file.checksum_ = checksum_of(file.tensors_, file.metadata_, release);
    if (stored.mapped() != file.checksum_) {
      throw Error(fmt::format("{}: damaged: its content does not have its checksum", path));
    }
  }
  return file;
}

void SafetensorsFile::release(const StoredTensor& tensor) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<std::uintptr_t>(tensor.bytes.data());
  const std::uintptr_t begin = (first + page - 1) / page * page, end = (first + tensor.bytes.size()) / page * page;
  // Whether the system follows this advice does not matter for what is read.
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

std::string write_safetensors(const std::string& path, const std::vector<StoredTensor>& tensors, Metadata metadata) {
  const std::string sum = checksum_of(tensors, metadata, [](const StoredTensor&) {});
  metadata[kChecksum] = sum;
  nlohmann::ordered_json header;
  header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const auto& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // the data start at a multiple of 8
  const std::uint64_t header_size = text.size();
  std::vector<Bytes> parts = {std::as_bytes(std::span(&header_size, 1)), std::as_bytes(std::span(text))};
  for (const auto& tensor : tensors) parts.push_back(tensor.bytes);
  replace_file(path, parts);
  return sum;
}

}  // namespace nsa::base
