// The kernels behind fused.h. Pointers to the device, contiguous but for the strides given (in elements); bfloat16
// activations, float32 residual stream and tables. They run on the default stream and return a cudaError_t.
#pragma once

#include <cstdint>

namespace nsa::lm::fused {

/// Channels that a thread loads at once: widths, strides and offsets are multiples of it.
inline constexpr std::int64_t kColumns = 8;
/// Channels of a normalised row, at most.
inline constexpr std::int64_t kWidest = 8192;

struct RotateArgs {
  const void* x;  // (rows, heads, 2 * half), contiguous channels
  std::int64_t row_stride, head_stride;
  const float *cos, *sin;  // (rows, half)
  float direction;         // +1, or -1: back
  void* out;               // (rows, heads, 2 * half)
  std::int64_t rows;
  int heads, half;
};
int rotate(const RotateArgs& args);

struct SwigluArgs {
  const void* x;    // (rows, 2 * width): gate, up
  const void* d_y;  // (rows, width); null: forward
  void* out;        // silu(gate) * up (rows, width); or the gradient of x
  std::int64_t rows, width;
};
int swiglu(const SwigluArgs& args);

struct RmsNormArgs {
  const float *x, *weight;  // (rows, width), (width)
  float eps;
  std::int64_t rows, width;
  float* scale;            // (rows): 1 / sqrt(mean x^2 + eps), out of the forward and into the backward
  void* y;                 // (rows, width)
  const void* d_y;         // (rows, width); null: forward
  float *d_x, *d_weights;  // (rows, width); (norm_parts(rows, width), width), to be summed
};
std::int64_t norm_parts(std::int64_t rows, std::int64_t width);
int rms_norm(const RmsNormArgs& args);

}  // namespace nsa::lm::fused
