// The kernel behind products.h. Pointers to the device; all is bfloat16 and contiguous but for what says otherwise.
#pragma once

#include <cstdint>

#include "lm/layers/elementwise_kernels.h"

namespace nsa::lm::fused {

inline constexpr int kMaxRows = 8;
/// rows * depth, at most: the factor's rows lie in shared memory.
inline constexpr std::int64_t kMaxElements = 24 * 1024;
/// More rows, in groups of so many, each of which reads the matrix again: of no more than so many elements.
inline constexpr int kMaxGroupedRows = 32;
inline constexpr std::int64_t kMaxRepeated = 16 * 1024;

/// What becomes of the input before the product.
enum class RowInput {
  kPlain,   // x (rows, depth)
  kNorm,    // the norm of residual + added
  kSwiglu,  // silu(gate) * up of x = (gate, up), (rows, 2 * depth)
  kSilu     // silu(x + bias)
};

struct FewRowsArgs {
  RowInput input;
  const void* x;
  std::int64_t x_row;     // stride of x
  const void* bias;       // (depth); kSilu
  const float* residual;  // float32 (rows, depth); kNorm
  const void* added;      // (rows, depth), null: nothing; kNorm
  const float* norm;      // float32 (depth); kNorm
  float eps;              // kNorm
  float* sum;             // residual + added, null without `added`; kNorm
  const void* matrix;     // (columns, depth)
  const void* gate_bias;  // (columns): y = sigmoid(product + bias); null: y = product
  int rows, depth, columns;
  void* y;       // (rows, columns)
  bool settled;  // no kernel that may be running yet writes the matrix
};
/// Returns a cudaError_t.
int few_rows(const FewRowsArgs& args, void* stream);
/// Beside the product of columns that fit into few thread blocks, what depends on the same kernel ahead.
int few_rows_and_rotary_copy(const FewRowsArgs& args, const RotaryCopyArgs& copies, void* stream);

}  // namespace nsa::lm::fused
