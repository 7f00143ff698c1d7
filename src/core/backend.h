// A backend: a namespace with the same functions. run(params) is the operation of this parameter struct, for each of
// operation_list.h. dispatch.cpp calls it with arguments that validate.h accepted and that support.h says the backend
// can do; in addition the last dimension of incoming gradients (d_o, d_out) is contiguous there. They may throw:
// dispatch turns exceptions into Status::internal.
#pragma once

#include <memory>
#include <string>

#include "core/execution.h"
#include "core/operation_list.h"
#include "nsa/decode.h"
#include "nsa/kv_cache.h"
#include "nsa/operations.h"

namespace nsa {
/// fork of both backends in host memory: it copies bytes only.
Status fork_in_host_memory(const ForkParams& params);
}  // namespace nsa

/// fp64 loops straight from the specification: the oracle.
namespace nsa::reference {
/// Which variant of its kernels the backend runs on this machine, for logs.
const char* variant();
#define NSA_DECLARE(operation, Params) Status run(const Params& params, const Context& context);
NSA_OPERATIONS(NSA_DECLARE)
#undef NSA_DECLARE
}  // namespace nsa::reference

/// Vectorised and threaded.
namespace nsa::cpu {
const char* variant();
/// The machine and this build have the instruction set that NSA_CPU_ISA asks for.
Status usable();
/// As nsa::describe_instruction_sets.
std::string describe_instruction_sets();
#define NSA_DECLARE(operation, Params) Status run(const Params& params, const Context& context);
NSA_OPERATIONS(NSA_DECLARE)
#undef NSA_DECLARE
}  // namespace nsa::cpu

/// NVIDIA GPUs. In a build without CUDA every function is kUnsupported (cuda/absent.cpp).
namespace nsa::cuda {
/// As nsa::describe_devices.
std::string describe_devices();
/// As nsa::device_count.
int device_count();
/// As nsa::describe_kernels, of heads that fit.
std::string describe_kernels(const KernelQuery& query);
/// Why the backend cannot run on a device; success if it was built in and the device is there and new enough.
Status usable(int device);
/// Why it cannot run on any.
Status available();

/// While it lives: the device of the tensors is the current one, and an NVTX range with the operation's name is open.
class Scope {
 public:
  Scope(const Device& device, const char* operation);
  Scope(const Scope&) = delete;
  ~Scope();

 private:
  [[maybe_unused]] int previous_ = -1;
};
/// Waits for the device.
Status copy_to_host(void* host, const void* device, std::size_t bytes);
/// A copy of `t` with a contiguous last dimension in the execution's memory.
Status make_contiguous(TensorView& t, Execution& execution);
/// Sanitizes the offsets of packed sequences, which lie on the device: copies in the execution's memory, all zero
/// (every sequence is empty) unless both ascend from 0 on and end at most at total_q and total_k. cu_k may be
/// undefined: the keys have the offsets of the queries.
Status sanitize_offsets(TensorView& cu_q, TensorView& cu_k, std::int64_t total_q, std::int64_t total_k,
                        Execution& execution);
/// Memory of a device for a cache with these options, without an allocator by cudaMallocAsync.
Status make_cache_memory(const KVCacheOptions& options, std::unique_ptr<CacheMemory>& memory);

// The operations run on any GPU from sm_80 on. None of them allocates, synchronises or uses another stream than the
// execution's.

const char* variant();
/// Whether this build has the kernels for such a call.
bool built(const Problem& problem);
/// The most entries of a row of selected blocks that attention and its backward have shared memory for. It is built.
std::int64_t max_topk(const Problem& problem, bool backward);
#define NSA_DECLARE(operation, Params) Status run(const Params& params, Execution& execution);
NSA_OPERATIONS(NSA_DECLARE)
#undef NSA_DECLARE
}  // namespace nsa::cuda
