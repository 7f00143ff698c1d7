// FlashAttention-3 as a dense baseline: the operators of an installed Python package, called without Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

namespace nsa::bench {

class Flash3 {
 public:
  /// Loads the extension module of a package of FlashAttention-3, e.g. `flash_attn_3/_C.abi3.so` or
  /// `fa3_fwd/_C.abi3.so`. Throws Error if it does not load or registers no such operators.
  explicit Flash3(const std::string& library);

  struct Forward {
    at::Tensor o, lse;
  };
  /// Causal attention: q (1, S, H, Dk), k (1, S, Hkv, Dk), v (1, S, Hkv, Dv), 16-bit, on a GPU. Throws c10::Error for
  /// what the build does not take; of a build for torch's stable interface it is another std::exception.
  Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;
  /// Its gradients, dropped. Builds without a backward throw.
  void backward(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const Forward& forward) const;

 private:
  std::optional<c10::OperatorHandle> forward_, backward_;
};

}  // namespace nsa::bench
