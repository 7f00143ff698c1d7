#include <cuda_runtime.h>

#include "device.h"
#include "kv_cache_support.h"

namespace nsa::test {

// Steps alone: a chunk rounds otherwise.
const CacheUnderTest under_test{
    {DeviceType::kCUDA, 0},
    64,
    kMaxDecodeTokens,
    [](const DecodeParams& p) {
      return on_device<DecodeParams>(p,
                                     [](const DecodeParams& q, const Context& context) { return decode(q, context); });
    },
    [](const TensorView& view) {
      Tensor copy(view.dtype, shape_of(view));
      const std::size_t bytes = static_cast<std::size_t>(view.numel()) * size_of(view.dtype);
      EXPECT_EQ(cudaMemcpy(copy.view().data, view.data, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
      return copy;
    }};

}  // namespace nsa::test
