// One instance of the attention kernels: compiled with NSA_ELEMENT, NSA_KEY_DIM and NSA_VALUE_DIM.
#include "cuda/common/launch.cuh"
#include "cuda/portable/d_kv.cuh"
#include "cuda/portable/instances.h"
#include "cuda/portable/range_d_q.cuh"
#include "cuda/portable/range_forward.cuh"
#include "cuda/portable/selected_d_q.cuh"
#include "cuda/portable/selected_forward.cuh"

namespace nsa::cuda::portable {
namespace {

using T = NSA_ELEMENT;
constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;

unsigned row_tiles(const Geometry& g, int rows) {
  return static_cast<unsigned>(ceil_div(static_cast<std::int64_t>(g.q_len) * g.group, rows));
}

template <class Args>
Fallback& fallback_of(Args& args) {
  return args.fallback;
}
Fallback& fallback_of(RangeDqArgs& args) { return args.branch[0].fallback; }

/// A launch, with few thread blocks for a fallback kernel (fallback.cuh).
template <class Args>
cudaError_t launch_attention(void (*kernel)(Args), dim3 grid, int memory, cudaStream_t stream, Args args) {
  Fallback& fallback = fallback_of(args);
  if (fallback.flag) {
    fallback.x = grid.x, fallback.y = grid.y, fallback.z = grid.z;
    grid = grid.x * grid.y * grid.z == 0 ? dim3(0) : dim3(264);
  }
  return launch(fallback, kernel, grid, 128, memory, stream, args);
}

cudaError_t run_range_forward(const RangeArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  return launch_attention(range_forward<T, Dk, Dv, RangeArgs>, dim3(row_tiles(g, kRangeRows), g.kv_heads, g.batches),
                          2 * kRangeStage<T, Dk, Dv>, stream, args);
}

cudaError_t run_selected_forward(const SelectedArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  return launch_attention(selected_forward<T, Dk, Dv, SelectedArgs>,
                          dim3(g.q_len, g.kv_heads * ((g.group + 15) / 16), g.batches),
                          SelectedForward<T, Dk, Dv>::kMemory + list_bytes(args.topk), stream, args);
}

template <bool kWide>
cudaError_t launch_range_d_q(const RangeDqArgs& args, cudaStream_t stream) {
  using Shape = RangeDq<T, Dk, Dv, kWide>;
  const Geometry& g = args.branch[0].geometry;
  return launch_attention(range_d_q<T, Dk, Dv>, dim3(row_tiles(g, Shape::kRows), g.kv_heads, g.batches), Shape::kMemory,
                          stream, args);
}

cudaError_t run_range_d_q(const BackwardArgs& args, const BackwardArgs* more, cudaStream_t stream) {
  cudaFuncAttributes kernel;  // which of the architectures it was compiled for runs here
  const cudaError_t error = cudaFuncGetAttributes(&kernel, range_d_q<T, Dk, Dv>);
  if (error != cudaSuccess) return error;
  RangeDqArgs ranges{{args, more ? *more : BackwardArgs{}}, more ? 2 : 1};
  if (more) ranges.branch[1].sum_from = args.sum_from;
  return kernel.ptxVersion / 10 == 9 ? launch_range_d_q<true>(ranges, stream) : launch_range_d_q<false>(ranges, stream);
}

cudaError_t run_selected_d_q(const BackwardArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  return launch_attention(selected_d_q<T, Dk, Dv>, dim3(g.q_len, g.kv_heads * ((g.group + 15) / 16), g.batches),
                          SelectedDq<T, Dk, Dv>::kMemory + list_bytes(args.topk), stream, args);
}

cudaError_t run_d_kv(const BackwardArgs& args, cudaStream_t stream) {
  auto kernel = args.compressed() ? d_kv<T, Dk, Dv, true, false> : d_kv<T, Dk, Dv, false, false>;
  if (args.compressed() && !args.ds_buffer.sums) kernel = d_kv<T, Dk, Dv, true, sizeof(T) == 2>;
  return launch(args.fallback, kernel, dim3(static_cast<unsigned>(args.items), args.geometry.kv_heads), 128,
                KeyGradients<T, Dk, Dv>::kMemory, stream, args);
}

cudaError_t run_sum_partials(const BackwardArgs& all, cudaStream_t stream) {
  if (all.partial_items == 0) return cudaSuccess;
  BackwardArgs args = all;
  if (args.ds_buffer.sums) args.items /= args.chunks, args.chunks = 1;  // first items come first
  return launch(args.fallback, sum_partials<T>, dim3(static_cast<unsigned>(args.items), args.geometry.kv_heads, 4), 128,
                0, stream, args, Dk, Dv);
}

}  // namespace

template <>
const AttentionKernels& attention_instance<T, Dk, Dv>() {
  static constexpr AttentionKernels table{run_range_forward,
                                          run_selected_forward,
                                          run_range_d_q,
                                          run_selected_d_q,
                                          run_d_kv,
                                          run_sum_partials,
                                          SelectedForward<T, Dk, Dv>::kMemory,
                                          SelectedDq<T, Dk, Dv>::kMemory};
  return table;
}

}  // namespace nsa::cuda::portable
