// The devices of this machine, and what every backend on them needs.
#include <cuda_runtime.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define NSA_NVTX 1
#endif

#include <cxxabi.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "core/backend.h"
#include "core/log.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.cuh"

namespace nsa::cuda {
namespace {

Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Status::internal(std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

Status out_of_workspace(const Arena& arena) {
  return Status::invalid_argument("workspace: too small, it holds less than " + std::to_string(arena.used()) +
                                  " bytes");
}

/// A strided source and where its elements go.
struct Gather {
  const char* from;
  char* to;
  long long count, shape[4], stride[4];  // strides in elements
};

template <class Item>
__global__ void gather(const __grid_constant__ Gather args) {
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < args.count; i += gridDim.x * 256ll) {
    long long rest = i, at = 0;
#pragma unroll
    for (int dim = 3; dim >= 0; --dim) {
      at += rest % args.shape[dim] * args.stride[dim];
      rest /= args.shape[dim];
    }
    reinterpret_cast<Item*>(args.to)[i] = reinterpret_cast<const Item*>(args.from)[at];
  }
}

/// Offsets and their copies; cu_k may be null.
struct Offsets {
  const int *cu_q, *cu_k;
  int *to_q, *to_k;
  int count;
  long long total_q, total_k;
};

__global__ void __launch_bounds__(1024) copy_offsets(const __grid_constant__ Offsets args) {
  const auto bad = [&](const int* cu, long long total) {
    bool found = false;
    for (int i = threadIdx.x; i < args.count; i += blockDim.x)
      found |= cu[i] < (i > 0 ? cu[i - 1] : 0) || cu[i] > total || (i == 0 && cu[i] != 0);
    return found;
  };
  const bool none = __syncthreads_or(bad(args.cu_q, args.total_q) || (args.cu_k && bad(args.cu_k, args.total_k)));
  for (int i = threadIdx.x; i < args.count; i += blockDim.x) {
    args.to_q[i] = none ? 0 : args.cu_q[i];
    if (args.cu_k) args.to_k[i] = none ? 0 : args.cu_k[i];
  }
}

/// What the driver lists.
Status list_devices(int& count) {
  count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return {};
  cudaGetLastError();  // not the next call's error
  count = 0;
  return Status::unsupported(std::string("backend cuda: no device: ") +
                             (error == cudaSuccess ? "the driver lists none" : cudaGetErrorString(error)));
}

/// "sm90::range_attention::range_forward<__nv_bfloat16, 128, 128>" of a mangled name.
std::string plain_name(const char* mangled) {
  int failed = 0;
  const std::unique_ptr<char, void (*)(void*)> demangled(abi::__cxa_demangle(mangled, nullptr, nullptr, &failed),
                                                         std::free);
  std::string name = failed ? mangled : demangled.get();
  for (const char* noise : {"void ", "(anonymous namespace)::", "nsa::cuda::", "(int)"})
    for (std::size_t at; (at = name.find(noise)) != std::string::npos;) name.erase(at, std::strlen(noise));
  return name.substr(0, name.find('('));
}

}  // namespace

cudaError_t sm_count(int& count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  // A test can ask for fewer thread blocks, each of which then has more to do.
  if (const char* wish = std::getenv("NSA_CUDA_PROCESSORS"); wish && std::atoi(wish) > 0) {
    count = std::atoi(wish);
    return cudaSuccess;
  }
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

void trace_launch(const void* kernel, dim3 grid, dim3 threads, std::size_t memory) {
  static const bool traces = std::getenv("NSA_CUDA_TRACE") != nullptr;
  const char* name = nullptr;
  if (!traces && !logs_details()) return;
  if (cudaFuncGetName(&name, kernel) != cudaSuccess) return;
  const auto text = [](auto... n) { return ((std::to_string(n) + " ") + ...); };
  if (logs_details())
    log_detail(plain_name(name) + " grid " + text(grid.x, grid.y, grid.z) + "threads " + text(threads.x) +
               "dynamic shared memory " + text(memory) + "bytes");
  if (!traces) return;
  static std::mutex mutex;
  static std::set<std::pair<std::string, const void*>> traced;
  const char* path = std::getenv("NSA_CUDA_TRACE");
  const std::lock_guard lock(mutex);
  if (path && traced.emplace(path, kernel).second) std::ofstream(path, std::ios::app) << name << '\n';
}

Status usable(int device) {
  int count = 0, major = 0, minor = 0;
  if (const Status status = list_devices(count); !status.ok()) return status;
  const std::string name = "backend cuda: cuda:" + std::to_string(device);
  if (device >= count) return Status::unsupported(name + ": the driver lists " + std::to_string(count) + " devices");
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return Status::unsupported(name + ": " + cudaGetErrorString(error));
  }
  if (major >= 8) return {};
  return Status::unsupported(name + ": not usable: compute capability " + std::to_string(major) + "." +
                             std::to_string(minor) + ", the kernels need 8.0");
}

int device_count() {
  int count = 0, good = 0;
  if (!list_devices(count).ok()) return 0;
  for (int i = 0; i < count; ++i) good += usable(i).ok();
  return good;
}

Status available() {
  if (device_count() > 0) return {};
  return usable(0);
}

std::string describe_devices() {
  int count = 0;
  if (const Status status = list_devices(count); !status.ok()) return "none: " + status.message();
  std::string text;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, i); error != cudaSuccess) {
      text += "cuda:" + std::to_string(i) + " " + cudaGetErrorString(error) + "\n";
      continue;
    }
    const std::string capability = std::to_string(properties.major) + "." + std::to_string(properties.minor);
    text += "cuda:" + std::to_string(i) + " " + properties.name + ", compute capability " + capability + ", " +
            std::to_string(properties.totalGlobalMem >> 20) + " MiB" +
            (usable(i).ok() ? "" : ": not usable, the kernels need 8.0") + "\n";
  }
  text.pop_back();
  return text;
}

