// The grids of shapes and options that a backend is checked on.
#pragma once

#include <vector>

#include "support/problem.h"

namespace nsa::test {

/// Cases in which every pair of values of any two options occurs: hyperparameters, lengths, group sizes, head
/// dimensions, dtypes, layouts. Compression is the mean.
std::vector<Case> attention_cases();

/// The same for compress: every function, weights shared or per head, with and without what is optional.
std::vector<Case> compression_cases();

/// The same for native_sparse_attention: every kind of compression, with and without a rotation.
std::vector<Case> layer_cases();

}  // namespace nsa::test
