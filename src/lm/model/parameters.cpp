#include "lm/model/parameters.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cmath>

namespace nsa::lm {

ParameterStore::ParameterStore(NamedTensors& list, std::optional<std::uint64_t> seed) : list_(list) {
  if (seed) generator_ = at::detail::createCPUGenerator(*seed);
}

at::Tensor ParameterStore::add(const std::string& name, at::Tensor value) {
  value.requires_grad_(true);
  list_.emplace_back(name, value);
  return value;
}

at::Tensor ParameterStore::normal(const std::string& name, at::IntArrayRef shape, double deviation) {
  auto values = at::empty(shape, matrix_dtype_);
  return add(name, generator_ ? values.normal_(0, deviation, generator_) : values);
}

at::Tensor ParameterStore::matrix(const std::string& name, std::int64_t rows, std::int64_t columns, double scale) {
  return normal(name, {rows, columns}, scale / std::sqrt(static_cast<double>(columns)));
}

at::Tensor ParameterStore::constant(const std::string& name, at::IntArrayRef shape, double value) {
  return add(name, at::full(shape, value, at::kFloat));
}

}  // namespace nsa::lm
