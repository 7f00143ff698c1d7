// The public functions: validate, choose the backend, log, dump, run.
#include <algorithm>
#include <exception>
#include <limits>
#include <new>
#include <optional>
#include <string>

#include "core/backend.h"
#include "core/call.h"
#include "core/dump.h"
#include "core/log.h"
#include "core/strided.h"
#include "core/support.h"
#include "core/validation/validate.h"

namespace nsa {
namespace {

template <class Params>
using Function = Status (*)(const Params&, const Context&);

/// An operation: its name and what every backend has for it.
template <class Params>
struct Operation {
  const char* name;
  Function<Params> cpu, reference;
  Status (*cuda)(const Params&, Execution&);
};

constexpr Operation<CompressParams> kCompress{"compress", cpu::compress, reference::compress, cuda::compress};
constexpr Operation<CompressBackwardParams> kCompressBackward{"compress_backward", cpu::compress_backward,
                                                              reference::compress_backward, cuda::compress_backward};
constexpr Operation<CompressedAttentionParams> kCompressedAttention{
    "compressed_attention", cpu::compressed_attention, reference::compressed_attention, cuda::compressed_attention};
constexpr Operation<CompressedAttentionBackwardParams> kCompressedAttentionBackward{
    "compressed_attention_backward", cpu::compressed_attention_backward, reference::compressed_attention_backward,
    cuda::compressed_attention_backward};
constexpr Operation<SelectBlocksParams> kSelectBlocks{"select_blocks", cpu::select_blocks, reference::select_blocks,
                                                      cuda::select_blocks};
constexpr Operation<SelectedAttentionParams> kSelectedAttention{
    "selected_attention", cpu::selected_attention, reference::selected_attention, cuda::selected_attention};
constexpr Operation<SelectedAttentionBackwardParams> kSelectedAttentionBackward{
    "selected_attention_backward", cpu::selected_attention_backward, reference::selected_attention_backward,
    cuda::selected_attention_backward};
constexpr Operation<SlidingWindowAttentionParams> kSlidingWindowAttention{
    "sliding_window_attention", cpu::sliding_window_attention, reference::sliding_window_attention,
    cuda::sliding_window_attention};
constexpr Operation<SlidingWindowAttentionBackwardParams> kSlidingWindowAttentionBackward{
    "sliding_window_attention_backward", cpu::sliding_window_attention_backward,
    reference::sliding_window_attention_backward, cuda::sliding_window_attention_backward};
constexpr Operation<CombineParams> kCombine{"combine", cpu::combine, reference::combine, cuda::combine};
constexpr Operation<CombineBackwardParams> kCombineBackward{"combine_backward", cpu::combine_backward,
                                                            reference::combine_backward, cuda::combine_backward};
constexpr Operation<NsaAttentionParams> kNsaAttention{"nsa_attention", cpu::nsa_attention, reference::nsa_attention,
                                                      cuda::nsa_attention};
constexpr Operation<NsaAttentionBackwardParams> kNsaAttentionBackward{
    "nsa_attention_backward", cpu::nsa_attention_backward, reference::nsa_attention_backward,
    cuda::nsa_attention_backward};
constexpr Operation<NativeSparseAttentionParams> kNativeSparseAttention{
    "native_sparse_attention", cpu::native_sparse_attention, reference::native_sparse_attention,
    cuda::native_sparse_attention};
constexpr Operation<NativeSparseAttentionBackwardParams> kNativeSparseAttentionBackward{
    "native_sparse_attention_backward", cpu::native_sparse_attention_backward,
    reference::native_sparse_attention_backward, cuda::native_sparse_attention_backward};
constexpr Operation<DecodeParams> kDecode{"decode", cpu::decode, reference::decode, cuda::decode};
constexpr Operation<DecodeParams> kPrefill{"prefill", cpu::decode, reference::decode, cuda::decode};
constexpr Operation<ForkParams> kFork{"fork", fork_in_host_memory, fork_in_host_memory, cuda::fork};

template <class Params>
constexpr TensorView Params::*incoming_gradient() {
  if constexpr (requires { &Params::d_o; }) return &Params::d_o;
  if constexpr (requires { &Params::d_out; }) return &Params::d_out;
  return nullptr;
}

/// Backends may rely on a contiguous last dimension; incoming gradients may come expanded or transposed. run(params)
/// is called with a copy where they do, which make_plain(view) makes.
template <class Params, class MakePlain, class Run>
Status with_plain_gradient(const Params& params, const MakePlain& make_plain, const Run& run) {
  if constexpr (incoming_gradient<Params>() != nullptr) {
    const TensorView& gradient = params.*incoming_gradient<Params>();
    if (gradient.size(-1) > 1 && gradient.stride[static_cast<std::size_t>(gradient.rank - 1)] != 1) {
      Params plain = params;
      if (Status status = make_plain(plain.*incoming_gradient<Params>()); !status.ok()) return status;
      return run(plain);
    }
  }
  return run(params);
}

/// The offsets of a packed call, and the rows of the tensors that they are about. q null: it has none.
struct Offsets {
  TensorView *q = nullptr, *k = nullptr;
  std::int64_t total_q = 0, total_k = 0;
};

/// Raw tokens that compressed rows can stand for.
std::int64_t raw_tokens(const TensorView& k_c, const NSAConfig& cfg) {
  return k_c.defined() ? (k_c.size(0) + 1) * cfg.kernel_stride - 1 : std::numeric_limits<std::int64_t>::max();
}

template <class Params>
Offsets offsets_of(Params& p) {
  if constexpr (requires { p.forward; }) {
    return offsets_of(p.forward);
  } else if constexpr (requires { p.attention; }) {
    return offsets_of(p.attention);
  } else if constexpr (requires { p.packed; }) {
    std::int64_t total_k = 0;
    if constexpr (requires { p.k_slc; }) {
      total_k = std::min(p.k_slc.size(0), raw_tokens(p.k_c, p.cfg));
    } else if constexpr (requires { p.k_c; }) {
      total_k = raw_tokens(p.k_c, p.cfg);
    } else {
      total_k = p.k.size(0);
    }
    if (p.packed.packed()) return {&p.packed.cu_seqlens_q, &p.packed.cu_seqlens_k, p.q.size(0), total_k};
  } else if constexpr (requires { p.cu_seqlens; }) {
    if (p.cu_seqlens.defined()) return {&p.cu_seqlens, nullptr, p.k.size(0), p.k.size(0)};
  }
  return {};
}

template <class Params>
Status run_on_host(Function<Params> function, const Params& params, const Context& context) {
  std::optional<ContiguousCopy> copy;
  const auto make_plain = [&](TensorView& gradient) {
    gradient = copy.emplace(gradient).view;
    return Status{};
  };
  return with_plain_gradient(params, make_plain, [&](const Params& plain) { return function(plain, context); });
}

template <class Params>
Status run_on_device(const Operation<Params>& operation, const Params& params, const Device& device,
                     Execution& execution) {
  const cuda::Scope scope(device, operation.name);
  Params trusted = params;
  if (const Offsets offsets = offsets_of(trusted); offsets.q) {
    TensorView same;
    Status status =
        cuda::trust_offsets(*offsets.q, offsets.k ? *offsets.k : same, offsets.total_q, offsets.total_k, execution);
    if (!status.ok()) return status;
  }
  return with_plain_gradient(
      trusted, [&](TensorView& gradient) { return cuda::make_contiguous(gradient, execution); },
      [&](const Params& plain) { return operation.cuda(plain, execution); });
}

Status accept(const auto& params, const Context& context, Call& call, Backend& backend) {
  if (Status status = validate(params, call); !status.ok()) return status;
  if (Status status = choose_backend(call.problem, context, backend); !status.ok()) return status;
  if (backend == Backend::kCUDA)
    if (Status status = supports_layout(call); !status.ok()) return status;
  if (context.num_threads < 0 || context.num_threads > kMaxThreads)
    return Status::invalid_argument("num_threads = " + std::to_string(context.num_threads) + ": must be 0 ... " +
                                    std::to_string(kMaxThreads));
  return {};
}

/// Runs `body`, whose failures, exceptions included, get the operation's name.
template <class Body>
Status named(const char* operation, const Body& body) try {
  const Status status = body();
  return status.ok() ? status : Status(status.code(), std::string(operation) + ": " + status.message());
} catch (const std::bad_alloc&) {
  return Status::internal(std::string(operation) + ": out of memory");
} catch (const std::exception& error) {
  return Status::internal(std::string(operation) + ": " + error.what());
}

bool writes_nothing(const Call& call) {
  return std::all_of(call.tensors.begin(), call.tensors.end(),
                     [](const Argument& a) { return a.access == Access::kInput || a.view.numel() == 0; });
}

template <class Params>
Status run(const Operation<Params>& operation, const Params& params, const Context& context) {
  return named(operation.name, [&]() -> Status {
    Call call;
    Backend backend = Backend::kAuto;
    if (Status status = accept(params, context, call, backend); !status.ok()) return status;
    log_call(operation.name, backend, variant_of(backend).c_str(), call);
    if (Status status = dump_call(operation.name, call); !status.ok()) return status;
    if (writes_nothing(call)) return {};  // however many sequences of no tokens there are
    const LoggedCall logged;
    if (backend == Backend::kCUDA) {
      Execution execution{
          static_cast<CUstream_st*>(context.stream), {context.workspace, context.workspace_size}, context.on_stage};
      return run_on_device(operation, params, call.problem.device, execution);
    }
    return run_on_host(backend == Backend::kReference ? operation.reference : operation.cpu, params, context);
  });
}

template <class Params>
Status measure(const Operation<Params>& operation, const Params& params, std::size_t& bytes, const Context& context) {
  bytes = 0;
  return named(operation.name, [&]() -> Status {
    Call call;
    Backend backend = Backend::kAuto;
    if (Status status = accept(params, context, call, backend); !status.ok() || backend != Backend::kCUDA)
      return status;
    Execution execution;
    Status status = run_on_device(operation, params, call.problem.device, execution);
    bytes = execution.arena.used();
    return status;
  });
}

}  // namespace

Status compress(const CompressParams& params, const Context& context) { return run(kCompress, params, context); }

Status compress_backward(const CompressBackwardParams& params, const Context& context) {
  return run(kCompressBackward, params, context);
}

Status compressed_attention(const CompressedAttentionParams& params, const Context& context) {
  return run(kCompressedAttention, params, context);
}

Status compressed_attention_backward(const CompressedAttentionBackwardParams& params, const Context& context) {
  return run(kCompressedAttentionBackward, params, context);
}

Status select_blocks(const SelectBlocksParams& params, const Context& context) {
  return run(kSelectBlocks, params, context);
}

Status selected_attention(const SelectedAttentionParams& params, const Context& context) {
  return run(kSelectedAttention, params, context);
}

Status selected_attention_backward(const SelectedAttentionBackwardParams& params, const Context& context) {
  return run(kSelectedAttentionBackward, params, context);
}

Status sliding_window_attention(const SlidingWindowAttentionParams& params, const Context& context) {
  return run(kSlidingWindowAttention, params, context);
}

Status sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams& params, const Context& context) {
  return run(kSlidingWindowAttentionBackward, params, context);
}

