#include "operations.h"

namespace nsa::python {
namespace {

KVCacheView cache_of(const Tensor& k_slc, const Tensor& v_slc, const Tensor& k_c, const Tensor& v_c,
                     const Tensor& k_swa_ring, const Tensor& v_swa_ring, const Tensor& k_cmp_ring,
                     const Tensor& v_cmp_ring, const Tensor& cache_seqlens, const Tensor& overflow,
                     const Tensor& block_table, const Tensor& block_table_c) {
  KVCacheView cache;
  cache.k_slc = output(k_slc, "cache.k_slc");
  cache.v_slc = output(v_slc, "cache.v_slc");
  cache.k_c = output(k_c, "cache.k_c");
  cache.v_c = output(v_c, "cache.v_c");
  cache.k_swa_ring = output(k_swa_ring, "cache.k_swa_ring");
  cache.v_swa_ring = output(v_swa_ring, "cache.v_swa_ring");
  cache.k_cmp_ring = output(k_cmp_ring, "cache.k_cmp_ring");
  cache.v_cmp_ring = output(v_cmp_ring, "cache.v_cmp_ring");
  cache.cache_seqlens = output(cache_seqlens, "cache.cache_seqlens");
  cache.overflow = output(overflow, "cache.overflow");
  cache.block_table = input(block_table, "cache.block_table");
  cache.block_table_c = input(block_table_c, "cache.block_table_c");
  return cache;
}

template <Status (*operation)(const DecodeParams&, const Context&)>
Tensors<2> step(const Tensor& q, const Tensor& k_cmp, const Tensor& v_cmp, const Tensor& k_slc, const Tensor& v_slc,
                const Tensor& k_swa, const Tensor& v_swa, const Tensor& gates, const Tensor& cache_k_slc,
                const Tensor& cache_v_slc, const Tensor& cache_k_c, const Tensor& cache_v_c, const Tensor& k_swa_ring,
                const Tensor& v_swa_ring, const Tensor& k_cmp_ring, const Tensor& v_cmp_ring,
                const Tensor& cache_seqlens, const Tensor& overflow, const Tensor& block_table,
                const Tensor& block_table_c, const std::string& kind_k, const OptionalTensor& pe_k,
                const OptionalTensor& w1_k, const OptionalTensor& b1_k, const OptionalTensor& w2_k,
                const OptionalTensor& b2_k, const std::string& kind_v, const OptionalTensor& pe_v,
                const OptionalTensor& w1_v, const OptionalTensor& b1_v, const OptionalTensor& w2_v,
                const OptionalTensor& b2_v, const Ints& cfg, Scale softmax_scale, const OptionalTensor& rope_cos,
                const OptionalTensor& rope_sin, const OptionalTensor& num_new, const OptionalTensor& imposed_indices) {
  DecodeParams params;
  params.q = input(q, "q");
  params.k_cmp = input(k_cmp, "k_cmp");
  params.v_cmp = input(v_cmp, "v_cmp");
  params.k_slc = input(k_slc, "k_slc");
  params.v_slc = input(v_slc, "v_slc");
  params.k_swa = input(k_swa, "k_swa");
  params.v_swa = input(v_swa, "v_swa");
  params.gates = input(gates, "gates");
  params.cache = cache_of(cache_k_slc, cache_v_slc, cache_k_c, cache_v_c, k_swa_ring, v_swa_ring, k_cmp_ring,
                          v_cmp_ring, cache_seqlens, overflow, block_table, block_table_c);
  params.weights_k = weights_of(kind_k, pe_k, w1_k, b1_k, w2_k, b2_k);
  params.weights_v = weights_of(kind_v, pe_v, w1_v, b1_v, w2_v, b2_v);
  params.cfg = config_of(cfg);
  params.softmax_scale = softmax_scale;
  params.rope_cos = input(rope_cos, "rope_cos");
  params.rope_sin = input(rope_sin, "rope_sin");
  params.num_new = input(num_new, "num_new");
  params.imposed_indices = input(imposed_indices, "imposed_indices");
  check(params.cfg.validate());  // before a size is taken from it
  Tensor o = make_o(q, v_cmp);
  Tensor indices = make_indices(q, k_cmp, params.cfg);
  params.o = output(o, "o");
  params.indices = output(indices, "indices");
  run(operation, params, q);
  return {o, indices};
}

void fork_cache(const Tensor& cache_k_slc, const Tensor& cache_v_slc, const Tensor& cache_k_c, const Tensor& cache_v_c,
                const Tensor& k_swa_ring, const Tensor& v_swa_ring, const Tensor& k_cmp_ring, const Tensor& v_cmp_ring,
                const Tensor& cache_seqlens, const Tensor& overflow, const Tensor& block_table,
                const Tensor& block_table_c, const Ints& cfg, std::int64_t parent, std::int64_t child,
                std::int64_t length) {
  ForkParams params;
  params.cache = cache_of(cache_k_slc, cache_v_slc, cache_k_c, cache_v_c, k_swa_ring, v_swa_ring, k_cmp_ring,
                          v_cmp_ring, cache_seqlens, overflow, block_table, block_table_c);
  params.cfg = config_of(cfg);
  params.parent = parent;
  params.child = child;
  params.length = length;
  run(nsa::fork, params, cache_k_slc);
}

/// The cache's tensors, those that a step changes marked so.
constexpr const char* kCache =
    "Tensor(a!) cache_k_slc, Tensor(b!) cache_v_slc, Tensor(c!) cache_k_c, Tensor(d!) cache_v_c, "
    "Tensor(e!) k_swa_ring, Tensor(f!) v_swa_ring, Tensor(g!) k_cmp_ring, Tensor(h!) v_cmp_ring, "
    "Tensor(i!) cache_seqlens, Tensor(j!) overflow, Tensor block_table, Tensor block_table_c, ";
constexpr const char* kNewTokens =
    "Tensor q, Tensor k_cmp, Tensor v_cmp, Tensor k_slc, Tensor v_slc, Tensor k_swa, Tensor v_swa, Tensor gates, ";
constexpr const char* kSettings =
    "str kind_k, Tensor? pe_k, Tensor? w1_k, Tensor? b1_k, Tensor? w2_k, Tensor? b2_k, "
    "str kind_v, Tensor? pe_v, Tensor? w1_v, Tensor? b1_v, Tensor? w2_v, Tensor? b2_v, "
    "int[] cfg, float? softmax_scale, Tensor? rope_cos, Tensor? rope_sin, Tensor? num_new, Tensor? imposed_indices";

}  // namespace

void define_decode(Library& m) {
  const std::string cache = kCache;
  const std::string step = kNewTokens + cache + kSettings;
  m.def(("decode(" + step + ") -> (Tensor, Tensor)").c_str());
  m.def(("prefill(" + step + ") -> (Tensor, Tensor)").c_str());
  m.def(("fork(" + cache + "int[] cfg, int parent, int child, int length) -> ()").c_str());
}

void implement_decode(Library& m) {
  m.impl("decode", TORCH_BOX(&step<nsa::decode>));
  m.impl("prefill", TORCH_BOX(&step<nsa::prefill>));
  m.impl("fork", TORCH_BOX(&fork_cache));
}

}  // namespace nsa::python
