// A window of one token: every query sees only itself, so the output is v, and the lse is the one score.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "nsa/config.h"
#include "nsa/operations.h"
#include "nsa/version.h"

int main() {
  constexpr int kTokens = 5, kHeads = 2, kDim = 8;
  std::vector<float> q(kTokens * kHeads * kDim, 0.5F), k(kTokens * kDim, 1.0F), v(kTokens * kDim);
  std::vector<float> o(q.size(), NAN), lse(kTokens * kHeads, NAN);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);

  const auto view = [](std::vector<float>& data, std::initializer_list<std::int64_t> shape) {
    return nsa::TensorView::contiguous(data.data(), nsa::DType::kFloat32, shape);
  };
  const auto input = [](const std::vector<float>& data, std::initializer_list<std::int64_t> shape) {
    return nsa::TensorView::input(data.data(), nsa::DType::kFloat32, shape);
  };
  nsa::SlidingWindowAttentionParams params;
  params.q = input(q, {1, kTokens, kHeads, kDim});
  params.k = input(k, {1, kTokens, 1, kDim});
  params.v = input(v, {1, kTokens, 1, kDim});
  params.window_size = 1;
  params.softmax_scale = 1.0;
  params.o = view(o, {1, kTokens, kHeads, kDim});
  params.lse = view(lse, {1, kHeads, kTokens});
  if (const nsa::Status status = nsa::sliding_window_attention(params); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  const auto near = [](float came, float wanted) { return std::abs(came - wanted) <= 1e-5F * (1 + wanted); };
  for (int t = 0; t < kTokens; ++t)
    for (int h = 0; h < kHeads; ++h)
      for (int c = 0; c < kDim; ++c)
        if (!near(o[(t * kHeads + h) * kDim + c], v[t * kDim + c]) || !near(lse[h * kTokens + t], 0.5F * kDim)) {
          std::fprintf(stderr, "token %d head %d channel %d: o %g, lse %g\n", t, h, c, o[(t * kHeads + h) * kDim + c],
                       lse[h * kTokens + t]);
          return 1;
        }
  const std::string version = std::to_string(NSA_VERSION_MAJOR) + "." + std::to_string(NSA_VERSION_MINOR) + "." +
                              std::to_string(NSA_VERSION_PATCH);
  if (version != NSA_VERSION || version != nsa::version()) {
    std::fprintf(stderr, "version: macros %s, %s, library %s\n", version.c_str(), NSA_VERSION, nsa::version());
    return 1;
  }
  std::printf("nsa %s: ok\n", nsa::version());
  return 0;
}