Status combine(const CombineParams& params, const Context& context) { return run(kCombine, params, context); }

Status combine_backward(const CombineBackwardParams& params, const Context& context) {
  return run(kCombineBackward, params, context);
}

Status nsa_attention(const NsaAttentionParams& params, const Context& context) {
  return run(kNsaAttention, params, context);
}

Status nsa_attention_backward(const NsaAttentionBackwardParams& params, const Context& context) {
  return run(kNsaAttentionBackward, params, context);
}

Status native_sparse_attention(const NativeSparseAttentionParams& params, const Context& context) {
  return run(kNativeSparseAttention, params, context);
}

Status native_sparse_attention_backward(const NativeSparseAttentionBackwardParams& params, const Context& context) {
  return run(kNativeSparseAttentionBackward, params, context);
}

Status decode(const DecodeParams& params, const Context& context) {
  if (params.q.rank == 4 && params.q.size(1) > kMaxDecodeTokens)
    return Status::invalid_argument("decode: q: " + params.q.describe() + ": at most " +
                                    std::to_string(kMaxDecodeTokens) + " new tokens; prefill takes more");
  return run(kDecode, params, context);
}

Status prefill(const DecodeParams& params, const Context& context) { return run(kPrefill, params, context); }

Status fork(const ForkParams& params, const Context& context) { return run(kFork, params, context); }

