#include "core/native_sparse_attention.h"

#include "core/backend.h"

namespace nsa::cpu {
namespace {

struct Run {
  const Context& context;

  Status operator()(const CompressParams& p) const { return cpu::compress(p, context); }
  Status operator()(const CompressBackwardParams& p) const { return cpu::compress_backward(p, context); }
  Status operator()(const NsaAttentionParams& p) const { return cpu::nsa_attention(p, context); }
  Status operator()(const NsaAttentionBackwardParams& p) const { return cpu::nsa_attention_backward(p, context); }
};

}  // namespace

Status native_sparse_attention(const NativeSparseAttentionParams& p, const Context& context) {
  return HostNativeSparseAttention(Run{context}, p.k_cmp.dtype).forward(p);
}

Status native_sparse_attention_backward(const NativeSparseAttentionBackwardParams& p, const Context& context) {
  return HostNativeSparseAttention(Run{context}, p.forward.k_cmp.dtype).backward(p);
}

}  // namespace nsa::cpu
