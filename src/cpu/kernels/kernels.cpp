#include "cpu/kernels/kernels.h"

namespace nsa::cpu::NSA_ISA {

const Kernels& kernels() {
  static constexpr Kernels table{
      .compress = compress,
      .compress_backward = compress_backward,
      .combine = combine,
      .combine_backward = combine_backward,
  };
  return table;
}

}  // namespace nsa::cpu::NSA_ISA
