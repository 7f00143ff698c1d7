#include "replay/dump.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/names.h"
#include "bridge/call.h"
#include "nsa/backend.h"

namespace nsa::replay {
namespace {

at::ScalarType scalar_type(const DumpedCall& dump, const base::StoredTensor& tensor) {
  const std::pair<const char*, at::ScalarType> types[] = {{"F32", at::kFloat}, {"BF16", at::kBFloat16},
                                                          {"F16", at::kHalf},  {"F64", at::kDouble},
                                                          {"I32", at::kInt},   {"F8_E4M3", at::kFloat8_e4m3fn}};
  for (const auto& [name, type] : types) {
    if (tensor.dtype == name) return type;
  }
  throw base::Error(
      fmt::format("{}: tensor '{}' has dtype {}, which no call takes", dump.path, tensor.name, tensor.dtype));
}

// A damaged file can ask for any size; of a tensor of 256k tokens with 16 heads of 128 channels this is half.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 28;

/// What is float32 in a call of any type.
bool is_always_float32(const std::string& name) {
  return name.starts_with("lse") || name.starts_with("rope") || name.ends_with("_scale");
}

}  // namespace

DumpedCall read_dump(const std::string& path) {
  const auto file = base::SafetensorsFile::open(path, base::Links::kFollow);
  DumpedCall dump;
  dump.path = path;
  dump.scalars = file.metadata();
  const auto operation = dump.scalars.find("operation");
  if (operation == dump.scalars.end()) {
    throw base::Error(
        fmt::format("{}: no dump of a call: its metadata names no operation (NSA_DUMP=folder writes dumps)", path));
  }
  dump.operation = operation->second;
  for (const auto& stored : file.tensors()) {
    const std::size_t rank = stored.shape.size();
    if (rank < 1 || rank > std::size_t{TensorView::kMaxRank}) {
      throw base::Error(
          fmt::format("{}: tensor '{}' has rank {}: must be 1 ... {}", path, stored.name, rank, TensorView::kMaxRank));
    }
    for (const std::int64_t size : stored.shape) {
      if (size > INT32_MAX) {
        throw base::Error(fmt::format("{}: tensor '{}' has a size of {}: must be below 2^31", path, stored.name, size));
      }
    }
    auto tensor = at::empty(stored.shape, scalar_type(dump, stored));
    if (!stored.bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), stored.bytes.data(), stored.bytes.size());
    dump.tensors.emplace(stored.name, tensor);
  }
  return dump;
}

CallArguments::CallArguments(const DumpedCall& call, bool exact) : call_(call) {
  for (const auto& [name, tensor] : call.tensors) {
    const bool stored = tensor.scalar_type() == at::kFloat8_e4m3fn;  // which the oracle reads as it is
    const bool data = tensor.is_floating_point() && !stored && !is_always_float32(name);
    inputs_[name] = data && exact ? tensor.to(at::kDouble) : tensor;
    if (data) dtype_ = inputs_[name].scalar_type();
  }
}

TensorView CallArguments::in(const std::string& name) const {
  return has(name) ? bridge::view_of(inputs_.at(name)) : TensorView{};
}

const at::Tensor& CallArguments::given(const std::string& name) const {
  if (!has(name)) throw base::Error(fmt::format("{}: tensor '{}' is missing", call_.path, name));
  return inputs_.at(name);
}

at::IntArrayRef CallArguments::shape(const std::string& name) const {
  const auto shape = given(name).sizes();
  if (shape.size() == 3 || shape.size() == 4) return shape;
  throw base::Error(
      fmt::format("{}: tensor '{}' has rank {}: must be 3 (packed) or 4", call_.path, name, shape.size()));
}

TensorView CallArguments::state(const std::string& name) {
  outputs_.emplace_back(name, given(name).clone());
  return bridge::view_of(outputs_.back().second);
}

TensorView CallArguments::out(const std::string& name, at::IntArrayRef shape, at::ScalarType dtype) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(elements, size, &elements) || elements > kMaxElements) {
      throw base::Error(fmt::format("{}: output '{}' ({}) would have more than {} elements", call_.path, name,
                                    fmt::join(shape, ", "), kMaxElements));
    }
  }
  // What the call forgets to write shows.
  const double poison = dtype == at::kInt ? -2 : std::numeric_limits<double>::quiet_NaN();
  outputs_.emplace_back(name, at::full(shape, poison, dtype));
  return bridge::view_of(outputs_.back().second);
}

TensorView CallArguments::out_like(const std::string& name, const std::string& input) {
  return has(input) ? out(name, inputs_.at(input).sizes(), inputs_.at(input).scalar_type()) : TensorView{};
}

template <class T>
T CallArguments::scalar(const std::string& name) const {
  const auto it = call_.scalars.find(name);
  T value{};
  if (it != call_.scalars.end()) {
    const std::string& text = it->second;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec == std::errc() && result.ptr == text.data() + text.size()) return value;
  }
  throw base::Error(fmt::format("{}: scalar '{}' = '{}': expected a number", call_.path, name,
                                it == call_.scalars.end() ? "" : it->second));
}
template int CallArguments::scalar<int>(const std::string&) const;
template std::int64_t CallArguments::scalar<std::int64_t>(const std::string&) const;
template std::uint64_t CallArguments::scalar<std::uint64_t>(const std::string&) const;
template double CallArguments::scalar<double>(const std::string&) const;

NSAConfig CallArguments::config() const {
  const NSAConfig cfg{.kernel_size = scalar<int>("kernel_size"),
                      .kernel_stride = scalar<int>("kernel_stride"),
                      .block_size = scalar<int>("block_size"),
                      .topk = scalar<int>("topk"),
                      .init_blocks = scalar<int>("init_blocks"),
                      .local_blocks = scalar<int>("local_blocks"),
                      .window_size = scalar<int>("window_size")};
  // The shapes of outputs follow from it before the call looks at it.
  if (const Status status = cfg.validate(); !status.ok()) {
    throw base::Error(fmt::format("{}: {}", call_.path, status.message()));
  }
  return cfg;
}

Packed CallArguments::packed() const {
  return {.cu_seqlens_q = in("cu_seqlens_q"), .cu_seqlens_k = in("cu_seqlens_k")};
}

CompressionWeights CallArguments::weights(const std::string& prefix) const {
  const auto kind = call_.scalars.find(prefix + "kind");
  if (kind == call_.scalars.end()) throw base::Error(fmt::format("{}: scalar '{}kind' is missing", call_.path, prefix));
  return {.kind = base::compression_kind(kind->second),
          .pe = in(prefix + "pe"),
          .w1 = in(prefix + "w1"),
          .b1 = in(prefix + "b1"),
          .w2 = in(prefix + "w2"),
          .b2 = in(prefix + "b2")};
}

std::optional<double> CallArguments::softmax_scale() const {
  if (!call_.scalars.count("softmax_scale")) return std::nullopt;
  return scalar<double>("softmax_scale");
}

}  // namespace nsa::replay
