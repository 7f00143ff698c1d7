#include "bench/run.h"

#include <c10/util/Exception.h>
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/machine.h"

namespace nsa::bench {
namespace {

/// On the CPU, up to here all forms of torch's attention are timed; beyond only the one that was faster.
constexpr std::int64_t kLongestAllForms = 8192;

class Runner {
 public:
  Runner(Report& report, const std::function<void(const Result&)>& on_result)
      : report_(report), options_(report.options), on_result_(on_result) {}

  void run(std::int64_t length) {
    Problem problem(options_.shape, length);
    // A selection of its own needs a call, which only rows end to end are worth.
    if (options_.only.empty() || options_.shape.selection != Selection::kOwn)
      report_.overlaps.push_back({length, problem.neighbour_overlap()});
    for (const bool backward : {false, true}) {
      if (backward && (!options_.backward || length > options_.longest_backward)) break;
      if (!options_.only.empty()) {
        time_operations(problem, backward, length);
        continue;
      }
      Ratio ratio{.pass = backward ? "forward_backward" : "forward", .length = length};
      for (std::size_t i = 0; i < options_.phis.size(); ++i) {
        const auto task = problem.end_to_end(options_.phis[i], backward);
        const auto result = time(task, length);
        if (options_.parts && task.staged) time_stages(problem, task, options_.phis[i], length);
        if (i > 0) continue;
        ratio.seconds = result.timing.seconds();
        ratio.judged = result.timing.judged;
        ratio.peer = result.peer;
      }
      if (options_.parts) time_operations(problem, backward, length);
      if (options_.plain) time_plain(problem, backward, length, ratio);
      if (length > longest_dense(backward)) {
        extrapolate_dense(backward, length, ratio);
      } else {
        time_dense(problem, backward, length, ratio);
      }
      if (ratio.dense_variant.empty()) continue;  // none of torch's forms runs: the refusals say why
      report_.ratios.push_back(ratio);
    }
  }

 private:
  Result add(Result result) {
    if (result.variant.empty() || result.variant == name_of(CompressionKind::kMean)) {
      result.peer = options_.peers.best(result.op, result.length, options_.shape.selection);
    }
    report_.results.push_back(result);
    on_result_(result);
    return result;
  }

  Result time(const Case& work, std::int64_t length) {
    const auto& shape = options_.shape;
    const bool on_host = shape.device.is_cpu();
    Result result{.op = work.op, .variant = work.variant, .length = length, .cost = work.cost};
    if (on_host) {
      result.timing = time_runs(work.work, options_.timing);
      result.rates.gflops = register_peak_gflops(shape.bfloat16, shape.threads);
    } else {
      result.timing = time_device_runs(work.work, options_.timing, shape.device);
      result.rates = options_.rates;
    }
    return add(result);
  }

  void time_operations(Problem& problem, bool backward, std::int64_t length) {
    for (const auto& operation : problem.operations(options_.phis, backward)) {
      if (operation.op.find(options_.only) != std::string::npos) time(operation, length);
    }
  }

  void time_stages(const Problem& problem, const Case& task, CompressionKind phi, std::int64_t length) {
    for (const auto& [stage, timing] : time_device_stages(task.staged, options_.timing, options_.shape.device)) {
      add({.op = stage,
           .variant = task.variant,
           .part_of = task.op,
           .length = length,
           .timing = timing,
           .cost = problem.cost(stage, phi),
           .rates = options_.rates});
    }
  }

  Result extrapolate(Result result, std::int64_t length) {
    if (result.length == 0) return result;  // nothing shorter was measured
    const double growth = static_cast<double>(length) / static_cast<double>(result.length);
    result.timing.best_s *= growth * growth;
    result.timing.median_s *= growth * growth;
    result.cost.gflop *= growth * growth;
    result.cost.bytes = static_cast<std::int64_t>(static_cast<double>(result.cost.bytes) * growth);
    result.length = length;
    result.extrapolated = true;
    return add(result);
  }

  std::int64_t longest_dense(bool backward) const {
    return backward ? options_.longest_dense_backward : options_.longest_dense_forward;
  }

