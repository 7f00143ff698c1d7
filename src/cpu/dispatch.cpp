// The CPU backend's operations: forwarded to the kernels of the chosen instruction set.
#include "core/backend.h"
#include "core/native_sparse_attention.h"
#include "cpu/isa.h"

#define NSA_DECLARE(operation, Params) Status run(const Params& params, const Context& context);
namespace nsa::cpu::portable {
NSA_KERNEL_OPERATIONS(NSA_DECLARE)
}
namespace nsa::cpu::avx2 {
NSA_KERNEL_OPERATIONS(NSA_DECLARE)
}
namespace nsa::cpu::avx512 {
NSA_KERNEL_OPERATIONS(NSA_DECLARE)
}
namespace nsa::cpu::avx512bf16 {
NSA_KERNEL_OPERATIONS(NSA_DECLARE)
}
#undef NSA_DECLARE

namespace nsa::cpu {
namespace {

template <class Params>
Status run_kernels(const Params& params, const Context& context) {
  Isa isa;
  if (Status s = choose_isa(isa); !s.ok()) return s;
  switch (isa) {
#if NSA_CPU_AVX512BF16
    case Isa::kAvx512Bf16:
      return avx512bf16::run(params, context);
#endif
#if NSA_CPU_AVX512
    case Isa::kAvx512:
      return avx512::run(params, context);
#endif
#if NSA_CPU_AVX2
    case Isa::kAvx2:
      return avx2::run(params, context);
#endif
    default:
      return portable::run(params, context);
  }
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

#define NSA_DEFINE(operation, Params) \
  Status run(const Params& params, const Context& context) { return run_kernels(params, context); }
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
