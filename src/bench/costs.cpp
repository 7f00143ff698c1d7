#include "bench/costs.h"

#include <algorithm>
#include <stdexcept>

namespace nsa::bench {
namespace {

Cost cost(double flop, double bytes) { return {1e-9 * flop, static_cast<std::int64_t>(bytes), 0}; }

Cost operator+(const Cost& a, const Cost& b) { return {a.gflop + b.gflop, a.bytes + b.bytes, a.gathered + b.gathered}; }

}  // namespace

Costs::Costs(const Dims& dims, std::int64_t length)
    : dims_(dims),
      length_(static_cast<double>(length)),
      blocks_(static_cast<double>(dims.nsa.num_compressed(length))),
      heads_(static_cast<double>(dims.num_heads)),
      kv_heads_(static_cast<double>(dims.num_kv_heads)),
      dk_(static_cast<double>(dims.head_dim)),
      dv_(static_cast<double>(dims.v_head_dim)),
      element_(dims.bfloat16 ? 2 : 4),
      q_(length_ * heads_ * dk_ * element_),
      o_(length_ * heads_ * dv_ * element_),
      gates_(length_ * heads_ * 3 * element_),
      row_(length_ * heads_ * 4),
      indices_(length_ * kv_heads_ * dims.nsa.topk * 4) {
  const auto& cfg = dims.nsa;
  for (std::int64_t t = 0; t < length; ++t) {
    const std::int64_t reach = static_cast<std::int64_t>(cfg.topk - 1) * cfg.block_size + t % cfg.block_size + 1;
    compressed_pairs_ += static_cast<double>(cfg.num_compressed(t + 1));
    selected_pairs_ += static_cast<double>(std::min(t + 1, reach));
    window_pairs_ += static_cast<double>(std::min<std::int64_t>(t + 1, cfg.window_size));
    causal_pairs_ += static_cast<double>(t + 1);
  }
  const double elements = length_ * heads_ * dv_;
  const Cost choose =
      cost(2 * compressed_pairs_ * heads_ * dk_, q_ + blocks_ * kv_heads_ * dk_ * element_ + row_ + indices_);
  const Cost sum = cost(5 * elements, 4 * o_ + gates_);
  table_ = {
      {"compressed_attention", attention(compressed_pairs_, blocks_)},
      {"select_blocks", choose},
      {"selected_attention", selected(attention(selected_pairs_, length_))},
      {"sliding_window_attention", attention(window_pairs_, length_)},
      {"combine", sum},
      {"compressed_attention_backward", attention_backward(compressed_pairs_, blocks_)},
      {"selected_attention_backward", selected(attention_backward(selected_pairs_, length_))},
      {"sliding_window_attention_backward", attention_backward(window_pairs_, length_)},
      {"dense_forward", end_to_end(causal_pairs_, false)},
      {"dense_forward_backward", end_to_end(causal_pairs_, true)},
      {"plain_forward", end_to_end(causal_pairs_, false)},
      {"plain_forward_backward", end_to_end(causal_pairs_, true)},
      // Stages. The scores of the compressed attention serve the selection too; the window's output is added at once.
      {"compressed attention, selection", attention(compressed_pairs_, blocks_) + cost(0, indices_)},
      {"selected attention", selected(attention(selected_pairs_, length_))},
      {"sliding window, combine", attention(window_pairs_, length_) + sum + cost(0, -2 * o_ - row_)},
      {"gates, row terms", cost(6 * elements, 4 * o_ + 2 * gates_ + 6 * row_)},
      {"selected attention: dQ", selected(query_gradient(selected_pairs_, length_))},
      {"selected attention: dK, dV", selected(key_gradients(selected_pairs_, length_))},
      {"compressed attention: dK, dV", key_gradients(compressed_pairs_, blocks_)},
      {"sliding window: dK, dV", key_gradients(window_pairs_, length_)},
      {"compressed and window: dQ",  // added to the dQ of the selection
       query_gradient(compressed_pairs_ + window_pairs_, blocks_ + length_) + cost(0, q_ + 3 * row_)},
  };
}

/// Bytes of `rows` rows of keys and values.
double Costs::keys_and_values(double rows) const { return rows * kv_heads_ * (dk_ + dv_) * element_; }

/// Bytes of phi's weights, for keys and for values.
double Costs::weights(CompressionKind phi) const {
  double count = 0;
  for (const double d : {dk_, dv_}) {
    const double flat = d * dims_.nsa.kernel_size;
    if (phi == CompressionKind::kLinear) count += flat + flat * d + d;
    if (phi == CompressionKind::kMlp) count += flat + flat * 2 * d + 2 * d + 2 * d * d + d;
  }
  return count * element_;
}

/// S = Q K^T and O = P V.
Cost Costs::attention(double pairs, double keys) const {
  return cost(2 * pairs * heads_ * (dk_ + dv_), q_ + keys_and_values(keys) + o_ + row_);
}

/// S again, dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q.
Cost Costs::attention_backward(double pairs, double keys) const {
  return cost(2 * pairs * heads_ * (3 * dk_ + 2 * dv_), 2 * (q_ + o_ + keys_and_values(keys)) + row_);
}

/// A stage: S, dP and dQ, from three numbers a row: lse, delta and gate.
Cost Costs::query_gradient(double pairs, double keys) const {
  return cost(2 * pairs * heads_ * (2 * dk_ + dv_), 2 * q_ + o_ + keys_and_values(keys) + 3 * row_);
}

/// A stage: S, dP, dV and dK.
Cost Costs::key_gradients(double pairs, double keys) const {
  return cost(2 * pairs * heads_ * (2 * dk_ + 2 * dv_), q_ + o_ + 2 * keys_and_values(keys) + 3 * row_);
}

/// With the indices, and what is gathered by them.
Cost Costs::selected(Cost cost) const {
  cost.bytes += static_cast<std::int64_t>(indices_);
  cost.gathered = static_cast<std::int64_t>(keys_and_values(selected_pairs_));
  return cost;
}

Cost Costs::compress(CompressionKind phi, bool backward) const {
  double flop = 0;  // of a block
  for (const double d : {dk_, dv_}) {
    const double flat = d * dims_.nsa.kernel_size, first = 2 * flat * 2 * d, second = 2 * 2 * d * d;
    if (phi == CompressionKind::kMean) flop += flat;
    if (phi == CompressionKind::kLinear) flop += (backward ? 2 : 1) * 2 * flat * d;
    // Backward: two products for each layer, and the first layer's outputs once more.
    if (phi == CompressionKind::kMlp) flop += backward ? 3 * first + 2 * second : first + second;
  }
  const double bytes = keys_and_values(length_) + keys_and_values(blocks_) + weights(phi);
  return cost(flop * blocks_ * kv_heads_, (backward ? 2 : 1) * bytes);
}

/// Attention to the raw tokens, which are read once whatever happens in between; the backward starts from the inputs
/// and o's gradient, and writes a gradient for each input.
Cost Costs::end_to_end(double pairs, bool backward) const {
  Cost result = cost(attention(pairs, 0).gflop * 1e9, q_ + keys_and_values(length_) + o_);
  if (!backward) return result;
  return {result.gflop + attention_backward(pairs, 0).gflop, 2 * result.bytes, 0};
}

Cost Costs::of(const std::string& name, CompressionKind phi) const {
  if (name == "compress") return compress(phi, false);
  if (name == "compress_backward") return compress(phi, true);
  if (name == "forward" || name == "forward_backward") {
    const bool backward = name != "forward";
    Cost result = end_to_end(compressed_pairs_ + selected_pairs_ + window_pairs_, backward);
    result.gflop += compress(phi, false).gflop + (backward ? compress(phi, true).gflop : 0);
    result.bytes += static_cast<std::int64_t>((backward ? 2 : 1) * (gates_ + weights(phi)));
    return result;
  }
  const auto found = table_.find(name);
  if (found == table_.end()) throw std::logic_error("the benchmark knows no cost of '" + name + "'");
  return found->second;
}

}  // namespace nsa::bench
