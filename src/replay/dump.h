// A call of libnsa that NSA_DUMP wrote to a file, ready to be run again.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/safetensors.h"
#include "nsa/decode.h"
#include "nsa/operations.h"

namespace nsa::replay {

struct DumpedCall {
  std::string path, operation;
  base::Metadata scalars;
  std::map<std::string, at::Tensor> tensors;
};

/// Throws Error unless it is a dump.
DumpedCall read_dump(const std::string& path);

/// The tensors of one repetition of a call: its inputs under their dumped names, and fresh outputs.
class CallArguments {
 public:
  /// `exact`: in float64, as the reference backend takes it; log-sums, rotations, integers and what a cache has in
  /// e4m3 keep their type.
  CallArguments(const DumpedCall& call, bool exact);

  /// A tensor of the dump; undefined where the call was made without it.
  TensorView in(const std::string& name) const;
  /// One that the call reads and changes: a copy, which counts as an output.
  TensorView state(const std::string& name);
  TensorView out(const std::string& name, at::IntArrayRef shape, at::ScalarType dtype);
  TensorView out(const std::string& name, at::IntArrayRef shape) { return out(name, shape, dtype_); }
  /// Of the shape and type of an input; undefined where that is.
  TensorView out_like(const std::string& name, const std::string& input);

  /// Of queries, keys or values: (total, heads, channels) or (B, S, heads, channels). Throws Error for another rank,
  /// and when there is none.
  at::IntArrayRef shape(const std::string& name) const;
  bool has(const std::string& name) const { return inputs_.count(name) > 0; }

  NSAConfig config() const;
  Packed packed() const;
  CompressionWeights weights(const std::string& prefix) const;
  std::optional<double> softmax_scale() const;
  bool has_scalar(const std::string& name) const { return call_.scalars.count(name) > 0; }
  /// A scalar of the dump. Throws Error when it is missing or no number.
  template <class T>
  T scalar(const std::string& name) const;

  const std::vector<std::pair<std::string, at::Tensor>>& outputs() const { return outputs_; }

 private:
  const at::Tensor& given(const std::string& name) const;

  const DumpedCall& call_;
  at::ScalarType dtype_ = at::kFloat;  // of the call's tensors
  std::map<std::string, at::Tensor> inputs_;
  std::vector<std::pair<std::string, at::Tensor>> outputs_;
};

}  // namespace nsa::replay
