#include "kv_cache_support.h"

namespace nsa::test {

const CacheUnderTest under_test{{},
                                8,
                                kCapacity,
                                [](const DecodeParams& p) {
                                  return (p.q.size(1) > kMaxDecodeTokens ? prefill : decode)(p, {Backend::kCPU, 1});
                                },
                                [](const TensorView& view) {
                                  Tensor copy(view.dtype, shape_of(view));
                                  assign(view, copy);
                                  return copy;
                                }};

}  // namespace nsa::test
