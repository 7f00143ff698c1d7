// Threads of the CPU backend: OpenMP's, so that they are shared with whatever else the process runs on it.
#pragma once

#include <omp.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <cstdint>
#include <exception>

#include "nsa/config.h"

namespace nsa::cpu {

inline int threads_of(const Context& context) {
  return context.num_threads > 0 ? context.num_threads : omp_get_max_threads();
}

/// How a thread rounds, and whether it flushes subnormal numbers. Each parallel region copies the caller's mode to its
/// threads: torch.set_flush_denormal, or fesetround, sets that of one thread alone.
class FloatMode {
 public:
  [[gnu::always_inline]] FloatMode() : bits_(of_thread()) {}

  /// The thread has the mode until the end of the scope.
  class Scope {
   public:
    [[gnu::always_inline]] explicit Scope(const FloatMode& mode)
        : before_(of_thread()), changes_(before_ != mode.bits_) {
      if (changes_) set(mode.bits_);
    }
    [[gnu::always_inline]] ~Scope() {
      if (changes_) set(before_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::uint64_t before_;
    bool changes_;
  };

 private:
#if defined(__x86_64__)
  [[gnu::always_inline]] static std::uint64_t of_thread() { return _mm_getcsr() & ~0x3fU; }  // without the flags
  [[gnu::always_inline]] static void set(std::uint64_t bits) { _mm_setcsr(static_cast<unsigned>(bits)); }
#elif defined(__aarch64__)
  [[gnu::always_inline]] static std::uint64_t of_thread() {
    std::uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  [[gnu::always_inline]] static void set(std::uint64_t bits) { asm volatile("msr fpcr, %0" : : "r"(bits)); }
#else
  static std::uint64_t of_thread() { return 0; }
  static void set(std::uint64_t) {}
#endif

  std::uint64_t bits_;
};

/// f(i) for every i < count, dynamically on all threads. An exception (out of memory) of any f is thrown again here,
/// after all have ended: none may leave a parallel region.
template <class F>
void parallel_for(std::int64_t count, const Context& context, const F& f) {
  std::exception_ptr error;
  const FloatMode mode;
#pragma omp parallel num_threads(threads_of(context))
  {
    const FloatMode::Scope scope(mode);
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t i = 0; i < count; ++i) {
      try {
        f(i);
      } catch (...) {
#pragma omp critical(nsa_parallel_for)
        if (!error) error = std::current_exception();
      }
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace nsa::cpu
