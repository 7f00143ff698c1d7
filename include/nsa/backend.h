// Backend selection. supports() tells before a call whether a backend can run it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "nsa/config.h"
#include "nsa/status.h"
#include "nsa/tensor.h"

namespace nsa {

enum class Backend : std::int8_t {
  kAuto,       // as NSA_BACKEND=auto|cpu|cuda|reference says; auto: the fast backend of the tensors' device
  kReference,  // fp64 loops straight from the specification, in host memory; runs only on request
  kCPU,        // vectorised and threaded
  kCUDA,       // NVIDIA GPUs from compute capability 8.0 on, if the library was built with it
};

const char* name_of(Backend backend);

inline constexpr int kMaxThreads = 1024;

/// How to execute a call. A backend that cannot do the call is an error, never a silent fall-back to a slower one.
struct Context {
  Backend backend = Backend::kAuto;
  // CPU threads, up to kMaxThreads; 0: OpenMP's current maximum. Results do not depend on it.
  int num_threads = 0;
  // On a GPU a call launches kernels on `stream`, works in `workspace`, and returns: it allocates nothing, waits for
  // nothing and uses no other stream, so calls may be captured in a CUDA graph.
  void* stream = nullptr;          // cudaStream_t of the tensors' device; null: the default stream
  void* workspace = nullptr;       // memory of the tensors' device, aligned to 256 bytes; free again after the call
  std::size_t workspace_size = 0;  // bytes, at least what workspace_size() (operations.h) says
  // For timing: on a GPU nsa_attention and nsa_attention_backward call it on the host with a stage's name whenever all
  // of that stage, or a part of it, has been launched. It may record an event on the stream. Null: not called.
  const std::function<void(const char* stage)>* on_stage = nullptr;
};

/// What backend selection depends on.
struct Problem {
  DType dtype = DType::kFloat32;  // of q, k, v
  Device device;
  // Dk and Dv of an attention. Without values (select_blocks): value_dim = 0; nothing attends (compress, combine):
  // key_dim = 0, value_dim the width of a row.
  std::int64_t key_dim = 64, value_dim = 64;
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

/// A line per instruction set the CPU backend has kernels for, newest first: whether this machine can run it; then
/// which one is chosen and why (NSA_CPU_ISA).
std::string describe_instruction_sets();

/// A line per CUDA device: name, compute capability, memory, why the backend cannot use it; or why there is none.
std::string describe_devices();
/// CUDA devices that the backend can use: compute capability 8.0 or newer; 0 if the library was built without it.
int device_count();

/// What the choice of CUDA kernels looks at.
struct KernelQuery {
  DType dtype = DType::kBFloat16;                                                 // of q, k, v
  std::int64_t num_heads = 64, num_kv_heads = 4, key_dim = 128, value_dim = 128;  // H, Hkv, Dk, Dv
  NSAConfig cfg;
  CompressionKind phi = CompressionKind::kMlp;
  std::int64_t phi_hidden = 0;  // E of an MLP; 0: 2 * Dk
};
/// A line per operation: the kernels that serve it on a GPU of compute capability 9.0 in tensors that TMA can read and,
/// where portable ones do, why. The same on every machine; one line with the reason where the library was built without
/// CUDA, or num_kv_heads does not divide num_heads.
std::string describe_kernels(const KernelQuery& query);

/// Threads of a call whose Context does not say: OpenMP's current maximum (OMP_NUM_THREADS).
int default_num_threads();

/// "0.1.0"
const char* version();

}  // namespace nsa
