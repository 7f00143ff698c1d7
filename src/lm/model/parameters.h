// The parameters of a model: made in order, with their names and initial values.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace nsa::lm {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Makes parameters, in order and with their initial values.
class ParameterStore {
 public:
  /// Without a seed nothing is drawn, and what normal() makes has no values yet.
  ParameterStore(NamedTensors& list, std::optional<std::uint64_t> seed);
  /// Of what matrix() and normal() make from now on: float32 unless set.
  void set_matrix_dtype(at::ScalarType dtype) { matrix_dtype_ = dtype; }
  at::Tensor normal(const std::string& name, at::IntArrayRef shape, double deviation);
  /// The weight of a linear layer, which starts with outputs `scale` times as large as its inputs, whatever the width.
  at::Tensor matrix(const std::string& name, std::int64_t rows, std::int64_t columns, double scale = 1);
  at::Tensor constant(const std::string& name, at::IntArrayRef shape, double value);
  at::Tensor add(const std::string& name, at::Tensor value);

 private:
  NamedTensors& list_;
  std::optional<at::Generator> generator_;
  at::ScalarType matrix_dtype_ = at::kFloat;
};

}  // namespace nsa::lm
