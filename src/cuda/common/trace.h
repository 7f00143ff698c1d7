// Which kernels a process launches, for the tests' list of cases (tools/kernel_cases.py).
#pragma once

namespace nsa::cuda {

/// Adds the kernel's name to the file NSA_CUDA_TRACE, once for each file, if the process began with that variable.
void trace_launch(const void* kernel);

}  // namespace nsa::cuda
