#include "support/tensor.h"

#include <algorithm>
#include <map>
#include <random>
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
  const std::size_t item = size_of(view_.dtype), elements = bytes_.size() / item;
  if (elements == static_cast<std::size_t>(view_.numel())) return true;  // there are none
  std::vector<bool> covered(elements);
  for_each_index(view_, [&](const Index& index) { covered[static_cast<std::size_t>(offset_of(view_, index))] = true; });
  for (std::size_t i = 0; i < bytes_.size(); ++i)
    if (bytes_[i] != std::byte{0xff} && !covered[i / item]) return false;
  return true;
}

std::vector<TensorView> views_of(const std::vector<Tensor>& tensors) { return {tensors.begin(), tensors.end()}; }

std::vector<std::int64_t> shape_of(const TensorView& view) {
  return {view.shape.begin(), view.shape.begin() + view.rank};
}

std::vector<double> values_of(const TensorView& view) {
  std::vector<double> values;
  for_each_index(view, [&](const Index& index) { values.push_back(get_element(view, offset_of(view, index))); });
  return values;
}

namespace {

/// The first `count` standard normal values of a seed. They are cached: most problems draw the same ones.
const std::vector<double>& normal_values(unsigned seed, std::size_t count) {
  struct Drawn {
    std::mt19937 generator;
    std::normal_distribution<double> normal;
    std::vector<double> values;
  };
  thread_local std::map<unsigned, Drawn> all;
  Drawn& drawn = all.try_emplace(seed, Drawn{std::mt19937(seed), {}, {}}).first->second;
  while (drawn.values.size() < count) drawn.values.push_back(drawn.normal(drawn.generator));
  return drawn.values;
}

/// Elements in row-major order as bytes.
std::vector<std::byte> bytes_of(const TensorView& view) {
  const auto item = static_cast<std::int64_t>(size_of(view.dtype));
  std::vector<std::byte> bytes(static_cast<std::size_t>(view.numel() * item));
  std::byte* to = bytes.data();
  for_each_index(view, [&](const Index& index) {
    to = std::copy_n(view.as<const std::byte>() + offset_of(view, index) * item, item, to);
  });
  return bytes;
}

}  // namespace

bool same_bits(const TensorView& a, const TensorView& b) { return a.dtype == b.dtype && bytes_of(a) == bytes_of(b); }

void fill_normal(const TensorView& view, unsigned seed, double deviation, std::int64_t rows) {
  const double* value = normal_values(seed, static_cast<std::size_t>(view.numel())).data();
  for_each_index(view, [&](const Index& index) {
    if (rows < 0 || view.rank != 3 || index[0] < rows) set_element(view, offset_of(view, index), deviation * *value);
    ++value;
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

TensorView part_of(const TensorView& view, Rows rows, const Sequence& s) {
  const bool lse = rows == Rows::kLse, packed = view.rank == (lse ? 2 : 3);
  const int dim = lse ? view.rank - 1 : view.rank - 3;
  const TensorView own = packed ? view : slice(view, 0, s.batch, s.batch + 1);
  if (rows == Rows::kKeys) return slice(own, dim, s.k_begin, s.k_begin + s.k_len);
  if (rows == Rows::kCompressed) return slice(own, dim, s.c_begin, s.c_begin + s.c_len);
  return slice(own, dim, s.q_begin, s.q_begin + s.q_len);
}

void assign(const TensorView& from, const TensorView& to) {
  const std::vector<double> values = values_of(from);
  std::size_t n = 0;
  for_each_index(to, [&](const Index& index) { set_element(to, offset_of(to, index), values[n++]); });
}

}  // namespace nsa::test
