#include "cli/bench_targets.h"

#include <fmt/core.h>

#include <string>

#include "cli/exit.h"
#include "nsa/backend.h"

namespace nsa::cli {
namespace {

/// NSA at least `factor` times as fast as torch's dense attention.
struct Target {
  bool bfloat16;
  const char* pass;
  std::int64_t length;
  double factor;
};
constexpr Target kTargets[] = {
    {true, "forward", 4096, 3},           {true, "forward", 16384, 8},           {true, "forward", 65536, 16},
    {true, "forward_backward", 16384, 5}, {true, "forward_backward", 65536, 12}, {false, "forward", 16384, 4},
    {false, "forward", 65536, 9},
};

/// Four times the length takes at most this many times as long.
constexpr std::int64_t kGrowthFrom = 16384, kGrowthTo = 65536;
constexpr double kMaxGrowth = 8.4;

const bench::Ratio* find(const bench::Report& report, const std::string& pass, std::int64_t length) {
  for (const auto& ratio : report.ratios) {
    if (ratio.pass == pass && ratio.length == length) return &ratio;
  }
  return nullptr;
}

bool is_target_machine(const bench::Report& report) {
  const auto& shape = report.options.shape;
  return variant_of(Backend::kCPU) == "avx512bf16" && shape.threads == 2 && shape.num_heads == 16 &&
         shape.num_kv_heads == 1 && shape.head_dim == 128 && shape.v_head_dim == 128 && shape.nsa == NSAConfig{};
}

const char* verdict(bool judged, bool reached) { return !judged ? "not judged" : reached ? "reached" : "MISSED"; }

}  // namespace

void judge_targets(const bench::Report& report) {
  if (report.options.shape.device.is_cuda()) {
    fmt::print("\ntargets: for the CPU only, none is judged on cuda\n");
    return;
  }
  const bool on_target_machine = is_target_machine(report);
  bool missed = false;
  fmt::print("\ntargets (2 threads with AVX512_BF16, H = 16, Hkv = 1, D = 128, default configuration)\n");
  for (const auto& bar : kTargets) {
    if (bar.bfloat16 != report.options.shape.bfloat16) continue;
    const auto* const ratio = find(report, bar.pass, bar.length);
    if (ratio == nullptr) {
      fmt::print("{:<17} at {:>6}: at least {:>4.1f} x torch: not measured\n", bar.pass, bar.length, bar.factor);
      continue;
    }
    const bool judged = on_target_machine && ratio->judged, reached = ratio->over_dense() >= bar.factor;
    missed = missed || (judged && !reached);
    fmt::print("{:<17} at {:>6}: at least {:>4.1f} x torch: {:>6.2f}, {}\n", bar.pass, bar.length, bar.factor,
               ratio->over_dense(), verdict(judged, reached));
  }
  const auto* const from = find(report, "forward", kGrowthFrom);
  const auto* const to = find(report, "forward", kGrowthTo);
  if (from != nullptr && to != nullptr) {
    const double growth = to->seconds / from->seconds;
    const bool judged = on_target_machine && from->judged && to->judged;
    missed = missed || (judged && growth > kMaxGrowth);
    fmt::print("forward from {} to {}: at most {:.1f} x the time: {:.2f}, {}\n", kGrowthFrom, kGrowthTo, kMaxGrowth,
               growth, verdict(judged, growth <= kMaxGrowth));
  }
  if (missed) throw Exit{1};
}

}  // namespace nsa::cli
