#include "lm/baselines/baseline.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/matmul.h>
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace nsa::lm {
namespace {

struct NamedBaseline {
  const char* name;
  std::unique_ptr<Baseline> (*make)(const at::Tensor& q, const at::Tensor& k, std::int64_t budget);
};
constexpr std::array kBaselines = {
    NamedBaseline{"streaming", make_streaming},  NamedBaseline{"h2o", make_h2o},
    NamedBaseline{"quest", make_quest},          NamedBaseline{"infllm", make_infllm},
    NamedBaseline{"clusterkv", make_cluster_kv}, NamedBaseline{"exact", make_exact},
};

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kMaxScores = std::int64_t{1} << 26;  // of a block of queries: 256 MiB in float32

/// The `budget` tokens of highest priority, bool of the same shape; of those that are level with the last one the
/// first.
at::Tensor chosen(const at::Tensor& priorities, std::int64_t budget) {
  const std::int64_t count = std::min(budget, priorities.size(-1));
  const auto best = std::get<0>(priorities.topk(count, -1, /*largest=*/true, /*sorted=*/false));
  const auto last = best.amin(-1, /*keepdim=*/true);
  const auto above = priorities > last, level = priorities == last;
  const auto room = count - above.sum(-1, /*keepdim=*/true);
  return above.logical_or(level.logical_and(level.cumsum(-1) <= room));
}

}  // namespace

std::vector<std::string> baseline_names() {
  std::vector<std::string> names;
  for (const NamedBaseline& baseline : kBaselines) names.emplace_back(baseline.name);
  return names;
}

at::Tensor baseline_attention(const std::string& baseline, std::int64_t budget, const at::Tensor& q,
                              const at::Tensor& k, const at::Tensor& v) {
  const auto* const named = std::find_if(kBaselines.begin(), kBaselines.end(),
                                         [&](const NamedBaseline& entry) { return entry.name == baseline; });
  if (named == kBaselines.end()) {
    throw base::Error(fmt::format("baseline {}: must be one of {}", baseline, fmt::join(baseline_names(), ", ")));
  }
  const std::int64_t length = q.size(0), kv_heads = k.size(1);
  const auto heads_first = [](const at::Tensor& t) {
    return t.transpose(0, 1).to(t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).contiguous();
  };
  const auto heads = heads_first(q).unflatten(0, {kv_heads, -1}) / std::sqrt(static_cast<double>(q.size(2)));
  const auto keys = heads_first(k), values = heads_first(v);
  const auto positions = at::arange(length, q.options().dtype(at::kLong));
  const auto ranking = named->make(heads, keys, budget);
  const std::int64_t step = std::clamp<std::int64_t>(kMaxScores / (q.size(1) * length), 1, 256);
  std::vector<at::Tensor> outputs;
  for (std::int64_t begin = 0; begin < length; begin += step) {
    const std::int64_t end = std::min(begin + step, length);
    const auto later = positions.narrow(0, 0, end) > positions.slice(0, begin, end).unsqueeze(1);  // (T, end)
    QueryBlock block{begin, heads.slice(2, begin, end)};
    block.scores = at::matmul(block.q, keys.narrow(1, 0, end).transpose(1, 2).unsqueeze(1));
    block.scores.masked_fill_(later, -kInfinity);
    const auto read = chosen(ranking->priorities(block).masked_fill(later, -kInfinity), budget);
    const auto weights = block.scores.masked_fill(~read.unsqueeze(1), -kInfinity).softmax(-1);
    outputs.push_back(at::matmul(weights, values.narrow(1, 0, end).unsqueeze(1)));  // (Hkv, G, T, Dv)
  }
  return at::cat(outputs, 2).flatten(0, 1).transpose(0, 1).to(q.scalar_type());
}

std::int64_t nsa_budget(const NSAConfig& config, std::int64_t length) {
  return std::int64_t{config.topk} * config.block_size + config.window_size + config.num_compressed(length);
}

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
