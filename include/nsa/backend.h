// Who executes a call. What a backend supports is decided in one place, which can be asked before a call.
#pragma once

#include <cstdint>
#include <string>

#include "nsa/status.h"
#include "nsa/tensor.h"

namespace nsa {

enum class Backend : std::int8_t {
  kAuto,       // as NSA_BACKEND=auto|cpu|reference says; auto: the fast backend of the tensors' device
  kReference,  // fp64 loops straight from the specification; runs only when asked for
  kCPU,        // vectorised and threaded
};

const char* name_of(Backend backend);

/// How to execute a call. A backend that cannot do the call is an error, never a silent fall-back to a slower one.
struct Context {
  Backend backend = Backend::kAuto;
  int num_threads = 0;  // CPU threads; 0: OpenMP's current maximum. Results do not depend on it.
};

/// What the choice of a backend depends on.
struct Problem {
  DType dtype = DType::kFloat32;  // of q, k, v
  Device device;
  std::int64_t key_dim = 64, value_dim = 64;  // Dk, Dv
};

/// Whether `backend` (not kAuto) can run such a call. Unsupported: the message names what it cannot do.
Status supports(Backend backend, const Problem& problem);

/// The backend that runs such a call. Unsupported if the chosen one cannot; invalid argument for an unknown
/// NSA_BACKEND.
Status choose_backend(const Problem& problem, const Context& context, Backend& chosen);

/// A line per backend: what it takes, the variant that runs on this machine; then which one is chosen and why.
std::string describe_backends();

/// The variant of its kernels that `backend` (not kAuto) runs on this machine: "avx512bf16", "portable", ...
std::string variant_of(Backend backend);

/// A line per instruction set the CPU backend has kernels for, best first: whether this machine can run it; then which
/// one is chosen and why (NSA_CPU_ISA).
std::string describe_instruction_sets();

/// Threads of a call whose Context does not say: OpenMP's current maximum (OMP_NUM_THREADS).
int default_num_threads();

/// "0.1.0"
const char* version();

}  // namespace nsa
