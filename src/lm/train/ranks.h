// The processes that train one model together, each on batches of its own: data parallelism.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"

namespace nsa::lm {

/// Another rank died, or cannot be reached any more.
class RankLost : public base::Failure {
 public:
  using base::Failure::Failure;
};

/// A process group of torch's, or this process alone, where nothing below does anything. Every rank calls the same
/// functions in the same order; where one does not come, they throw RankLost. Only copies travel, so that no bit
/// depends on how the group's backend (gloo, NCCL) adds.
class Ranks {
 public:
  Ranks() = default;
  /// Of torch.distributed.group.WORLD.group_name, say. Throws Error when this process has no such group.
  explicit Ranks(const std::string& group);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool first() const { return rank_ == 0; }

  /// (n) on any device: the sum over the ranks of what they give, added in their order. The result may lie in `flat`.
  at::Tensor sum(at::Tensor flat) const;
  /// The largest value of each over the ranks, which give equally many.
  void max(std::vector<std::int64_t>& values) const;
  /// Returns when every rank has called it.
  void barrier() const;
  /// Rank `from`'s values in place of the others'. `tensor` is contiguous.
  void broadcast(at::Tensor tensor, int from) const;
  /// The first rank's text.
  std::string broadcast(std::string text) const;

 private:
  struct Group;
  std::shared_ptr<Group> group_;
  int rank_ = 0, size_ = 1;
};

}  // namespace nsa::lm
