#include "lm/generate/step_ends.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "bridge/call.h"
#include "lm/generate/step_kernels.h"

namespace nsa::lm {
namespace {

StepInputs inputs_by_torch(const at::Tensor& tokens, const at::Tensor& embedding, const Rotation& table,
                           const StepState& state) {
  const auto at = state.positions.clamp_max(table.cos.size(0) - 1);
  StepInputs in{.x = at::embedding(embedding, tokens), .rotation = table.at(at), .slots = {}, .lengths = {}};
  if (state.first_slots.defined()) in.slots = at + state.first_slots;
  state.positions.add_(state.num_new);
  if (state.first_slots.defined()) in.lengths = state.positions.to(at::kInt);
  return in;
}

struct MostLikely {
  std::int64_t token = 0;
  double best = -INFINITY, second = -INFINITY;
  bool finite = true;
};

/// In one pass: there may be more than 100,000 logits, which torch's operators would read six times. Few runs of them
/// have one that is above the two highest before.
template <class T>
MostLikely most_likely(const T* logits, std::int64_t count) {
  using Logit = at::opmath_type<T>;
  constexpr std::int64_t kRun = 256;
  MostLikely found;
  for (std::int64_t begin = 0; begin < count; begin += kRun) {
    const std::int64_t end = std::min(begin + kRun, count);
    Logit highest = -INFINITY;
    int nonfinite = 0;
#pragma omp simd reduction(max : highest) reduction(| : nonfinite)
    for (std::int64_t i = begin; i < end; ++i) {
      const auto logit = static_cast<Logit>(logits[i]);
      highest = logit > highest ? logit : highest;
      nonfinite |= logit - logit == 0 ? 0 : 1;
    }
    found.finite &= nonfinite == 0;
    if (nonfinite == 0 && !(highest > found.second)) continue;
    for (std::int64_t i = begin; i < end; ++i) {
      const auto logit = static_cast<Logit>(logits[i]);
      if (!(logit > found.second)) continue;
      found.second = std::min<double>(logit, found.best);
      if (logit > found.best) found.best = logit, found.token = i;
    }
  }
  return found;
}

at::Tensor most_likely_on_host(const at::Tensor& logits, const at::Tensor& tokens) {
  const std::int64_t rows = logits.size(0);
  const auto out = at::empty({3, rows}, at::kDouble);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, logits.scalar_type(), "most_likely_tokens", [&] {
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto found = most_likely(logits.const_data_ptr<scalar_t>() + row * logits.stride(0), logits.size(1));
      tokens.mutable_data_ptr<std::int64_t>()[row] = found.token;
      auto* const numbers = out.mutable_data_ptr<double>() + row;
      numbers[0] = static_cast<double>(found.token);
      numbers[rows] = found.best - found.second;
      numbers[2 * rows] = found.finite ? 1 : 0;
    }
  });
  return out;
}

}  // namespace

#ifdef NSA_LM_CUDA

StepInputs step_inputs(const at::Tensor& tokens, const at::Tensor& embedding, const Rotation& table,
                       const StepState& state) {
  if (!tokens.is_cuda()) return inputs_by_torch(tokens, embedding, table, state);
  const std::int64_t rows = tokens.size(0), width = embedding.size(1), half = table.cos.size(1);
  StepInputs in{
      .x = at::empty({rows, width}, embedding.options()),
      .rotation = {at::empty({rows, half}, table.cos.options()), at::empty({rows, half}, table.sin.options())},
      .slots = {},
      .lengths = {}};
  fused::StepInputsArgs args{.tokens = tokens.const_data_ptr<std::int64_t>(),
                             .num_new = state.num_new.const_data_ptr<int>(),
                             .positions = state.positions.mutable_data_ptr<std::int64_t>(),
                             .capacity = table.cos.size(0),
                             .embedding = embedding.const_data_ptr<float>(),
                             .cos = table.cos.const_data_ptr<float>(),
                             .sin = table.sin.const_data_ptr<float>(),
                             .rows = static_cast<int>(rows),
                             .width = static_cast<int>(width),
                             .half = static_cast<int>(half),
                             .x = in.x.mutable_data_ptr<float>(),
                             .rotation_cos = in.rotation.cos.mutable_data_ptr<float>(),
                             .rotation_sin = in.rotation.sin.mutable_data_ptr<float>()};
  if (state.first_slots.defined()) {
    in.slots = at::empty({rows}, state.positions.options());
    in.lengths = at::empty({rows}, state.num_new.options());
    args.first_slots = state.first_slots.const_data_ptr<std::int64_t>();
    args.slots = in.slots.mutable_data_ptr<std::int64_t>();
    args.lengths = in.lengths.mutable_data_ptr<int>();
  }
  bridge::check_launch(fused::step_inputs(args, bridge::current_stream(tokens.device())), "step_inputs");
  return in;
}

at::Tensor most_likely_tokens(const at::Tensor& logits, const at::Tensor& tokens) {
  if (!logits.is_cuda()) return most_likely_on_host(logits, tokens);
  const auto out = at::empty({3, logits.size(0)}, logits.options().dtype(at::kDouble));
  const auto type = logits.scalar_type();
  bridge::check_launch(fused::most_likely({.logits = logits.const_data_ptr(),
                                           .type = type == at::kBFloat16 ? fused::LogitType::kBf16
                                                   : type == at::kHalf   ? fused::LogitType::kHalf
                                                                         : fused::LogitType::kFloat,
                                           .row = logits.stride(0),
                                           .rows = logits.size(0),
                                           .columns = static_cast<int>(logits.size(1)),
                                           .out = out.mutable_data_ptr<double>(),
                                           .tokens = tokens.mutable_data_ptr<std::int64_t>()},
                                          bridge::current_stream(logits.device())),
                       "most_likely");
  return out;
}

#else

StepInputs step_inputs(const at::Tensor& tokens, const at::Tensor& embedding, const Rotation& table,
                       const StepState& state) {
  return inputs_by_torch(tokens, embedding, table, state);
}

at::Tensor most_likely_tokens(const at::Tensor& logits, const at::Tensor& tokens) {
  return most_likely_on_host(logits, tokens);
}

#endif

}  // namespace nsa::lm
