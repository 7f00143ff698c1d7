// Instruction sets the CPU backend is built for, and the one a call uses.
#pragma once

#include <string>
#include <string_view>

#include "nsa/status.h"

/// SET(name, whether this build has it), newest first. The names are the values of NSA_CPU_ISA, and the namespaces of
/// the kernels.
#define NSA_CPU_SETS(SET)             \
  SET(avx512bf16, NSA_CPU_AVX512BF16) \
  SET(avx512, NSA_CPU_AVX512)         \
  SET(avx2, NSA_CPU_AVX2)             \
  SET(neonbf16, NSA_CPU_NEONBF16)     \
  SET(neon, NSA_CPU_NEON)             \
  SET(portable, true)

namespace nsa::cpu {

#define NSA_ENUMERATOR(set, built) set,
enum class Isa { NSA_CPU_SETS(NSA_ENUMERATOR) };
#undef NSA_ENUMERATOR

const char* name_of(Isa isa);

/// Whether this build and this machine have it.
bool available(Isa isa);

/// The fastest of the sets that `usable` accepts, on a processor of this vendor, as cpuid names it.
Isa fastest_isa(std::string_view vendor, bool (*usable)(Isa));

/// The fastest that is available, or what NSA_CPU_ISA asks for; an error if that is unknown or not available.
Status choose_isa(Isa& chosen);

/// As nsa::describe_instruction_sets.
std::string describe_instruction_sets();

}  // namespace nsa::cpu
