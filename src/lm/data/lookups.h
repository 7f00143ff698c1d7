// Lines "NAME = VALUE" that stand several times in a text: who reads the name again can know the value by looking it up
// alone.
#pragma once

#include <cstdint>
#include <string>

#include "base/random.h"
#include "lm/data/packing.h"
#include "lm/data/tokenizer.h"

namespace nsa::lm {

struct Lookup {
  std::string key, value;
};

/// A name of eight letters and a number of five digits.
Lookup random_lookup(base::Random& random);

/// Writes such lines over about `share` of the tokens of each sequence. Of these tokens a share of `pairs` is lines at
/// two places, both anywhere; the others are lines at sixteen, or as many as there is room for, where how far the
/// others are from one of them is drawn evenly by its logarithm. From the near ones a model learns what a look-up is,
/// from pairs to do it over any distance. One of a line's places is near the start of the sequence, evenly by the
/// logarithm, too, for a line of eight: few would stand there otherwise.
void plant_lookups(TrainingBatch& batch, double share, double pairs, const Tokenizer& tokenizer, std::uint64_t seed);

}  // namespace nsa::lm
