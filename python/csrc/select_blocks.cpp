#include "operations.h"

namespace nsa::python {

Tensor select_blocks(const Tensor& q, const Tensor& k_c, const Tensor& lse, const Ints& cfg, Scale softmax_scale,
                     Length seqlen_k, double noise, std::int64_t seed, const PackedArguments& packed) {
  SelectBlocksParams params;
  params.q = input(q, "q");
  params.k_c = input(k_c, "k_c");
  params.lse = input(lse, "lse");
  params.cfg = config_of(cfg);
  params.softmax_scale = softmax_scale;
  params.seqlen_k = seqlen_k;
  params.noise = noise;
  params.seed = static_cast<std::uint64_t>(seed);
  params.packed = packed.views();
  check(params.cfg.validate());  // before a size is taken from it
  Tensor indices = make_indices(q, k_c, params.cfg);
  params.indices = output(indices, "indices");
  run(nsa::select_blocks, params, q);
  return indices;
}

}  // namespace nsa::python
