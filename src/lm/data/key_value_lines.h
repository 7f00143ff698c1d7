// Associative recall as training data: key-value lines "NAME = VALUE", each repeated within a sequence. When a key
// recurs, its value can be predicted only from an earlier copy of the line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/random.h"
#include "lm/data/packing.h"
#include "lm/data/tokenizer.h"

namespace nsa::lm {

struct KeyValue {
  std::string key, value;
};

/// A key of eight letters and a value of five digits.
KeyValue random_key_value(base::Random& random);

/// Lines that belong together: `multivalue`: they have the same key; `tracking`: each value is the key of the next
/// line, but for the last; others: none.
std::vector<KeyValue> draw_key_value_lines(const std::string& kind, std::size_t count, base::Random& random);

/// Overwrites about `fraction` of the tokens of each sequence with such lines. A fraction `pairs` of these tokens holds
/// lines with two copies, both at uniform positions. The others hold lines with 16 copies, or as many as fit: distances
/// from the first copy are log-uniform. Models learn associative recall from near copies, at any distance from pairs.
/// For one line in eight the first copy's distance from the start of the sequence is log-uniform: few would be there
/// otherwise. `kinds`: each line is of one of them. Those other than `single` are two to four lines, which share the 16
/// copies; values of a key recur in the order in which they first occurred.
void insert_key_value_lines(TrainingBatch& batch, double fraction, double pairs, const Tokenizer& tokenizer,
                            std::uint64_t seed, const std::vector<std::string>& kinds = {"single"});

}  // namespace nsa::lm
