// A layer's attention end to end: compress, rotation and nsa_attention one after the other, what is between them in
// the workspace.
#include "core/native_sparse_attention.h"

#include "cuda/operations/branch.h"
#include "cuda/operations/operations.h"

namespace nsa::cuda {
namespace {

/// Turns the compressed keys where they lie.
Status rotate(const NativeSparseAttentionParams& p, const TensorView& k_c, bool back, Execution& e) {
  if (!p.rope_cos.defined() || e.arena.measuring()) return {};
  const NsaAttentionParams& a = p.attention;
  const bool packed = a.packed.packed();
  RotateArgs args{};
  args.geometry =
      geometry_of(a.q, p.k_cmp.size(-2), packed ? 0 : p.k_cmp.size(1), packed ? p.k_cmp.size(0) : 0, a.packed, a.cfg);
  args.keys = strided(k_c);
  args.key_dim = to_int(k_c.size(-1));
  args.rotation = rotation_of(p.rope_cos, p.rope_sin);
  args.back = back;
  return status_of(portable::element_kernels(k_c.dtype)->rotate(args, e.stream), "rotate_compressed");
}

TensorView take_compressed(const TensorView& raw, const NSAConfig& cfg, Execution& e) {
  return take_like(e.arena, compressed_shape(raw, cfg), raw.dtype);
}

/// attention.k_c and v_c: where the caller wants them, or in the workspace.
Status compress_and_rotate(const NativeSparseAttentionParams& p, NsaAttentionParams& attention, Execution& e) {
  if (!attention.k_c.defined()) {
    attention.k_c = take_compressed(p.k_cmp, attention.cfg, e);
    attention.v_c = take_compressed(p.v_cmp, attention.cfg, e);
  }
  const CompressParams values = compress_values(p, attention.v_c);
  if (Status s = compress(compress_keys(p, attention.k_c), &values, e); !s.ok()) return s;
  return rotate(p, attention.k_c, false, e);
}

}  // namespace

Status run(const NativeSparseAttentionParams& p, Execution& e) {
  NsaAttentionParams attention = p.attention;
  if (Status s = compress_and_rotate(p, attention, e); !s.ok()) return s;
  return run(attention, e);
}

Status run(const NativeSparseAttentionBackwardParams& p, Execution& e) {
  const NativeSparseAttentionParams& f = p.forward;
  NsaAttentionBackwardParams b = attention_backward(p);
  if (!b.forward.k_c.defined())
    if (Status s = compress_and_rotate(f, b.forward, e); !s.ok()) return s;
  const bool keys = wanted(p.d_k_cmp, p.d_weights_k), values = wanted(p.d_v_cmp, p.d_weights_v);
  if (keys) b.d_k_c = take_compressed(f.k_cmp, f.attention.cfg, e);
  if (values) b.d_v_c = take_compressed(f.v_cmp, f.attention.cfg, e);
  if (Status s = run(b, e); !s.ok()) return s;
  if (keys)
    if (Status s = rotate(f, b.d_k_c, true, e); !s.ok()) return s;
  if (!keys && !values) return {};
  const CompressBackwardParams of_keys{
      .forward = compress_keys(f, {}), .d_out = b.d_k_c, .d_k = p.d_k_cmp, .d_weights = p.d_weights_k};
  const CompressBackwardParams of_values{
      .forward = compress_values(f, {}), .d_out = b.d_v_c, .d_k = p.d_v_cmp, .d_weights = p.d_weights_v};
  return compress_backward(keys ? of_keys : of_values, keys && values ? &of_values : nullptr, e);
}

}  // namespace nsa::cuda
