// Calls of libnsa on torch tensors: views, the stream, the workspace, errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "base/error.h"
#include "nsa/operations.h"

namespace nsa::bridge {

/// A view of `tensor`, which must outlive it; an undefined tensor gives an undefined view.
TensorView view_of(const at::Tensor& tensor);

/// The cudaStream_t that torch works on now; null, the default one, unless a c10::StreamGuard says otherwise.
void* current_stream(at::Device device);

/// Throws where `error`, the cudaError_t of the launch of a kernel of that name, is one.
void check_launch(int error, const char* kernel);

/// `context` with `bytes` of workspace, which `memory` holds, on torch's current stream.
Context with_workspace(Context context, at::Device device, std::size_t bytes, at::Tensor& memory);

/// Runs an operation of libnsa, e.g. call(nsa::combine, params, device), on tensors of `device`. Throws as check does.
/// torch does not reuse the workspace before the stream has passed the operation.
template <class Params>
void call(Status (*operation)(const Params&, const Context&), const Params& params, at::Device device,
          const Context& context = {}) {
  if (device.is_cpu()) return base::check(operation(params, context));
  std::size_t bytes = 0;
  base::check(workspace_size(params, bytes, context));
  at::Tensor memory;
  base::check(operation(params, with_workspace(context, device, bytes, memory)));
}

}  // namespace nsa::bridge
