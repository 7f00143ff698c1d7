// Compress, rotate, attend. As operations of the backend, with compressed tokens in the type of the others, that is
// exactly the separate operations; as the oracle of a precision, with compressed tokens of that precision.
#include "core/native_sparse_attention.h"

#include "core/backend.h"
#include "reference/reference.h"

namespace nsa::reference {
namespace {

/// The separate operations, computed in `precision`.
auto composed(DType precision, DType between) {
  return HostNativeSparseAttention([precision](const auto& params) { return run(params, precision); }, between);
}

}  // namespace

Status run(const NativeSparseAttentionParams& p, DType precision) { return composed(precision, precision).forward(p); }

Status run(const NativeSparseAttentionBackwardParams& p, DType precision) {
  return composed(precision, precision).backward(p);
}

Status run(const NativeSparseAttentionParams& p, const Context&) {
  return composed(DType::kFloat64, p.k_cmp.dtype).forward(p);
}

Status run(const NativeSparseAttentionBackwardParams& p, const Context&) {
  return composed(DType::kFloat64, p.forward.k_cmp.dtype).backward(p);
}

}  // namespace nsa::reference
