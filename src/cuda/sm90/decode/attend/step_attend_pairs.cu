// The instances of step_attend that multiply two key tiles of keys in 16 bits at once: compiled with NSA_ELEMENT,
// NSA_KEY_DIM and NSA_VALUE_DIM. A file of their own compiles beside the other one.
#define NSA_STEP_REGISTERS __maxnreg__(240)
#include "cuda/sm90/decode/attend/step_attend.cuh"

namespace nsa::cuda::sm90::decode {

template <class T, int Dk, int Dv>
cudaError_t launch_step_pairs(const StepAttendArgs& args, cudaStream_t stream) {
  return launch_tiles<T, Dk, Dv, 1, false, false, 2>(args, stream);
}
template cudaError_t launch_step_pairs<NSA_ELEMENT, NSA_KEY_DIM, NSA_VALUE_DIM>(const StepAttendArgs&, cudaStream_t);

}  // namespace nsa::cuda::sm90::decode
