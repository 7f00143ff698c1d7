#include "cpu/kernels/kernels.h"

namespace nsa::cpu::NSA_ISA {

const Kernels& kernels() {
  static constexpr Kernels table{
      .compress = compress,
      .compress_backward = compress_backward,
      .compressed_attention = compressed_attention,
      .compressed_attention_backward = compressed_attention_backward,
      .select_blocks = select_blocks,
      .selected_attention = selected_attention,
      .selected_attention_backward = selected_attention_backward,
      .sliding_window_attention = sliding_window_attention,
      .sliding_window_attention_backward = sliding_window_attention_backward,
      .combine = combine,
      .combine_backward = combine_backward,
      .nsa_attention = nsa_attention,
      .nsa_attention_backward = nsa_attention_backward,
      .decode = decode,
  };
  return table;
}

}  // namespace nsa::cpu::NSA_ISA
