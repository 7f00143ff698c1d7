// Attention of each query to one contiguous range of keys, which serves compressed_attention and
// sliding_window_attention: what its host code and the kernels share.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/params.h"

namespace nsa::cuda::sm90::range_attention {

/// The sliding window and the gated sum with the other two branches. range.o may be null: then it is not stored.
struct WindowCombineArgs {
  RangeArgs range;
  Strided o_cmp, o_slc, gates, o;
};

// One instance each, compiled in a translation unit of its own. Weak: a build may leave instances out, their address is
// null then.
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_range_forward(const RangeArgs&, cudaStream_t);
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_window_combine(const WindowCombineArgs&, cudaStream_t);
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_range_d_q(const BackwardArgs&, const BackwardArgs* second, cudaStream_t);
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_range_d_kv(const BackwardArgs&, cudaStream_t);

}  // namespace nsa::cuda::sm90::range_attention
