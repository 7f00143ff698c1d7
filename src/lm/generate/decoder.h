// Reading sequences token by token with cached keys and values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>

#include "lm/model/model.h"

namespace nsa::lm {

struct DecoderOptions {
  std::int64_t sequences = 1;
  std::int64_t capacity = 0;  // tokens of each sequence
  std::int64_t chunk = 0;     // most tokens of a prompt that go through the model together; 0: the device's default
  bool fp8_cache = false;     // what attention reads is stored in e4m3; for attention `nsa`
};

/// Tokens of a prompt that go through the model together by default.
std::int64_t default_chunk(at::Device device);

/// Throws Error where a layer's attention is not `nsa`: its cache cannot be in fp8.
void require_fp8_cache(const ModelConfig& config);

/// B sequences of lengths of their own. Weights are cast to the compute dtype once, when it is made.
class Decoder {
 public:
  /// `model` must outlive it and keep its weights, its device and its compute dtype. Throws Error for fp8_cache where a
  /// layer's attention is not `nsa`.
  Decoder(const Model& model, const DecoderOptions& options);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  /// Appends at least one token to a sequence; returns the logits after the last one, (vocab_size) in the compute
  /// dtype, on the device. Throws Error beyond the capacity.
  at::Tensor prefill(std::int64_t sequence, std::span<const std::int64_t> tokens);

  /// A step appends a token to every sequence that has not ended. The host's half of it: lengths. Throws Error when
  /// the capacity is exceeded.
  void count_step();
  /// What it puts into the device's stream: tokens int64 (B) on the device, of which those of ended sequences have no
  /// meaning, to the logits after them, (B, vocab_size) in the compute dtype. Before the first token it may come any
  /// number of times, for nothing.
  at::Tensor enqueue_step(const at::Tensor& tokens);
  /// Whether that is the same every time, so that a graph can hold it: some dense attention has lengths on the host.
  bool steps_are_alike() const;

  /// Steps leave the sequence out from now on. Before its prefill they do so, too.
  void end(std::int64_t sequence);

  std::int64_t length(std::int64_t sequence) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nsa::lm
