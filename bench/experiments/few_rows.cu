// The chain of products of a decode step, without the rest of the model: what limits `few_rows_product`
// (src/lm/layers/few_rows_kernels.cu) with few rows, and whether its results are those of a plain loop.
//
//   few_rows [rows = 1] [layers = 18]
//
// Every layer has weights of its own, together more than the second-level cache holds. Chains are replays of one graph;
// the figures are medians over them, microseconds for each layer. `attend` stands for attention to one sequence: a
// cluster of eight thread blocks that waits for 20 microseconds. Results: docs/log/decoding.md.
//
//   nvcc -std=c++20 -O3 -arch=sm_90 --expt-relaxed-constexpr -I src few_rows.cu src/lm/layers/few_rows_kernels.cu
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "lm/layers/few_rows_kernels.h"

namespace {

using nsa::lm::fused::FewRowsArgs;
using nsa::lm::fused::RowInput;

void check(int error, const char* what) {
  if (error == 0) return;
  std::fprintf(stderr, "few_rows: %s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

__device__ float random_number(std::uint64_t i) {  // -1 ... 1
  i = (i + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  i = (i ^ (i >> 27)) * 0x94d049bb133111ebu;
  return static_cast<float>(static_cast<std::int64_t>(i ^ (i >> 31))) * 0x1p-63f;
}

__global__ void fill(__nv_bfloat16* to, std::int64_t count, float scale, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256)
    to[i] = __float2bfloat16_rn(random_number(seed * 0x100000000 + i) * scale);
}
__global__ void fill(float* to, std::int64_t count, float offset, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256)
    to[i] = random_number(seed * 0x100000000 + i) + offset;
}

/// What few_rows has to give, a thread for each result, in float32 with the same rounding of the input.
__global__ void plain_product(FewRowsArgs args, float* y) {
  const int column = blockIdx.x * 256 + threadIdx.x, r = blockIdx.y;
  if (column >= args.columns) return;
  const auto at = [](const void* p, std::int64_t i) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  };
  const auto silu = [](float x) { return x / (1 + expf(-x)); };
  const auto summed = [&](int c) {
    const std::int64_t i = std::int64_t{r} * args.depth + c;
    return args.residual[i] + (args.added ? at(args.added, i) : 0);
  };
  float scale = 0;
  if (args.input == RowInput::kNorm) {
    for (int c = 0; c < args.depth; ++c) scale += summed(c) * summed(c);
    scale = rsqrtf(scale / args.depth + args.eps);
  }
  double sum = 0;
  for (int c = 0; c < args.depth; ++c) {
    float x = 0;
    switch (args.input) {
      case RowInput::kPlain:
        x = at(args.x, r * args.x_row + c);
        break;
      case RowInput::kNorm:
        x = summed(c) * scale * args.norm[c];
        break;
      case RowInput::kSwiglu:
        x = silu(at(args.x, r * args.x_row + c)) * at(args.x, r * args.x_row + args.depth + c);
        break;
      case RowInput::kSilu:
        x = silu(at(args.x, r * args.x_row + c) + at(args.bias, c));
        break;
    }
    sum += __bfloat162float(__float2bfloat16_rn(x)) * at(args.matrix, std::int64_t{column} * args.depth + c);
  }
  if (args.gate_bias) sum = 1 / (1 + exp(-(sum + at(args.gate_bias, column))));
  y[std::int64_t{r} * args.columns + column] = static_cast<float>(sum);
}

/// Stands for a kernel that is short and starts when the one ahead has ended.
__global__ void step() {}

template <bool early>
__global__ void __cluster_dims__(8) attend(long long nanoseconds) {
  if (early) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

struct Layer {
  __nv_bfloat16 *in, *gate, *out, *up, *down;
  float *attention_norm, *ffn_norm;
};

constexpr int kHidden = 1024, kHeads = 2048, kProjected = 3072, kGateHidden = 256, kGates = 48, kFfn = 3072;

template <class T>
T* make(std::int64_t count, float parameter, std::uint64_t seed) {
  T* data = nullptr;
  check(cudaMalloc(&data, count * sizeof(T)), "cudaMalloc");
  fill<<<1024, 256>>>(data, count, parameter, seed);
  return data;
}

struct Model {
  int rows;
  std::vector<Layer> layers;
  float* residual[2];
  __nv_bfloat16 *added, *projected, *gates, *attended, *hidden, *gate_bias, *gate_out_bias;

  Model(int rows, int count) : rows(rows) {
    std::uint64_t seed = 1;
    const auto matrix = [&](std::int64_t columns, std::int64_t depth) {
      return make<__nv_bfloat16>(columns * depth, std::sqrt(3.0f / depth), ++seed);
    };
    for (int i = 0; i < count; ++i)
      layers.push_back({matrix(kProjected, kHidden), matrix(kGates, kGateHidden), matrix(kHidden, kHeads),
                        matrix(2 * kFfn, kHidden), matrix(kHidden, kFfn), make<float>(kHidden, 1, ++seed),
                        make<float>(kHidden, 1, ++seed)});
    for (float*& x : residual) x = make<float>(rows * kHidden, 0, ++seed);
    const auto activations = [&](std::int64_t width) { return make<__nv_bfloat16>(rows * width, 1, ++seed); };
    added = activations(kHidden), projected = activations(kProjected), gates = activations(kGates);
    attended = activations(kHeads), hidden = activations(2 * kFfn);
    gate_bias = activations(kGateHidden), gate_out_bias = activations(kGates);
  }

  FewRowsArgs made(RowInput input, const void* matrix, int depth, int columns, void* y) const {
    FewRowsArgs args{};
    args.input = input, args.matrix = matrix, args.rows = rows, args.depth = depth, args.columns = columns, args.y = y;
    args.settled = true;
    return args;
  }
  FewRowsArgs normed(const float* norm, const void* matrix, int columns, void* y, int from) const {
    auto args = made(RowInput::kNorm, matrix, kHidden, columns, y);
    args.residual = residual[from], args.added = added, args.norm = norm, args.eps = 1e-5f,
    args.sum = residual[1 - from];
    return args;
  }
  FewRowsArgs in(const Layer& l) const { return normed(l.attention_norm, l.in, kProjected, projected, 0); }
  FewRowsArgs gate(const Layer& l) const {
    auto args = made(RowInput::kSilu, l.gate, kGateHidden, kGates, gates);
    args.x = projected + kProjected - kGateHidden, args.x_row = kProjected;
    args.bias = gate_bias, args.gate_bias = gate_out_bias;
    return args;
  }
  FewRowsArgs out(const Layer& l) const {
    auto args = made(RowInput::kPlain, l.out, kHeads, kHidden, added);
    args.x = attended, args.x_row = kHeads;
    return args;
  }
  FewRowsArgs up(const Layer& l) const { return normed(l.ffn_norm, l.up, 2 * kFfn, hidden, 1); }
  FewRowsArgs down(const Layer& l) const {
    auto args = made(RowInput::kSwiglu, l.down, kFfn, kHidden, added);
    args.x = hidden, args.x_row = 2 * kFfn;
    return args;
  }
};

template <bool early>
void launch_attend(cudaStream_t stream, long long nanoseconds) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = 8, config.blockDim = 128, config.dynamicSmemBytes = 72 * 1024;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  cudaFuncSetAttribute(attend<early>, cudaFuncAttributeMaxDynamicSharedMemorySize, 72 * 1024);
  cudaFuncSetAttribute(attend<early>, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  check(cudaLaunchKernelEx(&config, attend<early>, nanoseconds), "attend");
}

/// Microseconds of a replay.
double time(cudaStream_t stream, const std::function<void()>& work) {
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  work();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&replay, graph, 0), "instantiate");
  cudaEvent_t begin, end;
  cudaEventCreate(&begin), cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 60; ++i) {
    float ms = 0;
    cudaEventRecord(begin, stream), check(cudaGraphLaunch(replay, stream), "replay"), cudaEventRecord(end, stream);
    check(cudaEventSynchronize(end), "replay");
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 10) times.push_back(ms * 1000);
  }
  cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void compare(const char* name, const FewRowsArgs& args, cudaStream_t stream) {
  const std::int64_t count = std::int64_t{args.rows} * args.columns;
  std::vector<__nv_bfloat16> y(count);
  std::vector<float> expected(count);
  float* device = nullptr;
  cudaMalloc(&device, count * sizeof(float));
  check(cudaMemset(args.y, 0xff, count * 2), "memset");
  plain_product<<<dim3((args.columns + 255) / 256, args.rows), 256>>>(args, device);
  check(cudaDeviceSynchronize(), "plain_product");
  check(few_rows(args, stream), name);
  check(cudaDeviceSynchronize(), name);
  cudaMemcpy(y.data(), args.y, count * 2, cudaMemcpyDeviceToHost);
  cudaMemcpy(expected.data(), device, count * 4, cudaMemcpyDeviceToHost);
  cudaFree(device);
  double worst = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double apart = std::abs(__bfloat162float(y[i]) - expected[i]) / std::max(1.0f, std::abs(expected[i]));
    worst = apart <= worst ? worst : apart;
  }
  std::printf("%-10s (%d, %d) x %d: off by at most %.5f%s\n", name, args.rows, args.depth, args.columns, worst,
              worst < 0.01 ? "" : "  WRONG");
}

}  // namespace

