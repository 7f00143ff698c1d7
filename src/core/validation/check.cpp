#include "core/validation/check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>

namespace nsa {
namespace {

/// Texts that are only made for a message.
struct Expected {
  const Shape& shape;

  std::string describe() const {
    std::string text = "(";
    for (std::size_t i = 0; i < shape.size(); ++i) {
      if (i > 0) text += ", ";
      const Dim& dim = *shape[i];
      text += dim.name;
      if (dim.value != Dim::kUnknown) text += (*dim.name ? " = " : "") + std::to_string(dim.value);
    }
    return text + ")";
  }
};

bool is_known(DeviceType type) { return type == DeviceType::kCPU || type == DeviceType::kCUDA; }

struct Place {
  const Device& device;

  std::string describe() const {
    if (!is_known(device.type)) return "no known device";
    if (device.type == DeviceType::kCPU && device.index == 0) return "cpu";
    std::string text = device.type == DeviceType::kCPU ? "cpu:" : "cuda:";
    return text += std::to_string(device.index);
  }
};

bool is_floating(DType dtype) {  // nor of a number that names no type
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat64;
}

}  // namespace

void Checker::check_shape(const std::string& name, const TensorView& view, const Shape& shape) {
  bool fits = view.rank == static_cast<int>(shape.size());
  for (int i = 0; fits && i < view.rank; ++i) {
    const Dim& dim = *shape[static_cast<std::size_t>(i)];
    fits = view.size(i) >= 0 && (dim.value == Dim::kUnknown || dim.value == view.size(i));
  }
  require(fits, name, ": ", view, ": expected the shape ", Expected{shape});
  if (!ok()) return;
  for (int i = 0; i < view.rank; ++i) {
    require(view.size(i) <= std::numeric_limits<std::int32_t>::max(), name, ": ", view, ": sizes must be below 2^31");
    shape[static_cast<std::size_t>(i)]->value = view.size(i);
  }
}

void Checker::check_tensor(const std::string& name, const TensorView& view, Access access, DType dtype,
                           const std::string& dtype_source, const Shape& shape, Strides strides) {
  if (!ok()) return;
  require(view.defined(), name, ": not given: expected ", name_of(dtype), " ", Expected{shape});
  if (!ok()) return;
  if (device_source_.empty()) {
    device_source_ = name;
    call_.problem.device = view.device;
  }
  require(is_known(view.device.type), name, ": on ", Place{view.device}, ": must be on the cpu or a CUDA device");
  require(view.device == call_.problem.device, name, ": on ", Place{view.device}, ": expected ",
          Place{call_.problem.device}, " as ", device_source_);
  require(view.dtype == dtype, name, ": ", view, ": expected ", name_of(dtype), dtype_source.empty() ? "" : " as ",
          dtype_source);
  check_shape(name, view, shape);
  if (!ok() || view.numel() == 0) {
    if (ok()) call_.tensors.push_back({name, view, access});
    return;
  }
  require(view.data != nullptr, name, ": ", view, ": the data pointer is null");
  require(reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) == 0, name, ": ", view,
          ": begins at an address that is no multiple of ", size_of(view.dtype));
  const std::int64_t last = view.stride[static_cast<std::size_t>(view.rank - 1)];
  require(strides == Strides::kAny || view.size(-1) == 1 || last == 1, name, ": ", view,
          ": the last dimension has stride ", last, ", expected 1");
  if (access != Access::kInput) check_output(name, view);
  if (ok()) call_.tensors.push_back({name, view, access});
}

/// From the smallest stride to the largest, each dimension must step over all of those before it.
void Checker::check_output(const std::string& name, const TensorView& view) {
  std::array<std::size_t, TensorView::kMaxRank> order{0, 1, 2, 3};
  const auto rank = static_cast<std::size_t>(view.rank);
  const auto end = order.begin() + view.rank;
  // All of the array, those beyond the rank last: GCC 12 warns of a sort whose end it does not know.
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return a < rank && (b >= rank || view.stride[a] < view.stride[b]); });
  std::int64_t last = 0;  // the highest offset of an element in the dimensions so far
  for (auto i = order.begin(); i != end && ok(); ++i) {
    const std::int64_t stride = view.stride[*i], steps = view.shape[*i] - 1;
    if (steps == 0) continue;
    require(stride > last, name, ": ", view, ": dimension ", *i, " of an output has stride ", stride,
            stride > 0 ? ": its elements overlap" : "");
    std::int64_t extent = 0;
    require(!__builtin_mul_overflow(stride, steps, &extent) && !__builtin_add_overflow(last, extent, &last), name, ": ",
            view, ": dimension ", *i, " has stride ", stride, ": too large");
  }
}

