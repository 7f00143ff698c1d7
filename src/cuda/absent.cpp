// Stands in for the CUDA backend in a build without it.
#include "core/backend.h"

namespace nsa::cuda {
namespace {

Status absent() { return Status::unsupported("backend cuda: this build of libnsa has none (NSA_BUILD_CUDA=OFF)"); }

}  // namespace

std::string describe_devices() { return "none: this build of libnsa has no CUDA backend (NSA_BUILD_CUDA=OFF)"; }
int device_count() { return 0; }
std::string describe_kernels(const KernelQuery&) { return describe_devices(); }
Status usable(int) { return absent(); }
Status available() { return absent(); }
Scope::Scope(const Device&, const char*) {}
Scope::~Scope() = default;
Status copy_to_host(void*, const void*, std::size_t) { return absent(); }
Status make_contiguous(TensorView&, Execution&) { return absent(); }
Status trust_offsets(TensorView&, TensorView&, std::int64_t, std::int64_t, Execution&) { return absent(); }
const char* variant() { return "none"; }
bool built(const Problem&) { return false; }
Status compress(const CompressParams&, Execution&) { return absent(); }
Status compress_backward(const CompressBackwardParams&, Execution&) { return absent(); }
Status compressed_attention(const CompressedAttentionParams&, Execution&) { return absent(); }
Status compressed_attention_backward(const CompressedAttentionBackwardParams&, Execution&) { return absent(); }
Status select_blocks(const SelectBlocksParams&, Execution&) { return absent(); }
Status selected_attention(const SelectedAttentionParams&, Execution&) { return absent(); }
Status selected_attention_backward(const SelectedAttentionBackwardParams&, Execution&) { return absent(); }
Status sliding_window_attention(const SlidingWindowAttentionParams&, Execution&) { return absent(); }
Status sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams&, Execution&) { return absent(); }
Status combine(const CombineParams&, Execution&) { return absent(); }
Status combine_backward(const CombineBackwardParams&, Execution&) { return absent(); }
Status nsa_attention(const NsaAttentionParams&, Execution&) { return absent(); }
Status nsa_attention_backward(const NsaAttentionBackwardParams&, Execution&) { return absent(); }
Status native_sparse_attention(const NativeSparseAttentionParams&, Execution&) { return absent(); }
Status native_sparse_attention_backward(const NativeSparseAttentionBackwardParams&, Execution&) { return absent(); }
Status decode(const DecodeParams&, Execution&) { return absent(); }
Status fork(const ForkParams&, Execution&) { return absent(); }

}  // namespace nsa::cuda
