#include "lm/generate/step_graph.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#ifdef NSA_LM_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <atomic>
#endif

#include "bridge/call.h"

namespace nsa::lm {

OwnStream::OwnStream(at::Device device) {
  if (!device.is_cuda()) return;
  const c10::impl::VirtualGuardImpl streams(device.type());
  streams.getStream(device).synchronize();
  guard_.reset_stream(streams.getStreamFromGlobalPool(device));
}

OwnStream::~OwnStream() {
  if (guard_.current_stream()) guard_.current_stream()->synchronize();
}

#ifdef NSA_LM_CUDA

namespace {

void check(cudaError_t error, const char* call) {
  TORCH_CHECK(error == cudaSuccess, call, ": ", cudaGetErrorString(error));
}

/// By its virtual functions alone, as the program is not linked with torch's CUDA part: base::choose_device loads it.
c10::cuda::CUDACachingAllocator::CUDAAllocator& allocator() {
  return *static_cast<c10::cuda::CUDACachingAllocator::CUDAAllocator*>(c10::GetAllocator(c10::kCUDA));
}

/// A private pool of torch's allocator. torch itself counts the first number up from 1.
c10::MempoolId_t new_pool() {
  static std::atomic<c10::CaptureId_t> last{c10::CaptureId_t{1} << 40};
  return {++last, 0};
}

}  // namespace

struct StepGraph::Impl {
  explicit Impl(at::Device device) : device(device) {}

  at::Device device;
  c10::MempoolId_t pool = new_pool();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t launchable = nullptr;

  void capture(const std::function<void()>& work) {
    const auto stream = static_cast<cudaStream_t>(bridge::current_stream(device));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      work();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&launchable, graph, 0), "cudaGraphInstantiate");
  }

  ~Impl() {
    if (launchable != nullptr) cudaGraphExecDestroy(launchable);
    if (graph != nullptr) cudaGraphDestroy(graph);
    allocator().releasePool(device.index(), pool);
  }
};

bool StepGraph::possible(at::Device device) { return device.is_cuda(); }

StepGraph::StepGraph(at::Device device, const std::function<void()>& work) : impl_(std::make_unique<Impl>(device)) {
  const auto own = static_cast<cudaStream_t>(bridge::current_stream(device));
  allocator().beginAllocateToPool(device.index(), impl_->pool, [own](cudaStream_t stream) { return stream == own; });
  try {
    impl_->capture(work);
  } catch (...) {
    allocator().endAllocateToPool(device.index(), impl_->pool);
    throw;
  }
  allocator().endAllocateToPool(device.index(), impl_->pool);
}

void StepGraph::replay() {
  check(cudaGraphLaunch(impl_->launchable, static_cast<cudaStream_t>(bridge::current_stream(impl_->device))),
        "cudaGraphLaunch");
}

#else

struct StepGraph::Impl {};

bool StepGraph::possible(at::Device) { return false; }
StepGraph::StepGraph(at::Device, const std::function<void()>&) {}
void StepGraph::replay() {}

#endif

StepGraph::~StepGraph() = default;

}  // namespace nsa::lm
