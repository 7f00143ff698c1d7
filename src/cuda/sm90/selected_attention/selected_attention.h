// Selected attention: the launches of its kernels, by loop order (docs/design/selected_attention.md). heuristics.cu
// chooses among them.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/params.h"
#include "cuda/sm90/selected_attention/forward_block_major.h"

namespace nsa::cuda::sm90::selected_attention {

// One instance each, compiled in a translation unit of its own. Weak: a build may leave instances out, their address is
// null then.

// Forward: `o` and `lse`.
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_selected_query_major(const SelectedArgs&, const LoopOrder&, cudaStream_t);
/// Requires has_union() (loop_order.h).
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_selected_union(const SelectedArgs&, const LoopOrder&, cudaStream_t);
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_selected_block_major(const BlockMajorArgs&, cudaStream_t);

// Backward.
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_selected_d_q(const BackwardArgs&, cudaStream_t);
/// From the dS that launch_selected_d_kv has left.
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_selected_d_q_of_ds(const BackwardArgs&, cudaStream_t);
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_selected_d_kv(const BackwardArgs&, cudaStream_t);

}  // namespace nsa::cuda::sm90::selected_attention