DType Checker::data_dtype(const std::string& name, const TensorView& view) {
  if (ok() && dtype_source_.empty() && view.defined()) {
    require(is_floating(view.dtype), name, ": ", view, ": expected float32, bfloat16, float16 or float64");
    call_.problem.dtype = view.dtype;
    dtype_source_ = name;
  }
  return call_.problem.dtype;
}

void Checker::tensor(const std::string& name, const TensorView& view, Access access, const Shape& shape) {
  const DType dtype = data_dtype(name, view);
  check_tensor(name, view, access, dtype, dtype_source_, shape, Strides::kLastContiguous);
}

void Checker::incoming_gradient(const std::string& name, const TensorView& view, const Shape& shape) {
  const DType dtype = data_dtype(name, view);
  check_tensor(name, view, Access::kInput, dtype, dtype_source_, shape, Strides::kAny);
}

void Checker::float32(const std::string& name, const TensorView& view, Access access, const Shape& shape) {
  check_tensor(name, view, access, DType::kFloat32, {}, shape, Strides::kLastContiguous);
}

void Checker::int32(const std::string& name, const TensorView& view, Access access, const Shape& shape) {
  check_tensor(name, view, access, DType::kInt32, {}, shape, Strides::kLastContiguous);
}

void Checker::float8(const std::string& name, const TensorView& view, Access access, const Shape& shape,
                     const std::string& source) {
  check_tensor(name, view, access, DType::kFloat8E4M3, source, shape, Strides::kLastContiguous);
}

void Checker::scales(const std::string& name, const TensorView& view, Dim& n) {
  check_tensor(name, view, Access::kInput, DType::kFloat32, {}, {&n}, Strides::kAny);
  const TensorView host = readable(view);
  if (!host.defined()) return;
  for (std::int64_t i = 0; i < host.size(0); ++i) {
    const float scale = host.as<const float>()[i * host.stride[0]];
    require(std::isfinite(scale) && scale > 0, name, "[", i, "] = ", scale, ": must be positive and finite");
    require(!(scale < std::numeric_limits<float>::min()), name, "[", i, "] = ", scale, ": must be at least 2^-126");
  }
}

void Checker::config(const NSAConfig& cfg) {
  if (ok()) status_ = cfg.validate();
  for (const auto& [name, value] : {std::pair{"kernel_size", cfg.kernel_size},
                                    {"kernel_stride", cfg.kernel_stride},
                                    {"block_size", cfg.block_size},
                                    {"topk", cfg.topk},
                                    {"init_blocks", cfg.init_blocks},
                                    {"local_blocks", cfg.local_blocks},
                                    {"window_size", cfg.window_size}})
    note(name, std::int64_t{value});
}

void Checker::softmax_scale(const std::optional<double>& scale) {
  if (!scale) return;
  require(std::isfinite(*scale), "softmax_scale = ", *scale, ": must be finite");
  require(std::abs(*scale) <= std::numeric_limits<float>::max(), "softmax_scale = ", *scale,
          ": must be below 2^128, the range of float32");
  note("softmax_scale", *scale);
}

void Checker::noise(double noise, std::uint64_t seed) {
  require(std::isfinite(noise) && noise >= 0, "noise = ", noise, ": must be finite and >= 0");
  note("noise", noise);
  note("seed", seed);
}

TensorView Checker::readable(const TensorView& view) {
  if (!ok() || view.device.type == DeviceType::kCPU) return ok() ? view : TensorView{};
  const char* wish = std::getenv("NSA_VALIDATE");
  if (!wish || !*wish || std::string(wish) == "0") return {};
  HostCopy& copy = copies_.emplace_back();
  require(HostCopy::make(view, copy));
  return ok() ? copy.view : TensorView{};
}

