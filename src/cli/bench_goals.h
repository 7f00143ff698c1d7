// The speed this project promises, and whether a benchmark kept it.
#pragma once

#include "bench/run.h"

namespace nsa::cli {

/// Prints a line for each goal that concerns the report's dtype: reached, missed, not judged (a disturbed run, or a
/// machine other than the one the goals are for: two threads with AVX512_BF16) or not measured. Throws Exit{1} when one
/// is missed.
void judge_goals(const bench::Report& report);

}  // namespace nsa::cli
