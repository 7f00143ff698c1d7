// One sequence of random data and everything the benchmark times on it: the operations of libnsa one by one, forward
// and backward, the whole, and dense attention beside it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lm/ops.h"
#include "nsa/backend.h"

namespace nsa::lm {

struct BenchShape {
  std::int64_t num_heads = 16, num_kv_heads = 1, head_dim = 128, v_head_dim = 128;
  bool bfloat16 = true;  // else float32
  NSAConfig nsa;
  int threads = 2;
  at::Device device = at::kCPU;
};

/// A piece of work and the least it costs.
struct BenchCase {
  std::string op, variant;
  double gflop = 0;        // of visible pairs, 2 * channels each per head and product
  std::int64_t bytes = 0;  // inputs and outputs, each moved once
  std::function<void()> work;
};

class BenchProblem {
 public:
  BenchProblem(const BenchShape& shape, std::int64_t length);

  /// All of NSA: compress keys and values by `phi`, attend; with `backward` the gradients of everything too.
  BenchCase whole(CompressionKind phi, bool backward);
  /// The operations one by one.
  std::vector<BenchCase> operations(const std::vector<CompressionKind>& phis, bool backward);
  /// Causal attention to everything on libnsa's own kernels: a window as long as the sequence.
  BenchCase plain(bool backward);
  /// The same by torch's scaled_dot_product_attention, in one of the forms below.
  BenchCase dense(const std::string& form, bool backward);
  /// On the CPU: K/V expanded to all heads, enable_gqa; on CUDA, enable_gqa on one back end each: cuDNN,
  /// FlashAttention-2.
  static std::vector<std::string> dense_forms(at::Device device);

 private:
  template <class Params>
  void run(Status (*operation)(const Params&, const Context&), const Params& params) const {
    call(operation, params, shape_.device, context_);
  }

  /// phi with its initial weights, and room for the gradients of one side (keys or values).
  struct Side {
    at::Tensor x, out, d_out, d_x;
    CompressionTensors weights, d_weights;
  };
  Side make_side(CompressionKind phi, bool keys) const;
  CompressParams compress_params(const Side& side) const;
  CompressBackwardParams compress_backward_params(const Side& side) const;
  std::function<void()> compress_work(CompressionKind phi, bool backward) const;
  double compress_gflop(CompressionKind phi) const;
  std::int64_t compress_bytes() const;
  double gflop(double pairs, double channels) const;
  std::vector<BenchCase> forward_operations();
  std::vector<BenchCase> backward_operations();

  BenchShape shape_;
  std::int64_t length_, blocks_;
  Context context_;
  double compressed_pairs_ = 0, selected_pairs_ = 0, window_pairs_ = 0, causal_pairs_ = 0;
  at::Tensor k_, v_, d_o_;        // (1, S, Hkv, D) serve all branches
  NsaAttentionParams attention_;  // with every output
  NsaAttentionBackwardParams backward_;
  std::vector<at::Tensor> storage_;  // what the parameters point into
};

}  // namespace nsa::lm
