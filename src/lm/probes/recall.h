// Associative recall: does a model find what it read longer ago than its window reaches?
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "lm/model/config.h"
#include "lm/model/model.h"

namespace nsa::lm {

/// Associative recall (MQAR). A sequence has `pairs` slots of a key, its value and padding; a gap; then query keys,
/// each followed by its value. The values occur nowhere else, so only attention to the pair predicts them. With one hop
/// every key is queried repeatedly, in random order. Multi-hop recall links `hops` pairs: the value of each is the key
/// of the next, and the last has a value. A query is the first key, followed by the answers of all hops. Tokens: 0
/// padding, 1 ... num_values values, then the keys.
struct RecallTask {
  int pairs = 80;  // those beyond a multiple of `hops` are never queried
  int hops = 1;    // at most `pairs`
  int slot = 4;    // tokens from a key to the next
  int gap = 9;     // more than layers * (window_size - 1): stacked windows do not reach from a query to a pair
  int num_values = 32;

  int vocab_size() const { return 1 + num_values + pairs; }
  int num_queries() const { return hops == 1 ? pairs * slot / 2 : pairs / hops * hops; }
  int length() const { return pairs * slot + gap + num_queries(); }
  double chance() const { return 1.0 / num_values; }  // of a value; an upper bound for several hops

  /// The same task in `tokens` tokens: the longest slots that fit, and what they leave for the gap. Throws Error.
  RecallTask stretched(int tokens) const;
};

/// In host memory.
struct RecallBatch {
  Batch batch;
  at::Tensor queries;    // int64: rows of the packed tokens that query
  at::Tensor answers;    // int64: the values to predict
  at::Tensor distances;  // int64: distance in tokens to the queried pair
  at::Tensor values;     // int64: rows of the pairs' values that are no keys; the key is the row before
};

/// `sequences` sequences with `pairs` <= task.pairs pairs each, their keys drawn from all of the task's.
RecallBatch make_recall_batch(const RecallTask& task, int pairs, int sequences, std::uint64_t seed);

/// A small model for the task, topk * block_size a quarter of the sequence; `vocab_size` is left to the task. On
/// CUDA its heads are as wide as the kernels there want them.
ModelConfig recall_model(at::Device device);

struct RecallOptions {
  RecallTask task;
  std::vector<int> lengths;  // tokens: the trained models are evaluated on these, too
  /// Names and attention of the baselines with which the trained full-attention model is evaluated as well.
  std::vector<std::pair<std::string, SequenceAttention>> baselines;
  ModelConfig model =
      recall_model(at::kCPU);  // of NSA; the others have attention `full` and `window` and are the same otherwise
  std::uint64_t seed = 1;
  std::int64_t tokens_per_step = 1024;
  std::int64_t max_steps = 1500;
  std::int64_t steps_after_success = 100;  // success: 97 % accuracy at the full length
  double lr = 5e-3;
  double selector_loss = 0;  // weight of the selector loss of NSA
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
};

/// A model's sequences grow when it has this share of answers right.
constexpr double kRecallGrowsAt = 0.9;

struct RecallStep {
  struct Model {
    int pairs = 0, slot = 0;        // of its sequences
    double loss = 0, accuracy = 0;  // the accuracy averaged over the last steps
  };
  std::int64_t step = 0;
  Model nsa, full;  // of the last step of a model that is done
};

/// Of one model on fresh sequences.
struct RecallScore {
  double accuracy = 0;              // fraction of queries with all hops right
  std::vector<double> by_hop;       // accuracy of each hop, given the right answers before it
  std::vector<double> by_distance;  // the same between two edges of the report; NaN where nothing was asked
  std::vector<double> by_length;    // `accuracy` at each of RecallOptions::lengths
};

struct RecallReport {
  RecallOptions options;
  double seconds = 0;
  std::vector<RecallStep> history;      // of the training, a line every 25 steps
  std::vector<std::int64_t> distances;  // edges in tokens, one more than there are parts
  RecallScore nsa, full, window;
  std::vector<RecallScore> baselines;  // in the order of the options
  // RecallScore::accuracy of the NSA model with
  double nsa_window_gate_only = 0;  // g_cmp = g_slc = 0
  double nsa_without_cmp = 0;       // g_cmp = 0; the selection still uses the compressed keys
  double nsa_without_slc = 0;       // g_slc = 0

  /// NSA at 95 % or more and at most a point behind full attention; the window model and NSA through its window alone
  /// at chance (at most twice its share).
  bool as_expected() const;
};

/// Trains an NSA model and one with full attention, each on sequences that grow as it learns: 4 queries, then twice as
/// many whenever its accuracy reaches `kRecallGrowsAt`. Then trains one with window attention on the NSA model's steps,
/// and evaluates all three. On the shortest sequences each value also predicts the key before it: recall needs
/// attention to the previous token, which is learned late from the answers alone.
RecallReport run_recall(const RecallOptions& options, const std::function<void(const RecallStep&)>& on_step);

void to_json(nlohmann::json& json, const RecallReport& report);

}  // namespace nsa::lm
