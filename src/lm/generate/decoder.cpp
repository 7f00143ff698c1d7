#include "lm/generate/decoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "base/device.h"
#include "base/error.h"
#include "lm/generate/layer_cache.h"
#include "lm/generate/step_ends.h"
#include "lm/model/model_impl.h"

namespace nsa::lm {

// On a GPU the first chunk is a forward pass; what comes behind it is slower.
std::int64_t default_chunk(at::Device device) { return device.is_cuda() ? 65536 : 4096; }

void require_fp8_cache(const ModelConfig& config) {
  for (int i = 0; i < config.num_layers; ++i) {
    const auto attention = config.of_layer(i).attention;
    if (attention == AttentionKind::kNsa) continue;
    throw base::Error(fmt::format("--kv-cache-dtype fp8: attention {} of layer {}: must be nsa in every layer",
                                  name_of(attention), i));
  }
}

struct Decoder::Impl {
  Impl(const Model::Impl& model, const DecoderOptions& options)
      : model(model),
        capacity(options.capacity),
        chunk(options.chunk > 0 ? options.chunk : default_chunk(model.device)) {}

  const Model::Impl& model;
  std::int64_t capacity, chunk;
  std::vector<std::int64_t> lengths;
  std::vector<bool> ended;
  StepState state;  // num_new is 1 for sequences that have begun and not ended; slots are dense attention's
  Rotation rotation;
  std::vector<BlockWeights> weights;
  at::Tensor head;
  std::vector<std::unique_ptr<LayerCache>> caches;

  void require_capacity(std::int64_t sequence, std::int64_t count) const {
    const std::int64_t length = lengths.at(static_cast<std::size_t>(sequence));
    if (count >= 1 && length + count <= capacity) return;
    throw base::Error(
        fmt::format("cache: {} more tokens after {} do not fit into its capacity of {}", count, length, capacity));
  }

  /// The residual stream after the last layer, (rows, hidden).
  Residual run(const at::Tensor& embedded, const Rotation& here, const CacheRows& rows) {
    Residual x{embedded, {}};
    for (std::size_t i = 0; i < weights.size(); ++i) {
      x = block_forward(model.blocks[i].config(), weights[i], x, here, [&](const AttentionInputs& projected) {
        return caches[i]->attend(weights[i], projected, rows);
      });
    }
    return x;
  }

  Residual append(std::int64_t sequence, std::span<const std::int64_t> tokens) {
    auto& length = lengths[static_cast<std::size_t>(sequence)];
    const auto ids = at::tensor(c10::ArrayRef<std::int64_t>(tokens.data(), tokens.size()), at::kLong);
    const auto begin = length;
    length += static_cast<std::int64_t>(tokens.size());
    state.positions.narrow(0, sequence, 1).fill_(length);
    const Rotation here{rotation.cos.slice(0, begin, length), rotation.sin.slice(0, begin, length)};
    return run(at::embedding(model.embedding, base::upload(ids, model.device)), here,
               {.first = sequence, .count = 1, .start = begin});
  }
};

Decoder::Decoder(const Model& model, const DecoderOptions& options)
    : impl_(std::make_unique<Impl>(*model.impl_, options)) {
  const at::NoGradGuard no_grad;
  const std::int64_t sequences = options.sequences, capacity = options.capacity;
  const ModelConfig& config = model.config();
  if (options.fp8_cache) require_fp8_cache(config);
  const auto on_device = at::TensorOptions(model.device());
  impl_->lengths.assign(static_cast<std::size_t>(sequences), 0);
  impl_->ended.assign(static_cast<std::size_t>(sequences), false);
  impl_->state.positions = at::zeros({sequences}, on_device.dtype(at::kLong));
  impl_->state.num_new = at::zeros({sequences}, on_device.dtype(at::kInt));
  impl_->rotation = rotation_table(capacity, rope_frequencies(config.head_dim, config.rope_theta, config.rope),
                                   model.device(), config.rope.attention_factor);
  impl_->head = impl_->model.head_weights();
  if (config.attention == AttentionKind::kFull || !config.dense_layers.empty()) {
    impl_->state.first_slots = at::arange(sequences, on_device.dtype(at::kLong)) * capacity;
  }
  for (const Block& block : impl_->model.blocks) {
    impl_->weights.push_back(block.weights(model.compute_dtype()));
    impl_->weights.back().weights_ready = true;  // every pass begins with kernels that wait for the cast
    impl_->caches.push_back(make_layer_cache(block.config(), sequences, capacity,
                                             on_device.dtype(model.compute_dtype()), options.fp8_cache,
                                             impl_->rotation));
  }
}

Decoder::~Decoder() = default;

std::int64_t Decoder::length(std::int64_t sequence) const {
  return impl_->lengths.at(static_cast<std::size_t>(sequence));
}

at::Tensor Decoder::prefill(std::int64_t sequence, std::span<const std::int64_t> tokens) {
  const at::NoGradGuard no_grad;
  impl_->require_capacity(sequence, static_cast<std::int64_t>(tokens.size()));
  impl_->state.num_new.narrow(0, sequence, 1).fill_(1);
  const auto most = static_cast<std::size_t>(impl_->chunk);
  Residual x;
  while (!tokens.empty()) {
    const auto chunk = tokens.first(std::min(tokens.size(), most));
    x = impl_->append(sequence, chunk);
    tokens = tokens.subspan(chunk.size());
  }
  const auto last = [](const at::Tensor& rows) { return rows.slice(0, rows.size(0) - 1); };
  return impl_->model.logits({last(x.x), last(x.added)}, {impl_->head, true}).squeeze(0);
}

void Decoder::count_step() {
  for (std::size_t b = 0; b < impl_->lengths.size(); ++b) {
    if (impl_->ended[b]) continue;
    impl_->require_capacity(static_cast<std::int64_t>(b), 1);
    ++impl_->lengths[b];
  }
}

at::Tensor Decoder::enqueue_step(const at::Tensor& tokens) {
  const at::NoGradGuard no_grad;
  // An ended sequence may be full: it is rotated by the last angle, and its result is not used.
  const auto in = step_inputs(tokens, impl_->model.embedding, impl_->rotation, impl_->state);
  const CacheRows rows{.first = 0,
                       .count = tokens.size(0),
                       .idle = impl_->ended,
                       .num_new = impl_->state.num_new,
                       .slots = in.slots,
                       .lengths = in.lengths};
  return impl_->model.logits(impl_->run(in.x, in.rotation, rows), {impl_->head, true});
}

bool Decoder::steps_are_alike() const {
  return std::ranges::all_of(impl_->caches, [](const auto& cache) { return cache->steps_are_alike(); });
}

void Decoder::end(std::int64_t sequence) {
  impl_->ended.at(static_cast<std::size_t>(sequence)) = true;
  impl_->state.num_new.narrow(0, sequence, 1).fill_(0);
}

}  // namespace nsa::lm
