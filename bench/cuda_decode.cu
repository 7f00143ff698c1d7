// Times decode steps on one GPU, through the public API.
//   cuda_decode [context [m [batch ...]]]  default 65536 1 32 8 1; m: new tokens a step; H = 64, Hkv = 4, D = 128,
//                                          bfloat16, MLP phi, default hyperparameters, pages of 128 tokens in
//                                          shuffled order
// Medians in microseconds: of graph replays with the second-level cache flushed before each, of replays one after the
// other, and of calls one after the other. Beside them the time that the bytes of a step take at the rate of a copy,
// and what the bytes of dense attention would take.
#include <cuda_runtime.h>

#include <numeric>

#include "cuda_device.cuh"
#include "nsa/decode.h"

namespace {

using namespace nsa;
using namespace nsa::bench;

constexpr std::int64_t kHeads = 64, kKvHeads = 4, kDim = 128, kPage = 128;
constexpr int kSteps = 128;  // of each kind; lengths grow with every step

double median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Events {
  Events() {
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
  }
  Events(const Events&) = delete;
  ~Events() {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  /// Microseconds of run().
  template <class Run>
  float time(cudaStream_t stream, const Run& run) const {
    check(cudaEventRecord(begin, stream), "event");
    run();
    check(cudaEventRecord(end, stream), "event");
    check(cudaEventSynchronize(end), "event");
    float ms;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    return ms * 1000;
  }
  cudaEvent_t begin, end;
};

/// Bytes per microsecond, read and written.
double copy_rate(cudaStream_t stream) {
  const std::size_t bytes = std::size_t{1} << 30;
  Tensors device;
  char *from = static_cast<char*>(device.take(bytes)), *to = static_cast<char*>(device.take(bytes));
  const Events events;
  std::vector<float> times;
  for (int i = 0; i < 9; ++i)
    times.push_back(events.time(
        stream, [&] { check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "copy"); }));
  return 2.0 * static_cast<double>(bytes) / median(times);
}

/// Pages of one kind for every sequence, in shuffled order.
TensorView page_table(Tensors& device, std::int64_t batch, std::int64_t pages) {
  const std::int64_t count = batch * pages;
  std::int64_t step = count * 5 / 8 + 1;
  while (std::gcd(step, count) != 1) ++step;
  std::vector<int> table;
  for (std::int64_t i = 0; i < count; ++i) table.push_back(static_cast<int>(i * step % count));
  return device.integers(table, {batch, pages});
}

/// A cache of `batch` sequences of `context` tokens, random, with room for what the program appends, and one step's
/// arguments.
DecodeParams make_step(Tensors& device, std::int64_t batch, std::int64_t context, std::int64_t m) {
  DecodeParams p;
  const NSAConfig& cfg = p.cfg;
  const std::int64_t room = context + 5 * kSteps * m, pages = (room + kPage - 1) / kPage,
                     pages_c = (cfg.num_compressed(room) + kPage - 1) / kPage;
  KVCacheView& c = p.cache;
  for (TensorView* t : {&c.k_slc, &c.v_slc}) *t = device.random({batch * pages, kPage, kKvHeads, kDim});
  for (TensorView* t : {&c.k_c, &c.v_c}) *t = device.random({batch * pages_c, kPage, kKvHeads, kDim}, 0.3f);
  for (TensorView* t : {&c.k_swa_ring, &c.v_swa_ring})
    *t = device.random({batch, cfg.window_size + kRollback, kKvHeads, kDim});
  for (TensorView* t : {&c.k_cmp_ring, &c.v_cmp_ring})
    *t = device.random({batch, cfg.kernel_size + kRollback, kKvHeads, kDim});
  c.block_table = page_table(device, batch, pages);
  c.block_table_c = page_table(device, batch, pages_c);
  std::vector<int> lengths;  // sequences complete their blocks at different steps
  for (std::int64_t b = 0; b < batch; ++b) lengths.push_back(static_cast<int>(context - b * 5 % 16));
  c.cache_seqlens = device.integers(lengths, {batch});
  c.overflow = device.integers({0}, {1});
  p.q = device.random({batch, m, kHeads, kDim});
  for (TensorView* t : {&p.k_cmp, &p.v_cmp, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa})
    *t = device.random({batch, m, kKvHeads, kDim});
  p.gates = device.random({batch, m, kHeads, 3}, 0.1f, 0.5f);
  for (CompressionWeights* w : {&p.weights_k, &p.weights_v})
    *w = {.kind = CompressionKind::kMlp,
          .pe = device.random({kKvHeads, cfg.kernel_size, kDim}, 0.02f),
          .w1 = device.random({kKvHeads, cfg.kernel_size * kDim, 2 * kDim}, 0.016f),
          .w2 = device.random({kKvHeads, 2 * kDim, kDim}, 0.06f)};
  p.o = device.tensor(DType::kBFloat16, {batch, m, kHeads, kDim});
  return p;
}

void run(std::int64_t batch, std::int64_t context_tokens, std::int64_t m, double rate, cudaStream_t stream) {
  Tensors device;
  const DecodeParams p = make_step(device, batch, context_tokens, m);
  Context context;
  context.stream = stream;
  check(workspace_size(p, context.workspace_size), "workspace_size");
  context.workspace = device.take(context.workspace_size);
  constexpr std::size_t kFlush = 256 << 20;
  void* flush = device.take(kFlush);
  check(cudaDeviceSynchronize(), "fill");

  const auto call = [&] { check(decode(p, context), "decode"); };
  call();
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  call();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&replay, graph, 0), "graph");
  const auto launch = [&] { check(cudaGraphLaunch(replay, stream), "replay"); };
  const Events events;
  std::vector<float> flushed, replayed, called;
  for (int i = 0; i < kSteps; ++i) {
    check(cudaMemsetAsync(flush, i, kFlush, stream), "flush");
    flushed.push_back(events.time(stream, launch));
  }
  const auto eight = [&](const auto& step) {
    return events.time(stream, [&] {
      for (int i = 0; i < 8; ++i) step();
    }) / 8;
  };
  for (int i = 0; i < kSteps / 8; ++i) replayed.push_back(eight(launch)), called.push_back(eight(call));
  int overflow = 0;
  check(cudaMemcpy(&overflow, p.cache.overflow.data, sizeof(int), cudaMemcpyDeviceToHost), "cudaMemcpy");
  if (overflow) std::printf("  a step had no room: these times are of nothing\n");
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);

  const auto token = static_cast<double>(kKvHeads * kDim * 2 * 2);  // bytes of a key and a value of all heads
  const auto tokens =
      static_cast<double>(p.cfg.num_compressed(context_tokens) + p.cfg.topk * p.cfg.block_size + p.cfg.window_size);
  const double sparse = static_cast<double>(batch) * tokens * token,
               dense = static_cast<double>(batch * context_tokens) * token;
  std::printf("  B = %-4lld %10.1f %10.1f %10.1f   %8.1f MB %8.1f %10.1f   workspace %.1f MiB\n",
              static_cast<long long>(batch), median(flushed), median(replayed), median(called), sparse / 1e6,
              sparse / rate, dense / rate, static_cast<double>(context.workspace_size) / (1 << 20));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t context = argc > 1 ? std::atoll(argv[1]) : 65536, m = argc > 2 ? std::atoll(argv[2]) : 1;
  std::vector<std::int64_t> batches;
  for (int i = 3; i < argc; ++i) batches.push_back(std::atoll(argv[i]));
  if (batches.empty()) batches = {32, 8, 1};
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "device");
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const double rate = copy_rate(stream);
  std::printf("%s, copies %.2f TB/s; a step of %lld tokens at %lld tokens of context, us\n", properties.name,
              rate / 1e6, static_cast<long long>(m), static_cast<long long>(context));
  std::printf("  %-8s %10s %10s %10s   %11s %8s %10s\n", "", "flushed", "replays", "calls", "", "floor", "dense floor");
  for (const std::int64_t batch : batches) run(batch, context, m, rate, stream);
  cudaStreamDestroy(stream);
  return 0;
}
