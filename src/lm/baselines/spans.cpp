#include "lm/baselines/spans.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <limits>

namespace nsa::lm {

at::Tensor whole_spans(const at::Tensor& rows, std::int64_t size) {
  const std::int64_t spans = rows.size(1) / size;
  return rows.narrow(1, 0, spans * size).reshape({rows.size(0), spans, size, rows.size(2)});
}

at::Tensor of_tokens(const at::Tensor& of_spans, std::int64_t size, std::int64_t tokens) {
  const auto each = of_spans.repeat_interleave(size, -1);
  return at::constant_pad_nd(each, {0, std::max<std::int64_t>(0, tokens - each.size(-1))}).narrow(-1, 0, tokens);
}

at::Tensor positions(const QueryBlock& block) {
  return at::arange(block.begin, block.end(), block.q.options().dtype(at::kLong));
}

at::Tensor read_in_any_case(const at::Tensor& priorities, std::int64_t sinks, const at::Tensor& from) {
  const auto token = at::arange(priorities.size(-1), from.options());
  const auto read = (token < sinks).logical_or(token >= from.unsqueeze(1));
  return priorities.masked_fill(read, std::numeric_limits<double>::infinity());
}

}  // namespace nsa::lm
