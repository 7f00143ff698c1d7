// The operations of the CUDA backend on tensors in host memory: copied to the device, run there, copied back. A cache
// may be there already.
#pragma once

#include <cstddef>
#include <functional>
#include <map>

#include "nsa/decode.h"

namespace nsa::test {

template <class Params>
using Function = std::function<Status(const Params&, const Context&)>;

/// True if the kernels of compute capability 9.0 serve calls on this machine.
bool hopper_kernels_run();

/// Memory on the device, all of which starts as NaN.
struct DeviceMemory {
  explicit DeviceMemory(std::size_t bytes);
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory();

  void* data = nullptr;
  std::size_t bytes;
  int error = 0;  // cudaError_t
};

/// Copies on the device of tensors in host memory, one for each address.
class DeviceCopies {
 public:
  /// Copies the tensor, unless there is a copy of it or it is on the device already, and lets `view` point there.
  void move(TensorView& view);
  Status status() const;
  /// Waits for the device.
  Status copy_back() const;
  /// The copy of the tensor at this address of the host.
  const DeviceMemory& of(const void* host) const { return copies_.at(const_cast<void*>(host)); }

 private:
  std::map<void*, DeviceMemory> copies_;
  int error_ = 0;
};

/// Moves every tensor of a call to the device.
template <class Params>
Status to_device(Params& params, DeviceCopies& copies);

/// Runs the call on copies of its tensors, in a workspace that starts as NaN, and copies the results back.
template <class Params>
Status on_device(Params params, const Function<Params>& function);

}  // namespace nsa::test
