// Random numbers of the exploration noise: Philox4x32-10 (Salmon et al., SC 2011), the same draws on every backend.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace nsa {

/// Ten rounds on a counter of four words under a 64-bit key (low word first).
constexpr std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::uint64_t key) {
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

/// The uniform number u behind the noise of a selection block, for the query at position t of a sequence: 23 bits,
/// strictly between 0 and 1. (constexpr, so that CUDA kernels can call it.)
constexpr double gumbel_uniform(std::uint64_t seed, std::int64_t block, std::int64_t t, std::int64_t kv_head,
                                std::int64_t sequence) {
  const std::array<std::uint32_t, 4> counter{static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(t),
                                             static_cast<std::uint32_t>(kv_head), static_cast<std::uint32_t>(sequence)};
  return (static_cast<double>(philox(counter, seed)[0] >> 9) + 0.5) * 0x1p-23;
}

/// Gumbel noise g = -ln(-ln u).
inline double gumbel(std::uint64_t seed, std::int64_t block, std::int64_t t, std::int64_t kv_head,
                     std::int64_t sequence) {
  return -std::log(-std::log(gumbel_uniform(seed, block, t, kv_head, sequence)));
}

}  // namespace nsa
