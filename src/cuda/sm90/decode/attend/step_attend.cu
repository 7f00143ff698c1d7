// One instance of step_attend: compiled with NSA_ELEMENT, NSA_KEY_DIM and NSA_VALUE_DIM.
#define NSA_STEP_REGISTERS __launch_bounds__(S::kRegisterThreads, S::kBlocks)
#include "cuda/sm90/decode/attend/step_attend.cuh"

namespace nsa::cuda::sm90::decode {

template <class T, int Dk, int Dv, bool kFloat8>
cudaError_t launch_step_attend(const StepAttendArgs& args, cudaStream_t stream) {
  const int group = args.geometry.group;
  if (args.shape == kSharedQueries) return launch_step_queries<T, Dk, Dv>(args, stream);
  if (args.shape.key_tiles == 2) {
    if constexpr (kFloat8)  // with as many registers as one key tile
      return launch_tiles<T, Dk, Dv, 1, false, true, 2>(args, stream);
    else
      return launch_step_pairs<T, Dk, Dv>(args, stream);
  }
  if (step_clusters(group) > 1) return launch_tiles<T, Dk, Dv, kMaxTiles, true, kFloat8, 1>(args, stream);
  return step_tiles(group) > 1 ? launch_tiles<T, Dk, Dv, kMaxTiles, false, kFloat8, 1>(args, stream)
                               : launch_tiles<T, Dk, Dv, 1, false, kFloat8, 1>(args, stream);
}
template cudaError_t launch_step_attend<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM, false>(const StepAttendArgs&,
                                                                                        cudaStream_t);
template cudaError_t launch_step_attend<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM, true>(const StepAttendArgs&,
                                                                                       cudaStream_t);

}  // namespace nsa::cuda::sm90::decode
