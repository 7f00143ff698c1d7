// What validation learns about a call: what the choice of backend, the log and the dump need.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "nsa/backend.h"
#include "nsa/tensor.h"

namespace nsa {

enum class Access {
  kInput,
  kOutput,
  kState,  // read and written: a cache
};

struct Argument {
  std::string name;
  TensorView view;
  Access access;
};

struct Scalar {
  std::string name;
  std::variant<std::int64_t, std::uint64_t, double, std::string> value;
};

struct Call {
  Problem problem;
  bool packed = false;
  std::vector<Argument> tensors;  // those given, in the order of the parameters
  std::vector<Scalar> scalars;
};

}  // namespace nsa
