// The tables of kernels: which instance serves which element type and head dims.
#include "cuda/portable/decode/step_kernels.h"
#include "cuda/portable/instances.h"

namespace nsa::cuda::portable {
namespace {

/// Null where a build leaves the instance out. `volatile`: compilers take it for granted that a function has an
/// address, weak ones included.
template <class Table>
const Table* of(const Table& (*instance)()) {
  const Table& (*volatile there)() = instance;
  return there ? &instance() : nullptr;
}

/// f<T>(), null for other types.
template <class F>
auto for_element(DType dtype, const F& f) -> decltype(f.template operator()<float>()) {
  if (dtype == DType::kBFloat16) return f.template operator()<Bf16>();
  if (dtype == DType::kFloat16) return f.template operator()<Half>();
  if (dtype == DType::kFloat32) return f.template operator()<float>();
  return nullptr;
}

/// f<T, Dk, Dv>(), null for other types or head dims.
template <class F>
auto for_instance(DType dtype, std::int64_t key_dim, std::int64_t value_dim, const F& f) {
  return for_element(dtype, [&]<class T>() -> decltype(f.template operator()<T, 64, 64>()) {
    if (key_dim == 64 && value_dim == 64) return f.template operator()<T, 64, 64>();
    if (key_dim == 128 && value_dim == 128) return f.template operator()<T, 128, 128>();
    if (key_dim == 192 && value_dim == 128) return f.template operator()<T, 192, 128>();
    return nullptr;
  });
}

}  // namespace

const AttentionKernels* attention_kernels(DType dtype, std::int64_t key_dim, std::int64_t value_dim) {
  return for_instance(dtype, key_dim, value_dim,
                      [&]<class T, int Dk, int Dv>() { return of(&attention_instance<T, Dk, Dv>); });
}
template <class Tokens>
const StepAttentionKernels<Tokens>* step_attention_kernels(DType dtype, std::int64_t key_dim, std::int64_t value_dim) {
  return for_instance(dtype, key_dim, value_dim,
                      [&]<class T, int Dk, int Dv>() { return of(&step_attention_instance<T, Dk, Dv, Tokens>); });
}
template const StepAttentionKernels<CachedTokens>* step_attention_kernels(DType, std::int64_t, std::int64_t);
template const StepAttentionKernels<Float8Tokens>* step_attention_kernels(DType, std::int64_t, std::int64_t);

const ElementKernels* element_kernels(DType dtype) {
  return for_element(dtype, [&]<class T>() { return of(&element_instance<T>); });
}
const StepElementKernels* step_element_kernels(DType dtype) {
  return for_element(dtype, [&]<class T>() { return of(&step_element_instance<T>); });
}

}  // namespace nsa::cuda::portable
