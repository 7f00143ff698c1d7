#include "lm/train/ranks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <fmt/core.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace nsa::lm {
namespace {

/// Waits for what `start` begins: the device for NCCL, the host for gloo.
template <class Start>
void finish(Start&& start) {
  try {
    start()->wait();
  } catch (const std::exception& error) {
    const std::string message = error.what();
    throw RankLost("another rank is gone: " + message.substr(0, message.find('\n')));
  }
}

}  // namespace

struct Ranks::Group {
  c10::intrusive_ptr<c10d::ProcessGroup> torch;
};

Ranks::Ranks(const std::string& group) {
  try {
    group_ = std::make_shared<Group>(Group{c10d::resolve_process_group(group)});
  } catch (const c10::Error& error) {
    throw base::Error(fmt::format("process group '{}': {}", group, error.what_without_backtrace()));
  }
  rank_ = group_->torch->getRank();
  size_ = group_->torch->getSize();
}

at::Tensor Ranks::sum(at::Tensor flat) const {
  if (size_ == 1) return flat;
  const auto share = (flat.numel() + size_ - 1) / size_, missing = share * size_ - flat.numel();
  auto sent = missing == 0 ? flat : at::constant_pad_nd(flat, {0, missing});
  auto received = at::empty_like(sent);
  std::vector<std::int64_t> equal;
  finish([&] { return group_->torch->alltoall_base(received, sent, equal, equal); });
  auto total = received.narrow(0, 0, share);
  for (int r = 1; r < size_; ++r) total.add_(received.narrow(0, r * share, share));
  finish([&] { return group_->torch->_allgather_base(sent, total); });
  return sent.narrow(0, 0, flat.numel());
}

void Ranks::max(std::vector<std::int64_t>& values) const {
  if (size_ == 1) return;
  const auto count = static_cast<std::int64_t>(values.size());
  auto here = at::from_blob(values.data(), {count}, at::kLong);
  auto all = at::empty({size_ * count}, at::kLong);
  finish([&] { return group_->torch->_allgather_base(all, here); });
  here.copy_(all.view({size_, count}).amax(0));
}

void Ranks::barrier() const {
  std::vector<std::int64_t> none = {0};
  max(none);
}

void Ranks::broadcast(at::Tensor tensor, int from) const {
  if (size_ == 1) return;
  std::vector<at::Tensor> tensors = {tensor};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  finish([&] { return group_->torch->broadcast(tensors, options); });
}

std::string Ranks::broadcast(std::string text) const {
  if (size_ == 1) return text;
  std::vector<std::int64_t> length = {first() ? static_cast<std::int64_t>(text.size()) : 0};
  max(length);
  text.resize(static_cast<std::size_t>(length[0]));
  if (!text.empty()) broadcast(at::from_blob(text.data(), {length[0]}, at::kByte), 0);
  return text;
}

}  // namespace nsa::lm
