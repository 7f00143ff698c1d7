#include "cuda/common/cut_sequences.h"

#include <climits>

#include "cuda/common/launch.cuh"
#include "cuda/common/selected_ds.h"

namespace nsa::cuda {
namespace {

/// One thread block.
__global__ void __launch_bounds__(256) write_cut(const __grid_constant__ Geometry g, CutSequences cut) {
  __shared__ int from, to;  // the sequences that are here, empty ones too
  if (threadIdx.x == 0) from = INT_MAX, to = 0;
  __syncthreads();
  const int first = cut.first, end = first + cut.count;
  for (int b = threadIdx.x; b < g.batches; b += blockDim.x) {
    const int begin = g.cu_q[b], next = g.cu_q[b + 1];
    const bool last = begin == end && end == g.total_q;
    if (begin < next ? begin < end && next > first : first <= begin && (begin < end || last)) {
      atomicMin(&from, b);
      atomicMax(&to, b + 1);
    }
    cut.cuts[b] = (begin < first && next > first ? SelectedWindows::kBefore : 0) |
                  (begin < end && next > end ? SelectedWindows::kAfter : 0);
  }
  __syncthreads();
  for (int i = threadIdx.x; i <= g.batches; i += blockDim.x) {
    cut.cu_q[i] = min(max(g.cu_q[i], first), end) - first;
    cut.cu_k[i] = to == 0 ? 0 : i < from ? g.cu_k[from] : i < to ? g.cu_k[i] : g.cu_k[to] - max(g.cu_q[to] - end, 0);
  }
}

}  // namespace

cudaError_t cut_sequences(const Geometry& whole, const CutSequences& cut, cudaStream_t stream) {
  return launch(write_cut, 1, 256, 0, stream, whole, cut);
}

}  // namespace nsa::cuda
