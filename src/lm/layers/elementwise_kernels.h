// The kernels behind elementwise.h. Pointers to the device, contiguous but for the strides given (in elements);
// bfloat16 activations, float32 residual stream and tables. They run on `stream`, a cudaStream_t, and return a
// cudaError_t.
#pragma once

#include <cstdint>

namespace nsa::lm::fused {

/// Channels that a thread loads at once: widths, strides and offsets are multiples of it.
inline constexpr std::int64_t kColumns = 8;
/// Channels of a row that a thread block takes, at most.
inline constexpr std::int64_t kWidest = 8192;
/// The number of partials that a sum over `rows` rows is made of.
std::int64_t num_partials(std::int64_t rows, std::int64_t width);

/// Heads that lie side by side, with contiguous channels each.
struct RotaryCopy {
  const void* from;  // (rows, heads, 2 * half)
  void* to;
  std::int64_t from_row, from_head, to_row, to_head;  // strides
  int heads, half;
  float direction;  // +1, -1: back, 0: copied
};
inline constexpr int kMaxRotaryCopies = 8;
struct RotaryCopyArgs {
  RotaryCopy copies[kMaxRotaryCopies];
  int count;
  const float *cos, *sin;  // (rows, half of those that rotate)
  std::int64_t rows;
};
int rotary_copy(const RotaryCopyArgs& args, void* stream);

struct SwigluArgs {
  const void* x;    // (rows, 2 * width): gate, up
  const void* d_y;  // (rows, width); null: forward
  void* out;        // silu(gate) * up (rows, width); or the gradient of x
  std::int64_t rows, width;
};
int swiglu(const SwigluArgs& args, void* stream);

struct BiasedSiluArgs {
  const void* x;     // (rows, width)
  std::int64_t row;  // its stride
  const void* bias;  // (width)
  std::int64_t rows, width;
  void* y;          // silu(x + bias) (rows, width)
  const void* d_y;  // (rows, width); null: forward
  void* d_x;        // (rows, width)
  float* d_biases;  // (num_partials(rows, width), width), to be summed
};
int biased_silu(const BiasedSiluArgs& args, void* stream);

/// The norm of x + added. Matrices are (rows, width).
struct NormArgs {
  const float *x, *weight;  // in the backward x holds the sum; (width)
  const void* added;        // null: nothing
  float eps;
  std::int64_t rows, width;
  float* sum;              // x + added; null without `added`
  float* scale;            // (rows): 1 / sqrt(mean sum^2 + eps), out of the forward and into the backward
  void* y;                 // sum * scale * weight
  const void* d_y;         // null: forward
  const float* d_sum;      // what reached the sum by other ways than the norm; null: nothing
  float *d_x, *d_weights;  // of the sum and so of x; (num_partials(rows, width), width), to be summed
  void* d_added;           // d_x once more; null: not wanted
};
int norm(const NormArgs& args, void* stream);

}  // namespace nsa::lm::fused
