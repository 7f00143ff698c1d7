// The memory of a cache on a device. Writes go there from pinned memory, so that no call waits for the stream.
#include "core/cache/memory.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "cuda/operations/branch.h"

namespace nsa::cuda {
namespace {

constexpr int kCopies = 16;

struct Edits {
  struct Copy {
    const char* from;
    char* to;
    long long bytes;
  };
  Copy copies[kCopies];
  int* number;  // null: none
  int value;
};

/// Grid y: the copies.
__global__ void __launch_bounds__(256) edit_cache(const __grid_constant__ Edits args) {
  const Edits::Copy& copy = args.copies[blockIdx.y];
  const long long first = blockIdx.x * 256ll + threadIdx.x, step = gridDim.x * 256ll;
  const auto bits = reinterpret_cast<unsigned long long>(copy.from) | reinterpret_cast<unsigned long long>(copy.to) |
                    static_cast<unsigned long long>(copy.bytes);
  if (bits % 16 == 0) {
    for (long long i = first; i < copy.bytes / 16; i += step)
      reinterpret_cast<uint4*>(copy.to)[i] = reinterpret_cast<const uint4*>(copy.from)[i];
  } else {
    for (long long i = first; i < copy.bytes; i += step) copy.to[i] = copy.from[i];
  }
  if (args.number && first == 0 && blockIdx.y == 0) *args.number = args.value;
}

/// What is being copied to the device.
class Staging {
 public:
  Staging() = default;
  Staging(const Staging&) = delete;
  ~Staging() {
    if (copied_) {
      cudaEventSynchronize(copied_);
      cudaEventDestroy(copied_);
    }
    if (data_) cudaFreeHost(data_);
  }

  cudaError_t make(std::size_t bytes) {
    const cudaError_t error = cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming);
    return error == cudaSuccess ? cudaMallocHost(&data_, bytes) : error;
  }
  /// Success if it may be filled, cudaErrorNotReady if the copy before is not done.
  cudaError_t state() const { return cudaEventQuery(copied_); }
  cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) const {
    std::memcpy(data_, from, bytes);
    const cudaError_t error = cudaMemcpyAsync(to, data_, bytes, cudaMemcpyHostToDevice, stream);
    return error == cudaSuccess ? cudaEventRecord(copied_, stream) : error;
  }

 private:
  void* data_ = nullptr;
  cudaEvent_t copied_ = nullptr;
};

class DeviceMemory final : public CacheMemory {
 public:
  DeviceMemory(KVCacheAllocator allocator, const Device& device, cudaStream_t stream)
      : CacheMemory(std::move(allocator)), device_(device), stream_(stream) {}
  ~DeviceMemory() override {
    const Scope scope(device_, "KVCache");
    staging_.clear();
    give_back(stream_);
  }

  Status add(std::size_t bytes) override {
    const Scope scope(device_, "KVCache");
    if (Status s = take(bytes, stream_); !s.ok()) return s;
    return status(cudaMemsetAsync(parts_.back().data, 0, bytes, stream_), "cudaMemsetAsync");
  }

  Status expect_writes(std::size_t bytes) override {
    const Scope scope(device_, "KVCache");
    largest_ = std::max(largest_, bytes);
    while (staging_.size() < 4)
      if (Status s = insert_staging(bytes); !s.ok()) return s;
    return {};
  }

  Status changeable() override {
    const Scope scope(device_, "KVCache");
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (Status s = status(cudaStreamIsCapturing(stream_, &capture), "cudaStreamIsCapturing"); !s.ok()) return s;
    if (capture == cudaStreamCaptureStatusNone) return {};
    return Status::invalid_argument("KVCache: its stream is being captured: only steps belong into a graph");
  }

