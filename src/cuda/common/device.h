// The current device, and which kernels a process launches on it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace nsa::cuda {

/// The number of SMs of the current device.
cudaError_t sm_count(int& count);

/// The kernel of a logged call and how it is launched go to the log (core/log.h). Its name is added to the file
/// NSA_CUDA_TRACE, once for each file, if the process began with that variable (tools/kernel_cases.py).
void trace_launch(const void* kernel, dim3 grid, dim3 threads, std::size_t memory);

}  // namespace nsa::cuda
