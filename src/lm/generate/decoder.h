// Reading a sequence token by token with cached keys and values.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "lm/model/model.h"

namespace nsa::lm {

class Decoder {
 public:
  /// Room for `capacity` tokens. `model` must outlive it and keep its weights, its device and its compute dtype.
  Decoder(const Model& model, std::int64_t capacity);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  /// Appends at least one token; returns the logits after the last one, float32 (vocab_size), on the device. Throws
  /// Error when there is no room.
  at::Tensor append(std::span<const std::int64_t> tokens);

  std::int64_t length() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nsa::lm
