#include "box.h"
#include "operations.h"

namespace nsa::python {
namespace {

using Operation = Status (*)(const DecodeParams&, const Context&);

/// A step with what the operators have in common; `params` has the rest. With `out` the first result is empty.
Tensors<2> run_step(Operation operation, DecodeParams params, const BranchArguments& branches,
                    const PhiArguments& weights_k, const PhiArguments& weights_v, const Ints& cfg, Scale softmax_scale,
                    const RotationArguments& rotation, bool rotate, const OptionalTensor& block_indices,
                    const OptionalTensor& out = {}) {
  params.q = input(branches.q, "q");
  params.k_cmp = input(branches.k_cmp, "k_cmp");
  params.v_cmp = input(branches.v_cmp, "v_cmp");
  params.k_slc = input(branches.k_slc, "k_slc");
  params.v_slc = input(branches.v_slc, "v_slc");
  params.k_swa = input(branches.k_swa, "k_swa");
  params.v_swa = input(branches.v_swa, "v_swa");
  params.gates = input(branches.gates, "gates");
  params.weights_k = weights_k.views();
  params.weights_v = weights_v.views();
  params.cfg = config_of(cfg);
  params.softmax_scale = softmax_scale;
  params.rope_cos = input(rotation.cos, "rope_cos");
  params.rope_sin = input(rotation.sin, "rope_sin");
  params.rotate = rotate;
  params.block_indices = input(block_indices, "block_indices");
  check(params.cfg.validate());  // before a size is taken from it
  Tensor o = out ? make(branches.q, {0}) : make_o(branches.q, branches.v_cmp);
  Tensor indices = make_indices(branches.q, branches.k_cmp, params.cfg);
  params.o = out ? output(*out, "out") : output(o, "o");
  params.indices = output(indices, "indices");
  run(operation, params, branches.q);
  return {o, indices};
}

template <Operation operation>
Tensors<2> step(const BranchArguments& branches, const CacheArguments& cache, const PhiArguments& weights_k,
                const PhiArguments& weights_v, const Ints& cfg, Scale softmax_scale, const RotationArguments& rotation,
                bool rotate, const OptionalTensor& num_new, const OptionalTensor& block_indices,
                const ScaleArguments& scales) {
  DecodeParams params;
  params.cache = cache.views();
  scales.give_to(params.cache);
  params.num_new = input(num_new, "num_new");
  return run_step(operation, params, branches, weights_k, weights_v, cfg, softmax_scale, rotation, rotate,
                  block_indices);
}

Tensors<2> decode_paged(const BranchArguments& branches, const PagedCacheArguments& cache,
                        const Tensor& query_start_loc, std::int64_t max_query_len, const PhiArguments& weights_k,
                        const PhiArguments& weights_v, const Ints& cfg, Scale softmax_scale,
                        const RotationArguments& rotation, bool rotate, const OptionalTensor& block_indices,
                        const ScaleArguments& scales, const OptionalTensor& out) {
  DecodeParams params;
  params.cache = cache.views();
  scales.give_to(params.cache);
  params.query_start_loc = input(query_start_loc, "query_start_loc");
  params.max_query_len = max_query_len;
  const bool chunks = max_query_len == 0 || max_query_len > kMaxDecodeTokens;
  return run_step(chunks ? nsa::prefill : nsa::decode, params, branches, weights_k, weights_v, cfg, softmax_scale,
                  rotation, rotate, block_indices, out);
}

void fork_cache(const CacheArguments& cache, const Ints& cfg, std::int64_t parent, std::int64_t child,
                std::int64_t length) {
  ForkParams params;
  params.cache = cache.views();
  params.cfg = config_of(cfg);
  params.parent = parent;
  params.child = child;
  params.length = length;
  run(nsa::fork, params, cache.k_slc);
}

}  // namespace

void define_decode(Library& m) {
  const std::string cache = CacheArguments::kSchema;
  const std::string branches = std::string(BranchArguments::kSchema) + ", ";
  const std::string options = ", " + PhiArguments::schema("_k") + ", " + PhiArguments::schema("_v") +
                              ", int[] cfg, float? softmax_scale, " + RotationArguments::kSchema + ", bool rotate, ";
  const std::string last = std::string("Tensor? block_indices, ") + ScaleArguments::kSchema;
  const std::string step = branches + cache + options + "Tensor? num_new, " + last;
  m.def(("decode(" + step + ") -> (Tensor, Tensor)").c_str());
  m.def(("prefill(" + step + ") -> (Tensor, Tensor)").c_str());
  m.def(("decode_paged(" + branches + PagedCacheArguments::kSchema + ", Tensor query_start_loc, SymInt max_query_len" +
         options + last + ", Tensor(j!)? out) -> (Tensor, Tensor)")
            .c_str());
  m.def(("fork(" + cache + ", int[] cfg, int parent, int child, int length) -> ()").c_str());
}

void implement_decode(Library& m) {
  m.impl("decode", box<&step<nsa::decode>>);
  m.impl("prefill", box<&step<nsa::prefill>>);
  m.impl("decode_paged", box<&decode_paged>);
  m.impl("fork", box<&fork_cache>);
}

}  // namespace nsa::python
