#include "lm/train/run_ahead.h"

#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/core.h>

#include <cmath>
#include <utility>

#include "base/error.h"

namespace nsa::lm {

StepThrottle::StepThrottle(at::Device device) : device_(device) {}

void StepThrottle::step() {
  if (!device_.is_cuda()) return;
  c10::Event now(device_.type());
  now.record(c10::Stream(c10::Stream::DEFAULT, device_));
  if (before_) before_->synchronize();
  before_ = std::move(now);
}

void StepThrottle::finish() {
  if (before_) before_->synchronize();
}

DeferredMetrics::DeferredMetrics(at::Device device)
    : loss_sum_(at::zeros({}, at::TensorOptions(device).dtype(at::kDouble))),
      largest_norm_(at::zeros_like(loss_sum_)) {}

void DeferredMetrics::add_norm(const at::Tensor& norm) {
  largest_norm_ = at::maximum(largest_norm_, norm);  // NaN if one is
}

double DeferredMetrics::sync(std::int64_t step) {
  if (!std::isfinite(largest_norm_.item<double>())) {
    throw base::Failure(fmt::format("{}: the gradients are not finite; a lower --lr may help",
                                    synced_ == step - 1 ? fmt::format("step {}", synced_)
                                                        : fmt::format("one of the steps {} to {}", synced_, step - 1)));
  }
  largest_norm_.zero_();
  synced_ = step;
  return loss_sum_.item<double>();
}

void DeferredMetrics::restart(std::int64_t step, double loss_sum) {
  synced_ = step;
  loss_sum_.fill_(loss_sum);
}

}  // namespace nsa::lm
