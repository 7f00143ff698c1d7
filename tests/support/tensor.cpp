#include "support/tensor.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace nsa::test {

Tensor::Tensor(DType dtype, std::vector<std::int64_t> shape, Layout layout) {
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view_.shape.begin());
  std::vector<std::size_t> order(shape.size());  // dimensions from outermost to innermost in memory
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (layout == Layout::kHeadsFirst && order.size() >= 3) std::swap(order[order.size() - 3], order[order.size() - 2]);
  std::int64_t stride = 1;
  for (std::size_t n = order.size(); n-- > 0;) {
    view_.stride[order[n]] = stride;
    stride *= shape[order[n]];
    if (layout == Layout::kPadded)
      stride += n + 1 == order.size() ? 8 : stride / std::max<std::int64_t>(shape[order[n]], 1);
  }
  bytes_.assign(static_cast<std::size_t>(std::max<std::int64_t>(stride, 1)) * size_of(dtype), std::byte{0xff});
  view_.data = bytes_.data();
}

Tensor Tensor::clone() const {
  Tensor copy;
  copy.bytes_ = bytes_;
  copy.view_ = view_;
  copy.view_.data = copy.bytes_.data();
  return copy;
}

bool Tensor::gaps_intact() const {
  std::vector<bool> covered(bytes_.size());
  const std::size_t item = size_of(view_.dtype);
  for_each_index(view_, [&](const Index& index) {
    for (std::size_t i = 0; i < item; ++i) covered[static_cast<std::size_t>(offset_of(view_, index)) * item + i] = true;
  });
  for (std::size_t i = 0; i < bytes_.size(); ++i)
    if (!covered[i] && bytes_[i] != std::byte{0xff}) return false;
  return true;
}

std::vector<std::int64_t> shape_of(const TensorView& view) {
  return {view.shape.begin(), view.shape.begin() + view.rank};
}

std::vector<double> values_of(const TensorView& view) {
  std::vector<double> values;
  for_each_index(view, [&](const Index& index) { values.push_back(get_element(view, offset_of(view, index))); });
  return values;
}

bool same_bits(const TensorView& a, const TensorView& b) {
  bool same = a.dtype == b.dtype && shape_of(a) == shape_of(b);
  const std::size_t bytes = size_of(a.dtype);
  if (same)
    for_each_index(a, [&](const Index& index) {
      same &= std::memcmp(a.as<char>() + offset_of(a, index) * static_cast<std::int64_t>(bytes),
                          b.as<char>() + offset_of(b, index) * static_cast<std::int64_t>(bytes), bytes) == 0;
    });
  return same;
}

void fill_normal(const TensorView& view, unsigned seed, double deviation, std::int64_t rows) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0, deviation);
  for_each_index(view, [&](const Index& index) {
    const double value = normal(generator);
    if (rows < 0 || view.rank != 3 || index[0] < rows) set_element(view, offset_of(view, index), value);
  });
}

void fill_exact(const TensorView& view, unsigned seed) {
  std::mt19937 generator(seed);
  for_each_index(view, [&](const Index& index) {
    set_element(view, offset_of(view, index), (static_cast<double>(generator() % 9) - 4) / 4);
  });
}

void fill_value(const TensorView& view, double value) {
  for_each_index(view, [&](const Index& index) { set_element(view, offset_of(view, index), value); });
}

TensorView broadcast(TensorView view, int dim) {
  view.stride[static_cast<std::size_t>(dim)] = 0;
  return view;
}

TensorView slice(TensorView view, int dim, std::int64_t begin, std::int64_t end) {
  const auto i = static_cast<std::size_t>(dim);
  view.data = view.as<char>() + begin * view.stride[i] * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape[i] = end - begin;
  return view;
}

}  // namespace nsa::test
