#include "cpu/isa.h"

#include <cstdlib>
#include <string>

namespace nsa::cpu {
namespace {
constexpr Isa kAll[] = {Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2, Isa::kPortable};  // best first
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512bf16";
  }
  return "unknown";
}

bool available(Isa isa) {
  if (isa == Isa::kPortable) return true;
#if NSA_CPU_AVX2 || NSA_CPU_AVX512 || NSA_CPU_AVX512BF16
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool avx512bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (isa == Isa::kAvx2) return NSA_CPU_AVX2 && avx2;
  if (isa == Isa::kAvx512) return NSA_CPU_AVX512 && avx512;
  if (isa == Isa::kAvx512Bf16) return NSA_CPU_AVX512BF16 && avx512bf16;
#endif
  return false;
}

Status choose_isa(Isa& chosen) {
  const char* wish = std::getenv("NSA_CPU_ISA");
  const std::string name = wish ? wish : "";
  for (Isa isa : kAll) {
    if (name.empty() || name == "auto" ? available(isa) : name == name_of(isa)) {
      if (!available(isa)) return Status::unsupported("NSA_CPU_ISA = '" + name + "': this machine does not have it");
      chosen = isa;
      return {};
    }
  }
  return Status::invalid_argument("NSA_CPU_ISA = '" + name + "': must be auto, avx512bf16, avx512, avx2 or portable");
}

std::string describe_instruction_sets() {
  std::string text;
  for (Isa isa : kAll) {
    text += std::string(name_of(isa)) + (available(isa) ? ": available\n" : ": not on this machine or not built\n");
  }
  Isa chosen;
  if (const Status status = choose_isa(chosen); !status.ok()) return text + "chosen: none, " + status.message();
  const char* wish = std::getenv("NSA_CPU_ISA");
  const std::string name = wish ? wish : "";
  return text + "chosen: " + name_of(chosen) +
         (name.empty() || name == "auto" ? ", the best available" : ", NSA_CPU_ISA = " + name);
}

}  // namespace nsa::cpu
