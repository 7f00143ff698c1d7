// The CPU backend's operations: forwarded to the kernels of the chosen instruction set.
#include "core/backend.h"
#include "cpu/isa.h"
#include "cpu/kernels/kernels.h"

namespace nsa::cpu {
namespace portable {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace avx512bf16 {
const Kernels& kernels();
}

namespace {

const Kernels& kernels_of(Isa isa) {
  switch (isa) {
#if NSA_CPU_AVX512BF16
    case Isa::kAvx512Bf16:
      return avx512bf16::kernels();
#endif
#if NSA_CPU_AVX512
    case Isa::kAvx512:
      return avx512::kernels();
#endif
#if NSA_CPU_AVX2
    case Isa::kAvx2:
      return avx2::kernels();
#endif
    default:
      return portable::kernels();
  }
}

template <class Params>
Status run(Kernel<Params> Kernels::*operation, const Params& params, const Context& context) {
  Isa isa;
  if (Status s = choose_isa(isa); !s.ok()) return s;
  const Kernel<Params> kernel = kernels_of(isa).*operation;
  if (!kernel) return Status::unsupported("not in this build");
  return kernel(params, context);
}

}  // namespace

const char* variant() {
  Isa isa;
  return choose_isa(isa).ok() ? name_of(isa) : "none: NSA_CPU_ISA asks for what is not there";
}

Status usable() {
  Isa isa;
  return choose_isa(isa);
}

Status compress(const CompressParams& p, const Context& c) { return run(&Kernels::compress, p, c); }
Status compress_backward(const CompressBackwardParams& p, const Context& c) {
  return run(&Kernels::compress_backward, p, c);
}
Status compressed_attention(const CompressedAttentionParams& p, const Context& c) {
  return run(&Kernels::compressed_attention, p, c);
}
Status compressed_attention_backward(const CompressedAttentionBackwardParams& p, const Context& c) {
  return run(&Kernels::compressed_attention_backward, p, c);
}
Status select_blocks(const SelectBlocksParams& p, const Context& c) { return run(&Kernels::select_blocks, p, c); }
Status selected_attention(const SelectedAttentionParams& p, const Context& c) {
  return run(&Kernels::selected_attention, p, c);
}
Status selected_attention_backward(const SelectedAttentionBackwardParams& p, const Context& c) {
  return run(&Kernels::selected_attention_backward, p, c);
}
Status sliding_window_attention(const SlidingWindowAttentionParams& p, const Context& c) {
  return run(&Kernels::sliding_window_attention, p, c);
}
Status sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams& p, const Context& c) {
  return run(&Kernels::sliding_window_attention_backward, p, c);
}
Status combine(const CombineParams& p, const Context& c) { return run(&Kernels::combine, p, c); }
Status combine_backward(const CombineBackwardParams& p, const Context& c) {
  return run(&Kernels::combine_backward, p, c);
}
Status nsa_attention(const NsaAttentionParams& p, const Context& c) { return run(&Kernels::nsa_attention, p, c); }
Status nsa_attention_backward(const NsaAttentionBackwardParams& p, const Context& c) {
  return run(&Kernels::nsa_attention_backward, p, c);
}
Status decode(const DecodeParams& p, const Context& c) { return run(&Kernels::decode, p, c); }

}  // namespace nsa::cpu
