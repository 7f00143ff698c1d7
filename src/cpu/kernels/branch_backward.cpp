// The backward operations: what each hands to attention_backward().
#include "cpu/kernels/attention_backward.h"
#include "cpu/kernels/for_dtype.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/queries.h"
#include "cpu/kernels/visible.h"

namespace nsa::cpu::NSA_ISA {
namespace {

BackwardCall call_of(const TensorView& q, const TensorView& d_o, const TensorView& d_q, std::vector<Sequence> sequences,
                     std::int64_t kv_heads, const std::optional<double>& scale) {
  BackwardCall call;
  call.q = q, call.d_o = d_o, call.d_q = d_q;
  call.sequences = std::move(sequences);
  call.kv_heads = kv_heads;
  call.scale = scale_of(scale, static_cast<int>(q.size(-1)));
  return call;
}

BranchCall compressed_branch(const NSAConfig& cfg) {
  BranchCall branch;
  branch.compressed = true;
  branch.visible = [cfg](const Sequence& s, std::int64_t, std::int64_t row, std::vector<Range>& ranges) {
    ranges.push_back(visible_in_compressed(cfg, s.position(row)));
  };
  return branch;
}

BranchCall window_branch(std::int64_t window) {
  BranchCall branch;
  branch.compressed = false;
  branch.visible = [window](const Sequence& s, std::int64_t, std::int64_t row, std::vector<Range>& ranges) {
    ranges.push_back(visible_in_window(window, s.position(row)));
  };
  return branch;
}

BranchCall selected_branch(const TensorView& indices, int block_size) {
  BranchCall branch;
  branch.compressed = false;
  branch.visible = [indices, block_size,
                    sorted = std::vector<std::int32_t>(static_cast<std::size_t>(indices.size(-1)))](
                       const Sequence& s, std::int64_t kv_head, std::int64_t row, std::vector<Range>& ranges) mutable {
    const std::int32_t* blocks = rows_of<const std::int32_t>(indices, s.batch, s.q_begin).at(row, kv_head);
    for_visible_in_selected(blocks, indices.size(-1), block_size, s.position(row), sorted.data(),
                            [&](Range range) { ranges.push_back(range); });
  };
  return branch;
}

/// One more branch, with what it reads and its gradients.
void add(BackwardCall& call, BranchCall branch, const TensorView& k, const TensorView& v, const TensorView& o,
         const TensorView& lse, const TensorView& d_k, const TensorView& d_v) {
  branch.k = k, branch.v = v, branch.o = o, branch.lse = lse, branch.d_k = d_k, branch.d_v = d_v;
  call.branches.push_back(std::move(branch));
}

Status run(const BackwardCall& call, const Context& context) {
  for_dtype(call.q.dtype, [&]<class In>() { attention_backward<In>(call, context); });
  return {};
}

}  // namespace

Status run(const CompressedAttentionBackwardParams& p, const Context& context) {
  const CompressedAttentionParams& f = p.forward;
  BackwardCall call = call_of(f.q, p.d_o, p.d_q, sequences_of(f.q, raw_length(f.q, f.seqlen_k), f.packed, f.cfg),
                              f.k_c.size(-2), f.softmax_scale);
  add(call, compressed_branch(f.cfg), f.k_c, f.v_c, f.o, f.lse, p.d_k_c, p.d_v_c);
  return run(call, context);
}

Status run(const SelectedAttentionBackwardParams& p, const Context& context) {
  const SelectedAttentionParams& f = p.forward;
  BackwardCall call =
      call_of(f.q, p.d_o, p.d_q, sequences_of(f.q, f.k.size(1), f.packed, {}), f.k.size(-2), f.softmax_scale);
  add(call, selected_branch(f.indices, f.block_size), f.k, f.v, f.o, f.lse, p.d_k, p.d_v);
  return run(call, context);
}

Status run(const SlidingWindowAttentionBackwardParams& p, const Context& context) {
  const SlidingWindowAttentionParams& f = p.forward;
  BackwardCall call =
      call_of(f.q, p.d_o, p.d_q, sequences_of(f.q, f.k.size(1), f.packed, {}), f.k.size(-2), f.softmax_scale);
  add(call, window_branch(f.window_size), f.k, f.v, f.o, f.lse, p.d_k, p.d_v);
  return run(call, context);
}

Status run(const NsaAttentionBackwardParams& p, const Context& context) {
  const NsaAttentionParams& f = p.forward;
  BackwardCall call = call_of(f.q, p.d_o, p.d_q, sequences_of(f.q, f.k_slc.size(1), f.packed, f.cfg), f.k_slc.size(-2),
                              f.softmax_scale);
  call.gates = f.gates, call.d_gates = p.d_gates;
  add(call, compressed_branch(f.cfg), f.k_c, f.v_c, f.o_cmp, f.lse_cmp, p.d_k_c, p.d_v_c);
  add(call, selected_branch(f.block_indices.defined() ? f.block_indices : f.indices, f.cfg.block_size), f.k_slc,
      f.v_slc, f.o_slc, f.lse_slc, p.d_k_slc, p.d_v_slc);
  add(call, window_branch(f.cfg.window_size), f.k_swa, f.v_swa, f.o_swa, f.lse_swa, p.d_k_swa, p.d_v_swa);
  return run(call, context);
}

}  // namespace nsa::cpu::NSA_ISA
