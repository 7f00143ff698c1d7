#include "device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "nsa/backend.h"

namespace nsa::test {
namespace {

// Every tensor of a call.
template <class F>
void for_views(CompressionWeights& w, const F& f) {
  for (TensorView* t : {&w.pe, &w.w1, &w.b1, &w.w2, &w.b2}) f(*t);
}
template <class F>
void for_views(Packed& p, const F& f) {
  f(p.cu_seqlens_q), f(p.cu_seqlens_k);
}
template <class F>
void for_views(CompressParams& p, const F& f) {
  f(p.k), f(p.cu_seqlens), f(p.out);
  for_views(p.weights, f);
}
template <class F>
void for_views(CompressedAttentionParams& p, const F& f) {
  for (TensorView* t : {&p.q, &p.k_c, &p.v_c, &p.o, &p.lse}) f(*t);
  for_views(p.packed, f);
}
template <class F>
void for_views(SelectBlocksParams& p, const F& f) {
  for (TensorView* t : {&p.q, &p.k_c, &p.lse, &p.indices}) f(*t);
  for_views(p.packed, f);
}
template <class F>
void for_views(SelectedAttentionParams& p, const F& f) {
  for (TensorView* t : {&p.q, &p.k, &p.v, &p.indices, &p.o, &p.lse}) f(*t);
  for_views(p.packed, f);
}
template <class F>
void for_views(SlidingWindowAttentionParams& p, const F& f) {
  for (TensorView* t : {&p.q, &p.k, &p.v, &p.o, &p.lse}) f(*t);
  for_views(p.packed, f);
}
template <class F>
void for_views(CombineParams& p, const F& f) {
  for (TensorView* t : {&p.o_cmp, &p.o_slc, &p.o_swa, &p.gates, &p.o}) f(*t);
}
template <class F>
void for_views(NsaAttentionParams& p, const F& f) {
  for (TensorView* t : {&p.q, &p.k_c, &p.v_c, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa, &p.gates, &p.block_indices, &p.o,
                        &p.indices, &p.o_cmp, &p.o_slc, &p.o_swa, &p.lse_cmp, &p.lse_slc, &p.lse_swa})
    f(*t);
  for_views(p.packed, f);
}
template <class F>
void for_views(NativeSparseAttentionParams& p, const F& f) {
  for (TensorView* t : {&p.k_cmp, &p.v_cmp, &p.rope_cos, &p.rope_sin}) f(*t);
  for_views(p.weights_k, f);
  for_views(p.weights_v, f);
  for_views(p.attention, f);
}
template <class F>
void for_views(KVCacheView& c, const F& f) {
  for (TensorView* t : {&c.k_slc, &c.v_slc, &c.block_table, &c.k_c, &c.v_c, &c.block_table_c, &c.k_swa_ring,
                        &c.v_swa_ring, &c.k_cmp_ring, &c.v_cmp_ring, &c.k_scale, &c.v_scale, &c.block_table_swa,
                        &c.block_table_cmp, &c.cache_seqlens, &c.overflow})
    f(*t);
}
template <class F>
void for_views(DecodeParams& p, const F& f) {
  for (TensorView* t : {&p.q, &p.k_cmp, &p.v_cmp, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa, &p.gates, &p.rope_cos,
                        &p.rope_sin, &p.num_new, &p.query_start_loc, &p.block_indices, &p.o, &p.indices})
    f(*t);
  for_views(p.cache, f);
  for_views(p.weights_k, f);
  for_views(p.weights_v, f);
}
template <class F>
void for_views(ForkParams& p, const F& f) {
  for_views(p.cache, f);
}
template <class Params, class F>
requires requires(Params& p) { p.forward; }
void for_views(Params& p, const F& f) {
  for_views(p.forward, f);
  const auto each = [&](auto... views) { (f(p.*views), ...); };
  if constexpr (requires { p.d_weights; }) {
    each(&Params::d_out, &Params::d_k);
    for_views(p.d_weights, f);
  } else if constexpr (requires { p.d_k_cmp; }) {
    each(&Params::d_o, &Params::d_q, &Params::d_k_cmp, &Params::d_v_cmp, &Params::d_k_slc, &Params::d_v_slc,
         &Params::d_k_swa, &Params::d_v_swa, &Params::d_gates);
    for_views(p.d_weights_k, f);
    for_views(p.d_weights_v, f);
  } else if constexpr (requires { p.d_k_slc; }) {
    each(&Params::d_o, &Params::d_q, &Params::d_k_c, &Params::d_v_c, &Params::d_k_slc, &Params::d_v_slc,
         &Params::d_k_swa, &Params::d_v_swa, &Params::d_gates);
  } else if constexpr (requires { p.d_gates; }) {
    each(&Params::d_o, &Params::d_o_cmp, &Params::d_o_slc, &Params::d_o_swa, &Params::d_gates);
  } else if constexpr (requires { p.d_k_c; }) {
    each(&Params::d_o, &Params::d_q, &Params::d_k_c, &Params::d_v_c);
  } else {
    each(&Params::d_o, &Params::d_q, &Params::d_k, &Params::d_v);
  }
}

/// Free memory of this thread, by its size: to get some from the driver takes longer than most calls.
thread_local std::multimap<std::size_t, void*> unused;

Status failed(const char* what, cudaError_t error) {
  return Status::internal(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

bool hopper_kernels_run() {
  const char* wish = std::getenv("NSA_CUDA_KERNELS");
  return !(wish && std::string(wish) == "portable") && describe_devices().find("capability 9.0") != std::string::npos;
}

DeviceMemory::DeviceMemory(std::size_t bytes) : bytes(bytes) {
  if (const auto block = unused.extract(bytes)) {
    data = block.mapped();
  } else {
    error = cudaMalloc(&data, std::max<std::size_t>(bytes, 1));
  }
  if (error == cudaSuccess) error = cudaMemset(data, 0xff, bytes);
}

DeviceMemory::~DeviceMemory() {
  if (data) unused.emplace(bytes, data);
}

void DeviceCopies::move(TensorView& t) {
  if (!t.defined() || t.device.type == DeviceType::kCUDA) return;
  std::int64_t last = 0;  // strides are not negative
  for (int i = 0; i < t.rank; ++i)
    last += std::max<std::int64_t>(t.size(i) - 1, 0) * t.stride[static_cast<std::size_t>(i)];
  const std::size_t bytes = t.numel() ? static_cast<std::size_t>(last + 1) * size_of(t.dtype) : 0;
  auto [at, is_new] = copies_.try_emplace(t.data, bytes);
  const DeviceMemory& memory = at->second;
  error_ = std::max(
      {error_, static_cast<int>(memory.error),
       is_new && bytes ? static_cast<int>(cudaMemcpy(memory.data, t.data, bytes, cudaMemcpyHostToDevice)) : 0});
  t.data = memory.data;
  t.device = {DeviceType::kCUDA, 0};
}

Status DeviceCopies::status() const {
  return error_ == cudaSuccess ? Status{} : failed("copy to the device", static_cast<cudaError_t>(error_));
}

Status DeviceCopies::copy_back() const {
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return failed("kernel", error);
  for (const auto& [host, memory] : copies_)
    if (const cudaError_t error = cudaMemcpy(host, memory.data, memory.bytes, cudaMemcpyDeviceToHost);
        error != cudaSuccess)
      return failed("copy from the device", error);
  return {};
}

template <class Params>
Status to_device(Params& params, DeviceCopies& copies) {
  for_views(params, [&](TensorView& t) { copies.move(t); });
  return copies.status();
}

template <class Params>
Status on_device(Params params, const Function<Params>& function) {
  DeviceCopies copies;
  if (Status s = to_device(params, copies); !s.ok()) return s;
  Context context;
  if (Status s = workspace_size(params, context.workspace_size); !s.ok()) return s;
  const DeviceMemory workspace(context.workspace_size);
  context.workspace = workspace.data;
  if (Status s = function(params, context); !s.ok()) return s;
  return copies.copy_back();
}

template Status to_device(DecodeParams&, DeviceCopies&);
template Status to_device(CompressParams&, DeviceCopies&);
template Status to_device(CompressBackwardParams&, DeviceCopies&);
template Status on_device(CompressParams, const Function<CompressParams>&);
template Status on_device(CompressBackwardParams, const Function<CompressBackwardParams>&);
template Status on_device(CompressedAttentionParams, const Function<CompressedAttentionParams>&);
template Status on_device(CompressedAttentionBackwardParams, const Function<CompressedAttentionBackwardParams>&);
template Status on_device(SelectBlocksParams, const Function<SelectBlocksParams>&);
template Status on_device(SelectedAttentionParams, const Function<SelectedAttentionParams>&);
template Status on_device(SelectedAttentionBackwardParams, const Function<SelectedAttentionBackwardParams>&);
template Status on_device(SlidingWindowAttentionParams, const Function<SlidingWindowAttentionParams>&);
template Status on_device(SlidingWindowAttentionBackwardParams, const Function<SlidingWindowAttentionBackwardParams>&);
template Status on_device(CombineParams, const Function<CombineParams>&);
template Status on_device(CombineBackwardParams, const Function<CombineBackwardParams>&);
template Status on_device(NsaAttentionParams, const Function<NsaAttentionParams>&);
template Status on_device(NsaAttentionBackwardParams, const Function<NsaAttentionBackwardParams>&);
template Status on_device(NativeSparseAttentionParams, const Function<NativeSparseAttentionParams>&);
template Status on_device(NativeSparseAttentionBackwardParams, const Function<NativeSparseAttentionBackwardParams>&);
template Status on_device(DecodeParams, const Function<DecodeParams>&);
template Status on_device(ForkParams, const Function<ForkParams>&);

}  // namespace nsa::test
