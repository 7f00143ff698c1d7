// The CPU backend's operations: forwarded to the kernels of the chosen instruction set.
#include "core/backend.h"
#include "cpu/isa.h"
#include "cpu/kernels/kernels.h"

namespace nsa::cpu {
namespace portable {
const Kernels& kernels();
}
#if NSA_CPU_X86
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace avx512bf16 {
const Kernels& kernels();
}
#endif

namespace {

const Kernels& kernels_of(Isa isa) {
  switch (isa) {
#if NSA_CPU_X86
    case Isa::kAvx512Bf16:
      return avx512bf16::kernels();
    case Isa::kAvx512:
      return avx512::kernels();
    case Isa::kAvx2:
      return avx2::kernels();
#endif
    default:
      return portable::kernels();
  }
}

template <class Params>
Status run(Status (*Kernels::*operation)(const Params&, const Context&), const Params& params, const Context& context) {
  Isa isa;
  if (Status s = choose_isa(isa); !s.ok()) return s;
  return (kernels_of(isa).*operation)(params, context);
}

}  // namespace

const char* variant() {
  Isa isa;
  return choose_isa(isa).ok() ? name_of(isa) : "none: NSA_CPU_ISA asks for what is not there";
}

Status combine(const CombineParams& p, const Context& c) { return run(&Kernels::combine, p, c); }
Status combine_backward(const CombineBackwardParams& p, const Context& c) {
  return run(&Kernels::combine_backward, p, c);
}

}  // namespace nsa::cpu
