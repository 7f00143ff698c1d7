// A step with a cache: append and compress (core/cache_step.h), then the pass of nsa_attention over pages and rings.
#include "core/cache_step.h"
#include "cpu/kernels/cached_tokens.h"
#include "cpu/kernels/for_dtype.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/nsa_forward.h"

namespace nsa::cpu::NSA_ISA {
namespace {

/// What of nsa_attention's parameters a step has.
NsaAttentionParams attention_of(const DecodeParams& p) {
  NsaAttentionParams attention;
  attention.q = p.q;
  attention.gates = p.gates;
  attention.cfg = p.cfg;
  attention.softmax_scale = p.softmax_scale;
  attention.block_indices = p.block_indices;
  attention.o = p.o;
  attention.indices = p.indices;
  return attention;
}

std::vector<Sequence> sequences_of(const std::vector<StepSequence>& steps, const NSAConfig& cfg) {
  std::vector<Sequence> sequences;
  for (const StepSequence& step : steps) {
    Sequence s;
    s.index = step.batch;
    s.batch = step.q_batch;
    s.q_begin = step.q_begin;
    s.q_len = step.num_new;
    s.k_len = step.length;
    s.c_len = cfg.num_compressed(step.length);
    sequences.push_back(s);
  }
  return sequences;
}

BranchTokens<CachedTokens> tokens_of(const std::vector<StepSequence>& steps, const DecodeParams& p) {
  const auto collect = [&](TokenRows StepSequence::*rows, const TensorView& like) {
    CachedTokens tokens{{}, like.size(-2), like.size(-1)};
    for (const StepSequence& step : steps) tokens.spans.push_back(step.*rows);
    return tokens;
  };
  return {.k_c = collect(&StepSequence::k_c, p.k_cmp),
          .v_c = collect(&StepSequence::v_c, p.v_cmp),
          .k_slc = collect(&StepSequence::k_slc, p.k_slc),
          .v_slc = collect(&StepSequence::v_slc, p.v_slc),
          .k_swa = collect(&StepSequence::k_swa, p.k_swa),
          .v_swa = collect(&StepSequence::v_swa, p.v_swa)};
}

/// Rotates a row of `dim` channels, pairs (j, j + dim / 2). Each product and each sum is rounded, as torch does it.
template <class In>
void rotate_row(const In* __restrict from, In* __restrict to, std::int64_t dim, const float* cos, const float* sin) {
  const std::int64_t half = dim / 2;
  for (std::int64_t j = 0; j < half; ++j) {
    const float low = to_float(from[j]), high = to_float(from[j + half]);
    from_float(low * cos[j] - high * sin[j], to[j]);
    from_float(high * cos[j] + low * sin[j], to[j + half]);
  }
}

void rotate(const RotatedStep& step, const Context& context) {
  const DecodeParams& p = step.params;
  const std::int64_t dim = p.q.size(-1);
  for_dtype(p.q.dtype, [&]<class In>() {
    parallel_for(std::ssize(step.tokens()), context, [&](std::int64_t i) {
      const RotatedStep::Token& token = step.tokens()[static_cast<std::size_t>(i)];
      const float* const cos = p.rope_cos.as<const float>() + token.position * p.rope_cos.stride[0];
      const float* const sin = p.rope_sin.as<const float>() + token.position * p.rope_sin.stride[0];
      step.rotate(token, [&](const std::byte* from, std::byte* to) {
        rotate_row(reinterpret_cast<const In*>(from), reinterpret_cast<In*>(to), dim, cos, sin);
      });
    });
  });
}

/// Whether the queries together select so much that packing the whole cache once is less work.
bool select_most(const std::vector<StepSequence>& steps, const NSAConfig& cfg) {
  std::int64_t selected = 0, held = 0;
  for (const StepSequence& step : steps) {
    selected += step.num_new * std::min<std::int64_t>(std::int64_t{cfg.topk} * cfg.block_size, step.length);
    held += step.length;
  }
  return selected >= held;
}

}  // namespace

Status run(const DecodeParams& given, const Context& context) {
  const RotatedStep rotated(given);
  if (!rotated.tokens().empty()) rotate(rotated, context);
  const DecodeParams& p = rotated.params;
  CacheStep step(p);
  if (Status status = step.append(NSA_ISA::run, context); !status.ok()) return status;
  for_dtype(p.q.dtype, [&]<class In>() {
    const auto attend = [&]<class Selected>() {
      NsaForward<In, Selected>(attention_of(p), sequences_of(step.sequences(), p.cfg), tokens_of(step.sequences(), p),
                               context, {.k = p.cache.k_scale, .v = p.cache.v_scale})
          .run(context);
    };
    if (select_most(step.sequences(), p.cfg)) {
      attend.template operator()<SelectedBranch<In>>();
    } else {
      attend.template operator()<SelectedBranch<In, PackedOnDemand<In>>>();
    }
  });
  step.finish();
  return {};
}

}  // namespace nsa::cpu::NSA_ISA
