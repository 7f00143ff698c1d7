// Random numbers of the exploration noise: Philox4x32-10 (Salmon et al., SC 2011), the same draws on every backend.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace nsa {

/// Ten rounds on a counter of four words under a 64-bit key (low word first).
inline std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::uint64_t key) {
  auto key0 = static_cast<std::uint32_t>(key), key1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<std::uint32_t>(product0)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

/// Gumbel noise g = -ln(-ln u) of a selection block, for the query at position t of a sequence. u has 23 bits and lies
/// strictly between 0 and 1.
inline double gumbel(std::uint64_t seed, std::int64_t block, std::int64_t t, std::int64_t kv_head,
                     std::int64_t sequence) {
  const auto word = [](std::int64_t x) { return static_cast<std::uint32_t>(x); };
  const std::uint32_t x = philox({word(block), word(t), word(kv_head), word(sequence)}, seed)[0];
  const double u = (static_cast<double>(x >> 9) + 0.5) * 0x1p-23;
  return -std::log(-std::log(u));
}

}  // namespace nsa
