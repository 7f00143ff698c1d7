// Training-free sparse attention from the literature, run on a trained full-attention model: baselines for NSA.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nsa/config.h"

namespace nsa::lm {

/// Consecutive queries of one sequence.
struct QueryBlock {
  std::int64_t begin = 0;  // position of the first
  at::Tensor q;            // (Hkv, G, T, Dk), times the softmax scale
  at::Tensor scores;       // (Hkv, G, T, begin + T), q k^T; -inf where the key comes after the query
  std::int64_t end() const { return begin + q.size(2); }
};

/// Ranks the tokens of one sequence. Every baseline reads the same number of tokens: query t reads the
/// min(t + 1, budget) tokens with the highest priority, ties to the lower index. The query heads of a group
/// (G = H / Hkv) share one selection, as in NSA. The papers select per head of a model without groups, unless the
/// baseline's file says otherwise.
class Baseline {
 public:
  virtual ~Baseline() = default;

  /// Priorities of the tokens 0 ... end - 1, (Hkv, T, end), +inf for those that are read in any case, which must be no
  /// more than the budget. What tokens after the query get does not matter; what those up to the query get must not
  /// depend on later ones. Called once for each block, from the first to the last.
  virtual at::Tensor priorities(const QueryBlock& block) = 0;
};

/// q (Hkv, G, S, Dk) times the softmax scale and k (Hkv, S, Dk), both rotated, of a full sequence; `budget` >= 1.
std::unique_ptr<Baseline> make_streaming(const at::Tensor& q, const at::Tensor& k, std::int64_t budget);
std::unique_ptr<Baseline> make_h2o(const at::Tensor& q, const at::Tensor& k, std::int64_t budget);
std::unique_ptr<Baseline> make_quest(const at::Tensor& q, const at::Tensor& k, std::int64_t budget);
std::unique_ptr<Baseline> make_infllm(const at::Tensor& q, const at::Tensor& k, std::int64_t budget);
std::unique_ptr<Baseline> make_cluster_kv(const at::Tensor& q, const at::Tensor& k, std::int64_t budget);
std::unique_ptr<Baseline> make_exact(const at::Tensor& q, const at::Tensor& k, std::int64_t budget);

/// As options give them.
std::vector<std::string> baseline_names();

/// Causal attention of one sequence with the baseline of that name: q (S, H, Dk) and k (S, Hkv, Dk), rotated, v
/// (S, Hkv, Dv) -> (S, H, Dv). Computes in float32, or in float64 when the tensors are that. Throws Error for a name
/// that is none.
at::Tensor baseline_attention(const std::string& baseline, std::int64_t budget, const at::Tensor& q,
                              const at::Tensor& k, const at::Tensor& v);

/// Keys that NSA reads for the last query of a sequence: the selected tokens, the window (also where they overlap) and
/// the compressed keys.
std::int64_t nsa_budget(const NSAConfig& config, std::int64_t length);

// What the baselines share that rank spans of consecutive tokens.

/// Rows (Hkv, S, D) in spans of `size` tokens, (Hkv, S / size, size, D), without those of an unfinished last one.
at::Tensor whole_spans(const at::Tensor& rows, std::int64_t size);

/// For every token its span's priority: (Hkv, T, spans) -> (Hkv, T, tokens); 0 behind the last span.
at::Tensor of_tokens(const at::Tensor& of_spans, std::int64_t size, std::int64_t tokens);

/// Positions of the block's queries, int64 (T).
at::Tensor positions(const QueryBlock& block);

/// `priorities` (Hkv, T, end) with +inf for the first `sinks` tokens and, for each query, for those at `from` (T) and
/// behind.
at::Tensor read_in_any_case(const at::Tensor& priorities, std::int64_t sinks, const at::Tensor& from);

}  // namespace nsa::lm