template <>
Status workspace_size(const CompressParams& params, std::size_t& bytes, const Context& context) {
  return measure(kCompress, params, bytes, context);
}

template <>
Status workspace_size(const CompressBackwardParams& params, std::size_t& bytes, const Context& context) {
  return measure(kCompressBackward, params, bytes, context);
}

template <>
Status workspace_size(const CompressedAttentionParams& params, std::size_t& bytes, const Context& context) {
  return measure(kCompressedAttention, params, bytes, context);
}

template <>
Status workspace_size(const CompressedAttentionBackwardParams& params, std::size_t& bytes, const Context& context) {
  return measure(kCompressedAttentionBackward, params, bytes, context);
}

template <>
Status workspace_size(const SelectBlocksParams& params, std::size_t& bytes, const Context& context) {
  return measure(kSelectBlocks, params, bytes, context);
}

template <>
Status workspace_size(const SelectedAttentionParams& params, std::size_t& bytes, const Context& context) {
  return measure(kSelectedAttention, params, bytes, context);
}

template <>
Status workspace_size(const SelectedAttentionBackwardParams& params, std::size_t& bytes, const Context& context) {
  return measure(kSelectedAttentionBackward, params, bytes, context);
}

template <>
Status workspace_size(const SlidingWindowAttentionParams& params, std::size_t& bytes, const Context& context) {
  return measure(kSlidingWindowAttention, params, bytes, context);
}

