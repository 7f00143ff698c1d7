// Where a model computes: this machine's CPU or its first CUDA device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>

namespace nsa::base {

struct DeviceChoice {
  at::Device device = at::kCPU;
  std::string text;  // for reports: "cuda:0 NVIDIA H200, ... (auto)"

  /// "cpu" or "cuda": what config.json records.
  std::string kind() const { return c10::DeviceTypeName(device.type(), /*lower_case=*/true); }
};

/// `wish`: cpu, cuda, or auto: as NSA_DEVICE says; where that says nothing, cuda if libnsa and LibTorch can both use a
/// device, else cpu. Throws Error for any other wish, and for cuda where it cannot be had. Comes before any use of
/// torch: it loads torch's CUDA part where there is a device.
DeviceChoice choose_device(const std::string& wish);

/// "NVIDIA H200, compute capability 9.0, 143771 MiB": the device that cuda means.
std::string gpu_name();

/// Computes on `threads` CPU threads (0: as many as OpenMP takes) and returns their number. Throws Error for more than
/// kMaxThreads, and Failure when the machine does not give them.
int set_threads(int threads);

/// The same bits from the same run on CUDA too, where some of torch's operations have a faster form that does not
/// promise it. What has no repeatable form throws.
void make_torch_deterministic(at::Device device);

/// A host tensor on `device`; the host does not wait for the copy.
at::Tensor upload(const at::Tensor& host, at::Device device);

}  // namespace nsa::base
