#include "core/strided.h"

#include <cstring>
#include <utility>

#include "core/backend.h"

namespace nsa {
namespace {

std::byte* gather_dim(const TensorView& view, int dim, const std::byte* source, std::byte* target) {
  const std::size_t item = size_of(view.dtype);
  if (dim == view.rank) {
    std::memcpy(target, source, item);
    return target + item;
  }
  const std::int64_t step = view.stride[static_cast<std::size_t>(dim)];
  if (dim == view.rank - 1 && step == 1) {
    const std::size_t bytes = static_cast<std::size_t>(view.size(dim)) * item;
    std::memcpy(target, source, bytes);
    return target + bytes;
  }
  for (std::int64_t i = 0; i < view.size(dim); ++i)
    target = gather_dim(view, dim + 1, source + i * step * static_cast<std::int64_t>(item), target);
  return target;
}

}  // namespace

std::vector<std::byte> gather(const TensorView& view) {
  std::vector<std::byte> result(static_cast<std::size_t>(view.numel()) * size_of(view.dtype));
  if (!result.empty()) gather_dim(view, 0, static_cast<const std::byte*>(view.data), result.data());
  return result;
}

Status HostCopy::make(const TensorView& source, HostCopy& copy) {
  copy.view = source;
  copy.view.device = {};
  if (source.numel() == 0) return {};
  std::int64_t last = 0;
  for (int i = 0; i < source.rank; ++i) last += (source.size(i) - 1) * source.stride[static_cast<std::size_t>(i)];
  copy.storage_.resize(static_cast<std::size_t>(last + 1) * size_of(source.dtype));
  copy.view.data = copy.storage_.data();
  const cuda::Scope scope(source.device, "copy_to_host");
  return cuda::copy_to_host(copy.view.data, source.data, copy.storage_.size());
}

ContiguousCopy::ContiguousCopy(const TensorView& shape, std::vector<std::byte> elements)
    : storage(std::move(elements)), view(shape) {
  view.data = storage.data();
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.stride[static_cast<std::size_t>(i)] = stride;
    stride *= view.size(i);
  }
}

}  // namespace nsa
