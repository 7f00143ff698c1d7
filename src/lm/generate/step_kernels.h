// The kernels behind step_ends.h, of a GPU. Pointers to the device, contiguous but for the stride given (in elements).
// They run on `stream`, a cudaStream_t, and return a cudaError_t.
#pragma once

#include <cstdint>

namespace nsa::lm::fused {

struct StepInputsArgs {
  const std::int64_t* tokens;  // (rows)
  const int* num_new;          // (rows): 0 or 1
  std::int64_t* positions;     // (rows): num_new is added
  std::int64_t capacity;       // of positions that have angles
  const float* embedding;      // (tokens, width)
  const float *cos, *sin;      // (capacity, half)
  int rows, width, half;
  float* x;                            // (rows, width)
  float *rotation_cos, *rotation_sin;  // (rows, half)
  const std::int64_t* first_slots;     // (rows); null: no slots, no lengths
  std::int64_t* slots;                 // (rows)
  int* lengths;                        // (rows)
};
int step_inputs(const StepInputsArgs& args, void* stream);

enum class LogitType { kFloat, kBf16, kHalf };
struct MostLikelyArgs {
  const void* logits;  // (rows, columns)
  LogitType type;
  std::int64_t row;  // its stride
  std::int64_t rows;
  int columns;
  double* out;  // (3, rows): the column of the highest, by how much it is higher than the second, 1 if all are finite
  std::int64_t* tokens;  // (rows): the column once more
};
int most_likely(const MostLikelyArgs& args, void* stream);

}  // namespace nsa::lm::fused
