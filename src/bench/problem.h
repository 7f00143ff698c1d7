// One sequence of random data and everything the benchmark times on it: the operations of libnsa one by one, forward
// and backward, end to end, and dense attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/costs.h"
#include "bench/device_timing.h"
#include "bench/flash3.h"
#include "bench/recorded_blocks.h"
#include "bench/selection.h"
#include "bridge/call.h"
#include "bridge/compression.h"
#include "nsa/backend.h"

namespace nsa::bench {

struct Shape : Dims {
  Selection selection = Selection::kModelLike;
  /// What it is to be: of kModelLike; of kOwn, where each query is near the previous one then.
  std::optional<double> neighbour_overlap = kModelOverlap;
  RecordedBlocks recorded;  // of kRecorded
  int threads = 2;
  std::optional<Flash3> flash3;  // if given, FlashAttention-3 is timed as dense attention
  at::Device device = at::kCPU;
};

/// (length, kv_heads, topk): the blocks to attend to; empty where the queries choose themselves.
std::vector<std::int32_t> given_blocks(const Shape& shape, std::int64_t length);

/// A task and the least it costs.
struct Case {
  std::string op, variant;
  Cost cost;
  std::function<void()> work;
  std::function<void(const StageMark&)> staged;  // the same with stage marks; empty without stages
};

class Problem {
 public:
  Problem(const Shape& shape, std::int64_t length);

  /// NSA end to end: compress keys and values by `phi`, attend; with `backward` also all gradients. It attends to the
  /// blocks of the shape's `selection`; the selector always runs. On CUDA it reports its stages.
  Case end_to_end(CompressionKind phi, bool backward);
  /// The operations one by one, as a caller has them.
  std::vector<Case> operations(const std::vector<CompressionKind>& phis, bool backward);
  /// Causal attention to everything on libnsa's own kernels: a window as long as the sequence.
  Case plain(bool backward);
  /// The same by torch's scaled_dot_product_attention or by FlashAttention-3, in one of the forms below.
  Case dense(const std::string& form, bool backward);
  /// On the CPU: K/V expanded to all heads, enable_gqa; on CUDA, enable_gqa on one back end each: cuDNN,
  /// FlashAttention-2, which gets its values padded where they are narrower than the keys, and FlashAttention-3 if the
  /// shape has it.
  std::vector<std::string> dense_forms() const;

  Cost cost(const std::string& name, CompressionKind phi) const { return costs_.of(name, phi); }

  /// Of the blocks that the queries attend to. Without given ones it runs the attention once.
  std::optional<double> neighbour_overlap() const;

 private:
  template <class Params>
  void run(Status (*operation)(const Params&, const Context&), const Params& params,
           const StageMark* mark = nullptr) const {
    Context context = context_;
    context.on_stage = mark;
    bridge::call(operation, params, shape_.device, context);
  }

  /// One operation of libnsa as a task.
  template <class Params>
  Case operation(const char* op, Status (*function)(const Params&, const Context&), const Params& params) const {
    return {.op = op, .variant = "", .cost = costs_.of(op), .work = [=, this] { run(function, params); }, .staged = {}};
  }

  /// phi with its initial weights, and memory for the gradients of one side (keys or values).
  struct Side {
    at::Tensor x, out, d_out, d_x;
    bridge::CompressionTensors weights, d_weights;
  };
  Side make_side(CompressionKind phi, bool keys) const;
  CompressParams compress_params(const Side& side) const;
  CompressBackwardParams compress_backward_params(const Side& side) const;
  std::function<void()> compress_work(CompressionKind phi, bool backward) const;
  std::function<void()> flash3_work(bool backward) const;
  TensorView keep(const at::Tensor& tensor);
  at::Tensor random(std::int64_t heads, std::int64_t width) const;
  at::Tensor new_indices() const;
  void correlate_queries(double overlap);
  void keep_branches();
  void keep_gradients();
  std::vector<Case> forward_operations();
  std::vector<Case> backward_operations();

  Shape shape_;
  std::int64_t length_, blocks_;
  Costs costs_;
  Context context_;
  at::Tensor q_, k_, v_, d_o_;           // (1, S, heads, D); k and v serve all branches; d_o from the first backward on
  std::optional<double> given_overlap_;  // of given blocks
  NsaAttentionParams attention_;         // with every output from keep_branches on
  NsaAttentionBackwardParams backward_;
  std::vector<at::Tensor> storage_;  // what the parameters point into
};

}  // namespace nsa::bench
