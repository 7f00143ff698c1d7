// Kernels for compute capability 9.0 (H100, H200), for bfloat16 and float16. They take the arguments of their portable
// counterparts. Where there is no such kernel for a call, the portable one serves.
//
// They suppose finite inputs: a masked score times an infinite value would not be zero. So each call first looks at
// what could leak (nonfinite.h); if a flag is set there these kernels return at once and the portable ones, launched
// after them, do the work.
#pragma once

#include <optional>

#include "cuda/portable/kernels.h"
#include "cuda/sm90/compressed_select.h"
#include "cuda/sm90/selected_by_block.h"
#include "nsa/config.h"

namespace nsa::cuda::sm90 {

using portable::BackwardArgs;
using portable::RangeArgs;
using portable::SelectArgs;
using portable::SelectedArgs;

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
[[gnu::weak]] cudaError_t launch_compressed_select(const CompressedSelectArgs&, cudaStream_t);
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_selected_forward(const SelectedArgs&, const portable::Ways&, cudaStream_t);
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_selected_by_block(const SelectedByBlockArgs&, cudaStream_t);
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_range_d_q(const BackwardArgs&, const BackwardArgs* second, cudaStream_t);
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_selected_d_q(const BackwardArgs&, cudaStream_t);
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_range_d_kv(const BackwardArgs&, cudaStream_t);
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_selected_d_kv(const BackwardArgs&, cudaStream_t);

/// Null: there is none.
struct Kernels {
  cudaError_t (*range_forward)(const RangeArgs&, cudaStream_t) = nullptr;
  /// Query by query and block by block. Where there are both, both are launched, and the indices decide which of them
  /// does the work (ways.h).
  cudaError_t (*selected_forward)(const SelectedArgs&, const portable::Ways&, cudaStream_t) = nullptr;
  cudaError_t (*selected_by_block)(const SelectedByBlockArgs&, cudaStream_t) = nullptr;
  /// With a second branch of the same queries: the sum of both, where the second one says.
  cudaError_t (*range_d_q)(const BackwardArgs&, const BackwardArgs* second, cudaStream_t) = nullptr;
  cudaError_t (*selected_d_q)(const BackwardArgs&, cudaStream_t) = nullptr;
  cudaError_t (*range_d_kv)(const BackwardArgs&, cudaStream_t) = nullptr;
  cudaError_t (*selected_d_kv)(const BackwardArgs&, cudaStream_t) = nullptr;
  cudaError_t (*compressed_select)(const CompressedSelectArgs&, cudaStream_t) = nullptr;
  cudaError_t (*window_combine)(const WindowCombineArgs&, cudaStream_t) = nullptr;
};

inline bool any(const Kernels& k) {
  return k.range_forward || k.selected_forward || k.selected_by_block || k.range_d_q || k.selected_d_q ||
         k.range_d_kv || k.selected_d_kv;
}

/// Bytes of an item in BackwardArgs::plan.
inline constexpr int kPlanItem = 64;

/// Of the current device.
cudaError_t multiprocessors(int& count);

/// What the choice of kernels looks at.
struct Call {
  DType dtype = DType::kBFloat16;
  std::int64_t key_dim = 0, value_dim = 0;
  int group = 0;       // G
  int block_size = 0;  // selected attention, else 0
  int topk = 0;        // selected attention, else 0
  bool mappable = true;
  std::optional<NSAConfig> selection;  // the choice of blocks together with the compressed attention it follows from
};

/// The kernels that serve a call on a GPU of compute capability 9.0. Which they are depends on the arguments alone.
Kernels choose(const Call& call);

/// Whether they can be used on the device `index`: it may be another one, or NSA_CUDA_KERNELS=portable forbids them.
bool serve(int index);
/// choose(), or none where they do not serve.
Kernels kernels_on(int index, const Call& call);

}  // namespace nsa::cuda::sm90
