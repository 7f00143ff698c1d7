#include "bench/selection.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace nsa::bench {
namespace {

constexpr const char* kNames[] = {"own", "random", "clustered"};

/// splitmix64
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// The blocks of one query, in no order. A place among the free ones is drawn for `period` queries.
void draw_blocks(const NSAConfig& cfg, std::int64_t t, std::int64_t head, int period, std::vector<std::int32_t>& row) {
  const auto own = static_cast<std::int32_t>(t / cfg.block_size);
  const bool few = own < cfg.topk;  // candidates: all of them
  const std::int32_t first = few ? own + 1 : cfg.init_blocks;
  row.clear();
  for (std::int32_t block = 0; block < first; ++block) row.push_back(block);
  for (std::int32_t block = std::max(first, own - cfg.local_blocks + 1); block <= own; ++block) row.push_back(block);
  for (int place = static_cast<int>(row.size()); !few && place < cfg.topk; ++place) {
    const std::int64_t moment = (t + place) / period;
    const std::uint64_t seed =
        mixed(static_cast<std::uint64_t>(moment)) + static_cast<std::uint64_t>(place * 65536 + head);
    for (std::uint64_t draw = 0; static_cast<int>(row.size()) == place; ++draw) {  // until the block is a new one
      const auto block = static_cast<std::int32_t>(mixed(mixed(seed) + draw) % static_cast<std::uint64_t>(own + 1));
      if (std::find(row.begin(), row.end(), block) == row.end()) row.push_back(block);
    }
  }
}

}  // namespace

const char* name_of(Selection selection) { return kNames[static_cast<std::size_t>(selection)]; }

Selection parse_selection(const std::string& name) {
  const auto* const found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) throw std::invalid_argument("no selection is named " + name);
  return static_cast<Selection>(found - std::begin(kNames));
}

std::vector<std::int32_t> chosen_blocks(Selection selection, const NSAConfig& cfg, std::int64_t length,
                                        std::int64_t kv_heads) {
  if (selection == Selection::kOwn) return {};
  std::vector<std::int32_t> all(static_cast<std::size_t>(length * kv_heads * cfg.topk), -1), row;
  auto out = all.begin();
  for (std::int64_t t = 0; t < length; ++t) {
    for (std::int64_t head = 0; head < kv_heads; ++head, out += cfg.topk) {
      draw_blocks(cfg, t, head, selection == Selection::kClustered ? 3 : 1, row);
      std::sort(row.begin(), row.end());
      std::copy(row.begin(), row.end(), out);
    }
  }
  return all;
}

}  // namespace nsa::bench
