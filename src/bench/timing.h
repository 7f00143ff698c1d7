// Timing of work on several threads, with what tells an undisturbed run from a disturbed one.
#pragma once

#include <functional>
#include <optional>

namespace nsa::bench {

struct Timing {
  double best_s = 0, median_s = 0;  // time of one call
  bool by_median = false;           // which of them counts: the median on a GPU, else the best
  double cpu_over_wall = 0;         // of the best run: process CPU time over wall time; CPU only
  bool judged = false;              // cpu_over_wall reached kJudgedShare of the threads

  double seconds() const { return by_median ? median_s : best_s; }
};

/// On a machine shared with others a thread may wait for a core. A run whose threads together got less than this share
/// of their time on a core is disturbed: it is repeated, and if no run is better it is reported but not judged.
inline constexpr double kJudgedShare = 0.95;

struct TimingOptions {
  int threads = 1;
  int repeats = 3;       // undisturbed runs wanted
  double budget_s = 10;  // no further run is started after this long, once there is one
};

/// Calls `work` once to warm up, then in runs of at least 20 ms. Work that takes longer than half the budget is not
/// warmed up. Meaningful only where idle threads sleep (OMP_WAIT_POLICY=passive): spinning counts as CPU time.
Timing time_runs(const std::function<void()>& work, const TimingOptions& options);

/// The most the machine can do in registers, measured now: giga floating-point operations per second of vdpbf16ps
/// (`bfloat16`, where the CPU has it) or of fused multiply-add in float32, on `threads` threads. Empty on a CPU without
/// a kernel for it.
std::optional<double> register_peak_gflops(bool bfloat16, int threads);

}  // namespace nsa::bench