  void time_plain(Problem& problem, bool backward, std::int64_t length, Ratio& ratio) {
    Result& before = plain_[backward];
    const Result plain =
        length <= longest_dense(backward) ? time(problem.plain(backward), length) : extrapolate(before, length);
    if (!plain.extrapolated) before = plain;
    ratio.plain_seconds = plain.timing.seconds();
    ratio.extrapolated = plain.extrapolated;
    ratio.judged = ratio.judged && plain.timing.judged;
  }

  void time_dense(Problem& problem, bool backward, std::int64_t length, Ratio& ratio) {
    const Result before = dense_[backward];
    Result& best = dense_[backward];
    const bool all = length <= kLongestAllForms || before.length == 0 || !options_.shape.device.is_cpu();
    best = {};
    for (const auto& form : problem.dense_forms()) {
      if (!all && form != before.variant) continue;
      const auto result = time_form(problem, form, backward, length);
      if (result && (best.length == 0 || result->timing.seconds() < best.timing.seconds())) best = *result;
    }
    if (best.length == 0) return;
    ratio.dense_seconds = best.timing.seconds();
    ratio.dense_variant = best.variant;
    ratio.judged = ratio.judged && best.timing.judged;
  }

  /// Nothing where the back end refuses: not each takes every dtype and head dim, or has a backward.
  std::optional<Result> time_form(Problem& problem, const std::string& form, bool backward, std::int64_t length) {
    try {
      return time(problem.dense(form, backward), length);
    } catch (const std::exception& error) {  // FlashAttention-3 throws others than torch's
      const auto* const torch = dynamic_cast<const c10::Error*>(&error);
      report_.refusals.push_back(fmt::format("dense attention, {}, at {}: {}", form, length,
                                             torch != nullptr ? torch->what_without_backtrace() : error.what()));
      return std::nullopt;
    }
  }

  void extrapolate_dense(bool backward, std::int64_t length, Ratio& ratio) {
    if (dense_[backward].length == 0) return;  // nothing shorter was measured
    const auto result = extrapolate(dense_[backward], length);
    ratio.dense_seconds = result.timing.seconds();
    ratio.dense_variant = result.variant;
    ratio.judged = ratio.judged && result.timing.judged;
    ratio.extrapolated = true;
  }

