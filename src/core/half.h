// The floats below 32 bits as storage types, with conversions that round to nearest even and keep NaN, and inf where
// the type has it.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace nsa {

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

/// e4m3 without infinities, as torch.float8_e4m3fn: the largest number is 448, bits 0x7f and 0xff are NaN.
struct Float8E4M3 {
  std::uint8_t bits;
};

inline float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

inline BFloat16 to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return {static_cast<std::uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline float to_float(Float16 x) {
  const int exponent = (x.bits >> 10) & 31, mantissa = x.bits & 1023;
  float magnitude;
  if (exponent == 31)
    magnitude = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  else if (exponent == 0)
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  else
    magnitude = std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return x.bits & 0x8000 ? -magnitude : magnitude;
}

inline Float16 to_float16(float x) {
  const int sign = std::signbit(x) ? 0x8000 : 0;
  const float magnitude = std::fabs(x);
  int bits;
  if (std::isnan(x)) {
    bits = 0x7e00;
  } else if (magnitude >= 65520) {  // halfway between the largest number and the next power of two
    bits = 0x7c00;
  } else if (magnitude < 0x1p-14f) {  // subnormal; rounding up to 2^-14 carries into the exponent
    bits = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 24)));
  } else {
    int exponent;
    const float fraction = std::frexp(magnitude, &exponent);  // in [1/2, 1)
    bits = ((exponent + 14) << 10) + static_cast<int>(std::nearbyint(std::ldexp(fraction, 11))) - 1024;
  }
  return {static_cast<std::uint16_t>(sign | bits)};
}

/// Without branches, so that loops become vectors.
inline float to_float(Float8E4M3 x) {
  const std::uint32_t code = x.bits & 0x7f, sign = std::uint32_t{x.bits} >> 7 << 31;
  const float normal = std::bit_cast<float>((code << 20) + (120u << 23));
  const float subnormal = std::bit_cast<float>((code << 20) + (121u << 23)) - 0x1p-6f;  // exact
  const auto magnitude = std::bit_cast<std::uint32_t>(code < 8 ? subnormal : normal);
  return std::bit_cast<float>(sign | (code == 0x7f ? 0x7fc00000u : magnitude));
}

/// Saturates: what is beyond +-448, inf included, becomes +-448.
inline Float8E4M3 to_float8_e4m3(float x) {
  const int sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fabs(x);
  int code;
  if (std::isnan(x)) {
    code = 0x7f;
  } else if (magnitude >= 448) {
    code = 0x7e;
  } else if (magnitude < 0x1p-6f) {  // subnormal; rounding up to 2^-6 carries into the exponent
    code = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 9)));
  } else {
    const auto bits = std::bit_cast<std::uint32_t>(magnitude);
    code = static_cast<int>((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
  }
  return {static_cast<std::uint8_t>(sign | code)};
}

}  // namespace nsa
