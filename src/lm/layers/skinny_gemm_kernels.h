// Skinny GEMM: the kernel of linear.h. Device pointers; tensors are bfloat16 and contiguous unless noted.
#pragma once

#include <cstdint>

#include "lm/layers/elementwise_kernels.h"

namespace nsa::lm::fused {

inline constexpr int kMaxRows = 8;
/// rows * depth, at most: the weight's rows lie in shared memory.
inline constexpr std::int64_t kMaxElements = 24 * 1024;
/// More rows, in groups of so many, each of which reads the matrix again: of no more than so many elements.
inline constexpr int kMaxGroupedRows = 32;
inline constexpr std::int64_t kMaxRepeated = 16 * 1024;

/// The elementwise operation on the input before the GEMM.
enum class RowInput {
  kPlain,   // x (rows, depth)
  kNorm,    // the norm of residual + added
  kSwiglu,  // silu(gate) * up of x = (gate, up), (rows, 2 * depth)
  kSilu     // silu(x + bias)
};

struct SkinnyGemmArgs {
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
  const void* gate_bias;  // (columns): y = sigmoid(x W^T + bias); null: y = x W^T
  int rows, depth, columns;
  void* y;             // (rows, columns)
  bool weights_ready;  // no kernel that may still be running writes the matrix
};
/// Returns a cudaError_t.
int skinny_gemm(const SkinnyGemmArgs& args, void* stream);
/// The skinny GEMM of few columns, and in spare thread blocks a rotary copy that waits for the same kernel.
int skinny_gemm_and_rotary_copy(const SkinnyGemmArgs& args, const RotaryCopyArgs& copies, void* stream);

}  // namespace nsa::lm::fused
