// The tables of kernels: which instance serves which element type and head dims.
#include "core/backend.h"
#include "cuda/portable/launch.cuh"

namespace nsa::cuda::portable {
namespace {

template <class Table>
const Table* of(const Table& (*instance)()) {
  return instance ? &instance() : nullptr;
}

}  // namespace

const AttentionKernels* attention_kernels(DType dtype, std::int64_t key_dim, std::int64_t value_dim) {
  const auto with = [&]<class T>() -> const AttentionKernels* {
    if (key_dim == 64 && value_dim == 64) return of(&attention_instance<T, 64, 64>);
    if (key_dim == 128 && value_dim == 128) return of(&attention_instance<T, 128, 128>);
    if (key_dim == 192 && value_dim == 128) return of(&attention_instance<T, 192, 128>);
    return nullptr;
  };
  if (dtype == DType::kBFloat16) return with.operator()<Bf16>();
  if (dtype == DType::kFloat16) return with.operator()<Half>();
  if (dtype == DType::kFloat32) return with.operator()<float>();
  return nullptr;
}

const ElementKernels* element_kernels(DType dtype) {
  if (dtype == DType::kBFloat16) return of(&element_instance<Bf16>);
  if (dtype == DType::kFloat16) return of(&element_instance<Half>);
  if (dtype == DType::kFloat32) return of(&element_instance<float>);
  return nullptr;
}

const char* variant() { return "portable"; }

bool built(const Problem& problem) {
  if (!element_kernels(problem.dtype)) return false;
  return problem.key_dim == 0 || problem.value_dim == 0 ||
         attention_kernels(problem.dtype, problem.key_dim, problem.value_dim);
}

}  // namespace nsa::cuda::portable
