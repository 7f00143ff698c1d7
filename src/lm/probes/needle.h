// Needle retrieval: key-value needles in a haystack, by context length and needle depth.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/random.h"
#include "lm/data/key_value_lines.h"
#include "lm/probes/inspect.h"
#include "lm/run/open.h"

namespace nsa::lm {

/// The tasks, after RULER (arXiv 2404.06654): single, multikey, multivalue, multiquery, tracking.
const std::vector<std::string>& needle_tasks();

/// The context: text from the haystack with lines "NAME = VALUE" in it, then the beginning of such a line, which the
/// model completes. {key} and {value} stand for a name of letters and a number, drawn for each sample.
struct NeedleOptions {
  std::vector<std::int64_t> lengths;  // tokens, question and answer included
  // Needle depth: 0 is the start, 1 is right before the question. See needle_place().
  std::vector<double> depths = {0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1};
  int samples = 10;
  std::string task = "single";
  int lines = 4;  // in the context, of tasks other than single
  std::uint64_t seed = 1;
  std::string needle = "\n{key} = {value}\n";
  std::string question = "\n{key} = ";
  ForwardOptions forward;  // how the model is run
  bool diagnose = false;   // fills NeedleReport::reads; `nsa` only
};

/// Means over the samples of one length and depth.
struct NeedleCell {
  double accuracy = 0;      // share of the answers' tokens that the model ranks first, given the right ones before
  double answers = 0;       // share of the answers all of whose tokens are
  int exact = 0;            // samples in which all answers are: what greedy decoding would write
  double loss = 0;          // nats per token of the answers
  double loss_without = 0;  // the same loss when the needles are not in the context: what guessing costs
};

/// The lines of a sample. The first `asked` of them are asked for, in this order.
struct NeedleLines {
  std::vector<KeyValue> lines;
  std::size_t asked = 1;
  bool in_order = false;  // is this their order in the context, too? Otherwise it is random
};

/// Lines of a task. `multikey`: one of several keys is asked for; `multiquery`: all are. `multivalue`: all have the
/// same key; the values are asked for in the order of the context. `tracking`: each value is the key of the next line,
/// up to a number; the lines are asked for one after the other. Throws Error when the task is not known.
NeedleLines draw_needle_lines(const std::string& task, int lines, base::Random& random);

/// The token at which a needle begins that has `room` tokens around it. `draw`: of the sample, the same at all depths:
/// those of a depth are spread over 64 tokens, so that it is not always at one offset within selection blocks.
std::int64_t needle_place(double depth, std::int64_t room, std::uint64_t draw);

/// The 95 % interval of a share by Wilson's score, from `count` of `samples`.
std::array<double, 2> wilson_interval(int count, int samples);

/// How a context's first token that was not right, or else the first token of its first answer, was looked up: the
/// query that must copy it, and the block in which it is.
struct NeedleRead {
  std::int64_t length = 0;
  double depth = 0;
  int sample = 0;
  bool exact = false;             // are all answers right?
  std::vector<BlockRead> blocks;  // by layer and KV head
};

struct NeedleReport {
  std::vector<std::vector<NeedleCell>> cells;  // by length and depth
  std::vector<NeedleRead> reads;
};

/// `on_length` is called when a length is done. Throws Error when the texts are too short.
NeedleReport run_needle(const OpenedCheckpoint& opened, const std::vector<Document>& texts,
                        const NeedleOptions& options,
                        const std::function<void(std::int64_t, const std::vector<NeedleCell>&)>& on_length);

/// Where retrieval happens, of reads in the same layers and KV heads.
struct RetrievalHead {
  int layer = 0, kv_head = 0;
  bool carries = false;  // retrieval: its mass over hits is at least half of the largest
  struct Mean {
    double selected = 0;  // share of reads whose block was selected
    double mass = 0, dense_mass = 0;
    std::int64_t median_rank = 0;
  } hits, misses;
};
std::vector<RetrievalHead> retrieval_heads(const std::vector<NeedleRead>& reads);
/// Of a miss: did no head that carries retrieval select the block? Without hits all heads count.
bool block_not_selected(const NeedleRead& miss, const std::vector<RetrievalHead>& heads);

}  // namespace nsa::lm
