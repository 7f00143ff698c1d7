// Dumped calls run again, on the backend that takes them and on the oracle.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "replay/dump.h"

namespace nsa::replay {

/// Runs the call on `backend`. Throws Error for an operation that cannot be repeated, or when the backend refuses.
/// `given`: the blocks that nsa_attention and decode attend to instead of selecting.
void replay(const DumpedCall& call, CallArguments& arguments, Backend backend, const at::Tensor& given = {});

/// How far an output of `got` is from the oracle's.
struct Difference {
  std::string name;
  double max_error = 0, max_oracle = 0;  // over the elements that are finite in both
  std::int64_t not_finite_differ = 0;    // elements that are NaN or infinite in one alone, or unequally so
  double rows_equal = 1;                 // integers: share of rows (last dimension) that are the same
  bool is_integer = false;
};

/// The backend that a call takes by default against the oracle, output by output. Blocks that it selected are given
/// on the oracle, so that a tie decided otherwise does not count as an error of the attention.
std::vector<Difference> compare_with_oracle(const DumpedCall& call);

}  // namespace nsa::replay
