// Compress, rotate, attend. As operations of the backend, with compressed tokens in the type of the others, that is
// exactly the separate operations; as the oracle of a precision, with compressed tokens of that precision.
#include "core/native_sparse_attention.h"

#include "core/backend.h"
#include "reference/reference.h"

namespace nsa::reference {
namespace {

struct Run {
  DType precision;

  Status operator()(const CompressParams& p) const { return compress(p, precision); }
  Status operator()(const CompressBackwardParams& p) const { return compress_backward(p, precision); }
  Status operator()(const NsaAttentionParams& p) const { return nsa_attention(p, precision); }
  Status operator()(const NsaAttentionBackwardParams& p) const { return nsa_attention_backward(p, precision); }
};

}  // namespace

Status native_sparse_attention(const NativeSparseAttentionParams& p, DType precision) {
  return HostNativeSparseAttention(Run{precision}, precision).forward(p);
}

Status native_sparse_attention_backward(const NativeSparseAttentionBackwardParams& p, DType precision) {
  return HostNativeSparseAttention(Run{precision}, precision).backward(p);
}

Status native_sparse_attention(const NativeSparseAttentionParams& p, const Context&) {
  return HostNativeSparseAttention(Run{DType::kFloat64}, p.k_cmp.dtype).forward(p);
}

Status native_sparse_attention_backward(const NativeSparseAttentionBackwardParams& p, const Context&) {
  return HostNativeSparseAttention(Run{DType::kFloat64}, p.forward.k_cmp.dtype).backward(p);
}

}  // namespace nsa::reference
