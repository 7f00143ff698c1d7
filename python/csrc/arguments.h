// Groups of arguments that the schemas of several operators have in common. A group is a parameter of a kernel like any
// other (box.h) and takes as many arguments of a call as it has members, in their order.
#pragma once

#include <string>
#include <tuple>

#include "convert.h"

namespace nsa::python {

/// Phi: the kind and its weights, as CompressionWeights has them.
struct PhiArguments {
  std::string kind;
  OptionalTensor pe, w1, b1, w2, b2;

  using Members =
      std::tuple<std::string, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>;
  static std::string schema(const std::string& suffix = "") {
    std::string text = "str kind" + suffix;
    for (const char* name : {"pe", "w1", "b1", "w2", "b2"}) text += std::string(", Tensor? ") + name + suffix;
    return text;
  }
  CompressionWeights views() const;
};

/// Gradients of phi's weights, wanted as needs[first ...] says. `like`: for the dtype and device of those that are not.
struct WeightGradients {
  WeightGradients(const std::vector<bool>& needs, std::size_t first, const Tensor& like, const PhiArguments& of)
      : pe(of.pe, needs[first], like),
        w1(of.w1, needs[first + 1], like),
        b1(of.b1, needs[first + 2], like),
        w2(of.w2, needs[first + 3], like),
        b2(of.b2, needs[first + 4], like) {}

  CompressionWeights views() const {
    return {{}, pe.view("d_pe"), w1.view("d_w1"), b1.view("d_b1"), w2.view("d_w2"), b2.view("d_b2")};
  }

  Tensors<5> tensors() const { return {pe.tensor, w1.tensor, b1.tensor, w2.tensor, b2.tensor}; }

  Gradient pe, w1, b1, w2, b2;
};

/// Where packed sequences are.
struct PackedArguments {
  OptionalTensor cu_seqlens_q, cu_seqlens_k;
  std::int64_t max_seqlen_q, max_seqlen_k;

  using Members = std::tuple<OptionalTensor, OptionalTensor, std::int64_t, std::int64_t>;
  static constexpr const char* kSchema =
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k";
  Packed views() const;
};

/// What the three branches of a layer read. `k_cmp` and `v_cmp` are raw, or compressed already: `kSchema` or
/// `kSchemaCompressed`.
struct BranchArguments {
  Tensor q, k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa, gates;

  using Members = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  static constexpr const char* kSchema =
      "Tensor q, Tensor k_cmp, Tensor v_cmp, Tensor k_slc, Tensor v_slc, Tensor k_swa, Tensor v_swa, Tensor gates";
  static constexpr const char* kSchemaCompressed =
      "Tensor q, Tensor k_c, Tensor v_c, Tensor k_slc, Tensor v_slc, Tensor k_swa, Tensor v_swa, Tensor gates";
};

/// Outputs of the branches, on the way into a backward.
struct SavedArguments {
  Tensor o_cmp, o_slc, o_swa, lse_cmp, lse_slc, lse_swa;

  using Members = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  static constexpr const char* kSchema =
      "Tensor o_cmp, Tensor o_slc, Tensor o_swa, Tensor lse_cmp, Tensor lse_slc, Tensor lse_swa";
};

/// Tables of the rotation.
struct RotationArguments {
  OptionalTensor cos, sin;

  using Members = std::tuple<OptionalTensor, OptionalTensor>;
  static constexpr const char* kSchema = "Tensor? rope_cos, Tensor? rope_sin";
};

/// The tensors of a KVCache; those that a step changes are marked so.
struct CacheArguments {
  Tensor k_slc, v_slc, k_c, v_c, k_swa_ring, v_swa_ring, k_cmp_ring, v_cmp_ring, cache_seqlens, overflow, block_table,
      block_table_c;

  using Members =
      std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  static constexpr const char* kSchema =
      "Tensor(a!) cache_k_slc, Tensor(b!) cache_v_slc, Tensor(c!) cache_k_c, Tensor(d!) cache_v_c, "
      "Tensor(e!) k_swa_ring, Tensor(f!) v_swa_ring, Tensor(g!) k_cmp_ring, Tensor(h!) v_cmp_ring, "
      "Tensor(i!) cache_seqlens, Tensor(j!) overflow, Tensor block_table, Tensor block_table_c";
  KVCacheView views() const;
};

/// Of a cache in e4m3.
struct ScaleArguments {
  OptionalTensor k_scale, v_scale;

  using Members = std::tuple<OptionalTensor, OptionalTensor>;
  static constexpr const char* kSchema = "Tensor? k_scale, Tensor? v_scale";
  void give_to(KVCacheView& cache) const;
};

/// A cache in memory of an engine: seq_lens are lengths after the step, its own.
struct PagedCacheArguments {
  Tensor k_slc, v_slc, k_c, v_c;
  OptionalTensor k_swa, v_swa;
  Tensor k_cmp;
  OptionalTensor v_cmp;
  Tensor overflow, seq_lens, block_table;
  OptionalTensor block_table_c, block_table_swa, block_table_cmp;

  using Members = std::tuple<Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, Tensor, OptionalTensor,
                             Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor>;
  static constexpr const char* kSchema =
      "Tensor(a!) cache_k_slc, Tensor(b!) cache_v_slc, Tensor(c!) cache_k_c, Tensor(d!) cache_v_c, "
      "Tensor(e!)? k_swa_ring, Tensor(f!)? v_swa_ring, Tensor(g!) k_cmp_ring, Tensor(h!)? v_cmp_ring, "
      "Tensor(i!) overflow, Tensor seq_lens, Tensor block_table, Tensor? block_table_c, Tensor? block_table_swa, "
      "Tensor? block_table_cmp";
  KVCacheView views() const;
};

}  // namespace nsa::python
