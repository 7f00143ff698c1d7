// Softmax attention in which each query sees a list of keys: what the three branches share.
#pragma once

#include <functional>

#include "reference/reference.h"

namespace nsa::reference {

struct Attention {
  TensorView q, k, v;
  std::vector<Sequence> sequences;
  bool compressed_keys = false;  // k and v hold the sequences' compressed tokens, otherwise the raw ones
  double scale = 1;
  DType precision = DType::kFloat64;
  /// The keys, counted within the sequence, that query `row` sees with the heads of KV head `kv_head`.
  std::function<std::vector<std::int64_t>(const Sequence&, std::int64_t kv_head, std::int64_t row)> visible;
};

double softmax_scale_of(const std::optional<double>& scale, const TensorView& q);

/// o = sum over the visible j of exp(scale * q . k_j - lse) * v_j; o = 0 and lse = -inf where nothing is visible.
void attend(const Attention& attention, const TensorView& o, const TensorView& lse);

/// Gradients of attend, from the inputs alone: o and lse are computed again.
void attend_backward(const Attention& attention, const TensorView& d_o, const TensorView& d_q, const TensorView& d_k,
                     const TensorView& d_v);

}  // namespace nsa::reference
