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

#define NSA_DEFINE(operation, Params) \
  constexpr const char* name_of(const Params&) { return #operation; }
NSA_OPERATIONS(NSA_DEFINE)
#undef NSA_DEFINE

/// decode and prefill have the same parameters: the name says which of them was called.
constexpr const char* kPrefill = "prefill";

Status check_name(const auto&, const char*) { return {}; }
Status check_name(const DecodeParams& params, const char* name) {
  const bool packed = params.query_start_loc.defined();
  if (name == kPrefill || params.q.rank != (packed ? 3 : 4)) return {};
  const std::int64_t most = !packed                    ? params.q.size(1)
                            : params.max_query_len > 0 ? params.max_query_len
                                                       : params.q.size(0);
  if (most <= kMaxDecodeTokens) return {};
  if (params.max_query_len > 0 && packed)
    return Status::invalid_argument("max_query_len = " + std::to_string(most) + ": at most " +
                                    std::to_string(kMaxDecodeTokens) + " new tokens; prefill takes more");
  return Status::invalid_argument("q: " + params.q.describe() + ": at most " + std::to_string(kMaxDecodeTokens) +
                                  " new tokens; prefill takes more");
}

template <class Params>
constexpr TensorView Params::*incoming_gradient() {
  if constexpr (requires { &Params::d_o; }) return &Params::d_o;
  if constexpr (requires { &Params::d_out; }) return &Params::d_out;
  return nullptr;
}

/// Backends may rely on a contiguous last dimension; incoming gradients may come expanded or transposed. run(params)
/// is called with a copy where they do, which make_contiguous_grad(view) makes.
template <class Params, class MakeContiguous, class Run>
Status with_contiguous_grad(const Params& params, const MakeContiguous& make_contiguous_grad, const Run& run) {
  if constexpr (incoming_gradient<Params>() != nullptr) {
    const TensorView& gradient = params.*incoming_gradient<Params>();
    if (gradient.size(-1) > 1 && gradient.stride[static_cast<std::size_t>(gradient.rank - 1)] != 1) {
      Params contiguous = params;
      if (Status status = make_contiguous_grad(contiguous.*incoming_gradient<Params>()); !status.ok()) return status;
      return run(contiguous);
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
    if (p.packed.packed())
      return {.q = &p.packed.cu_seqlens_q, .k = &p.packed.cu_seqlens_k, .total_q = p.q.size(0), .total_k = total_k};
  } else if constexpr (requires { p.cu_seqlens; }) {
    if (p.cu_seqlens.defined()) return {.q = &p.cu_seqlens, .total_q = p.k.size(0), .total_k = p.k.size(0)};
  }
  return {};
}

/// run(contiguous) is a backend's.
template <class Params, class Run>
Status run_on_host(const Params& params, const Run& run) {
  std::optional<ContiguousCopy> copy;
  const auto make_contiguous_grad = [&](TensorView& gradient) {
    gradient = copy.emplace(gradient).view;
    return Status{};
  };
  return with_contiguous_grad(params, make_contiguous_grad, run);
}

template <class Params>
Status run_on_device(const char* name, const Params& params, const Device& device, Execution& execution) {
  const cuda::Scope scope(device, name);
  Params sanitized = params;
  if (const Offsets offsets = offsets_of(sanitized); offsets.q) {
    TensorView same;
    Status status =
        cuda::sanitize_offsets(*offsets.q, offsets.k ? *offsets.k : same, offsets.total_q, offsets.total_k, execution);
    if (!status.ok()) return status;
  }
  return with_contiguous_grad(
      sanitized, [&](TensorView& gradient) { return cuda::make_contiguous(gradient, execution); },
      [&](const Params& contiguous) { return cuda::run(contiguous, execution); });
}

/// Entries of a row of the blocks that an operation attends to, 0 if it attends to none.
template <class Params>
std::int64_t topk_of(const Params& p) {
  if constexpr (requires { p.forward; }) {
    return topk_of(p.forward);
  } else if constexpr (requires { p.attention; }) {
    return topk_of(p.attention);
  } else if constexpr (requires { p.k_slc; }) {
    return p.cfg.topk;
  } else if constexpr (requires { p.indices, p.block_size; }) {
    return p.indices.size(-1);
  } else {
    return 0;
  }
}

template <class Params>
Status accept(const Params& params, const Context& context, Call& call, Backend& backend) {
  if (Status status = validate(params, call); !status.ok()) return status;
  if (Status status = choose_backend(call.problem, context, backend); !status.ok()) return status;
  if (backend == Backend::kCUDA) {
    if (Status status = supports_layout(call); !status.ok()) return status;
    if (const std::int64_t topk = topk_of(params); topk > 0) {
      constexpr bool kBackward = requires { params.forward; };
      if (Status status = supports_topk(call.problem, topk, kBackward); !status.ok()) return status;
    }
  }
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
Status run(const char* name, const Params& params, const Context& context) {
  return named(name, [&]() -> Status {
    if (Status status = check_name(params, name); !status.ok()) return status;
    Call call;
    Backend backend = Backend::kAuto;
    if (Status status = accept(params, context, call, backend); !status.ok()) return status;
    log_call(name, backend, variant_of(backend).c_str(), call);
    if (Status status = dump(name, call); !status.ok()) return status;
    if (writes_nothing(call)) return {};  // however many sequences of no tokens there are
    const LoggedCall logged;
    if (backend == Backend::kCUDA) {
      Execution execution{
          static_cast<CUstream_st*>(context.stream), {context.workspace, context.workspace_size}, context.on_stage};
      return run_on_device(name, params, call.problem.device, execution);
    }
    return run_on_host(params, [&](const Params& contiguous) {
      return backend == Backend::kReference ? reference::run(contiguous, context) : cpu::run(contiguous, context);
    });
  });
}

}  // namespace

#define NSA_DEFINE(operation, Params) \
  Status operation(const Params& params, const Context& context) { return run(#operation, params, context); }
NSA_OPERATIONS(NSA_DEFINE)
#undef NSA_DEFINE

Status prefill(const DecodeParams& params, const Context& context) { return run(kPrefill, params, context); }

template <class Params>
Status workspace_size(const Params& params, std::size_t& bytes, const Context& context) {
  const char* name = name_of(params);
  if (!check_name(params, name).ok()) name = kPrefill;
  bytes = 0;
  return named(name, [&]() -> Status {
    Call call;
    Backend backend = Backend::kAuto;
    if (Status status = accept(params, context, call, backend); !status.ok() || backend != Backend::kCUDA)
      return status;
    Execution execution;
    Status status = run_on_device(name, params, call.problem.device, execution);
    bytes = execution.arena.used();
    return status;
  });
}
#define NSA_INSTANTIATE(operation, Params) \
  template Status workspace_size(const Params& params, std::size_t& bytes, const Context& context);
NSA_OPERATIONS(NSA_INSTANTIATE)
#undef NSA_INSTANTIATE

}  // namespace nsa
