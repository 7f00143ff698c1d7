#include "cpu/kernels/kernels.h"

namespace nsa::cpu::NSA_ISA {

const Kernels& kernels() {
  static constexpr Kernels table{
      .compress = compress,
      .compress_backward = compress_backward,
      .compressed_attention = compressed_attention,
      .select_blocks = select_blocks,
      .selected_attention = selected_attention,
      .sliding_window_attention = sliding_window_attention,
      .combine = combine,
      .combine_backward = combine_backward,
      .nsa_attention = nsa_attention,
      .decode = decode,
  };
  return table;
}

}  // namespace nsa::cpu::NSA_ISA
