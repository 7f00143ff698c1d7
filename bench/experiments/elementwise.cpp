// The elementwise steps of src/lm/layers beside the same in torch's operations: forward and backward, in turn, medians.
// docs/log/training.md has what came out. After `make build` (or a build with CUDA, then with `cuda` behind it):
//   T=$(.venv/bin/python -c 'import torch, os; print(os.path.dirname(torch.__file__))'); B=build
//   g++ -std=c++20 -O2 -fopenmp -Isrc -Iinclude -isystem $T/include -isystem $T/include/torch/csrc/api/include \
//     bench/experiments/elementwise.cpp -o $B/elementwise $B/src/lm/libnsa_lm.a $B/src/bridge/libnsa_bridge.a \
//     $B/src/base/libnsa_base.a -L$B/lib -lnsa -L$T/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 \
//     -Wl,-rpath,$T/lib:$B/lib && OMP_NUM_THREADS=1 $B/elementwise
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "lm/layers/activations.h"
#include "lm/layers/norm.h"
#include "lm/layers/rope.h"
#include "lm/layers/rope_frequencies.h"

namespace {

using Step = std::function<at::Tensor()>;

at::Device device = at::kCPU;

/// Milliseconds of a forward and the gradients of `inputs`.
double timed(const Step& step, const std::vector<at::Tensor>& inputs, const at::Tensor& d_y) {
  const auto begin = std::chrono::steady_clock::now();
  torch::autograd::grad({step()}, inputs, {d_y});
  if (device.is_cuda()) torch::cuda::synchronize();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

void compare(const std::string& name, const Step& ours, const Step& theirs, const std::vector<at::Tensor>& inputs) {
  const at::Tensor d_y = at::randn_like(ours());
  std::vector<double> times[2];
  for (int i = -3; i < 41; ++i) {
    const double pair[] = {timed(ours, inputs, d_y), timed(theirs, inputs, d_y)};
    for (int which = 0; which < 2 && i >= 0; ++which) times[which].push_back(pair[which]);
  }
  for (auto& list : times) std::nth_element(list.begin(), list.begin() + 20, list.end());
  std::printf("%-32s ours %8.3f ms, torch %8.3f ms\n", name.c_str(), times[0][20], times[1][20]);
}

at::Tensor leaf(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::randn(shape, at::device(device).dtype(dtype)).requires_grad_();
}

}  // namespace

int main(int argc, char**) {
  if (argc > 1) device = at::Device(at::kCUDA, 0);
  const std::int64_t rows = device.is_cuda() ? 32768 : 4096;
  torch::manual_seed(0);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const std::string type = dtype == at::kFloat ? " float32" : " bfloat16";
    for (const std::int64_t width : {256, 1024}) {
      const at::Tensor x = leaf({rows, width}, at::kFloat), weight = leaf({width}, at::kFloat);
      compare(
          "rms_norm " + std::to_string(width) + type, [&] { return nsa::lm::rms_norm(x, weight, 1e-5, dtype); },
          [&] { return at::rms_norm(x, {width}, weight, 1e-5).to(dtype); }, {x, weight});
    }
    const nsa::lm::Rotation table = nsa::lm::rotation_table(rows, nsa::lm::rope_frequencies(32, 10000, {}), device);
    const at::Tensor heads = leaf({rows, 8, 2 * table.cos.size(1)}, dtype);
    const at::Tensor cos = table.cos.unsqueeze(1), sin = table.sin.unsqueeze(1);
    compare(
        "rotate 8 x " + std::to_string(heads.size(2)) + type, [&] { return nsa::lm::rotate(heads, table); },
        [&] {
          const auto half = heads.to(at::kFloat).chunk(2, -1);
          return at::cat({half[0] * cos - half[1] * sin, half[1] * cos + half[0] * sin}, -1).to(dtype);
        },
        {heads});
    const at::Tensor both = leaf({rows, 2 * 1024}, dtype), bias = leaf({2 * 1024}, dtype);
    compare(
        "swiglu 1024" + type, [&] { return nsa::lm::swiglu(both); },
        [&] {
          const auto half = both.chunk(2, -1);
          return at::silu(half[0]) * half[1];
        },
        {both});
    compare(
        "biased_silu 2048" + type, [&] { return nsa::lm::biased_silu(both, bias); },
        [&] { return at::silu(both + bias); }, {both, bias});
  }
}
