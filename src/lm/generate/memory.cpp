#include "lm/generate/memory.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "base/error.h"
#include "lm/generate/layer_cache.h"
#include "lm/model/counts.h"

namespace nsa::lm {
namespace {

/// Code and tables of torch's and OpenMP's libraries that the first matmul loads, stacks of threads, and what malloc
/// keeps of freed memory.
constexpr std::int64_t kLibraries = std::int64_t{128} << 20;
constexpr std::int64_t kShortestChunk = 256;

std::int64_t size_of(at::ScalarType dtype) { return static_cast<std::int64_t>(c10::elementSize(dtype)); }

/// Of the temporary tensors of a layer, the bytes for each token of a chunk. All that a layer makes counts, as if it
/// lived until the layer's end.
std::int64_t bytes_per_token(const ModelConfig& config, at::ScalarType dtype) {
  const std::int64_t hidden = config.hidden_size, ffn = config.ffn_size, heads = config.num_heads;
  const std::int64_t kv = std::int64_t{config.num_kv_heads} * (config.head_dim + config.v_head_dim);
  const bool sparse = config.attention == AttentionKind::kNsa;
  const std::int64_t projected = heads * config.head_dim + (sparse && !config.share_kv ? 3 : 1) * kv + hidden / 4;
  const std::int64_t attended = heads * config.v_head_dim;
  // In the compute dtype: projections and their copies, the output of attention, the FFN (both halves, their product
  // and its factor), norms and sums. Float32: the residual stream before and after each half.
  std::int64_t bytes = size_of(dtype) * (2 * projected + 2 * attended + 4 * ffn + 6 * hidden) + 16 * hidden;
  // Without 16-bit products torch gets the widest matmul's input and output in float32.
  if (dtype != at::kFloat) bytes += 4 * (2 * ffn + hidden);
  // The chunk's keys and values of the window and of the compression, as they are packed or gathered.
  if (sparse) bytes += (4 + 2 * size_of(dtype)) * kv;
  return bytes;
}

std::string mib(std::int64_t bytes) { return fmt::format("{} MiB", (bytes + (1 << 20) - 1) >> 20); }

}  // namespace

ModelMemory model_memory(const ModelConfig& config, at::ScalarType dtype) {
  const std::int64_t table = std::int64_t{config.vocab_size} * config.hidden_size;
  const std::int64_t layers = parameter_counts(config).total() - table * (config.tied_head ? 1 : 2);
  // The embedding is float32. The head is the same memory only where it is tied and float32, too.
  const bool one_table = config.tied_head && dtype == at::kFloat;
  const std::int64_t weights = 4 * table + (one_table ? 0 : table * size_of(dtype)) + layers * size_of(dtype);
  // Of the largest tensor, the file's pages and a copy of them, and what the search for NaN takes. The weights of a
  // layer that are joined are less, or a layer.
  const std::int64_t largest = std::max<std::int64_t>(table, std::int64_t{config.ffn_size} * config.hidden_size);
  const std::int64_t read = 8 * (largest + std::min(largest, kCheckedValues));
  return {weights, std::max(read, layers / config.num_layers * size_of(dtype))};
}

GenerateMemory generate_memory(const ModelConfig& config, at::ScalarType dtype, const DecoderOptions& options) {
  GenerateMemory memory;
  std::int64_t per_token = 0, mask = 0, packed = 0;
  for (int i = 0; i < config.num_layers; ++i) {
    const ModelConfig layer = config.of_layer(i);
    const auto without_memory = at::TensorOptions(at::kMeta).dtype(dtype);
    memory.cache +=
        make_layer_cache(layer, options.sequences, options.capacity, without_memory, options.fp8_cache, {})->bytes();
    per_token = std::max(per_token, bytes_per_token(layer, dtype));
    if (layer.attention == AttentionKind::kFull) {
      // A chunk's mask: of bool, then in the compute dtype.
      mask = (2 + size_of(dtype)) * options.capacity * std::min(options.chunk, options.capacity);
      continue;
    }
    // A prefill packs the keys and values of the whole sequence and its compressed tokens, up to four bytes an element.
    const std::int64_t kv = std::int64_t{layer.num_kv_heads} * (layer.head_dim + layer.v_head_dim);
    packed = std::max(packed, 4 * kv * (options.capacity + layer.nsa.num_compressed(options.capacity)));
  }
  const std::int64_t angles = options.capacity * config.head_dim * 4;
  memory.workspace = std::min(options.chunk, options.capacity) * per_token + std::max(mask, packed) + angles;
  return memory;
}

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

std::int64_t chunk_within(std::int64_t limit, const ModelConfig& config, at::ScalarType dtype, DecoderOptions options) {
  const std::int64_t resident = resident_bytes() + kLibraries;
  for (options.chunk = default_chunk(at::kCPU); options.chunk >= kShortestChunk; options.chunk /= 2) {
    const auto memory = generate_memory(config, dtype, options);
    if (resident + memory.cache + memory.workspace <= limit) return options.chunk;
  }
  options.chunk = kShortestChunk;
  const auto memory = generate_memory(config, dtype, options);
  throw base::Error(
      fmt::format("--max-memory {}: must be at least {}: {} for the loaded model, {} for the cache of {} x "
                  "{} tokens, {} of workspace",
                  mib(limit), mib(resident + memory.cache + memory.workspace), mib(resident), mib(memory.cache),
                  options.sequences, options.capacity, mib(memory.workspace)));
}

void require_memory_to_load(std::int64_t limit, const ModelConfig& config, at::ScalarType dtype) {
  const auto [weights, loading] = model_memory(config, dtype);
  const std::int64_t resident = resident_bytes() + kLibraries;
  if (resident + weights + loading <= limit) return;
  throw base::Error(
      fmt::format("--max-memory {}: must be at least {} to load the model: {} for the program, {} for "
                  "weights, {} while they are read",
                  mib(limit), mib(resident + weights + loading), mib(resident), mib(weights), mib(loading)));
}

}  // namespace nsa::lm
