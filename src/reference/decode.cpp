// One step with a cache: append, compress, then the operations of nsa_attention on what each sequence's cache holds.
#include "core/backend.h"
#include "core/cache_step.h"
#include "core/element.h"
#include "reference/reference.h"

namespace nsa::reference {
namespace {

/// Tokens begin ... end - 1 of a cache, one after the other: e4m3 values in float64, which holds them exactly.
TokenBuffer gathered(const TensorView& like, const TokenRows& rows, std::int64_t begin, std::int64_t end) {
  const DType dtype = rows.dtype == DType::kFloat8E4M3 ? DType::kFloat64 : rows.dtype;
  TokenBuffer buffer(like, begin, end - begin, dtype, {});
  buffer.take(rows, begin, end);
  return buffer;
}

/// Each product and each sum is rounded to float32, or to float64 for that type.
void rotate(const RotatedStep& step, const RotatedStep::Token& token) {
  const DecodeParams& p = step.params;
  const float* const cos = p.rope_cos.as<const float>() + token.position * p.rope_cos.stride[0];
  const float* const sin = p.rope_sin.as<const float>() + token.position * p.rope_sin.stride[0];
  const std::int64_t dim = p.q.size(-1), half = dim / 2;
  const auto rounded = [&](double x) { return p.q.dtype == DType::kFloat64 ? x : static_cast<float>(x); };
  step.rotate(token, [&](std::byte* from, std::byte* to) {
    const TensorView x = TensorView::contiguous(from, p.q.dtype, {dim});
    const TensorView y = TensorView::contiguous(to, p.q.dtype, {dim});
    for (std::int64_t j = 0; j < half; ++j) {
      const double low = get_element(x, j), high = get_element(x, j + half);
      set_element(y, j, rounded(rounded(low * cos[j]) - rounded(high * sin[j])));
      set_element(y, j + half, rounded(rounded(high * cos[j]) + rounded(low * sin[j])));
    }
  });
}

void attend(const DecodeParams& p, const StepSequence& s) {
  const auto step_rows = [&](const TensorView& tensor) { return slice_rows(tensor, s.q_batch, s.q_begin, s.num_new); };
  const TensorView q = step_rows(p.q), o = step_rows(p.o);
  const Temporary o_cmp(o, DType::kFloat64), o_slc(o, DType::kFloat64), o_swa(o, DType::kFloat64);
  const TensorView lse_shape = TensorView::contiguous(nullptr, DType::kFloat64, {1, q.size(2), q.size(1)});
  const Temporary lse(lse_shape, DType::kFloat64), lse_unused(lse_shape, DType::kFloat64);

  const std::int64_t blocks = p.cfg.num_compressed(s.length);
  const TokenBuffer k_c = gathered(p.k_cmp, s.k_c, 0, blocks), v_c = gathered(p.v_cmp, s.v_c, 0, blocks);
  (void)run(CompressedAttentionParams{.q = q,
                                      .k_c = k_c.view(),
                                      .v_c = v_c.view(),
                                      .cfg = p.cfg,
                                      .softmax_scale = p.softmax_scale,
                                      .seqlen_k = s.length,
                                      .o = o_cmp.view(),
                                      .lse = lse.view()},
            DType::kFloat64);

  const Temporary own_indices(
      TensorView::contiguous(nullptr, DType::kInt32, {1, s.num_new, p.k_cmp.size(-2), p.cfg.topk}), DType::kInt32);
  (void)run(SelectBlocksParams{.q = q,
                               .k_c = k_c.view(),
                               .lse = lse.view(),
                               .cfg = p.cfg,
                               .softmax_scale = p.softmax_scale,
                               .seqlen_k = s.length,
                               .indices = own_indices.view()},
            Context{});
  add({own_indices.view()}, step_rows(p.indices));
  const TensorView indices = p.block_indices.defined() ? step_rows(p.block_indices) : own_indices.view();

  const TokenBuffer k_slc = gathered(p.k_slc, s.k_slc, 0, s.length), v_slc = gathered(p.v_slc, s.v_slc, 0, s.length);
  (void)run(SelectedAttentionParams{.q = q,
                                    .k = k_slc.view(),
                                    .v = v_slc.view(),
                                    .indices = indices,
                                    .block_size = p.cfg.block_size,
                                    .softmax_scale = p.softmax_scale,
                                    .o = o_slc.view(),
                                    .lse = lse_unused.view()},
            DType::kFloat64);

  const TokenBuffer k_swa = gathered(p.k_swa, s.k_swa, s.window_begin, s.length),
                    v_swa = gathered(p.v_swa, s.v_swa, s.window_begin, s.length);
  (void)run(SlidingWindowAttentionParams{.q = q,
                                         .k = k_swa.view(),
                                         .v = v_swa.view(),
                                         .window_size = p.cfg.window_size,
                                         .softmax_scale = p.softmax_scale,
                                         .o = o_swa.view(),
                                         .lse = lse_unused.view()},
            DType::kFloat64);
  (void)run(
      CombineParams{
          .o_cmp = o_cmp.view(), .o_slc = o_slc.view(), .o_swa = o_swa.view(), .gates = step_rows(p.gates), .o = o},
      DType::kFloat64);
}

}  // namespace

Status run(const DecodeParams& given, const Context& context) {
  const RotatedStep rotated(given);
  const DecodeParams& params = rotated.params;
  for (const RotatedStep::Token& token : rotated.tokens()) rotate(rotated, token);
  CacheStep step(params);
  if (Status status = step.append([](const CompressParams& p, const Context& c) { return run(p, c); }, context);
      !status.ok())
    return status;
  for (const StepSequence& sequence : step.sequences()) attend(params, sequence);
  step.finish();
  return {};
}

}  // namespace nsa::reference
