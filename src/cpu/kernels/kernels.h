// The operations of the CPU backend once per instruction set. Every file of this folder except this one is compiled
// once per set, into the namespace nsa::cpu::NSA_ISA.
#pragma once

#include "core/backend.h"

namespace nsa::cpu {

/// One entry per operation; the arguments are validated.
struct Kernels {
  Status (*combine)(const CombineParams&, const Context&);
  Status (*combine_backward)(const CombineBackwardParams&, const Context&);
};

#ifdef NSA_ISA
namespace NSA_ISA {
Status combine(const CombineParams&, const Context&);
Status combine_backward(const CombineBackwardParams&, const Context&);
const Kernels& kernels();
}  // namespace NSA_ISA
#endif

}  // namespace nsa::cpu
