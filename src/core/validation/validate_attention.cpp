#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>

#include "core/validation/check.h"
#include "core/validation/validate.h"

namespace nsa {
namespace {

/// The sizes in one attention call, and the shapes that its tensors must have.
struct Shapes {
  explicit Shapes(const Packed& packed) : packed(packed.packed()) {}

  bool packed;
  Dim B{"B"}, Sq{packed ? "total_q" : "Sq"}, Sk{packed ? "total_k" : "Sk"};
  Dim Nc{packed ? "floor(total_k / kernel_stride)" : "N_c(Sk)"};
  Dim H{"H"}, Hkv{"Hkv"}, Dk{"Dk"}, Dv{"Dv"}, three{"", 3};

  Shape rows(Dim& row, Dim& head, Dim& channel) {
    return packed ? Shape{&row, &head, &channel} : Shape{&B, &row, &head, &channel};
  }
  Shape q() { return rows(Sq, H, Dk); }
  Shape o() { return rows(Sq, H, Dv); }
  Shape k() { return rows(Sk, Hkv, Dk); }
  Shape v() { return rows(Sk, Hkv, Dv); }
  Shape k_c() { return rows(Nc, Hkv, Dk); }
  Shape v_c() { return rows(Nc, Hkv, Dv); }
  Shape gates() { return rows(Sq, H, three); }
  Shape indices(Dim& n) { return rows(Sq, Hkv, n); }
  Shape lse() { return packed ? Shape{&H, &Sq} : Shape{&B, &H, &Sq}; }
};

void check_heads(Checker& check, const Shapes& shapes) {
  if (!check.ok()) return;
  check.require(shapes.H.value > 0 && shapes.Hkv.value > 0 && shapes.H.value % shapes.Hkv.value == 0,
                "H = ", shapes.H.value, ", Hkv = ", shapes.Hkv.value, ": Hkv must divide H, both >= 1");
  check.require(shapes.Dk.value > 0, "q: head dim Dk = 0: must be >= 1");
  check.require(shapes.Dv.value != 0, "v: head dim Dv = 0: must be >= 1");
  Call& call = check.call();
  call.packed = shapes.packed;
  call.problem.key_dim = shapes.Dk.value;
  call.problem.value_dim = shapes.Dv.value == Dim::kUnknown ? 0 : shapes.Dv.value;
}

void check_upper_bound(Checker& check, const char* name, std::int64_t bound, const char* source,
                       const TensorView& given) {
  check.require(bound >= 0, name, " = ", bound, ": must be >= 0 (0: the total)");
  check.note(name, bound);
  if (bound <= 0) return;
  const TensorView offsets = check.readable(given);
  if (!offsets.defined()) return;
  for (std::int64_t b = 0; check.ok() && b + 1 < offsets.size(0); ++b) {
    const std::int64_t length = int32_at(offsets, b + 1) - int32_at(offsets, b);
    check.require(length <= bound, name, " = ", bound, ": ", source, " has a sequence of ", length);
  }
}

/// Offsets of a packed call, or the lengths of a batched one. `k_total` is unknown where only compressed keys are
/// given.
void check_lengths(Checker& check, const Shapes& shapes, const Packed& packed, std::int64_t k_len) {
  if (!check.ok()) return;
  if (!shapes.packed) {
    check.require(!packed.cu_seqlens_k.defined(), "cu_seqlens_k: given without cu_seqlens_q");
    check.require(shapes.Sq.value <= k_len, "Sq = ", shapes.Sq.value, ", Sk = ", k_len, ": Sq must not exceed Sk");
    return;
  }
  Dim count{"B + 1"};
  check.int32("cu_seqlens_q", packed.cu_seqlens_q, Access::kInput, {&count});
  check.offsets("cu_seqlens_q", packed.cu_seqlens_q, shapes.Sq.value);
  const bool own_k = packed.cu_seqlens_k.defined();
  if (own_k) check.int32("cu_seqlens_k", packed.cu_seqlens_k, Access::kInput, {&count});
  const TensorView& k_offsets = own_k ? packed.cu_seqlens_k : packed.cu_seqlens_q;
  const char* k_name = own_k ? "cu_seqlens_k" : "cu_seqlens_q (cu_seqlens_k is not given)";
  check.offsets(k_name, k_offsets, k_len == Dim::kUnknown ? std::numeric_limits<std::int32_t>::max() : k_len);
  if (!check.ok()) return;
  check_upper_bound(check, "max_seqlen_q", packed.max_seqlen_q, "cu_seqlens_q", packed.cu_seqlens_q);
  check_upper_bound(check, "max_seqlen_k", packed.max_seqlen_k, k_name, k_offsets);
  if (!own_k) return;
  const TensorView q_read = check.readable(packed.cu_seqlens_q), k_read = check.readable(k_offsets);
  if (!q_read.defined() || !k_read.defined()) return;
  for (std::int64_t b = 0; check.ok() && b + 1 < count.value; ++b) {
    const std::int64_t q_len = int32_at(q_read, b + 1) - int32_at(q_read, b);
    const std::int64_t k_len_b = int32_at(k_read, b + 1) - int32_at(k_read, b);
    check.require(q_len <= k_len_b, "cu_seqlens_q: sequence ", b, " has ", q_len, " queries, but only ", k_len_b,
                  " keys in cu_seqlens_k");
  }
}

/// Lengths of a call that sees the keys only through their compressed tokens.
void check_compressed_lengths(Checker& check, const Shapes& shapes, const Packed& packed, const NSAConfig& cfg,
                              const std::optional<std::int64_t>& seqlen_k) {
  if (!check.ok()) return;
  check.require(!(shapes.packed && seqlen_k), "seqlen_k: only for batched calls; cu_seqlens_k has the lengths here");
  if (seqlen_k) {
    check.require(*seqlen_k >= 0 && *seqlen_k <= std::numeric_limits<std::int32_t>::max(), "seqlen_k = ", *seqlen_k,
                  ": must be >= 0 and below 2^31");
    check.note("seqlen_k", *seqlen_k);
  }
  const std::int64_t k_len = shapes.packed ? Dim::kUnknown : seqlen_k.value_or(shapes.Sq.value);
  check_lengths(check, shapes, packed, k_len);
  if (!check.ok()) return;
  if (!shapes.packed) {
    check.require(cfg.num_compressed(k_len) == shapes.Nc.value, "k_c: ", shapes.Nc.value,
                  " compressed tokens: seqlen_k = ", k_len, seqlen_k ? "" : " (not given: Sq)", " makes ",
                  cfg.num_compressed(k_len));
    return;
  }
  const TensorView offsets = check.readable(packed.cu_seqlens_k.defined() ? packed.cu_seqlens_k : packed.cu_seqlens_q);
  if (!offsets.defined()) return;
  const std::int64_t needed = int32_at(offsets, offsets.size(0) - 1) / cfg.kernel_stride;
  check.require(shapes.Nc.value >= needed, "k_c: ", shapes.Nc.value,
                " rows: expected floor(total_k / kernel_stride), at least ", needed);
}

void check_block_size(Checker& check, int block_size) {
  check.require(block_size >= 16 && block_size % 16 == 0, "block_size = ", block_size,
                ": must be a positive multiple of 16");
  check.note("block_size", std::int64_t{block_size});
}

/// Checks what every branch has besides its q, keys and values; `check_sequences` checks the lengths.
template <class Params, class CheckSequences>
void check_branch(Checker& check, Shapes& shapes, const Params& params, Access results,
                  CheckSequences&& check_sequences) {
  check_heads(check, shapes);
  check.softmax_scale(params.softmax_scale);
  check_sequences();
  check.tensor("o", params.o, results, shapes.o());
  check.float32("lse", params.lse, results, shapes.lse());
}

// One check_forward for each operation; in the backward the forward's results are inputs.

void check_forward(Checker& check, Shapes& shapes, const CompressedAttentionParams& params, Access results) {
  check.config(params.cfg);
  check.tensor("q", params.q, Access::kInput, shapes.q());
  check.tensor("k_c", params.k_c, Access::kInput, shapes.k_c());
  check.tensor("v_c", params.v_c, Access::kInput, shapes.v_c());
  check_branch(check, shapes, params, results,
               [&] { check_compressed_lengths(check, shapes, params.packed, params.cfg, params.seqlen_k); });
}

/// What selected and sliding-window attention have in common.
template <class Params>
void check_token_attention(Checker& check, Shapes& shapes, const Params& params, Access results) {
  check.tensor("q", params.q, Access::kInput, shapes.q());
  check.tensor("k", params.k, Access::kInput, shapes.k());
  check.tensor("v", params.v, Access::kInput, shapes.v());
  check_branch(check, shapes, params, results, [&] { check_lengths(check, shapes, params.packed, shapes.Sk.value); });
}

void check_forward(Checker& check, Shapes& shapes, const SelectedAttentionParams& params, Access results) {
  Dim n{"n"};
  check_block_size(check, params.block_size);
  check_token_attention(check, shapes, params, results);
  check.int32("indices", params.indices, Access::kInput, shapes.indices(n));
}

void check_forward(Checker& check, Shapes& shapes, const SlidingWindowAttentionParams& params, Access results) {
  check.require(params.window_size >= 1, "window_size = ", params.window_size, ": must be >= 1");
  check.note("window_size", params.window_size);
  check_token_attention(check, shapes, params, results);
}

/// nsa_attention. `made_here`: k_c and v_c are results of the call too, both or none.
void check_whole(Checker& check, Shapes& shapes, const NsaAttentionParams& params, Access results, bool made_here) {
  Dim topk{"topk", params.cfg.topk};
  check.config(params.cfg);
  check.tensor("q", params.q, Access::kInput, shapes.q());
  check.tensor("k_slc", params.k_slc, Access::kInput, shapes.k());
  check.tensor("v_slc", params.v_slc, Access::kInput, shapes.v());
  check.tensor("k_swa", params.k_swa, Access::kInput, shapes.k());
  check.tensor("v_swa", params.v_swa, Access::kInput, shapes.v());
  if (check.ok()) shapes.Nc.value = params.cfg.compressed_rows(shapes.Sk.value, shapes.packed);
  if (!made_here || params.k_c.defined() || params.v_c.defined()) {
    check.tensor("k_c", params.k_c, made_here ? results : Access::kInput, shapes.k_c());
    check.tensor("v_c", params.v_c, made_here ? results : Access::kInput, shapes.v_c());
  }
  check_heads(check, shapes);
  check.tensor("gates", params.gates, Access::kInput, shapes.gates());
  check.softmax_scale(params.softmax_scale);
  check.noise(params.noise, params.seed);
  check_lengths(check, shapes, params.packed, shapes.Sk.value);
  check.optional_int32("block_indices", params.block_indices, Access::kInput, shapes.indices(topk));
  const bool backward = results == Access::kInput;
  if (!backward) check.tensor("o", params.o, results, shapes.o());
  const bool attended = backward && !params.block_indices.defined();
  if (attended || params.indices.defined()) check.int32("indices", params.indices, results, shapes.indices(topk));
  for (const auto& [name, view] :
       {std::pair{"o_cmp", &params.o_cmp}, {"o_slc", &params.o_slc}, {"o_swa", &params.o_swa}})
    if (backward || view->defined()) check.tensor(name, *view, results, shapes.o());
  for (const auto& [name, view] :
       {std::pair{"lse_cmp", &params.lse_cmp}, {"lse_slc", &params.lse_slc}, {"lse_swa", &params.lse_swa}})
    if (backward || view->defined()) check.float32(name, *view, results, shapes.lse());
}

void check_forward(Checker& check, Shapes& shapes, const NsaAttentionParams& params, Access results) {
  check_whole(check, shapes, params, results, false);
}

/// The last position at which a compressed key is rotated; 0 where the lengths lie on a device, -1 without tokens.
std::int64_t last_compressed_position(Checker& check, const Shapes& shapes, const NsaAttentionParams& params) {
  if (shapes.Sk.value == 0) return -1;
  std::int64_t longest = shapes.packed ? 0 : shapes.Sk.value;
  if (shapes.packed) {
    const Packed& packed = params.packed;
    const TensorView cu = check.readable(packed.cu_seqlens_k.defined() ? packed.cu_seqlens_k : packed.cu_seqlens_q);
    for (std::int64_t b = 0; cu.defined() && b + 1 < cu.size(0); ++b)
      longest = std::max(longest, int32_at(cu, b + 1) - int32_at(cu, b));
  }
  return std::max<std::int64_t>(params.cfg.num_compressed(longest) - 1, 0) * params.cfg.kernel_stride;
}

void check_forward(Checker& check, Shapes& shapes, const NativeSparseAttentionParams& params, Access results) {
  const NsaAttentionParams& attention = params.attention;
  check_whole(check, shapes, attention, results, true);
  check.tensor("k_cmp", params.k_cmp, Access::kInput, shapes.k());
  check.tensor("v_cmp", params.v_cmp, Access::kInput, shapes.v());
  if (!check.ok()) return;
  check_weights(check, "weights_k.", params.weights_k, attention.cfg, shapes.Hkv, shapes.Dk);
  check_weights(check, "weights_v.", params.weights_v, attention.cfg, shapes.Hkv, shapes.Dv);
  const std::int64_t positions = check_rotation(check, params.rope_cos, params.rope_sin, shapes.Dk);
  if (!check.ok() || !params.rope_cos.defined()) return;
  const std::int64_t last = last_compressed_position(check, shapes, attention);
  check.require(last < positions, "rope_cos: ", params.rope_cos, ": a compressed key is rotated at position ", last);
}

void check_forward(Checker& check, Shapes& shapes, const CombineParams& params) {
  check.tensor("o_cmp", params.o_cmp, Access::kInput, shapes.o());
  check.tensor("o_slc", params.o_slc, Access::kInput, shapes.o());
  check.tensor("o_swa", params.o_swa, Access::kInput, shapes.o());
  check.tensor("gates", params.gates, Access::kInput, shapes.gates());
  check.call().packed = shapes.packed;
  check.call().problem.key_dim = 0;
  check.call().problem.value_dim = shapes.Dv.value;
}

/// combine has no sequences: rank 3 is the packed layout.
Packed layout_of(const CombineParams& params) {
  Packed packed;
  if (params.o_cmp.rank == 3) packed.cu_seqlens_q.rank = 1;
  return packed;
}

const Packed& packed_of(const NativeSparseAttentionParams& params) { return params.attention.packed; }
const Packed& packed_of(const auto& params) { return params.packed; }

template <class Params>
Status validate_forward(const Params& params, Call& call) {
  Checker check(call);
  Shapes shapes(packed_of(params));
  check_forward(check, shapes, params, Access::kOutput);
  return check.finish();
}

/// A gradient that a backward may be asked for.
struct Gradient {
  const char* name;
  const TensorView& view;
  Shape (Shapes::*shape)();
};

template <class BackwardParams>
Status validate_backward(const BackwardParams& params, std::initializer_list<Gradient> gradients, Call& call) {
  Checker check(call);
  Shapes shapes(packed_of(params.forward));
  check_forward(check, shapes, params.forward, Access::kInput);
  check.incoming_gradient("d_o", params.d_o, shapes.o());
  check.optional_tensor("d_q", params.d_q, Access::kOutput, shapes.q());
  for (const Gradient& gradient : gradients)
    check.optional_tensor(gradient.name, gradient.view, Access::kOutput, (shapes.*gradient.shape)());
  if constexpr (requires { params.d_weights_k; }) {
    check_weight_gradients(check, "d_weights_k.", params.d_weights_k, params.forward.weights_k);
    check_weight_gradients(check, "d_weights_v.", params.d_weights_v, params.forward.weights_v);
  }
  return check.finish();
}

template <class BackwardParams>
Status validate_token_backward(const BackwardParams& params, Call& call) {
  return validate_backward(params, {{"d_k", params.d_k, &Shapes::k}, {"d_v", params.d_v, &Shapes::v}}, call);
}

}  // namespace

Status validate(const CompressedAttentionParams& params, Call& call) { return validate_forward(params, call); }

Status validate(const CompressedAttentionBackwardParams& params, Call& call) {
  return validate_backward(params, {{"d_k_c", params.d_k_c, &Shapes::k_c}, {"d_v_c", params.d_v_c, &Shapes::v_c}},
                           call);
}

Status validate(const SelectBlocksParams& params, Call& call) {
  Checker check(call);
  Shapes shapes(params.packed);
  Dim topk{"topk", params.cfg.topk};
  check.config(params.cfg);
  check.tensor("q", params.q, Access::kInput, shapes.q());
  check.tensor("k_c", params.k_c, Access::kInput, shapes.k_c());
  check_heads(check, shapes);
  check.float32("lse", params.lse, Access::kInput, shapes.lse());
  check.softmax_scale(params.softmax_scale);
  check.noise(params.noise, params.seed);
  check_compressed_lengths(check, shapes, params.packed, params.cfg, params.seqlen_k);
  check.int32("indices", params.indices, Access::kOutput, shapes.indices(topk));
  return check.finish();
}

Status validate(const SelectedAttentionParams& params, Call& call) { return validate_forward(params, call); }

Status validate(const SelectedAttentionBackwardParams& params, Call& call) {
  return validate_token_backward(params, call);
}

Status validate(const SlidingWindowAttentionParams& params, Call& call) { return validate_forward(params, call); }

Status validate(const SlidingWindowAttentionBackwardParams& params, Call& call) {
  return validate_token_backward(params, call);
}

Status validate(const CombineParams& params, Call& call) {
  Checker check(call);
  Shapes shapes(layout_of(params));
  check_forward(check, shapes, params);
  check.tensor("o", params.o, Access::kOutput, shapes.o());
  return check.finish();
}

Status validate(const CombineBackwardParams& params, Call& call) {
  Checker check(call);
  Shapes shapes(layout_of(params.forward));
  check_forward(check, shapes, params.forward);
  check.incoming_gradient("d_o", params.d_o, shapes.o());
  check.optional_tensor("d_o_cmp", params.d_o_cmp, Access::kOutput, shapes.o());
  check.optional_tensor("d_o_slc", params.d_o_slc, Access::kOutput, shapes.o());
  check.optional_tensor("d_o_swa", params.d_o_swa, Access::kOutput, shapes.o());
  check.optional_tensor("d_gates", params.d_gates, Access::kOutput, shapes.gates());
  return check.finish();
}

Status validate(const NsaAttentionParams& params, Call& call) { return validate_forward(params, call); }

Status validate(const NsaAttentionBackwardParams& params, Call& call) {
  return validate_backward(params,
                           {{"d_k_c", params.d_k_c, &Shapes::k_c},
                            {"d_v_c", params.d_v_c, &Shapes::v_c},
                            {"d_k_slc", params.d_k_slc, &Shapes::k},
                            {"d_v_slc", params.d_v_slc, &Shapes::v},
                            {"d_k_swa", params.d_k_swa, &Shapes::k},
                            {"d_v_swa", params.d_v_swa, &Shapes::v},
                            {"d_gates", params.d_gates, &Shapes::gates}},
                           call);
}

Status validate(const NativeSparseAttentionParams& params, Call& call) { return validate_forward(params, call); }

Status validate(const NativeSparseAttentionBackwardParams& params, Call& call) {
  return validate_backward(params,
                           {{"d_k_cmp", params.d_k_cmp, &Shapes::k},
                            {"d_v_cmp", params.d_v_cmp, &Shapes::v},
                            {"d_k_slc", params.d_k_slc, &Shapes::k},
                            {"d_v_slc", params.d_v_slc, &Shapes::v},
                            {"d_k_swa", params.d_k_swa, &Shapes::k},
                            {"d_v_swa", params.d_v_swa, &Shapes::v},
                            {"d_gates", params.d_gates, &Shapes::gates}},
                           call);
}

}  // namespace nsa