  Report& report_;
  const Options& options_;
  const std::function<void(const Result&)>& on_result_;
  Result plain_[2], dense_[2];  // the last ones measured, forward and with backward
};

}  // namespace

std::optional<double> Result::share() const {
  if (!rates.gflops || extrapolated) return std::nullopt;
  const double computing = cost.gflop / *rates.gflops;
  const double moving = rates.bytes_per_s ? static_cast<double>(cost.bytes) / *rates.bytes_per_s : 0;
  return std::max(computing, moving) / timing.seconds();
}

std::optional<double> Report::crossover(const std::string& pass, double (Ratio::*over)() const) const {
  const Ratio* slower = nullptr;  // the longest length at which NSA is not faster
  const Ratio* faster = nullptr;  // the next measured one
  for (const auto& ratio : ratios) {
    if (ratio.pass != pass) continue;
    if ((ratio.*over)() < 1) {
      slower = &ratio;
      faster = nullptr;
    } else if (faster == nullptr) {
      faster = &ratio;
    }
  }
  if (faster == nullptr) return std::nullopt;
  const auto length = static_cast<double>(faster->length);
  if (slower == nullptr) return length;
  const auto before = static_cast<double>(slower->length);
  const double low = std::log((slower->*over)()), high = std::log((faster->*over)());
  return before * std::pow(length / before, -low / (high - low));
}

Options default_options(at::Device device) {
  Options options;
  options.shape.device = device;
  options.lengths = {1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072};
  if (!device.is_cuda()) return options;
  options.lengths = {8192, 16384, 32768, 65536};
  options.shape.num_heads = 64;
  options.shape.num_kv_heads = 4;
  options.timing.repeats = 7;
  options.longest_dense_forward = options.longest_dense_backward = 131072;
  return options;
}

Report run(const Options& options, const std::function<void(const Result&)>& on_result) {
  Report report{.options = options, .results = {}, .ratios = {}, .overlaps = {}, .refusals = {}};
  Runner runner(report, on_result);
  for (const auto length : options.lengths) runner.run(length);
  return report;
}

void to_json(nlohmann::json& json, const Report& report) {
  const auto& shape = report.options.shape;
  const auto& cfg = shape.nsa;
  json = {{"kind", "nsa-bench"}, {"version", version()}, {"machine", base::machine_json(shape.threads, shape.device)}};
  json["settings"] = {{"dtype", shape.bfloat16 ? "bfloat16" : "float32"},
                      {"num_heads", shape.num_heads},
                      {"num_kv_heads", shape.num_kv_heads},
                      {"head_dim", shape.head_dim},
                      {"v_head_dim", shape.v_head_dim},
                      {"phi", name_of(report.options.phis.front())},
                      {"kernel_size", cfg.kernel_size},
                      {"kernel_stride", cfg.kernel_stride},
                      {"block_size", cfg.block_size},
                      {"topk", cfg.topk},
                      {"init_blocks", cfg.init_blocks},
                      {"local_blocks", cfg.local_blocks},
                      {"window_size", cfg.window_size},
                      {"selection", name_of(shape.selection)},
                      {"repeats", report.options.timing.repeats}};
  if (shape.neighbour_overlap) json["settings"]["neighbour_overlap"] = *shape.neighbour_overlap;
  const auto optional = [](const std::optional<double>& value) {
    return value ? nlohmann::json(*value) : nlohmann::json();
  };
  if (shape.device.is_cuda()) {
    const auto& [gflops, bytes_per_s] = report.options.rates;
    json["rates"] = {{"gflops", optional(gflops)}, {"bytes_per_s", optional(bytes_per_s)}};
  }
  for (const auto& r : report.results) {
    json["results"].push_back({{"op", r.op},
                               {"variant", r.variant},
                               {"part_of", r.part_of},
                               {"length", r.length},
                               {"seconds", r.timing.seconds()},
                               {"best_s", r.timing.best_s},
                               {"median_s", r.timing.median_s},
                               {"cpu_over_wall", r.timing.cpu_over_wall},
                               {"judged", r.timing.judged},
                               {"extrapolated", r.extrapolated},
                               {"gflop", r.cost.gflop},
                               {"gflops", r.gflops()},
                               {"bytes", r.cost.bytes},
                               {"gathered_bytes", r.cost.gathered},
                               {"peak_gflops", optional(r.rates.gflops)},
                               {"share", optional(r.share())},
                               {"peer", r.peer ? nlohmann::json(r.peer->name) : nlohmann::json()},
                               {"peer_s", r.peer ? nlohmann::json(r.peer->seconds) : nlohmann::json()}});
  }
  json["neighbour_overlap"] = nlohmann::json::array();
  for (const auto& [length, measured] : report.overlaps)
    json["neighbour_overlap"].push_back({{"length", length}, {"measured", optional(measured)}});
  json["ratios"] = nlohmann::json::array();
  for (const auto& r : report.ratios) {
    json["ratios"].push_back({{"length", r.length},
                              {"pass", r.pass},
                              {"seconds", r.seconds},
                              {"dense_seconds", r.dense_seconds},
                              {"dense_variant", r.dense_variant},
                              {"plain_seconds", r.plain_seconds},
                              {"over_dense", r.over_dense()},
                              {"over_plain", r.plain_seconds > 0 ? nlohmann::json(r.over_plain()) : nlohmann::json()},
                              {"extrapolated", r.extrapolated},
                              {"judged", r.judged}});
  }
  json["refusals"] = report.refusals;
  for (const char* pass : {"forward", "forward_backward"}) {
    const auto length = [&](auto over) { return optional(report.crossover(pass, over)); };
    json["crossover"][pass] = {{"dense", length(&Ratio::over_dense)}, {"plain", length(&Ratio::over_plain)}};
  }
}

}  // namespace nsa::bench
