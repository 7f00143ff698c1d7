// The three branches and their combination; the branches meet unrounded.
#include "core/backend.h"
#include "reference/reference.h"

namespace nsa::reference {
namespace {

/// The parameters of each branch, outputs left open.
CompressedAttentionParams compressed_branch(const NsaAttentionParams& p) {
  CompressedAttentionParams branch;
  branch.q = p.q, branch.k_c = p.k_c, branch.v_c = p.v_c;
  branch.cfg = p.cfg;
  branch.softmax_scale = p.softmax_scale;
  if (!p.packed.packed()) branch.seqlen_k = p.k_slc.size(1);
  branch.packed = p.packed;
  return branch;
}

SelectedAttentionParams selected_branch(const NsaAttentionParams& p, const TensorView& indices) {
  SelectedAttentionParams branch;
  branch.q = p.q, branch.k = p.k_slc, branch.v = p.v_slc;
  branch.indices = indices;
  branch.block_size = p.cfg.block_size;
  branch.softmax_scale = p.softmax_scale;
  branch.packed = p.packed;
  return branch;
}

SlidingWindowAttentionParams window_branch(const NsaAttentionParams& p) {
  SlidingWindowAttentionParams branch;
  branch.q = p.q, branch.k = p.k_swa, branch.v = p.v_swa;
  branch.window_size = p.cfg.window_size;
  branch.softmax_scale = p.softmax_scale;
  branch.packed = p.packed;
  return branch;
}

TensorView lse_shape(const TensorView& q) {
  return q.rank == 4 ? TensorView::contiguous(nullptr, DType::kFloat64, {q.size(0), q.size(2), q.size(1)})
                     : TensorView::contiguous(nullptr, DType::kFloat64, {q.size(1), q.size(0)});
}

/// indices (B, Sq, Hkv, topk) or (total_q, Hkv, topk)
TensorView indices_shape(const NsaAttentionParams& p) {
  TensorView shape = p.q;
  shape.shape[shape.rank - 2] = p.k_c.size(-2);
  shape.shape[shape.rank - 1] = p.cfg.topk;
  return shape;
}

/// The rows that belong to a sequence: all of a batched tensor, those before cu_seqlens[-1] of a packed one.
TensorView used_rows(TensorView tensor, const Packed& packed) {
  if (tensor.defined() && packed.packed()) {
    const TensorView& cu = packed.cu_seqlens_q;
    tensor.shape[0] = cu.as<const std::int32_t>()[(cu.size(0) - 1) * cu.stride[0]];
  }
  return tensor;
}

}  // namespace

Status run(const NsaAttentionParams& p, DType precision) {
  const Temporary o_cmp(p.o, DType::kFloat64), o_slc(p.o, DType::kFloat64), o_swa(p.o, DType::kFloat64);
  const Temporary lse(lse_shape(p.q), DType::kFloat64), own_indices(indices_shape(p), DType::kInt32);

  CompressedAttentionParams compressed = compressed_branch(p);
  compressed.o = o_cmp.view(), compressed.lse = lse.view();
  (void)run(compressed, precision);
  add({lse.view()}, p.lse_cmp);

  if (p.indices.defined() || !p.block_indices.defined()) {
    const SelectBlocksParams selection{.q = p.q,
                                       .k_c = p.k_c,
                                       .lse = lse.view(),
                                       .cfg = p.cfg,
                                       .softmax_scale = p.softmax_scale,
                                       .seqlen_k = compressed.seqlen_k,
                                       .noise = p.noise,
                                       .seed = p.seed,
                                       .packed = p.packed,
                                       .indices = own_indices.view()};
    (void)run(selection, Context{});
    add({own_indices.view()}, p.indices);
  }

  SelectedAttentionParams selected =
      selected_branch(p, p.block_indices.defined() ? p.block_indices : own_indices.view());
  selected.o = o_slc.view(), selected.lse = p.lse_slc;
  (void)run(selected, precision);

  SlidingWindowAttentionParams window = window_branch(p);
  window.o = o_swa.view(), window.lse = p.lse_swa;
  (void)run(window, precision);

  add({o_cmp.view()}, p.o_cmp);
  add({o_slc.view()}, p.o_slc);
  add({o_swa.view()}, p.o_swa);
  fill(p.o, 0);
  const auto used = [&](const TensorView& tensor) { return used_rows(tensor, p.packed); };
  return run(CombineParams{.o_cmp = used(o_cmp.view()),
                           .o_slc = used(o_slc.view()),
                           .o_swa = used(o_swa.view()),
                           .gates = used(p.gates),
                           .o = used(p.o)},
             precision);
}

Status run(const NsaAttentionBackwardParams& p, DType precision) {
  // The forward again, so that the branches enter unrounded, and over the blocks that it attended to.
  NsaAttentionParams f = p.forward;
  if (!f.block_indices.defined()) f.block_indices = f.indices;
  const Temporary o(p.d_o, DType::kFloat64), o_cmp(p.d_o, DType::kFloat64), o_slc(p.d_o, DType::kFloat64),
      o_swa(p.d_o, DType::kFloat64);
  f.o = o.view(), f.o_cmp = o_cmp.view(), f.o_slc = o_slc.view(), f.o_swa = o_swa.view();
  f.indices = f.lse_cmp = f.lse_slc = f.lse_swa = {};
  (void)run(f, precision);

  const Temporary d_o_cmp(p.d_o, DType::kFloat64), d_o_slc(p.d_o, DType::kFloat64), d_o_swa(p.d_o, DType::kFloat64);
  fill(p.d_gates, 0);
  const auto used = [&](const TensorView& tensor) { return used_rows(tensor, f.packed); };
  const CombineParams combined{
      .o_cmp = used(f.o_cmp), .o_slc = used(f.o_slc), .o_swa = used(f.o_swa), .gates = used(f.gates)};
  (void)run(CombineBackwardParams{.forward = combined,
                                  .d_o = used(p.d_o),
                                  .d_o_cmp = used(d_o_cmp.view()),
                                  .d_o_slc = used(d_o_slc.view()),
                                  .d_o_swa = used(d_o_swa.view()),
                                  .d_gates = used(p.d_gates)},
            precision);

  const Temporary d_q_cmp(f.q, DType::kFloat64), d_q_slc(f.q, DType::kFloat64), d_q_swa(f.q, DType::kFloat64);
  (void)run(CompressedAttentionBackwardParams{.forward = compressed_branch(f),
                                              .d_o = d_o_cmp.view(),
                                              .d_q = d_q_cmp.view(),
                                              .d_k_c = p.d_k_c,
                                              .d_v_c = p.d_v_c},
            precision);
  (void)run(SelectedAttentionBackwardParams{.forward = selected_branch(f, f.block_indices),
                                            .d_o = d_o_slc.view(),
                                            .d_q = d_q_slc.view(),
                                            .d_k = p.d_k_slc,
                                            .d_v = p.d_v_slc},
            precision);
  (void)run(SlidingWindowAttentionBackwardParams{.forward = window_branch(f),
                                                 .d_o = d_o_swa.view(),
                                                 .d_q = d_q_swa.view(),
                                                 .d_k = p.d_k_swa,
                                                 .d_v = p.d_v_swa},
            precision);
  add({d_q_cmp.view(), d_q_slc.view(), d_q_swa.view()}, p.d_q, precision);
  return {};
}

Status run(const NsaAttentionParams& p, const Context&) { return run(p, DType::kFloat64); }

Status run(const NsaAttentionBackwardParams& p, const Context&) { return run(p, DType::kFloat64); }

}  // namespace nsa::reference
