// The operations of the CUDA backend on tensors in host memory: copied to the device, run there, copied back.
#pragma once

#include <functional>

#include "nsa/operations.h"

namespace nsa::test {

template <class Params>
using Function = std::function<Status(const Params&, const Context&)>;

/// Memory of the device is poisoned with NaN before the copy, the workspace too.
template <class Params>
Status on_device(Params params, const Function<Params>& function);

}  // namespace nsa::test
