#include "cpu/isa.h"

#include <cstddef>
#include <cstdlib>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace nsa::cpu {
namespace {

struct Set {
  Isa isa;
  const char* name;
  bool built;
};
#define NSA_ROW(set, built) {Isa::set, #set, built},
constexpr Set kSets[] = {NSA_CPU_SETS(NSA_ROW)};
#undef NSA_ROW

#if defined(__aarch64__)
/// BFDOT and BFCVT. Processors that have them have the rest of ARMv8.2 too, which the set is compiled for.
bool has_neon_bf16() {
#if defined(__APPLE__)  // after Apple's documentation, neither compiled nor run on a Mac
  int found = 0;
  std::size_t size = sizeof found;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found == 1;
#elif defined(__linux__)
  constexpr unsigned long kBf16 = 1UL << 14;  // HWCAP2_BF16, which headers before Linux 5.6 lack
  return getauxval(AT_HWCAP2) & kBf16;
#else
  return false;
#endif
}
#endif

bool machine_has(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return true;
#if defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::avx512:
      return machine_has(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case Isa::avx512bf16:
      return machine_has(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
    case Isa::neon:
      return true;
    case Isa::neonbf16: {
      static const bool found = has_neon_bf16();
      return found;
    }
#endif
    default:
      return false;
  }
}

/// "GenuineIntel", "AuthenticAMD", ...; empty where there is no cpuid.
std::string vendor() {
#if defined(__x86_64__)
  unsigned largest = 0, words[3] = {};
  __get_cpuid(0, &largest, &words[0], &words[2], &words[1]);
  return {reinterpret_cast<const char*>(words), sizeof words};
#else
  return {};
#endif
}

/// The value of NSA_CPU_ISA.
std::string wish() {
  const char* value = std::getenv("NSA_CPU_ISA");
  return value && *value ? value : "auto";
}

}  // namespace

const char* name_of(Isa isa) { return kSets[static_cast<std::size_t>(isa)].name; }

bool available(Isa isa) { return kSets[static_cast<std::size_t>(isa)].built && machine_has(isa); }

Isa fastest_isa(std::string_view vendor, bool (*usable)(Isa)) {
  // Intel's vdpbf16ps has half of FMA's rate: on a Xeon the avx512 kernels took .80 of the time in bfloat16.
  const bool slow_pairs = vendor == "GenuineIntel" && usable(Isa::avx512);
  for (const Set& set : kSets) {
    if (usable(set.isa) && !(slow_pairs && set.isa == Isa::avx512bf16)) return set.isa;
  }
  return Isa::portable;
}

Status choose_isa(Isa& chosen) {
  const std::string name = wish();
  if (name == "auto") {
    static const Isa fastest = fastest_isa(vendor(), available);
    chosen = fastest;
    return {};
  }
  std::string allowed = "auto";
  for (const Set& set : kSets) {
    if (name == set.name) {
      if (!available(set.isa))
        return Status::unsupported("NSA_CPU_ISA = '" + name + "': this machine does not have it");
      chosen = set.isa;
      return {};
    }
    allowed.append(set.isa == Isa::portable ? " or " : ", ").append(set.name);
  }
  return Status::invalid_argument("NSA_CPU_ISA = '" + name + "': must be " + allowed);
}

std::string describe_instruction_sets() {
  std::string text;
  for (const Set& set : kSets) {
    text += std::string(set.name) + (available(set.isa) ? ": available\n" : ": not on this machine or not built\n");
  }
  Isa chosen;
  if (const Status status = choose_isa(chosen); !status.ok()) return text + "chosen: none, " + status.message();
  const std::string name = wish();
  return text + "chosen: " + name_of(chosen) +
         (name == "auto" ? ", the fastest on this processor" : ", NSA_CPU_ISA = " + name);
}

}  // namespace nsa::cpu
