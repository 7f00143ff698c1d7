// One instance of the attention kernels of a step: compiled with NSA_ELEMENT, NSA_KEY_DIM and NSA_VALUE_DIM.
#include "cuda/portable/decode/step_kernels.h"
#include "cuda/portable/decode/step_ranges.cuh"
#include "cuda/portable/range_forward.cuh"
#include "cuda/portable/selected_forward.cuh"

namespace nsa::cuda::portable {
namespace {

using T = NSA_ELEMENT;
constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;

template <class Tokens>
cudaError_t run_range_forward(const StepRangeArgs<Tokens>& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  const auto count = static_cast<unsigned>(ceil_div(static_cast<std::int64_t>(g.q_len) * g.group, kRangeRows));
  return launch(range_forward<T, Dk, Dv, StepRangeArgs<Tokens>>, dim3(count, g.kv_heads, g.batches), 128,
                2 * kRangeStage<T, Dk, Dv>, stream, args);
}

template <class Tokens>
cudaError_t run_ranges(const StepRangesArgs<Tokens>& args, cudaStream_t stream) {
  const Geometry& g = args.compressed.geometry;
  const auto count =
      static_cast<unsigned>((args.compressed.splits.num_splits + args.window.splits.num_splits) * args.row_tiles);
  return launch(step_ranges<T, Dk, Dv, Tokens>, dim3(count, g.kv_heads, g.batches), 128,
                KeySteps<T, Dk, Dv, Dv>::kMemory, stream, args);
}

template <class Tokens>
cudaError_t run_selected_forward(const StepSelectedArgs<Tokens>& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  const auto count = static_cast<unsigned>(g.q_len * std::max(args.splits.num_splits, 1));
  return launch(selected_forward<T, Dk, Dv, StepSelectedArgs<Tokens>>,
                dim3(count, g.kv_heads * ((g.group + 15) / 16), g.batches), 128,
                SelectedForward<T, Dk, Dv>::kMemory + list_bytes(args.topk), stream, args);
}

template <class Tokens>
constexpr StepAttentionKernels<Tokens> kTable{run_range_forward<Tokens>, run_ranges<Tokens>,
                                              run_selected_forward<Tokens>};

}  // namespace

template <>
const StepAttentionKernels<CachedTokens>& step_attention_instance<T, Dk, Dv, CachedTokens>() {
  return kTable<CachedTokens>;
}
template <>
const StepAttentionKernels<Float8Tokens>& step_attention_instance<T, Dk, Dv, Float8Tokens>() {
  return kTable<Float8Tokens>;
}

}  // namespace nsa::cuda::portable
