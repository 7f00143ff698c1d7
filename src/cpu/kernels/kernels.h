// The operations of the CPU backend once per instruction set. The .cpp files of this folder are compiled once per set,
// into the namespace nsa::cpu::NSA_ISA.
#pragma once

#include "core/backend.h"

namespace nsa::cpu {

template <class Params>
using Kernel = Status (*)(const Params& params, const Context& context);

/// One entry per operation; the arguments are validated.
struct Kernels {
  Kernel<CompressParams> compress = nullptr;
  Kernel<CompressBackwardParams> compress_backward = nullptr;
  Kernel<CompressedAttentionParams> compressed_attention = nullptr;
  Kernel<CompressedAttentionBackwardParams> compressed_attention_backward = nullptr;
  Kernel<SelectBlocksParams> select_blocks = nullptr;
  Kernel<SelectedAttentionParams> selected_attention = nullptr;
  Kernel<SelectedAttentionBackwardParams> selected_attention_backward = nullptr;
  Kernel<SlidingWindowAttentionParams> sliding_window_attention = nullptr;
  Kernel<SlidingWindowAttentionBackwardParams> sliding_window_attention_backward = nullptr;
  Kernel<CombineParams> combine = nullptr;
  Kernel<CombineBackwardParams> combine_backward = nullptr;
  Kernel<NsaAttentionParams> nsa_attention = nullptr;
  Kernel<NsaAttentionBackwardParams> nsa_attention_backward = nullptr;
  Kernel<DecodeParams> decode = nullptr;
};

#ifdef NSA_ISA
namespace NSA_ISA {
Status compress(const CompressParams& params, const Context& context);
Status compress_backward(const CompressBackwardParams& params, const Context& context);
Status compressed_attention(const CompressedAttentionParams& params, const Context& context);
Status compressed_attention_backward(const CompressedAttentionBackwardParams& params, const Context& context);
Status select_blocks(const SelectBlocksParams& params, const Context& context);
Status selected_attention(const SelectedAttentionParams& params, const Context& context);
Status selected_attention_backward(const SelectedAttentionBackwardParams& params, const Context& context);
Status sliding_window_attention(const SlidingWindowAttentionParams& params, const Context& context);
Status sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams& params, const Context& context);
Status combine(const CombineParams& params, const Context& context);
Status combine_backward(const CombineBackwardParams& params, const Context& context);
Status nsa_attention(const NsaAttentionParams& params, const Context& context);
Status nsa_attention_backward(const NsaAttentionBackwardParams& params, const Context& context);
Status decode(const DecodeParams& params, const Context& context);
const Kernels& kernels();
}  // namespace NSA_ISA
#endif

}  // namespace nsa::cpu
