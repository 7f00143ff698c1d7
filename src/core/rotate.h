// The rotation of compressed keys in host memory: key i of a sequence turns by the angles at its block's first token.
#pragma once

#include <vector>

#include "core/layout.h"
#include "nsa/config.h"
#include "nsa/tensor.h"

namespace nsa {

/// Tables of angles by position, float32 (max_positions, D / 2) each; undefined: no rotation. Pairs of channels
/// (x[j], x[j + D/2]) turn; the products are exact in float64, so each result is rounded once.
struct RotationTable {
  TensorView cos, sin;

  bool defined() const { return cos.defined(); }
  /// A row of D channels in place. `back`: by the opposite angles, which is also the gradient.
  void rotate(const TensorView& row, std::int64_t position, bool back = false) const;
};

/// Every compressed key of a call, in place.
void rotate_compressed(const TensorView& k_c, const std::vector<Sequence>& sequences, const NSAConfig& cfg,
                       const RotationTable& table, bool back);

}  // namespace nsa
