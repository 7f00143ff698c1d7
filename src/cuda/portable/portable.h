// The portable CUDA backend: all operations on any NVIDIA GPU from sm_80 on, on the caller's stream, in the caller's
// memory. Nothing here allocates, synchronises or uses another stream, so calls may be captured in a graph.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "nsa/operations.h"

namespace nsa::cuda::portable {

/// Device memory of one call. Without memory it only measures what the call would take.
class Arena {
 public:
  Arena() = default;
  Arena(void* memory, std::size_t size) : memory_(static_cast<char*>(memory)), size_(size) {}

  /// `count` elements, aligned to 256 bytes; null when measuring or when there is no room.
  template <class T>
  T* take(std::int64_t count) {
    const std::size_t at = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return memory_ && used_ <= size_ ? reinterpret_cast<T*>(memory_ + at) : nullptr;
  }
  bool measuring() const { return memory_ == nullptr; }
  bool enough() const { return used_ <= size_; }
  std::size_t used() const { return used_; }

 private:
  char* memory_ = nullptr;
  std::size_t size_ = 0, used_ = 0;
};

/// Where a call runs. With a measuring arena nothing is launched and arena.used() tells the bytes that a call needs.
struct Execution {
  cudaStream_t stream = nullptr;
  Arena arena;
};

Status compress(const CompressParams& params, Execution& execution);
Status compress_backward(const CompressBackwardParams& params, Execution& execution);
Status compressed_attention(const CompressedAttentionParams& params, Execution& execution);
Status compressed_attention_backward(const CompressedAttentionBackwardParams& params, Execution& execution);
Status select_blocks(const SelectBlocksParams& params, Execution& execution);
Status selected_attention(const SelectedAttentionParams& params, Execution& execution);
Status selected_attention_backward(const SelectedAttentionBackwardParams& params, Execution& execution);
Status sliding_window_attention(const SlidingWindowAttentionParams& params, Execution& execution);
Status sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams& params, Execution& execution);
Status combine(const CombineParams& params, Execution& execution);
Status combine_backward(const CombineBackwardParams& params, Execution& execution);
Status nsa_attention(const NsaAttentionParams& params, Execution& execution);
Status nsa_attention_backward(const NsaAttentionBackwardParams& params, Execution& execution);

}  // namespace nsa::cuda::portable
