// Chains of independent fused multiply-adds that never leave the registers. 24 accumulators hide the latency; the
// unroll pragmas keep them in registers (g++ 12 puts an array of vectors into memory otherwise).
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "bench/timing.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nsa::bench {
namespace {

#if defined(__x86_64__)
constexpr int kAccumulators = 24;
constexpr long kSteps = 200000;  // a few milliseconds

/// Hides a zero from the compiler, which would otherwise see that all accumulators are equal and keep one.
template <class Vector>
inline __attribute__((always_inline)) void hide(Vector& value) {
  asm volatile("" : "+x"(value));
}

__attribute__((target("avx512f,avx512bf16"))) float spin_bf16() {
  __m512 sums[kAccumulators];
#pragma GCC unroll 24
  for (auto& sum : sums) {
    sum = _mm512_setzero_ps();
    hide(sum);
  }
  const auto a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f003f00));
  for (long step = 0; step < kSteps; ++step) {
#pragma GCC unroll 24
    for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, a, a);
  }
#pragma GCC unroll 24
  for (const auto& sum : sums) sums[0] = _mm512_add_ps(sums[0], sum);
  return _mm512_cvtss_f32(sums[0]);
}

__attribute__((target("avx512f"))) float spin_avx512() {
  __m512 sums[kAccumulators];
#pragma GCC unroll 24
  for (auto& sum : sums) {
    sum = _mm512_setzero_ps();
    hide(sum);
  }
  const auto a = _mm512_set1_ps(0.5f);
  for (long step = 0; step < kSteps; ++step) {
#pragma GCC unroll 24
    for (auto& sum : sums) sum = _mm512_fmadd_ps(a, a, sum);
  }
#pragma GCC unroll 24
  for (const auto& sum : sums) sums[0] = _mm512_add_ps(sums[0], sum);
  return _mm512_cvtss_f32(sums[0]);
}

__attribute__((target("avx2,fma"))) float spin_avx2() {
  constexpr int kRegisters = 12;  // of 16
  __m256 sums[kRegisters];
#pragma GCC unroll 12
  for (auto& sum : sums) {
    sum = _mm256_setzero_ps();
    hide(sum);
  }
  const auto a = _mm256_set1_ps(0.5f);
  for (long step = 0; step < kSteps * kAccumulators / kRegisters; ++step) {
#pragma GCC unroll 12
    for (auto& sum : sums) sum = _mm256_fmadd_ps(a, a, sum);
  }
#pragma GCC unroll 12
  for (const auto& sum : sums) sums[0] = _mm256_add_ps(sums[0], sum);
  return _mm256_cvtss_f32(sums[0]);
}

struct Spin {
  float (*function)() = nullptr;
  int flops = 0;  // of one instruction
};

Spin choose_spin(bool bfloat16) {
  if (bfloat16 && __builtin_cpu_supports("avx512bf16")) return {spin_bf16, 64};
  if (__builtin_cpu_supports("avx512f")) return {spin_avx512, 32};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {spin_avx2, 16};
  return {};
}
#endif

}  // namespace

std::optional<double> register_peak_gflops(bool bfloat16, int threads) {
#if defined(__x86_64__)
  const Spin spin = choose_spin(bfloat16);
  if (spin.function == nullptr) return std::nullopt;
  double best = 0;
  for (int run = 0; run < 3; ++run) {
    std::vector<double> seconds(static_cast<std::size_t>(threads));
    std::vector<std::thread> workers;
    for (auto& spent : seconds) {
      workers.emplace_back([&spent, spin] {
        const auto start = std::chrono::steady_clock::now();
        const volatile float result = spin.function();
        static_cast<void>(result);
        spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      });
    }
    for (auto& worker : workers) worker.join();
    const double slowest = *std::max_element(seconds.begin(), seconds.end());
    best = std::max(best, 1e-9 * threads * static_cast<double>(kSteps) * kAccumulators * spin.flops / slowest);
  }
  return best;
#else
  static_cast<void>(bfloat16), static_cast<void>(threads);
  return std::nullopt;
#endif
}

}  // namespace nsa::bench
