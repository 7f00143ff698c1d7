// One instance of the kernels of a step that depend on the element type only: compiled with NSA_ELEMENT.
#include "cuda/portable/decode/step_combine.cuh"
#include "cuda/portable/decode/step_kernels.h"
#include "cuda/portable/decode/step_select.cuh"

namespace nsa::cuda::portable {
namespace {

using T = NSA_ELEMENT;

/// f<Dk>() for a head dim of keys.
template <class F>
cudaError_t for_key_dim(int key_dim, const F& f) {
  return key_dim == 64    ? f.template operator()<64>()
         : key_dim == 128 ? f.template operator()<128>()
                          : f.template operator()<192>();
}

cudaError_t run_store_compressed(const StoreArgs& args, int blocks, cudaStream_t stream) {
  return launch(store_compressed<T>, dim3(blocks, args.geometry.batches), 128, 0, stream, args);
}

cudaError_t run_quantise(const QuantiseArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  return launch(quantise_tokens<T>, dim3(std::min(g.q_len, 1024), args.kinds, g.batches), 128, 0, stream, args);
}

template <class Tokens>
cudaError_t run_select_blocks(const StepSelectArgs<Tokens>& args, int key_dim, int blocks_of_threads,
                              cudaStream_t stream) {
  return for_key_dim(key_dim, [&]<int Dk>() {
    return launch(select_blocks<T, Dk, StepSelectArgs<Tokens>>, blocks_of_threads, 128, SelectShape<T, Dk>::kMemory,
                  stream, args);
  });
}

template <class Tokens>
cudaError_t run_select_in_splits(const StepSelectArgs<Tokens>& args, int key_dim, cudaStream_t stream) {
  using Args = StepSelectArgs<Tokens>;
  const Geometry& g = args.geometry;
  const auto keys = static_cast<unsigned>(ceil_div(args.scratch_keys, kSumKeys));
  const cudaError_t error =
      args.scores
          ? launch(sum_scores<Args>, dim3(keys, g.kv_heads, g.batches), kSumThreads, 0, stream, args)
          : for_key_dim(key_dim, [&]<int Dk>() {
              return launch(score_splits<T, Dk, Args>, dim3(args.splits.num_splits, g.kv_heads, g.batches * args.tiles),
                            128, SelectShape<T, Dk>::kMemory, stream, args);
            });
  if (error != cudaSuccess) return error;
  return launch(top_k_step<Args>, dim3(g.q_len, g.kv_heads, g.batches), kTopKThreads, 0, stream, args);
}

cudaError_t run_clear(const StepCombineArgs& args, cudaStream_t stream) {
  return launch(clear_rows<T>, dim3(args.geometry.rows), 128, 0, stream, args);
}

cudaError_t run_combine(const StepCombineArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  return launch(combine_step<T>, dim3(g.q_len, g.heads, g.batches), 32 * kBranches, 0, stream, args);
}

}  // namespace

template <>
const StepElementKernels& step_element_instance<T>() {
  static constexpr StepElementKernels table{run_quantise,
                                            run_store_compressed,
                                            {run_select_blocks<CachedTokens>, run_select_in_splits<CachedTokens>},
                                            {run_select_blocks<Float8Tokens>, run_select_in_splits<Float8Tokens>},
                                            run_clear,
                                            run_combine};
  return table;
}

}  // namespace nsa::cuda::portable
