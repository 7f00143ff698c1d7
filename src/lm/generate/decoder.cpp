#include "lm/generate/decoder.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/tensor.h>
#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "base/device.h"
#include "base/error.h"
#include "lm/generate/layer_cache.h"
#include "lm/model/model_impl.h"

namespace nsa::lm {
namespace {

constexpr std::int64_t kChunk = 4096;  // tokens of a prompt that go through the model together

}  // namespace

struct Decoder::Impl {
  Impl(const Model::Impl& model, std::int64_t capacity) : model(model), capacity(capacity) {}

  const Model::Impl& model;
  std::int64_t capacity;
  std::int64_t length = 0;
  Rotation rotation;
  std::vector<BlockWeights> weights;
  std::vector<std::unique_ptr<LayerCache>> caches;

  /// The residual stream after the last layer, (m, hidden).
  Residual append(std::span<const std::int64_t> tokens) {
    const auto ids = at::tensor(c10::ArrayRef<std::int64_t>(tokens.data(), tokens.size()), at::kLong);
    const auto end = length + static_cast<std::int64_t>(tokens.size());
    const Rotation here{rotation.cos.slice(0, length, end), rotation.sin.slice(0, length, end)};
    Residual x{at::embedding(model.embedding, base::upload(ids, model.device)), {}};
    for (std::size_t i = 0; i < weights.size(); ++i) {
      x = block_forward(model.blocks[i].config(), weights[i], x, here,
                        [&](const AttentionInputs& projected) { return caches[i]->attend(weights[i], projected); });
    }
    length = end;
    return x;
  }
};

Decoder::Decoder(const Model& model, std::int64_t capacity) : impl_(std::make_unique<Impl>(*model.impl_, capacity)) {
  const at::NoGradGuard no_grad;
  const ModelConfig& config = model.config();
  impl_->rotation =
      rotation_table(capacity, rope_frequencies(config.head_dim, config.rope_theta, config.rope), model.device());
  for (const Block& block : impl_->model.blocks) {
    impl_->weights.push_back(block.weights(model.compute_dtype()));
    impl_->caches.push_back(make_layer_cache(
        block.config(), capacity, at::TensorOptions(model.device()).dtype(model.compute_dtype()), impl_->rotation));
  }
}

Decoder::~Decoder() = default;

std::int64_t Decoder::length() const { return impl_->length; }

at::Tensor Decoder::append(std::span<const std::int64_t> tokens) {
  const at::NoGradGuard no_grad;
  const auto count = static_cast<std::int64_t>(tokens.size());
  if (count < 1 || impl_->length + count > impl_->capacity) {
    throw base::Error(fmt::format("cache: {} more tokens after {} do not fit into its capacity of {}", count,
                                  impl_->length, impl_->capacity));
  }
  Residual x;
  while (!tokens.empty()) {
    const auto chunk = tokens.first(std::min<std::size_t>(tokens.size(), kChunk));
    x = impl_->append(chunk);
    tokens = tokens.subspan(chunk.size());
  }
  const auto last = [](const at::Tensor& rows) { return rows.slice(0, rows.size(0) - 1); };
  return impl_->model.logits({last(x.x), last(x.added)}).squeeze(0);
}

}  // namespace nsa::lm
