// Rotary position embedding: rotates channel pairs (j, j + D/2) by position * frequency. With torch's operations it
// takes 2.6 times as long on a CPU: docs/findings/training/speed.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lm/layers/elementwise.h"

namespace nsa::lm {

/// Cosines and sines, float32 (rows, D/2).
struct Rotation {
  at::Tensor cos, sin;

  /// The rows of the given positions, int64 (n).
  Rotation at(const at::Tensor& positions) const;
};

/// One row for each position 0 ... max_positions - 1, one column for each frequency (rope_frequencies()), times
/// `magnitude`.
Rotation rotation_table(std::int64_t max_positions, const std::vector<double>& frequencies, at::Device device,
                        double magnitude = 1);

/// Rotates x (n, heads, D) row by row in float32; differentiable. Result in x's dtype, contiguous.
at::Tensor rotate(const at::Tensor& x, const Rotation& rotation);

/// Heads side by side in the columns of a matrix.
struct HeadGroup {
  std::int64_t heads, dim;
  bool rotated;
};
/// The columns of x (n, sum of heads * dim) as one (n, heads, dim) for each group: rotated as by rotate, or views. Its
/// gradient is written in one pass.
std::vector<at::Tensor> split_heads(const at::Tensor& x, const std::vector<HeadGroup>& groups,
                                    const Rotation& rotation);

/// The same without a gradient, with the rotations left to the caller.
struct UnrotatedHeads {
  std::vector<at::Tensor> heads;   // of each group
  std::vector<RotaryCopy> copies;  // that write the rotated ones
};
UnrotatedHeads unrotated_heads(const at::Tensor& x, const std::vector<HeadGroup>& groups);

}  // namespace nsa::lm
