// Threads of the CPU backend: OpenMP's, so that they are shared with whatever else the process runs on it.
#pragma once

#include <omp.h>

#include "nsa/config.h"

namespace nsa::cpu {

inline int threads_of(const Context& context) {
  return context.num_threads > 0 ? context.num_threads : omp_get_max_threads();
}

}  // namespace nsa::cpu