void Checker::offsets(const std::string& name, const TensorView& given, std::int64_t total) {
  require(given.size(0) > 0, name, ": ", given, ": expected B + 1 offsets, the first 0");
  const TensorView offsets = readable(given);
  if (!ok() || !offsets.defined()) return;
  const std::int64_t last = offsets.size(0) - 1;
  require(int32_at(offsets, 0) == 0, name, "[0] = ", int32_at(offsets, 0), ": must be 0");
  for (std::int64_t i = 0; i < last && ok(); ++i)
    require(int32_at(offsets, i) <= int32_at(offsets, i + 1), name, "[", i + 1, "] = ", int32_at(offsets, i + 1),
            ": must not be less than ", name, "[", i, "] = ", int32_at(offsets, i));
  require(int32_at(offsets, last) <= total, name, "[", last, "] = ", int32_at(offsets, last),
          ": must not exceed the rows of the tensor, ", total);
}

void Checker::check_overlap() {
  // Views into one buffer may interleave without touching, so only the plain mistake is looked for: the same address.
  for (const Argument& out : call_.tensors) {
    if (out.access == Access::kInput || out.view.numel() == 0) continue;
    for (const Argument& other : call_.tensors)
      require(&other == &out || other.view.data != out.view.data || other.view.numel() == 0, out.name,
              ": an output at the same address as ", other.name);
  }
}

Status Checker::finish() {
  if (ok()) check_overlap();
  return status_;
}

void check_weights(Checker& check, const std::string& prefix, const CompressionWeights& weights, const NSAConfig& cfg,
                   Dim Hkv, Dim D) {
  check.note(prefix + "kind", std::string(name_of(weights.kind)));
  Dim P{"P"}, E{"E"}, l{"kernel_size", cfg.kernel_size}, flat{"kernel_size * D", cfg.kernel_size * D.value};
  const bool linear = weights.kind == CompressionKind::kLinear, mlp = weights.kind == CompressionKind::kMlp;
  const auto weight = [&](const char* name, const TensorView& view, bool allowed, bool needed, const Shape& shape) {
    check.require(allowed || !view.defined(), prefix, name, ": ", view, ": must not be given for kind ",
                  name_of(weights.kind));
    if (!allowed || (!needed && !view.defined())) return;
    check.tensor(prefix + name, view, Access::kInput, shape);
    check.require(P.value == 1 || P.value == Hkv.value, prefix, name, ": ", view,
                  ": the first size must be Hkv = ", Hkv.value, " or 1");
  };
  weight("pe", weights.pe, linear || mlp, false, {&P, &l, &D});
  weight("w1", weights.w1, linear || mlp, true, {&P, &flat, linear ? &D : &E});
  weight("b1", weights.b1, linear || mlp, false, {&P, linear ? &D : &E});
  weight("w2", weights.w2, mlp, true, {&P, &E, &D});
  weight("b2", weights.b2, mlp, false, {&P, &D});
}

void check_weight_gradients(Checker& check, const std::string& prefix, const CompressionWeights& gradients,
                            const CompressionWeights& weights) {
  const auto gradient = [&](const char* name, const TensorView& view, const TensorView& weight) {
    if (!view.defined()) return;
    check.require(weight.defined(), prefix, name, ": asked for, but the weight is not given");
    if (!check.ok()) return;
    Dim sizes[TensorView::kMaxRank]{{""}, {""}, {""}, {""}};
    Shape shape;
    for (int i = 0; i < weight.rank; ++i) {
      sizes[i].value = weight.size(i);
      shape.push_back(&sizes[i]);
    }
    check.tensor(prefix + name, view, Access::kOutput, shape);
  };
  gradient("pe", gradients.pe, weights.pe);
  gradient("w1", gradients.w1, weights.w1);
  gradient("b1", gradients.b1, weights.b1);
  gradient("w2", gradients.w2, weights.w2);
  gradient("b2", gradients.b2, weights.b2);
}

std::int64_t check_rotation(Checker& check, const TensorView& cos, const TensorView& sin, const Dim& Dk) {
  check.require(cos.defined() == sin.defined(), cos.defined() ? "rope_sin" : "rope_cos",
                ": not given: rope_cos and rope_sin come together");
  if (!check.ok() || !cos.defined()) return 0;
  check.require(Dk.value % 2 == 0, "rope_cos: Dk = ", Dk.value, ": only an even head dim can be rotated");
  Dim positions{"max_positions"}, half{"Dk / 2", Dk.value / 2};
  check.float32("rope_cos", cos, Access::kInput, {&positions, &half});
  check.float32("rope_sin", sin, Access::kInput, {&positions, &half});
  return positions.value;
}

}  // namespace nsa
