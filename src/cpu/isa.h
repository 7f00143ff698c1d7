// Instruction sets the CPU backend is built for, and the one a call uses.
#pragma once

#include <string>

#include "nsa/status.h"

namespace nsa::cpu {

enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

/// "portable", "avx2", "avx512", "avx512bf16": the values of NSA_CPU_ISA.
const char* name_of(Isa isa);

/// Whether this build and this machine have it.
bool available(Isa isa);

/// The best that is available, or what NSA_CPU_ISA asks for; an error if that is unknown or not available.
Status choose_isa(Isa& chosen);

/// As nsa::describe_instruction_sets.
std::string describe_instruction_sets();

}  // namespace nsa::cpu
