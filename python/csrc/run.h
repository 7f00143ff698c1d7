// Calls an operation of the library where its tensors are.
#pragma once

#include "convert.h"

namespace nsa::python {

/// Refuses (kInvalidArgument), or throws what Python shows as NotImplementedError (kUnsupported) or RuntimeError (the
/// rest).
void check(const Status& status);

/// As many threads as torch uses (torch.set_num_threads).
Context context();

/// torch's current stream on a CUDA device, a cudaStream_t.
void* current_stream(std::int32_t device);

/// operation(params). For tensors on a GPU (`on` is one of them): on torch's current stream, in memory from torch's
/// allocator, which may give the workspace to later work of that stream as soon as this returns.
template <class Params>
void run(Status (*operation)(const Params&, const Context&), const Params& params, const Tensor& on) {
  Context where = context();
  OptionalTensor workspace;
  if (on.is_cuda()) {
    check(workspace_size(params, where.workspace_size, where));
    workspace = make(on, {static_cast<std::int64_t>(where.workspace_size)}, ScalarType::Byte);
    where.workspace = workspace->mutable_data_ptr();
    where.stream = current_stream(on.get_device_index());
  }
  check(operation(params, where));
}

}  // namespace nsa::python
