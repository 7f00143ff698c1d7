// The public functions: validate, choose the backend, log, dump, run.
#include <exception>
#include <new>
#include <string>

#include "core/backend.h"
#include "core/call.h"
#include "core/dump.h"
#include "core/log.h"
#include "core/strided.h"
#include "core/validate.h"

namespace nsa {
namespace {

template <class Params>
using Function = Status (*)(const Params&, const Context&);

/// One operation of every backend.
template <class Params>
struct Implementations {
  Function<Params> cpu, reference;
};

Status named(const char* operation, const Status& status) {
  return status.ok() ? status : Status(status.code(), std::string(operation) + ": " + status.message());
}

template <class Params>
constexpr TensorView Params::*incoming_gradient() {
  if constexpr (requires { &Params::d_o; }) return &Params::d_o;
  if constexpr (requires { &Params::d_out; }) return &Params::d_out;
  return nullptr;
}

/// Backends may rely on a contiguous last dimension; incoming gradients may come expanded or transposed.
template <class Params>
Status run_with_plain_gradient(Function<Params> function, const Params& params, const Context& context) {
  if constexpr (incoming_gradient<Params>() != nullptr) {
    const TensorView& gradient = params.*incoming_gradient<Params>();
    if (gradient.size(-1) > 1 && gradient.stride[static_cast<std::size_t>(gradient.rank - 1)] != 1) {
      const ContiguousCopy copy(gradient);
      Params plain = params;
      plain.*incoming_gradient<Params>() = copy.view;
      return function(plain, context);
    }
  }
  return function(params, context);
}

template <class Params>
Status run(const char* operation, const Params& params, const Context& context,
           Implementations<Params> implementations) try {
  Call call;
  Backend backend;
  if (Status status = validate(params, call); !status.ok()) return named(operation, status);
  if (Status status = choose_backend(call.problem, context, backend); !status.ok()) return named(operation, status);
  if (context.num_threads < 0)
    return Status::invalid_argument(std::string(operation) + ": num_threads = " + std::to_string(context.num_threads) +
                                    ": must be >= 0");
  const bool reference = backend == Backend::kReference;
  log_call(operation, backend, reference ? reference::variant() : cpu::variant(), call);
  if (Status status = dump_call(operation, call); !status.ok()) return named(operation, status);
  return named(operation,
               run_with_plain_gradient(reference ? implementations.reference : implementations.cpu, params, context));
} catch (const std::bad_alloc&) {
  return Status::internal(std::string(operation) + ": out of memory");
} catch (const std::exception& error) {
  return Status::internal(std::string(operation) + ": " + error.what());
}

}  // namespace

Status compress(const CompressParams& params, const Context& context) {
  return run("compress", params, context, {cpu::compress, reference::compress});
}

Status compress_backward(const CompressBackwardParams& params, const Context& context) {
  return run("compress_backward", params, context, {cpu::compress_backward, reference::compress_backward});
}

Status compressed_attention(const CompressedAttentionParams& params, const Context& context) {
  return run("compressed_attention", params, context, {cpu::compressed_attention, reference::compressed_attention});
}

Status compressed_attention_backward(const CompressedAttentionBackwardParams& params, const Context& context) {
  return run("compressed_attention_backward", params, context,
             {cpu::compressed_attention_backward, reference::compressed_attention_backward});
}

Status select_blocks(const SelectBlocksParams& params, const Context& context) {
  return run("select_blocks", params, context, {cpu::select_blocks, reference::select_blocks});
}

Status selected_attention(const SelectedAttentionParams& params, const Context& context) {
  return run("selected_attention", params, context, {cpu::selected_attention, reference::selected_attention});
}

Status selected_attention_backward(const SelectedAttentionBackwardParams& params, const Context& context) {
  return run("selected_attention_backward", params, context,
             {cpu::selected_attention_backward, reference::selected_attention_backward});
}

Status sliding_window_attention(const SlidingWindowAttentionParams& params, const Context& context) {
  return run("sliding_window_attention", params, context,
             {cpu::sliding_window_attention, reference::sliding_window_attention});
}

Status sliding_window_attention_backward(const SlidingWindowAttentionBackwardParams& params, const Context& context) {
  return run("sliding_window_attention_backward", params, context,
             {cpu::sliding_window_attention_backward, reference::sliding_window_attention_backward});
}

Status combine(const CombineParams& params, const Context& context) {
  return run("combine", params, context, {cpu::combine, reference::combine});
}

Status combine_backward(const CombineBackwardParams& params, const Context& context) {
  return run("combine_backward", params, context, {cpu::combine_backward, reference::combine_backward});
}

Status nsa_attention(const NsaAttentionParams& params, const Context& context) {
  return run("nsa_attention", params, context, {cpu::nsa_attention, reference::nsa_attention});
}

Status nsa_attention_backward(const NsaAttentionBackwardParams& params, const Context& context) {
  return run("nsa_attention_backward", params, context,
             {cpu::nsa_attention_backward, reference::nsa_attention_backward});
}

Status decode(const DecodeParams& params, const Context& context) {
  if (params.q.rank == 4 && params.q.size(1) > kMaxDecodeTokens)
    return Status::invalid_argument("decode: q: " + params.q.describe() + ": at most " +
                                    std::to_string(kMaxDecodeTokens) + " new tokens; prefill takes more");
  return run("decode", params, context, {cpu::decode, reference::decode});
}

Status prefill(const DecodeParams& params, const Context& context) {
  return run("prefill", params, context, {cpu::decode, reference::decode});
}

Status fork(const ForkParams& params, const Context& context) {
  return run("fork", params, context, {cpu::fork, cpu::fork});
}

}  // namespace nsa
