// Threads of the CPU backend: OpenMP's, so that they are shared with whatever else the process runs on it.
#pragma once

#include <omp.h>

#include <cstdint>
#include <exception>

#include "nsa/config.h"

namespace nsa::cpu {

inline int threads_of(const Context& context) {
  return context.num_threads > 0 ? context.num_threads : omp_get_max_threads();
}

/// f(i) for every i < count, dynamically on all threads. An exception (out of memory) of any f is thrown again here,
/// after all have ended: none may leave a parallel region.
template <class F>
void parallel_for(std::int64_t count, const Context& context, const F& f) {
  std::exception_ptr error;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_of(context))
  for (std::int64_t i = 0; i < count; ++i) {
    try {
      f(i);
    } catch (...) {
#pragma omp critical(nsa_parallel_for)
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace nsa::cpu
