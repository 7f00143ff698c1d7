// The operations of the CPU backend once per instruction set. The .cpp files of this folder are compiled once per set,
// into the namespace nsa::cpu::NSA_ISA. The arguments are validated.
#pragma once

#include "core/backend.h"

#define NSA_DECLARE(operation, Params) Status run(const Params& params, const Context& context);
namespace nsa::cpu::NSA_ISA {
NSA_KERNEL_OPERATIONS(NSA_DECLARE)
}
#undef NSA_DECLARE
