#include "core/dump.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
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

}  // namespace

Status dump_call(const char* operation, const Call& call) {
  const char* folder = std::getenv("NSA_DUMP");
  if (!folder || !*folder) return {};
  static std::atomic<int> count{0};
  char name[64];
  std::snprintf(name, sizeof name, "/%ld-%06d-", static_cast<long>(getpid()), count++);
  const std::string path = folder + std::string(name) + operation + ".safetensors";
  std::ofstream file(path, std::ios::binary);
  std::uint64_t size = 0;
  const std::string header = header_of(operation, call, size);
  for (int i = 0; i < 8; ++i) file.put(static_cast<char>(header.size() >> (8 * i) & 0xff));
  file << header;
  for (const Argument& argument : call.tensors) {
    if (argument.access == Access::kOutput) continue;
    HostCopy host;
    const bool on_device = argument.view.device.type == DeviceType::kCUDA;
    if (on_device)
      if (Status status = HostCopy::make(argument.view, host); !status.ok()) return status;
    const std::vector<std::byte> data = gather(on_device ? host.view : argument.view);
    file.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
  }
  file.close();
  if (!file) return Status::internal("NSA_DUMP: could not write " + path);
  return {};
}

}  // namespace nsa
