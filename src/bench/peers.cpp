#include "bench/peers.h"

#include <fmt/core.h>

#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"

namespace nsa::bench {
namespace {

/// What an op consists of in bench/peers/peers.py: stages, and passes of each.
struct Parts {
  std::vector<std::string> stages, passes;
};

Parts parts_of(const std::string& op, Selection selection) {
  const std::string pattern =
      fmt::format(", {}", name_of(selection == Selection::kOwn ? Selection::kRandom : selection));
  const std::string compress = "compress k and v", choose = "compressed attention, selection",
                    window = "sliding window";
  const std::string selected = "selected attention" + pattern, end_to_end = "end to end" + pattern;
  const std::map<std::string, Parts> table = {
      {"compress", {{compress}, {"forward"}}},
      {"compress_backward", {{compress}, {"backward"}}},
      {"compressed attention, selection", {{choose}, {"forward"}}},
      {"compressed_attention_backward", {{choose}, {"backward"}}},
      {"selected attention", {{selected}, {"forward"}}},
      {"selected_attention", {{selected}, {"forward"}}},
      {"selected_attention_backward", {{selected}, {"backward"}}},
      {"sliding_window_attention", {{window}, {"forward"}}},
      {"sliding_window_attention_backward", {{window}, {"backward"}}},
      {"combine", {{"combine"}, {"forward"}}},
      {"sliding window, combine", {{window, "combine"}, {"forward"}}},
      {"forward", {{end_to_end}, {"forward"}}},
      {"forward_backward", {{end_to_end}, {"forward", "backward"}}},
  };
  const auto found = table.find(op);
  return found == table.end() ? Parts{} : found->second;
}

}  // namespace

Peers::Peers(const std::string& path, const Dims& dims, const std::string& gpu) try {
  const auto json = base::parse_json(base::read_text(path, base::kMaxJsonBytes), path);
  const auto& settings = json.at("settings");
  const auto same = [&](const char* field, const auto& here) {
    if (settings.at(field) == here) return;
    throw base::Error(
        fmt::format("{}: measured with {} = {}, here it is {}", path, field, settings.at(field).dump(), here));
  };
  same("num_heads", dims.num_heads);
  same("num_kv_heads", dims.num_kv_heads);
  same("head_dim", dims.head_dim);
  same("v_head_dim", dims.v_head_dim);
  same("dtype", std::string(dims.bfloat16 ? "bfloat16" : "float32"));
  if (dims.nsa != NSAConfig()) throw base::Error(fmt::format("{}: measured with the default hyperparameters", path));
  const auto other = json.at("gpu").get<std::string>();
  if (!gpu.starts_with(other))
    throw base::Error(fmt::format("{}: measured on {}, not on this device ({})", path, other, gpu));
  for (const auto& [length, measured] : json.at("lengths").items()) {
    for (const auto& [stage, implementations] : measured.at("stages").items()) {
      for (const auto& [name, passes] : implementations.items()) {
        for (const auto& [pass, ms] : passes.items()) {
          if (name == "nsa" || !ms.is_number()) continue;  // null: it failed
          times_[{std::stoll(length), stage, pass}][name] = 1e-3 * ms.get<double>();
        }
      }
    }
  }
} catch (const nlohmann::json::exception& error) {
  throw base::Error(fmt::format("{}: not a result of bench/peers/peers.py: {}", path, error.what()));
} catch (const std::logic_error& error) {  // stoll
  throw base::Error(fmt::format("{}: not a result of bench/peers/peers.py: {}", path, error.what()));
}

std::optional<PeerTime> Peers::best(const std::string& op, std::int64_t length, Selection selection) const {
  const auto [stages, passes] = parts_of(op, selection);
  Stage sums;
  bool first = true;
  for (const auto& stage : stages) {
    for (const auto& pass : passes) {
      const auto found = times_.find({length, stage, pass});
      if (found == times_.end()) return std::nullopt;
      if (first) sums = found->second;
      for (auto it = sums.begin(); !first && it != sums.end();) {  // who lacks a part is out
        const auto more = found->second.find(it->first);
        if (more == found->second.end()) {
          it = sums.erase(it);
        } else {
          (it++)->second += more->second;
        }
      }
      first = false;
    }
  }
  std::optional<PeerTime> best;
  for (const auto& [name, seconds] : sums) {
    if (!best || seconds < best->seconds) best = PeerTime{name, seconds};
  }
  return best;
}

}  // namespace nsa::bench
