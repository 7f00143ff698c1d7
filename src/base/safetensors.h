// The safetensors file format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes.
// https://huggingface.co/docs/safetensors. Here without torch; see checkpoint.h for tensors. Written out, because
// neither Debian nor PyPI has a reader for C++.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/files.h"

namespace nsa::base {

struct StoredTensor {
  std::string name;
  std::string dtype;  // "F32", "BF16", "I64", ...
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  // row-major
};

using Metadata = std::map<std::string, std::string>;

/// A file mapped into memory; the tensors point into it.
class SafetensorsFile {
 public:
  /// Throws Error, naming the file and what is wrong, unless the file is sound: header, names, dtypes, shapes and
  /// offsets, which must cover the data without gaps or overlaps, and the checksum where it has one.
  static SafetensorsFile open(const std::string& path, Links links);

  const Metadata& metadata() const { return metadata_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  /// The checksum that write_safetensors() returned; empty for files of other programs.
  const std::string& checksum() const { return checksum_; }

  /// Frees the memory of a tensor's bytes, which a later access reads from the file again.
  static void release(const StoredTensor& tensor);

 private:
  std::shared_ptr<const void> mapping_;
  std::string checksum_;
  Metadata metadata_;
  std::vector<StoredTensor> tensors_;
};

/// Replaces `path` as replace_file() does; returns the checksum that the file carries of its content.
std::string write_safetensors(const std::string& path, const std::vector<StoredTensor>& tensors, Metadata metadata);

}  // namespace nsa::base
