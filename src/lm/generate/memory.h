// Host memory of generating on a CPU, computed before it is taken.
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>

#include "lm/generate/decoder.h"
#include "lm/model/config.h"

namespace nsa::lm {

/// Values that load_tensors() checks for NaN at a time: the check takes memory for them.
inline constexpr std::int64_t kCheckedValues = std::int64_t{1} << 24;

/// Of a model for inference: the weights, and what loading takes for a while in addition.
struct ModelMemory {
  std::int64_t weights = 0, loading = 0;
};
ModelMemory model_memory(const ModelConfig& config, at::ScalarType dtype);

/// Upper bounds: of the caches, and of the temporary tensors of a chunk of a prompt.
struct GenerateMemory {
  std::int64_t cache = 0, workspace = 0;
};
GenerateMemory generate_memory(const ModelConfig& config, at::ScalarType dtype, const DecoderOptions& options);

/// Memory of this process that is resident now.
std::int64_t resident_bytes();

/// The longest chunk of a prompt, a power of two times kShortestChunk, with which generating stays within `limit` bytes
/// of resident memory. Throws Error naming --max-memory where none does.
std::int64_t chunk_within(std::int64_t limit, const ModelConfig& config, at::ScalarType dtype, DecoderOptions options);

/// Throws Error naming --max-memory unless the model can be loaded within `limit` bytes of resident memory.
void require_memory_to_load(std::int64_t limit, const ModelConfig& config, at::ScalarType dtype);

}  // namespace nsa::lm
