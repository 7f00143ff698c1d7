#include <utility>

#include "device.h"
#include "under_test.h"

namespace nsa::test {

namespace {

template <class Params, Status (*function)(const Params&, const Context&)>
Status run(const Params& params, const Context&) {
  return on_device<Params>(params, function);
}

}  // namespace

const Operations under_test{run<CompressParams, compress>,
                            run<CompressBackwardParams, compress_backward>,
                            run<CompressedAttentionParams, compressed_attention>,
                            run<CompressedAttentionBackwardParams, compressed_attention_backward>,
                            run<SelectBlocksParams, select_blocks>,
                            run<SelectedAttentionParams, selected_attention>,
                            run<SelectedAttentionBackwardParams, selected_attention_backward>,
                            run<SlidingWindowAttentionParams, sliding_window_attention>,
                            run<SlidingWindowAttentionBackwardParams, sliding_window_attention_backward>,
                            run<CombineParams, combine>,
                            run<CombineBackwardParams, combine_backward>,
                            run<NsaAttentionParams, nsa_attention>,
                            run<NsaAttentionBackwardParams, nsa_attention_backward>,
                            5e-5,  // one visible key: dP - delta is rounding noise of float32 products instead of 0
                            hopper_kernels_run};  // they leave such inputs to the portable ones

/// Hidden units in multiples of 8; every third 16-bit case in float16, and some head dims of the kernels for Hopper.
std::vector<Case> supported_by_compress(std::vector<Case> cases) {
  int n = 0;
  for (Case& c : cases) {
    if (c.hidden) c.hidden = (c.hidden + 7) / 8 * 8;
    if (c.dtype == DType::kBFloat16 && c.dk == 24) c.dk = 192, c.dv = 128;
    if (c.dtype == DType::kBFloat16 && ++n % 3 == 0) c.dtype = DType::kFloat16, c.name += "_f16";
  }
  return cases;
}

/// And head dims of the kernels instead of odd ones.
std::vector<Case> supported(std::vector<Case> cases) {
  for (Case& c : cases) {
    if (c.dk < 64) c.dk = c.dv = c.dk < 24 ? 64 : 128;
    if (c.dk != c.dv || c.dk == 72) c.dk = 192, c.dv = 128;
  }
  return supported_by_compress(std::move(cases));
}

}  // namespace nsa::test
