// AdamW with clipping of the gradients, and the learning rate over a run.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lm/model/model.h"

namespace nsa::lm {

struct AdamWConfig {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;  // of the matrices; norms, biases and phi are not decayed
  double clip = 1.0;          // largest norm of all gradients together; 0: no clipping
};

class AdamW {
 public:
  AdamW(const NamedTensors& parameters, const AdamWConfig& config);

  /// Clips, updates and frees the gradients; returns their norm before the clipping, a float64 scalar on the
  /// parameters' device, for which the host does not wait. Parameters without a gradient keep their values; on a GPU,
  /// where nobody has looked at the norm yet, all do if it is not finite.
  at::Tensor step(double learning_rate);

  /// The moments and the number of steps of each parameter, sharing memory: what a checkpoint holds.
  const NamedTensors& state() const { return state_; }

 private:
  struct Group {
    std::vector<at::Tensor> parameters, moments, squares, steps;
    double weight_decay = 0;
  };
  struct Clipped {
    at::Tensor norm;
    std::optional<at::Tensor> divisor, not_finite;  // of the gradients, for the update; 1 if no update shall be made
  };
  Clipped clip_on_host(const std::vector<at::Tensor>& gradients) const;
  Clipped clip_on_device(const std::vector<at::Tensor>& gradients) const;

  AdamWConfig config_;
  NamedTensors state_;
  Group decayed_, plain_;
};

/// Linear warm-up over `warmup` steps, then a cosine from `peak` to `peak * floor` at `steps`.
double learning_rate(std::int64_t step, std::int64_t steps, std::int64_t warmup, double peak, double floor);

}  // namespace nsa::lm
