#include "cuda/common/inverse_index.cuh"

#include "cuda/common/inverse_index.h"
#include "cuda/common/launch.cuh"

namespace nsa::cuda {

cudaError_t build_inverse_index(const InverseArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  const dim3 grid(static_cast<unsigned>(args.lists.chunks), g.kv_heads, g.batches);
  cudaError_t error = launch(mark_queries<false>, grid, 256, 0, stream, args);
  if (error == cudaSuccess) error = launch(scan_queries, dim3(1, g.kv_heads, g.batches), 1024, 0, stream, args);
  if (error != cudaSuccess) return error;
  return launch(args.lists.entry_slots.data ? mark_queries<true, true> : mark_queries<true>, grid, 256, 0, stream,
                args);
}

}  // namespace nsa::cuda
