// From torch's stable tensors to the library's views and back. Nothing here depends on a torch version above 2.10.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "nsa/decode.h"
#include "nsa/operations.h"

namespace nsa::python {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::vector<std::int64_t>;

template <class Indices>
struct TensorTuple;
template <std::size_t... I>
struct TensorTuple<std::index_sequence<I...>> {
  using type = std::tuple<std::enable_if_t<(I >= 0), Tensor>...>;
};
/// std::tuple of n tensors.
template <std::size_t n>
using Tensors = typename TensorTuple<std::make_index_sequence<n>>::type;

/// A view of an argument. Refuses, naming it, a rank or a dtype that no operation takes.
TensorView input(const Tensor& tensor, const char* name);
TensorView input(const OptionalTensor& tensor, const char* name);
/// A view of an argument that the operation changes, or of a tensor that it fills.
TensorView output(const Tensor& tensor, const char* name);
TensorView output(const OptionalTensor& tensor, const char* name);

Shape shape_of(const Tensor& tensor);
/// A new tensor without gaps on the device of `like`, of its dtype or the given one.
Tensor make(const Tensor& like, const Shape& shape, std::optional<ScalarType> dtype = std::nullopt);
// Outputs of attention. If a rank is too low for them, any shape: the library then refuses the argument by its name.
Tensor make_o(const Tensor& q, const Tensor& v);                                // (..., H, Dv)
Tensor make_lse(const Tensor& q);                                               // float32 (B, H, S) or (H, total)
Tensor make_indices(const Tensor& q, const Tensor& k_c, const NSAConfig& cfg);  // int32 (..., Hkv, topk)

/// The gradient of an argument: a tensor like it if it is there and wanted, else 1-D without elements and no view.
struct Gradient {
  Gradient(const Tensor& of, bool wanted) : wanted(wanted), tensor(make(of, wanted ? shape_of(of) : Shape{0})) {}
  Gradient(const OptionalTensor& of, bool wanted, const Tensor& like)
      : wanted(of && wanted), tensor(this->wanted ? make(*of, shape_of(*of)) : make(like, {0})) {}

  TensorView view(const char* name) const { return wanted ? output(tensor, name) : TensorView{}; }

  bool wanted;
  Tensor tensor;
};
void expect_needs(const std::vector<bool>& needs, std::size_t count);

/// cfg holds NSAConfig's members in their order.
NSAConfig config_of(const std::vector<std::int64_t>& cfg);
/// Of what compress makes of raw keys or values; `cfg` must be valid.
Shape compressed_shape(const Tensor& k, const NSAConfig& cfg, bool packed);

/// Throws for an argument that is not allowed. Some versions of torch show it as ValueError, some as RuntimeError; by
/// its first words, "invalid argument: ", Python makes it a ValueError in all of them.
[[noreturn]] void refuse(const std::string& message);

}  // namespace nsa::python
