// The CPU backend's operations: forwarded to the kernels of the chosen instruction set.
#include <pthread.h>

#include <atomic>
#include <exception>
#include <thread>

#include "core/backend.h"
#include "core/native_sparse_attention.h"
#include "cpu/isa.h"
#include "cpu/threads.h"

#define NSA_DECLARE(operation, Params) Status run(const Params& params, const Context& context);
#define NSA_DECLARE_SET(set, built)  \
  namespace nsa::cpu::set {          \
  NSA_KERNEL_OPERATIONS(NSA_DECLARE) \
  }
NSA_CPU_SETS(NSA_DECLARE_SET)
#undef NSA_DECLARE_SET
#undef NSA_DECLARE

namespace nsa::cpu {
namespace {

std::atomic<bool> forked = false;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

/// run(context). A process that fork() made has the forking thread's OpenMP pool without the threads in it, for which a
/// parallel region would wait forever. There run(context) is on a new thread, which gets a pool of its own.
template <class Run>
Status with_usable_pool(const Context& context, const Run& run) {
  if (!forked) return run(context);
  Context own = context;
  own.num_threads = threads_of(context);  // a new thread does not inherit omp_set_num_threads()
  Status status;
  std::exception_ptr error;
  std::thread([&] {
    try {
      status = run(own);
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
  return status;
}

template <class Params>
Status run_kernels(const Params& params, const Context& context) {
  Isa isa;
  if (Status s = choose_isa(isa); !s.ok()) return s;
  switch (isa) {
#define NSA_CASE(set, built)                               \
  case Isa::set:                                           \
    if constexpr (built) return set::run(params, context); \
    break;
    NSA_CPU_SETS(NSA_CASE)
#undef NSA_CASE
  }
  __builtin_unreachable();  // choose_isa() takes what is built
}

/// native_sparse_attention as the separate operations.
auto composed(DType dtype, const Context& context) {
  return HostNativeSparseAttention([&context](const auto& params) { return cpu::run(params, context); }, dtype);
}

}  // namespace

const char* variant() {
  Isa isa;
  return choose_isa(isa).ok() ? name_of(isa) : "none: NSA_CPU_ISA asks for what is not there";
}

Status usable() {
  Isa isa;
  return choose_isa(isa);
}

#define NSA_DEFINE(operation, Params)                                                                     \
  Status run(const Params& params, const Context& context) {                                              \
    return with_usable_pool(context, [&](const Context& usable) { return run_kernels(params, usable); }); \
  }
NSA_KERNEL_OPERATIONS(NSA_DEFINE)
#undef NSA_DEFINE

Status run(const NativeSparseAttentionParams& params, const Context& context) {
  return composed(params.k_cmp.dtype, context).forward(params);
}
Status run(const NativeSparseAttentionBackwardParams& params, const Context& context) {
  return composed(params.forward.k_cmp.dtype, context).backward(params);
}
Status run(const ForkParams& params, const Context&) { return fork_in_host_memory(params); }

}  // namespace nsa::cpu
