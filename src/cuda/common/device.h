// The current device, and which kernels a process launches on it.
#pragma once

#include <cuda_runtime.h>

namespace nsa::cuda {

/// Multiprocessors of the current device.
cudaError_t multiprocessors(int& count);

/// Adds the kernel's name to the file NSA_CUDA_TRACE, once for each file, if the process began with that variable
/// (tools/kernel_cases.py).
void trace_launch(const void* kernel);

}  // namespace nsa::cuda
