// The benchmark: NSA by sequence length, by operation and end to end, and dense attention.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/peers.h"
#include "bench/problem.h"
#include "bench/timing.h"

namespace nsa::bench {

/// Peak rates of the machine. On the CPU the register peak, measured right after each result; on CUDA a large GEMM of
/// torch and a device copy, measured once.
struct Rates {
  std::optional<double> gflops, bytes_per_s;
};

struct Options {
  Shape shape;
  std::vector<std::int64_t> lengths;
  std::vector<CompressionKind> phis;  // of compress and end to end; ratios use the first
  bool backward = true;
  bool parts = true;  // stages of end to end on CUDA, and single operations
  bool plain = true;  // dense attention on libnsa's kernels
  std::string only;   // if given, time only operations whose name contains it
  TimingOptions timing;
  std::int64_t longest_backward = 131072;      // no backward beyond this length
  std::int64_t longest_dense_forward = 32768;  // beyond it dense and plain attention grow as the length squared
  std::int64_t longest_dense_backward = 8192;
  Rates rates;  // on CUDA
  Peers peers;
};

struct Result {
  std::string op, variant;
  std::string part_of;  // of a stage: the op it is part of, as that runs it
  std::int64_t length = 0;
  Timing timing;
  bool extrapolated = false;  // from a shorter length, as its square
  Cost cost;
  Rates rates;
  std::optional<PeerTime> peer;  // the fastest other implementation

  double gflops() const { return cost.gflop / timing.seconds(); }
  /// The least time at these rates over the time taken.
  std::optional<double> share() const;
};

/// How many times faster NSA is than dense attention.
struct Ratio {
  std::string pass;  // "forward" or "forward_backward"
  std::int64_t length = 0;
  double seconds = 0;                           // NSA
  double dense_seconds = 0, plain_seconds = 0;  // torch's, the fastest form; on libnsa's kernels, 0: not measured
  std::string dense_variant;                    // the fastest form
  std::optional<PeerTime> peer;                 // the fastest other implementation of NSA
  bool extrapolated = false;                    // dense or plain
  bool judged = false;                          // every run was undisturbed

  double over_dense() const { return dense_seconds / seconds; }
  double over_plain() const { return plain_seconds / seconds; }
};

/// What `neighbour_overlap` of src/bench/selection.h is of the blocks attended to, at a length.
struct Overlap {
  std::int64_t length = 0;
  std::optional<double> measured;  // empty where every query takes all its blocks
};

struct Report {
  Options options;
  std::vector<Result> results;
  std::vector<Ratio> ratios;
  std::vector<Overlap> overlaps;
  std::vector<std::string> refusals;  // forms of torch's attention that cannot run here, and why

  /// The length from which on NSA is faster, interpolated between the measured ones; the shortest measured length where
  /// it is faster already, empty where it never is. `over`: Ratio::over_dense or over_plain.
  std::optional<double> crossover(const std::string& pass, double (Ratio::*over)() const) const;
};

/// The problem of the published figures: on the CPU 16 heads to one KV head, on CUDA 64 to 4.
Options default_options(at::Device device);

/// `on_result` is called as soon as a result is there.
Report run(const Options& options, const std::function<void(const Result&)>& on_result);

void to_json(nlohmann::json& json, const Report& report);

}  // namespace nsa::bench
