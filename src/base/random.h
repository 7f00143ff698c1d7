// Small random numbers that are the same on every machine and need no state to be saved: functions of their key.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string_view>
#include <utility>
#include <vector>

namespace nsa::base {

/// SplitMix64's finaliser: a bijection that mixes all bits.
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// 64-bit hash of the bytes, eight at a time. It shows accidental changes, not deliberate ones.
inline std::uint64_t hash(std::string_view bytes, std::uint64_t seed = 0) {
  std::uint64_t state = mix(seed ^ bytes.size());
  while (!bytes.empty()) {
    std::uint64_t word = 0;
    const std::size_t n = std::min<std::size_t>(8, bytes.size());
    std::memcpy(&word, bytes.data(), n);
    state = mix(state ^ word);
    bytes.remove_prefix(n);
  }
  return state;
}

/// A seed derived from several numbers, e.g. (run seed, step, micro-batch, layer).
inline std::uint64_t derive_seed(std::initializer_list<std::uint64_t> parts) {
  std::uint64_t seed = 0;
  for (const std::uint64_t part : parts) seed = mix(seed ^ mix(part));
  return seed;
}

/// A stream of numbers from a seed.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed)) {}
  std::uint64_t next() { return mix(state_++); }
  /// 0 ... n - 1, n >= 1; the bias of the remainder is below n / 2^64.
  std::uint64_t below(std::uint64_t n) { return next() % n; }
  /// In [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

template <class T>
void shuffle(std::vector<T>& values, std::uint64_t seed) {
  Random random(seed);
  for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random.below(i)]);
}

}  // namespace nsa::base
