// Where the sequences of a call lie, and how a backend reaches the rows of one of them, batched or packed alike.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "nsa/operations.h"

namespace nsa {

/// One sequence of a call. Rows are counted within `batch` of a batched tensor, or within a packed tensor (batch = 0).
struct Sequence {
  std::int64_t index = 0;    // number of the sequence in the call
  std::int64_t batch = 0;    // first index of batched tensors
  std::int64_t q_begin = 0;  // first row of q, o, gates, indices, lse
  std::int64_t q_len = 0;    // Sq
  std::int64_t k_begin = 0;  // first row of the raw keys and values
  std::int64_t k_len = 0;    // Sk
  std::int64_t c_begin = 0;  // first row of the compressed keys and values
  std::int64_t c_len = 0;    // N_c(Sk)

  /// Position of query i.
  std::int64_t position(std::int64_t i) const { return i + k_len - q_len; }
};

/// Sequences of a call with queries q; k_len is only read in batched calls. Those without tokens are none, however
/// large the batch. CPU tensors only.
inline std::vector<Sequence> sequences_of(const TensorView& q, std::int64_t k_len, const Packed& packed,
                                          const NSAConfig& cfg) {
  std::vector<Sequence> result;
  if (!packed.packed()) {
    if (q.size(1) == 0 && k_len == 0) return result;
    for (std::int64_t b = 0; b < q.size(0); ++b)
      result.push_back(
          {.index = b, .batch = b, .q_len = q.size(1), .k_len = k_len, .c_len = cfg.num_compressed(k_len)});
    return result;
  }
  const TensorView& k_lens = packed.cu_seqlens_k.defined() ? packed.cu_seqlens_k : packed.cu_seqlens_q;
  const auto at = [](const TensorView& cu, std::int64_t i) {
    return static_cast<std::int64_t>(cu.as<const std::int32_t>()[i * cu.stride[0]]);
  };
  std::int64_t c_begin = 0;
  for (std::int64_t b = 0; b + 1 < packed.cu_seqlens_q.size(0); ++b) {
    Sequence s;
    s.index = b;
    s.q_begin = at(packed.cu_seqlens_q, b);
    s.q_len = at(packed.cu_seqlens_q, b + 1) - s.q_begin;
    s.k_begin = at(k_lens, b);
    s.k_len = at(k_lens, b + 1) - s.k_begin;
    s.c_begin = c_begin;
    s.c_len = cfg.num_compressed(s.k_len);
    c_begin += s.c_len;
    result.push_back(s);
  }
  return result;
}

/// A (rows, heads, D) window onto one sequence of a (B, S, heads, D) or (total, heads, D) tensor.
template <class T>
struct RowView {
  T* data = nullptr;
  std::int64_t row_stride = 0, head_stride = 0;

  T* at(std::int64_t row, std::int64_t head) const { return data + row * row_stride + head * head_stride; }
};

/// Elements between the start of a (B, S, heads, D) or (total, heads, D) tensor and row `begin` of a sequence.
inline std::int64_t row_offset(const TensorView& view, std::int64_t batch, std::int64_t begin) {
  const int token = view.rank - 3;
  return (token == 1 ? batch * view.stride[0] : 0) + begin * view.stride[token];
}

template <class T>
RowView<T> rows_of(const TensorView& view, std::int64_t batch, std::int64_t begin) {
  if (!view.defined()) return {};
  const int token = view.rank - 3;
  return {static_cast<T*>(view.data) + row_offset(view, batch, begin), view.stride[token], view.stride[token + 1]};
}

/// lse of one sequence: (B, H, S) or (H, total), element (head, row).
template <class T>
struct LseView {
  T* data = nullptr;
  std::int64_t head_stride = 0, row_stride = 0;

  T& at(std::int64_t row, std::int64_t head) const { return data[head * head_stride + row * row_stride]; }
};

/// Elements between the start of a (B, H, S) or (H, total) tensor and row `begin` of a sequence.
inline std::int64_t lse_offset(const TensorView& view, std::int64_t batch, std::int64_t begin) {
  const int head = view.rank - 2;
  return (head == 1 ? batch * view.stride[0] : 0) + begin * view.stride[head + 1];
}

template <class T>
LseView<T> lse_of(const TensorView& view, std::int64_t batch, std::int64_t begin) {
  if (!view.defined()) return {};
  const int head = view.rank - 2;
  return {static_cast<T*>(view.data) + lse_offset(view, batch, begin), view.stride[head], view.stride[head + 1]};
}

/// What compress makes of raw keys or values: a contiguous view without data.
inline TensorView compressed_shape(const TensorView& k, const NSAConfig& cfg) {
  const bool packed = k.rank == 3;
  const std::int64_t rows = cfg.compressed_rows(k.size(-3), packed);
  return packed ? TensorView::contiguous(nullptr, k.dtype, {rows, k.size(1), k.size(2)}, k.device)
                : TensorView::contiguous(nullptr, k.dtype, {k.size(0), rows, k.size(2), k.size(3)}, k.device);
}

/// Raw key tokens of a batched call behind compressed keys.
inline std::int64_t raw_length(const TensorView& q, const std::optional<std::int64_t>& seqlen_k) {
  return seqlen_k.value_or(q.rank == 4 ? q.size(1) : 0);
}

}  // namespace nsa
