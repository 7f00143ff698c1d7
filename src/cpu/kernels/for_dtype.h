// From a run-time dtype to the element type of a template.
#pragma once

#include "cpu/kernels/simd.h"
#include "nsa/tensor.h"

namespace nsa::cpu::NSA_ISA {

/// f.operator()<In>() with In = float or bf16, which the support check left as the only possibilities.
template <class F>
auto for_dtype(DType dtype, const F& f) {
  return dtype == DType::kFloat32 ? f.template operator()<float>() : f.template operator()<bf16>();
}

}  // namespace nsa::cpu::NSA_ISA
