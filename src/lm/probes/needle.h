// Needle retrieval: key-value needles in a haystack, by context length and needle depth.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lm/run/open.h"

namespace nsa::lm {

/// The context: text from the haystack with the needle "NAME = VALUE" in it, then the beginning of the same line, which
/// the model completes. {key} and {value} stand for a name of letters and a number, drawn for each sample.
struct NeedleOptions {
  std::vector<std::int64_t> lengths;  // tokens, question and answer included
  // Needle depth: 0 is the start, 1 is right before the question. See needle_place().
  std::vector<double> depths = {0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1};
  int samples = 10;
  std::uint64_t seed = 1;
  std::string needle = "\n{key} = {value}\n";
  std::string question = "\n{key} = ";
  ForwardOptions forward;  // how the model is run
};

/// Means over the samples of one length and depth.
struct NeedleCell {
  double accuracy = 0;      // share of the answer's tokens that the model ranks first, given the right ones before
  int exact = 0;            // samples in which all of them are: what greedy decoding would write
  double loss = 0;          // nats per token of the answer
  double loss_without = 0;  // the same loss when the needle is not in the context: what guessing costs
};

/// The token at which a needle begins that has `room` tokens around it. `draw`: of the sample, the same at all depths:
/// those of a depth are spread over 64 tokens, so that it is not always at one offset within selection blocks.
std::int64_t needle_place(double depth, std::int64_t room, std::uint64_t draw);

/// The 95 % interval of a share by Wilson's score, from `count` of `samples`.
std::array<double, 2> wilson_interval(int count, int samples);

/// cells[length][depth]; `on_length` is called when a length is done. Throws Error when the texts are too short.
std::vector<std::vector<NeedleCell>> run_needle(
    const OpenedCheckpoint& opened, const std::vector<Document>& texts, const NeedleOptions& options,
    const std::function<void(std::int64_t, const std::vector<NeedleCell>&)>& on_length);

}  // namespace nsa::lm
