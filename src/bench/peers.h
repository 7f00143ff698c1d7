// Other implementations' times, as bench/peers/peers.py measured them, for the table of the benchmark.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "bench/costs.h"
#include "bench/selection.h"

namespace nsa::bench {

struct PeerTime {
  std::string name;
  double seconds = 0;
};

class Peers {
 public:
  /// No peers.
  Peers() = default;
  /// Throws Error for a file that is not one of bench/peers/peers.py, or is about another GPU or another problem.
  Peers(const std::string& path, const Dims& dims, const std::string& gpu);

  bool empty() const { return times_.empty(); }

  /// The fastest peer for `op` (an operation, a stage or end to end); empty if no peer times it. Peers compress by the
  /// mean. For the selection `own` their time with a random selection counts.
  std::optional<PeerTime> best(const std::string& op, std::int64_t length, Selection selection) const;

 private:
  using Stage = std::map<std::string, double>;                                 // seconds by implementation
  std::map<std::tuple<std::int64_t, std::string, std::string>, Stage> times_;  // by length, stage, pass
};

}  // namespace nsa::bench
