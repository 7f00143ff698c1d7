// Minimum cost of the benchmark's tasks, floating-point operations and bytes, from shapes alone.
//
// Counted is what the algorithm needs: of attention 2 * channels for each visible (query, key) pair, head and product;
// bytes of every input read once and of every output written once.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "nsa/config.h"

namespace nsa::bench {

struct Dims {
  std::int64_t num_heads = 16, num_kv_heads = 1, head_dim = 128, v_head_dim = 128;
  bool bfloat16 = true;  // else float32
  NSAConfig nsa;
};

struct Cost {
  double gflop = 0;
  std::int64_t bytes = 0;
  std::int64_t gathered = 0;  // selected attention: bytes of the keys and values that each query visits, in all
};

/// Of one sequence.
class Costs {
 public:
  Costs(const Dims& dims, std::int64_t length);

  /// `name`: an operation of libnsa, its backward ("combine", "compress_backward", ...), end to end ("forward",
  /// "forward_backward", also with the prefix "dense_" or "plain_"), or a stage of Context::on_stage.
  /// phi matters where it compresses. Throws std::logic_error for any other name.
  Cost of(const std::string& name, CompressionKind phi = CompressionKind::kMean) const;

 private:
  double keys_and_values(double rows) const;
  double weights(CompressionKind phi) const;
  Cost attention(double pairs, double keys) const;
  Cost attention_backward(double pairs, double keys) const;
  Cost query_gradient(double pairs, double keys) const;
  Cost key_gradients(double pairs, double keys) const;
  Cost selected(Cost cost) const;
  Cost compress(CompressionKind phi, bool backward) const;
  Cost end_to_end(double pairs, bool backward) const;

  Dims dims_;
  double length_, blocks_;  // raw and compressed tokens
  double heads_, kv_heads_, dk_, dv_, element_;
  double compressed_pairs_ = 0, selected_pairs_ = 0, window_pairs_ = 0, causal_pairs_ = 0;  // visible, per head
  double q_, o_, gates_, row_, indices_;  // bytes; row_: a float32 for every query and head
  std::map<std::string, Cost> table_;     // of what does not compress
};

}  // namespace nsa::bench
