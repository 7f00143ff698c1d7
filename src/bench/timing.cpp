#include "bench/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <vector>

namespace nsa::bench {
namespace {

constexpr double kShortestRun = 0.02;  // seconds: below that the wake-up of threads shows
constexpr int kMaxCalls = 1000;

struct Run {
  double wall_s = 0, cpu_over_wall = 0;
};

double process_cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Run run_once(const std::function<void()>& work, int calls) {
  const double cpu = process_cpu_seconds(), wall = wall_seconds();
  for (int i = 0; i < calls; ++i) work();
  const double wall_spent = wall_seconds() - wall;
  return {wall_spent / calls, (process_cpu_seconds() - cpu) / wall_spent};
}

}  // namespace

Timing time_runs(const std::function<void()>& work, const TimingOptions& options) {
  const double start = wall_seconds(), wanted = kJudgedShare * options.threads;
  std::vector<Run> judged, all;
  const auto keep = [&](const Run& run) {
    all.push_back(run);
    if (run.cpu_over_wall >= wanted) judged.push_back(run);
  };
  const Run first = run_once(work, 1);
  if (first.wall_s > options.budget_s / 2) keep(first);
  const int calls = std::clamp(static_cast<int>(std::ceil(kShortestRun / first.wall_s)), 1, kMaxCalls);
  const auto repeats = static_cast<std::size_t>(options.repeats);
  while (judged.size() < repeats && all.size() < 3 * repeats) {
    const bool late = wall_seconds() - start > options.budget_s;
    if (late && (!judged.empty() || all.size() > 1)) break;
    keep(run_once(work, calls));
  }
  auto& runs = judged.empty() ? all : judged;
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.wall_s < b.wall_s; });
  return {.best_s = runs.front().wall_s,
          .median_s = runs[runs.size() / 2].wall_s,
          .cpu_over_wall = runs.front().cpu_over_wall,
          .judged = !judged.empty()};
}

}  // namespace nsa::bench
