#include "box.h"
#include "operations.h"

namespace nsa::python {
namespace {

template <Status (*operation)(const DecodeParams&, const Context&)>
Tensors<2> step(const BranchArguments& branches, const CacheArguments& cache, const PhiArguments& weights_k,
                const PhiArguments& weights_v, const Ints& cfg, Scale softmax_scale, const RotationArguments& rotation,
                const OptionalTensor& num_new, const OptionalTensor& imposed_indices) {
  DecodeParams params;
  params.q = input(branches.q, "q");
  params.k_cmp = input(branches.k_cmp, "k_cmp");
  params.v_cmp = input(branches.v_cmp, "v_cmp");
  params.k_slc = input(branches.k_slc, "k_slc");
  params.v_slc = input(branches.v_slc, "v_slc");
  params.k_swa = input(branches.k_swa, "k_swa");
  params.v_swa = input(branches.v_swa, "v_swa");
  params.gates = input(branches.gates, "gates");
  params.cache = cache.views();
  params.weights_k = weights_k.views();
  params.weights_v = weights_v.views();
  params.cfg = config_of(cfg);
  params.softmax_scale = softmax_scale;
  params.rope_cos = input(rotation.cos, "rope_cos");
  params.rope_sin = input(rotation.sin, "rope_sin");
  params.num_new = input(num_new, "num_new");
  params.imposed_indices = input(imposed_indices, "imposed_indices");
  check(params.cfg.validate());  // before a size is taken from it
  Tensor o = make_o(branches.q, branches.v_cmp);
  Tensor indices = make_indices(branches.q, branches.k_cmp, params.cfg);
  params.o = output(o, "o");
  params.indices = output(indices, "indices");
  run(operation, params, branches.q);
  return {o, indices};
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
  const std::string step = std::string(BranchArguments::kSchema) + ", " + cache + ", " + PhiArguments::schema("_k") +
                           ", " + PhiArguments::schema("_v") + ", int[] cfg, float? softmax_scale, " +
                           RotationArguments::kSchema + ", Tensor? num_new, Tensor? imposed_indices";
  m.def(("decode(" + step + ") -> (Tensor, Tensor)").c_str());
  m.def(("prefill(" + step + ") -> (Tensor, Tensor)").c_str());
  m.def(("fork(" + cache + ", int[] cfg, int parent, int child, int length) -> ()").c_str());
}

void implement_decode(Library& m) {
  m.impl("decode", box<&step<nsa::decode>>);
  m.impl("prefill", box<&step<nsa::prefill>>);
  m.impl("fork", box<&fork_cache>);
}

}  // namespace nsa::python
