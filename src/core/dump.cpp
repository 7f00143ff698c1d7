#include "core/dump.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "core/strided.h"
#include "core/text.h"

namespace nsa {
namespace {

const char* safetensors_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat16:
      return "F16";
    case DType::kFloat64:
      return "F64";
    case DType::kInt32:
      return "I32";
    case DType::kFloat8E4M3:
      return "F8_E4M3";
  }
  return "";
}

std::string text_of_scalar(const decltype(Scalar::value)& value) {
  return std::visit([](const auto& x) { return text_of(x); }, value);
}

/// Names and values here are identifiers and numbers: nothing to escape.
std::string quoted(const std::string& text) { return '"' + text + '"'; }

std::string header_of(const char* operation, const Call& call, std::uint64_t& size) {
  std::string header = text_of(R"({"__metadata__":{"operation":)", quoted(operation), R"(,"layout":)",
                               quoted(call.packed ? "packed" : "batched"));
  for (const Scalar& scalar : call.scalars)
    header += text_of(',', quoted(scalar.name), ':', quoted(text_of_scalar(scalar.value)));
  header += '}';
  size = 0;
  for (const Argument& argument : call.tensors) {
    if (argument.access == Access::kOutput) continue;
    const TensorView& view = argument.view;
    header +=
        text_of(',', quoted(argument.name), R"(:{"dtype":)", quoted(safetensors_name(view.dtype)), R"(,"shape":[)");
    for (int i = 0; i < view.rank; ++i) header += text_of(i > 0 ? "," : "", view.size(i));
    const std::uint64_t end = size + static_cast<std::uint64_t>(view.numel()) * size_of(view.dtype);
    header += text_of(R"(],"data_offsets":[)", size, ',', end, "]}");
    size = end;
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the data is aligned
  return header;
}

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

/// A new file of the next number that has none: a process with this id may have left its own here, or links that lead
/// elsewhere. Null: it cannot be made, errno says why.
File create(const char* folder, const char* operation, std::string& path) {
  static std::atomic<int> count{0};
  std::FILE* file = nullptr;
  do {
    char name[64];
    std::snprintf(name, sizeof name, "/%ld-%06d-", static_cast<long>(getpid()), count++);
    path = folder + std::string(name) + operation + ".safetensors";
    file = std::fopen(path.c_str(), "wbx");
  } while (!file && errno == EEXIST);
  return File(file);
}

}  // namespace

Status dump(const char* operation, const Call& call) {
  const char* folder = std::getenv("NSA_DUMP");
  if (!folder || !*folder) return {};
  std::string path;
  const File file = create(folder, operation, path);
  const auto write = [&](const void* data, std::size_t size) { return std::fwrite(data, 1, size, file.get()) == size; };
  bool written = file != nullptr;
  std::uint64_t size = 0;
  const std::string header = header_of(operation, call, size);
  for (int i = 0; i < 8 && written; ++i) written = std::fputc(header.size() >> (8 * i) & 0xff, file.get()) != EOF;
  written = written && write(header.data(), header.size());
  for (const Argument& argument : call.tensors) {
    if (!written) break;
    if (argument.access == Access::kOutput) continue;
    HostCopy host;
    const bool on_device = argument.view.device.type == DeviceType::kCUDA;
    if (on_device)
      if (Status status = HostCopy::make(argument.view, host); !status.ok()) return status;
    const std::vector<std::byte> data = gather(on_device ? host.view : argument.view);
    written = write(data.data(), data.size());
  }
  if (!written || std::fflush(file.get()) != 0) {
    const std::string why = std::strerror(errno);
    if (file) std::remove(path.c_str());
    return Status::internal("NSA_DUMP: could not write " + path + ": " + why);
  }
  return {};
}

}  // namespace nsa
