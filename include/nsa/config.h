// Hyperparameters of Native Sparse Attention (arXiv 2502.11089, section 3).
#pragma once

#include <cstdint>

#include "nsa/status.h"

namespace nsa {

/// Defaults are the paper's. Valid: init_blocks >= 0; kernel_size, kernel_stride, topk, local_blocks, window_size >= 1;
/// block_size a positive multiple of 16; kernel_stride divides kernel_size and block_size (kernel_size may exceed
/// block_size); topk >= init_blocks + local_blocks.
struct NSAConfig {
  int kernel_size = 32;    // l: tokens in a compression block
  int kernel_stride = 16;  // d: tokens between the starts of compression blocks
  int block_size = 64;     // l': tokens in a selection block
  int topk = 16;           // n: selection blocks per query, forced ones included
  int init_blocks = 1;     // first blocks, always selected
  int local_blocks = 2;    // last blocks up to the query's own, always selected
  int window_size = 512;   // w: sliding window in tokens, the query itself included

  /// Names the parameter, its value and the rule it breaks.
  Status validate() const;

  /// N_c(L): compression blocks that lie wholly in L tokens. 0 for L < l, else floor((L - l) / d) + 1.
  std::int64_t num_compressed(std::int64_t length) const {
    return length < kernel_size ? 0 : (length - kernel_size) / kernel_stride + 1;
  }

  /// Rows of what compress makes of `tokens` tokens: the blocks of a batched sequence, or, of all packed sequences
  /// together, always enough for their blocks.
  std::int64_t compressed_rows(std::int64_t tokens, bool packed) const {
    return packed ? tokens / kernel_stride : num_compressed(tokens);
  }

  bool operator==(const NSAConfig&) const = default;
};

/// The function that compresses one block of l tokens into one (section 3.3.1).
enum class CompressionKind : std::int8_t {
  kMean,    // average over the l tokens, no parameters
  kLinear,  // flatten -> D
  kMlp,     // flatten -> E -> SiLU -> D, the paper's
};

const char* name_of(CompressionKind kind);

}  // namespace nsa
