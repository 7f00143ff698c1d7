// Speed targets, and whether a benchmark reached them.
#pragma once

#include "bench/run.h"

namespace nsa::cli {

/// Prints a line for each target of the report's dtype: reached, missed, not measured, or not judged (a disturbed run,
/// or not the targets' machine: two threads with AVX512_BF16). Throws Exit{1} when one is missed.
void judge_targets(const bench::Report& report);

}  // namespace nsa::cli
