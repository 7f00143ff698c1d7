// A layer's attention end to end in host memory, made of a backend's operations one after the other.
#pragma once

#include <cstddef>
#include <vector>

#include "core/layout.h"
#include "core/rotate.h"
#include "nsa/operations.h"

namespace nsa {

/// Whether the backward of a compression has anything to compute.
inline bool wanted(const TensorView& d_k, const CompressionWeights& d) {
  return d_k.defined() || d.pe.defined() || d.w1.defined() || d.b1.defined() || d.w2.defined() || d.b2.defined();
}

/// Offsets of the raw keys of a packed call.
inline const TensorView& key_offsets(const Packed& packed) {
  return packed.cu_seqlens_k.defined() ? packed.cu_seqlens_k : packed.cu_seqlens_q;
}

inline CompressParams compress_keys(const NativeSparseAttentionParams& p, const TensorView& k_c) {
  return {.k = p.k_cmp,
          .weights = p.weights_k,
          .cfg = p.attention.cfg,
          .cu_seqlens = key_offsets(p.attention.packed),
          .out = k_c};
}
inline CompressParams compress_values(const NativeSparseAttentionParams& p, const TensorView& v_c) {
  return {.k = p.v_cmp,
          .weights = p.weights_v,
          .cfg = p.attention.cfg,
          .cu_seqlens = key_offsets(p.attention.packed),
          .out = v_c};
}

/// What is given to nsa_attention_backward: all but k_c, v_c and their gradients.
inline NsaAttentionBackwardParams attention_backward(const NativeSparseAttentionBackwardParams& p) {
  NsaAttentionBackwardParams b;
  b.forward = p.forward.attention;
  b.d_o = p.d_o, b.d_q = p.d_q, b.d_gates = p.d_gates;
  b.d_k_slc = p.d_k_slc, b.d_v_slc = p.d_v_slc, b.d_k_swa = p.d_k_swa, b.d_v_swa = p.d_v_swa;
  return b;
}

/// run(params) runs a backend's operation. Compressed tokens that are not returned are held in type `between`.
template <class Run>
class HostNativeSparseAttention {
 public:
  HostNativeSparseAttention(Run run, DType between) : run_(run), between_(between) {}

  Status forward(const NativeSparseAttentionParams& p) const {
    Compressed compressed;
    NsaAttentionParams attention = p.attention;
    if (Status s = compress(p, attention, compressed); !s.ok()) return s;
    return run_(attention);
  }

  Status backward(const NativeSparseAttentionBackwardParams& p) const {
    const NativeSparseAttentionParams& f = p.forward;
    Compressed compressed, gradients;
    NsaAttentionBackwardParams b = attention_backward(p);
    if (!b.forward.k_c.defined())
      if (Status s = compress(f, b.forward, compressed); !s.ok()) return s;
    const bool keys = wanted(p.d_k_cmp, p.d_weights_k), values = wanted(p.d_v_cmp, p.d_weights_v);
    if (keys) b.d_k_c = make(gradients.k, f.k_cmp, f.attention.cfg);
    if (values) b.d_v_c = make(gradients.v, f.v_cmp, f.attention.cfg);
    if (Status s = run_(b); !s.ok()) return s;
    if (keys) {
      rotate(f, b.d_k_c, true);
      const CompressBackwardParams compress{
          .forward = compress_keys(f, {}), .d_out = b.d_k_c, .d_k = p.d_k_cmp, .d_weights = p.d_weights_k};
      if (Status s = run_(compress); !s.ok()) return s;
    }
    if (!values) return {};
    return run_(CompressBackwardParams{
        .forward = compress_values(f, {}), .d_out = b.d_v_c, .d_k = p.d_v_cmp, .d_weights = p.d_weights_v});
  }

 private:
  struct Compressed {
    std::vector<std::byte> k, v;
  };

  TensorView make(std::vector<std::byte>& memory, const TensorView& raw, const NSAConfig& cfg) const {
    TensorView view = compressed_shape(raw, cfg);
    view.dtype = between_;
    memory.resize(static_cast<std::size_t>(view.numel()) * size_of(between_));
    view.data = memory.data();
    return view;
  }

  static void rotate(const NativeSparseAttentionParams& p, const TensorView& k_c, bool back) {
    const NsaAttentionParams& a = p.attention;
    rotate_compressed(k_c, sequences_of(a.q, p.k_cmp.size(1), a.packed, a.cfg), a.cfg, {p.rope_cos, p.rope_sin}, back);
  }

  /// attention.k_c and v_c: where the caller wants them, or in `memory`.
  Status compress(const NativeSparseAttentionParams& p, NsaAttentionParams& attention, Compressed& memory) const {
    if (!attention.k_c.defined()) {
      attention.k_c = make(memory.k, p.k_cmp, attention.cfg);
      attention.v_c = make(memory.v, p.v_cmp, attention.cfg);
    }
    if (Status s = run_(compress_keys(p, attention.k_c)); !s.ok()) return s;
    if (Status s = run_(compress_values(p, attention.v_c)); !s.ok()) return s;
    rotate(p, attention.k_c, false);
    return {};
  }

  Run run_;
  DType between_;
};

}  // namespace nsa
