#include "lm/train/throttle.h"

#include <utility>

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

}  // namespace nsa::lm