template <>
Status workspace_size(const SlidingWindowAttentionBackwardParams& params, std::size_t& bytes, const Context& context) {
  return measure(kSlidingWindowAttentionBackward, params, bytes, context);
}

template <>
Status workspace_size(const CombineParams& params, std::size_t& bytes, const Context& context) {
  return measure(kCombine, params, bytes, context);
}

template <>
Status workspace_size(const CombineBackwardParams& params, std::size_t& bytes, const Context& context) {
  return measure(kCombineBackward, params, bytes, context);
}

template <>
Status workspace_size(const NsaAttentionParams& params, std::size_t& bytes, const Context& context) {
  return measure(kNsaAttention, params, bytes, context);
}

template <>
Status workspace_size(const NsaAttentionBackwardParams& params, std::size_t& bytes, const Context& context) {
  return measure(kNsaAttentionBackward, params, bytes, context);
}

template <>
Status workspace_size(const NativeSparseAttentionParams& params, std::size_t& bytes, const Context& context) {
  return measure(kNativeSparseAttention, params, bytes, context);
}

template <>
Status workspace_size(const NativeSparseAttentionBackwardParams& params, std::size_t& bytes, const Context& context) {
  return measure(kNativeSparseAttentionBackward, params, bytes, context);
}

template <>
Status workspace_size(const DecodeParams& params, std::size_t& bytes, const Context& context) {
  const bool one_step = params.q.rank == 4 && params.q.size(1) <= kMaxDecodeTokens;  // only names the call
  return measure(one_step ? kDecode : kPrefill, params, bytes, context);
}

template <>
Status workspace_size(const ForkParams& params, std::size_t& bytes, const Context& context) {
  return measure(kFork, params, bytes, context);
}

}  // namespace nsa
