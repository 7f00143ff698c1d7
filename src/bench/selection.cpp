#include "bench/selection.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <stdexcept>

namespace nsa::bench {
namespace {

constexpr const char* kNames[] = {"own", "random", "clustered", "model-like", "recorded"};

/// splitmix64
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// More visible blocks than a query takes.
bool has_choice(const NSAConfig& cfg, std::int64_t t) { return t / cfg.block_size >= cfg.topk; }

bool contains(std::span<const std::int32_t> row, std::int32_t block) {
  return std::find(row.begin(), row.end(), block) != row.end();
}

/// The blocks that query t has to take: the forced ones, or all visible ones without a choice.
void take_forced(const NSAConfig& cfg, std::int64_t t, std::vector<std::int32_t>& row) {
  const auto own = static_cast<std::int32_t>(t / cfg.block_size);
  const std::int32_t first = has_choice(cfg, t) ? cfg.init_blocks : own + 1;
  row.clear();
  for (std::int32_t block = 0; block < first; ++block) row.push_back(block);
  for (std::int32_t block = std::max(first, own - cfg.local_blocks + 1); block <= own; ++block) row.push_back(block);
}

/// One more of the blocks 0 to own; `next` gives random numbers.
template <class Next>
void draw_block(std::int64_t own, Next next, std::vector<std::int32_t>& row) {
  while (true) {
    const auto block = static_cast<std::int32_t>(next() % static_cast<std::uint64_t>(own + 1));
    if (contains(row, block)) continue;
    row.push_back(block);
    return;
  }
}

/// A free slot is drawn for `period` queries.
void draw_for_period(const NSAConfig& cfg, std::int64_t t, std::int64_t head, int period,
                     std::vector<std::int32_t>& row) {
  for (int place = static_cast<int>(row.size()); place < cfg.topk; ++place) {
    const std::int64_t moment = (t + place) / period;
    std::uint64_t state =
        mixed(mixed(static_cast<std::uint64_t>(moment)) + static_cast<std::uint64_t>(place * 65536 + head));
    draw_block(
        t / cfg.block_size, [&state] { return mixed(state++); }, row);
  }
}

/// Model-like blocks of one KV head into rows that are `stride` elements apart. Each free block of the previous query
/// stays with probability `keep`.
void draw_model_like(const NSAConfig& cfg, std::int64_t first, std::int64_t length, std::int64_t head, double keep,
                     std::int32_t* out, std::int64_t stride) {
  std::uint64_t state = mixed(static_cast<std::uint64_t>(head));
  const auto next = [&state] { return mixed(state++); };
  const double limit = keep * 0x1p64;
  std::vector<std::int32_t> row;
  const auto topk = static_cast<std::size_t>(cfg.topk);
  std::span<const std::int32_t> before;
  for (std::int64_t t = first; t < length; ++t, out += stride) {
    take_forced(cfg, t, row);
    if (has_choice(cfg, t)) {
      for (const auto block : before) {
        const bool stays = static_cast<double>(next()) < limit;
        if (stays && row.size() < topk && !contains(row, block)) row.push_back(block);
      }
      while (row.size() < topk) draw_block(t / cfg.block_size, next, row);
    }
    std::sort(row.begin(), row.end());
    std::copy(row.begin(), row.end(), out);
    before = {out, row.size()};
  }
}

/// The probability with which the overlap becomes `overlap`, by bisection on what it is: of one KV head, or of as many
/// as make thousands of queries.
double find_keep(const NSAConfig& cfg, std::int64_t first, std::int64_t length, double overlap) {
  const std::int64_t heads = 1 + 4096 / std::max<std::int64_t>(length - first, 1);
  std::vector<std::int32_t> blocks(static_cast<std::size_t>((length - first) * heads * cfg.topk), -1);
  double low = 0, high = 1;
  for (int step = 0; step < 10; ++step) {
    const double keep = (low + high) / 2;
    for (std::int64_t head = 0; head < heads; ++head)
      draw_model_like(cfg, first, length, head, keep, &blocks[static_cast<std::size_t>(head * cfg.topk)],
                      heads * cfg.topk);
    (neighbour_overlap(blocks, cfg, heads, first).value_or(1) < overlap ? low : high) = keep;
  }
  return (low + high) / 2;
}

}  // namespace

const char* name_of(Selection selection) { return kNames[static_cast<std::size_t>(selection)]; }

Selection parse_selection(const std::string& name) {
  const auto* const found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) throw std::invalid_argument("no selection is named " + name);
  return static_cast<Selection>(found - std::begin(kNames));
}

std::vector<std::int32_t> chosen_blocks(Selection selection, const NSAConfig& cfg, std::int64_t length,
                                        std::int64_t kv_heads, double overlap, std::int64_t first) {
  if (selection == Selection::kOwn || selection == Selection::kRecorded || length <= first) return {};
  std::vector<std::int32_t> all(static_cast<std::size_t>((length - first) * kv_heads * cfg.topk), -1), row;
  if (selection == Selection::kModelLike) {
    const double keep = find_keep(cfg, first, length, overlap);
    for (std::int64_t head = 0; head < kv_heads; ++head)
      draw_model_like(cfg, first, length, head, keep, &all[static_cast<std::size_t>(head * cfg.topk)],
                      kv_heads * cfg.topk);
    return all;
  }
  auto out = all.begin();
  for (std::int64_t t = first; t < length; ++t) {
    for (std::int64_t head = 0; head < kv_heads; ++head, out += cfg.topk) {
      take_forced(cfg, t, row);
      if (has_choice(cfg, t)) draw_for_period(cfg, t, head, selection == Selection::kClustered ? 3 : 1, row);
      std::sort(row.begin(), row.end());
      std::copy(row.begin(), row.end(), out);
    }
  }
  return all;
}

std::optional<double> neighbour_overlap(std::span<const std::int32_t> blocks, const NSAConfig& cfg,
                                        std::int64_t kv_heads, std::int64_t first) {
  const auto topk = static_cast<std::size_t>(cfg.topk), stride = static_cast<std::size_t>(kv_heads) * topk;
  std::int64_t shared = 0, chosen = 0;
  for (std::size_t at = stride; at < blocks.size(); at += topk) {
    if (!has_choice(cfg, first + static_cast<std::int64_t>(at / stride))) continue;
    const auto before = blocks.subspan(at - stride, topk);
    for (const auto block : blocks.subspan(at, topk)) {
      chosen += block >= 0;
      shared += block >= 0 && contains(before, block);
    }
  }
  if (chosen == 0) return std::nullopt;
  return static_cast<double>(shared) / static_cast<double>(chosen);
}

}  // namespace nsa::bench
