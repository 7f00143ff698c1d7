#include "core/element.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace nsa {
namespace {

/// x rounded to `digits` binary digits; numbers below 2^min_exponent keep the spacing they have there.
double round_to(double x, int digits, int min_exponent, double max) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x), min_exponent) - (digits - 1));
  const double y = std::nearbyint(x / unit) * unit;
  return std::fabs(y) > max ? std::copysign(std::numeric_limits<double>::infinity(), x) : y;
}

}  // namespace

double rounded(double x, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<float>(x);
    case DType::kBFloat16:
      return round_to(x, 8, -126, 0x1.FEp127);
    case DType::kFloat16:
      return round_to(x, 11, -14, 65504);
    case DType::kFloat8E4M3:
      return std::isnan(x) ? x : round_to(std::clamp(x, -448.0, 448.0), 4, -6, 448);
    default:
      return x;
  }
}

}  // namespace nsa