int main(int argc, char** argv) {
  const int rows = argc > 1 ? std::atoi(argv[1]) : 1, count = argc > 2 ? std::atoi(argv[2]) : 18;
  const Model model(rows, count);
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  const auto put = [&](const FewRowsArgs& args) { check(few_rows(args, stream), "few_rows"); };
  const Layer& first = model.layers[0];
  compare("in", model.in(first), stream), compare("gate", model.gate(first), stream);
  compare("out", model.out(first), stream), compare("up", model.up(first), stream);
  compare("down", model.down(first), stream);
  auto odd = model.out(model.layers[0]);  // a tail of columns, a tail of rows
  odd.depth = 1016, odd.columns = 1021;
  compare("odd", odd, stream);
  odd.depth = 5000, odd.columns = 333, odd.x = model.hidden;  // more than the stages hold
  if (rows * odd.depth <= nsa::lm::fused::kMostElements) compare("deep", odd, stream);

  struct Product {
    const char* name;
    FewRowsArgs (Model::*args)(const Layer&) const;
  };
  const Product products[] = {
      {"in", &Model::in}, {"gate", &Model::gate}, {"out", &Model::out}, {"up", &Model::up}, {"down", &Model::down}};
  std::printf("rows %d, %d layers; us for each layer\n", rows, count);
  for (const Product& product : products) {
    const double us = time(stream,
                           [&] {
                             for (const Layer& l : model.layers) put((model.*product.args)(l));
                           }) /
                      count;
    const FewRowsArgs args = (model.*product.args)(first);
    const double bytes = 2.0 * args.depth * args.columns;
    std::printf("%-10s %7.2f  %5.2f MB, %.2f TB/s\n", product.name, us, bytes / 1e6, bytes / us / 1e6);
  }
  const auto chain = [&](const Layer& l) { put(model.out(l)), put(model.up(l)), put(model.down(l)); };
  const double four = time(stream,
                           [&] {
                             for (const Layer& l : model.layers) put(model.in(l)), chain(l);
                           }) /
                      count;
  std::printf("%-10s %7.2f\n", "four", four);
  for (const long long ns : {20000ll, 0ll}) {
    const auto layer = [&](bool early) {
      return time(stream,
                  [&] {
                    for (const Layer& l : model.layers) {
                      put(model.in(l));
                      step<<<18, 256, 0, stream>>>();
                      put(model.gate(l));
                      step<<<33, 256, 0, stream>>>();
                      early ? launch_attend<true>(stream, ns) : launch_attend<false>(stream, ns);
                      chain(l);
                    }
                  }) /
             count;
    };
    std::printf("layer, attend %lld us: %7.2f, attend launches early %7.2f\n", ns / 1000, layer(false), layer(true));
  }
  check(cudaDeviceSynchronize(), "end");
}
