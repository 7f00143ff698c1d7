// Checks of arguments, written as a flat list: the first one that fails gives the message, the later ones do nothing.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "core/call.h"
#include "core/strided.h"
#include "core/text.h"
#include "nsa/operations.h"

namespace nsa {

/// A size with a name. The first tensor that has it gives it its value, the others must agree.
struct Dim {
  static constexpr std::int64_t kUnknown = -1;
  const char* name;
  std::int64_t value = kUnknown;
};
using Shape = std::vector<Dim*>;

class Checker {
 public:
  explicit Checker(Call& call) : call_(call) {
    call_.tensors.reserve(64);  // calls are frequent, and this is most of what validation costs
    call_.scalars.reserve(16);
  }

  bool ok() const { return status_.ok(); }
  /// The first failure, or success.
  Status finish();

  /// Fails with the concatenation of `parts`.
  template <class... Parts>
  void require(bool condition, const Parts&... parts) {
    if (condition || !ok()) return;
    status_ = Status::invalid_argument(text_of(parts...));
  }
  void require(const Status& status) {
    if (ok()) status_ = status;
  }

  /// A tensor in the call's floating-point type, which the first such tensor decides.
  void tensor(const std::string& name, const TensorView& view, Access access, const Shape& shape);
  void float32(const std::string& name, const TensorView& view, Access access, const Shape& shape);
  void int32(const std::string& name, const TensorView& view, Access access, const Shape& shape);
  /// An e4m3 tensor as `source` is one.
  void float8(const std::string& name, const TensorView& view, Access access, const Shape& shape,
              const std::string& source);
  /// Positive float32 numbers (n), with any stride.
  void scales(const std::string& name, const TensorView& view, Dim& n);
  /// A gradient from outside: like tensor(), with any strides.
  void incoming_gradient(const std::string& name, const TensorView& view, const Shape& shape);
  /// The same when `view` is given.
  void optional_tensor(const std::string& name, const TensorView& view, Access access, const Shape& shape) {
    if (view.defined()) tensor(name, view, access, shape);
  }
  void optional_int32(const std::string& name, const TensorView& view, Access access, const Shape& shape) {
    if (view.defined()) int32(name, view, access, shape);
  }

  void config(const NSAConfig& cfg);
  void softmax_scale(const std::optional<double>& scale);
  void noise(double noise, std::uint64_t seed);
  /// Notes a scalar for the dump.
  void note(std::string name, decltype(Scalar::value) value) {
    call_.scalars.push_back({std::move(name), std::move(value)});
  }

  /// What `view` holds, in host memory; undefined if it is on a device and must not be waited for (unless
  /// NSA_VALIDATE is set to something other than 0). Valid as long as the Checker.
  TensorView readable(const TensorView& view);

  /// Offsets of a packed call: 0 first, not decreasing, the last <= total.
  void offsets(const std::string& name, const TensorView& given, std::int64_t total);

  Call& call() { return call_; }

 private:
  enum class Strides { kLastContiguous, kAny };
  void check_tensor(const std::string& name, const TensorView& view, Access access, DType dtype,
                    const std::string& dtype_source, const Shape& shape, Strides strides);
  void check_shape(const std::string& name, const TensorView& view, const Shape& shape);
  void check_output(const std::string& name, const TensorView& view);
  void check_overlap();
  DType data_dtype(const std::string& name, const TensorView& view);

  Call& call_;
  Status status_;
  std::string dtype_source_, device_source_;  // the tensors that decided
  std::deque<HostCopy> copies_;
};

/// Element i of an int32 vector in host memory.
inline std::int64_t int32_at(const TensorView& view, std::int64_t i) {
  return view.as<const std::int32_t>()[i * view.stride[0]];
}

// The weights of the compression function and the rotation of compressed keys, which several operations take.

/// `prefix` names the parameter ("weights."); `Hkv` and `D` are those of the tensor that is compressed.
void check_weights(Checker& check, const std::string& prefix, const CompressionWeights& weights, const NSAConfig& cfg,
                   Dim Hkv, Dim D);

/// Gradients of those weights that were asked for, in the shapes of the weights.
void check_weight_gradients(Checker& check, const std::string& prefix, const CompressionWeights& gradients,
                            const CompressionWeights& weights);

/// The angles that rotate compressed keys, both tables or none; returns their positions.
std::int64_t check_rotation(Checker& check, const TensorView& cos, const TensorView& sin, const Dim& Dk);

}  // namespace nsa