  Status write(std::byte* to, const std::byte* from, std::size_t bytes) override {
    const Scope scope(device_, "KVCache");
    // The one that was filled first comes next. Where its copy is not done, the host is further ahead than ever.
    const cudaError_t ready = bytes > largest_ ? cudaErrorNotReady : staging_[next_]->state();
    if (ready == cudaErrorNotReady) {
      largest_ = std::max(largest_, bytes);
      if (Status s = insert_staging(largest_); !s.ok()) return s;
    } else if (ready != cudaSuccess) {
      return status(ready, "cudaEventQuery");
    }
    const Staging& staging = *staging_[next_];
    next_ = (next_ + 1) % staging_.size();
    return status(staging.copy(to, from, bytes, stream_), "cudaMemcpyAsync to the device");
  }

  Status edit(std::span<const Copy> copies, std::int32_t* number, std::int32_t value) override {
    const Scope scope(device_, "KVCache");
    while (!copies.empty() || number) {
      const auto now = copies.first(std::min<std::size_t>(copies.size(), kCopies));
      Edits args{.copies = {}, .number = number, .value = value};
      std::size_t most = 1;
      for (std::size_t i = 0; i < now.size(); ++i) {
        args.copies[i] = {reinterpret_cast<const char*>(now[i].from), reinterpret_cast<char*>(now[i].to),
                          static_cast<long long>(now[i].bytes)};
        most = std::max(most, now[i].bytes);
      }
      const dim3 grid(static_cast<unsigned>(std::min<std::size_t>((most + 4095) / 4096, 128)),
                      static_cast<unsigned>(std::max<std::size_t>(now.size(), 1)));
      if (Status s = status(launch(edit_cache, grid, 256, 0, stream_, args), "edit_cache"); !s.ok()) return s;
      copies = copies.subspan(now.size());
      number = nullptr;
    }
    return {};
  }

  Status read(std::byte* to, const std::byte* from, std::size_t bytes) override {
    const Scope scope(device_, "KVCache");
    if (Status s =
            status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync to the host");
        !s.ok())
      return s;
    return status(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  Status clone(std::unique_ptr<CacheMemory>& made) override {
    const Scope scope(device_, "KVCache");
    auto other = std::make_unique<DeviceMemory>(allocator_, device_, stream_);
    for (const Part& part : parts_) {
      if (Status s = other->take(part.size, stream_); !s.ok()) return s;
      if (Status s = status(
              cudaMemcpyAsync(other->parts_.back().data, part.data, part.size, cudaMemcpyDeviceToDevice, stream_),
              "cudaMemcpyAsync on the device");
          !s.ok())
        return s;
    }
    if (Status s = other->expect_writes(largest_); !s.ok()) return s;
    made = std::move(other);
    return {};
  }

 private:
  static Status status(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return {};
    return Status::internal(std::string("KVCache: ") + what + ": " + cudaGetErrorName(error) + ", " +
                            cudaGetErrorString(error));
  }

  /// In front of the one that comes next.
  Status insert_staging(std::size_t bytes) {
    auto made = std::make_unique<Staging>();
    if (Status s = status(made->make(bytes), "pinned memory"); !s.ok()) return s;
    staging_.insert(staging_.begin() + static_cast<std::ptrdiff_t>(next_), std::move(made));
    return {};
  }

  Device device_;
  cudaStream_t stream_;
  std::vector<std::unique_ptr<Staging>> staging_;  // a ring
  std::size_t next_ = 0, largest_ = 0;
};

}  // namespace

Status make_cache_memory(const KVCacheOptions& options, std::unique_ptr<CacheMemory>& memory) {
  KVCacheAllocator allocator = options.allocator;
  if (!allocator.allocate) {
    allocator.allocate = [](std::size_t bytes, void* stream) -> void* {
      void* data = nullptr;
      const cudaError_t error = cudaMallocAsync(&data, bytes, static_cast<cudaStream_t>(stream));
      if (error != cudaSuccess) cudaGetLastError();  // not the next call's error
      return error == cudaSuccess ? data : nullptr;
    };
    allocator.release = [](void* data, std::size_t, void* stream) {
      cudaFreeAsync(data, static_cast<cudaStream_t>(stream));
    };
  }
  memory =
      std::make_unique<DeviceMemory>(std::move(allocator), options.device, static_cast<cudaStream_t>(options.stream));
  return {};
}

}  // namespace nsa::cuda
