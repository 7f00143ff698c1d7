// AdamW with clipping of the gradients, and the learning rate over a run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lm/model/model.h"
#include "lm/train/ranks.h"

namespace nsa::lm {

struct AdamWConfig {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;  // of the matrices; norms, biases and phi are not decayed
  double clip = 1.0;          // largest norm of all gradients together; 0: no clipping
  double phi_lr_scale = 0;    // the learning rate of phi over that of the rest; 0: by fan-in
};

/// The learning rate of each parameter over that of the rest: 1, but `scale` for the tensors of phi. 0: for a matrix of
/// phi kPhiFanIn over its rows, at most 1, and likewise for the bias and the positions that are added before it. AdamW
/// moves every entry by about the rate, whatever the entries are; those of W1 start as the mean of l tokens, 1 / l on
/// one of D entries, so that one step at the common rate would move them by a quarter.
std::vector<double> learning_rate_scales(const NamedTensors& parameters, double scale);
inline constexpr double kPhiFanIn = 128;

class AdamW {
 public:
  /// The gradients of a step are the same on all ranks. `shard`: each rank keeps the moments of a share of the
  /// parameters (complete tensors), updates those and sends them to the others (ZeRO-1, arXiv 1910.02054); the same
  /// bits.
  AdamW(const NamedTensors& parameters, const AdamWConfig& config, const Ranks& ranks = {}, bool shard = false);

  /// Clips, updates and frees the gradients; returns their norm before the clipping, a float64 scalar on the
  /// parameters' device, for which the host does not wait. Parameters without a gradient keep their values; on a GPU,
  /// if the norm has not been checked yet, all do if it is not finite.
  at::Tensor step(double learning_rate);

  /// The moments and the number of steps of each parameter: what a checkpoint holds. All of them on the first rank,
  /// nothing on the others. Sharing memory, unless `shard`: then they are copies in host memory.
  NamedTensors gather_state() const;
  /// The first rank's state, such as gather_state() gives it, to those that keep it.
  void scatter_state(const NamedTensors& state);

 private:
  struct Group {
    std::vector<at::Tensor> parameters, moments, squares, steps;  // the latter three undefined on another rank
    std::vector<int> owners;
    double weight_decay = 0, learning_rate_scale = 1;
  };
  struct State {  // one of a parameter's
    std::string name;
    std::vector<std::int64_t> sizes;
    int owner = 0;
    at::Tensor tensor;  // undefined on another rank
  };
  struct Clipped {
    at::Tensor norm;
    std::optional<at::Tensor> divisor, not_finite;  // of the gradients, for the update; 1 if no update shall be made
  };
  Clipped clip_on_host(const std::vector<at::Tensor>& gradients) const;
  Clipped clip_on_device(const std::vector<at::Tensor>& gradients) const;
  void exchange(const std::vector<at::Tensor>& updated, const std::vector<int>& owners) const;

  AdamWConfig config_;
  Ranks ranks_;
  bool shard_;
  at::TensorOptions options_;  // of the parameters
  std::vector<State> state_;   // in the order of a checkpoint
  std::vector<Group> groups_;
};

/// Linear warm-up over `warmup` steps, then a cosine from `peak` to `peak * floor` at `steps`.
double learning_rate(std::int64_t step, std::int64_t steps, std::int64_t warmup, double peak, double floor);

}  // namespace nsa::lm
