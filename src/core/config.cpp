#include "nsa/config.h"

#include <string>

namespace nsa {

const char* name_of(CompressionKind kind) {
  switch (kind) {
    case CompressionKind::kMean:
      return "mean";
    case CompressionKind::kLinear:
      return "linear";
    case CompressionKind::kMlp:
      return "mlp";
  }
  return "unknown";
}

Status NSAConfig::validate() const {
  auto fail = [](const char* name, int value, const std::string& rule) {
    return Status::invalid_argument(std::string(name) + " = " + std::to_string(value) + ": must be " + rule);
  };
  if (kernel_size < 1) return fail("kernel_size", kernel_size, ">= 1");
  if (kernel_stride < 1) return fail("kernel_stride", kernel_stride, ">= 1");
  if (block_size < 16 || block_size % 16 != 0) return fail("block_size", block_size, "a positive multiple of 16");
  if (kernel_size % kernel_stride != 0)
    return fail("kernel_stride", kernel_stride, "a divisor of kernel_size = " + std::to_string(kernel_size));
  if (block_size % kernel_stride != 0)
    return fail("kernel_stride", kernel_stride, "a divisor of block_size = " + std::to_string(block_size));
  if (init_blocks < 0) return fail("init_blocks", init_blocks, ">= 0");
  if (local_blocks < 1) return fail("local_blocks", local_blocks, ">= 1");
  if (window_size < 1) return fail("window_size", window_size, ">= 1");
  if (topk < 1) return fail("topk", topk, ">= 1");
  if (topk < init_blocks || topk - init_blocks < local_blocks)
    return fail(
        "topk", topk,
        ">= init_blocks + local_blocks = " + std::to_string(init_blocks) + " + " + std::to_string(local_blocks));
  return {};
}

}  // namespace nsa