Scope::Scope(const Device& device, const char* operation) {
  int current = 0;
  if (cudaGetDevice(&current) == cudaSuccess && current != device.index && cudaSetDevice(device.index) == cudaSuccess)
    previous_ = current;
#ifdef NSA_NVTX
  nvtxRangePushA(operation);
#else
  (void)operation;
#endif
}

Scope::~Scope() {
#ifdef NSA_NVTX
  nvtxRangePop();
#endif
  if (previous_ >= 0) cudaSetDevice(previous_);
}

Status copy_to_host(void* host, const void* device, std::size_t bytes) {
  return status_of(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "copy to the host");
}

Status sanitize_offsets(TensorView& cu_q, TensorView& cu_k, std::int64_t total_q, std::int64_t total_k,
                        Execution& execution) {
  const std::int64_t count = cu_q.size(0);
  Offsets args{.cu_q = cu_q.as<const int>(),
               .cu_k = cu_k.as<const int>(),
               .to_q = execution.arena.take<int>(count),
               .to_k = nullptr,
               .count = static_cast<int>(count),
               .total_q = total_q,
               .total_k = total_k};
  if (args.cu_k) {
    args.to_k = execution.arena.take<int>(count);
  } else {
    args.total_q = std::min(args.total_q, args.total_k);
  }
  if (execution.arena.measuring()) return {};
  if (!execution.arena.enough()) return out_of_workspace(execution.arena);
  cu_q.data = args.to_q;
  cu_k.data = args.to_k;
  return status_of(launch(copy_offsets, 1, 1024, 0, execution.stream, args), "copy_offsets");
}

Status make_contiguous(TensorView& t, Execution& execution) {
  const auto item = static_cast<std::int64_t>(size_of(t.dtype));
  const std::int64_t count = t.numel();
  Gather args{.from = static_cast<const char*>(t.data),
              .to = execution.arena.take<char>(count * item),
              .count = count,
              .shape = {},
              .stride = {}};
  std::int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    const int dim = i - (4 - t.rank);
    args.shape[i] = dim < 0 ? 1 : t.size(dim);
    args.stride[i] = dim < 0 ? 0 : t.stride[static_cast<std::size_t>(dim)];
    if (dim < 0) continue;
    t.stride[static_cast<std::size_t>(dim)] = stride;
    stride *= t.size(dim);
  }
  t.data = args.to;
  if (execution.arena.measuring() || count == 0) return {};
  if (!execution.arena.enough()) return out_of_workspace(execution.arena);
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((count + 255) / 256, 4096));
  const auto kernel = item == 2 ? gather<unsigned short> : gather<unsigned>;
  return status_of(launch(kernel, blocks, 256, 0, execution.stream, args), "gather");
}

}  // namespace nsa::cuda
