// Both ends of a decode step: its inputs, and the sampling of the next tokens. On a GPU each is one kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include "lm/layers/rope.h"

namespace nsa::lm {

/// Where the sequences of a step are; tensors on the device.
struct StepState {
  at::Tensor positions;    // int64 (B): their lengths, which a step advances
  at::Tensor num_new;      // int32 (B): 1, or 0 for sequences that take no part
  at::Tensor first_slots;  // int64 (B): of each in a cache of slots; undefined: no layer has one
};

struct StepInputs {
  at::Tensor x;        // float32 (B, hidden): the tokens' embeddings
  Rotation rotation;   // (B): of their positions; a sequence beyond the table's end gets the last angle
  at::Tensor slots;    // int64 (B): where a token goes; undefined without first_slots
  at::Tensor lengths;  // int32 (B): with it
};

/// `tokens`: int64 (B); `embedding`: float32 (tokens, hidden). Adds num_new to the positions.
StepInputs step_inputs(const at::Tensor& tokens, const at::Tensor& embedding, const Rotation& table,
                       const StepState& state);

/// double (3, B): the most likely tokens, of equals the first, how far the second ones are behind, and whether all
/// logits are finite. `tokens`, int64 (B), gets the first of them, too. `logits`: (B, vocab_size),
/// contiguous in a row.
at::Tensor most_likely_tokens(const at::Tensor& logits, const at::Tensor& tokens);

}  // namespace nsa::lm
