// Times decode steps on one GPU, through the public API.
//
//   cuda_decode [--context 65536] [--batch 32,8,1] [--new 1] [--selection own|random|clustered] [--ragged] [--layers 0]
//               [--cache bfloat16] [--heads 64] [--kv-heads 4] [--engine] [--kernels] [--json FILE]
//   cuda_decode --chunk 8192 [--context 65536] [--batch 1] [--cache bfloat16] [--engine] [--mixed]
//
//   --new        new tokens of a step       --selection  own: the step chooses its blocks. random, clustered: they are
//   --batch      sequences                               imposed, of neighbouring queries four fifths alike or none
//   --ragged     lengths between 1024 and twice the context, evenly on a logarithmic scale
//   --layers     also a graph of so many steps, each with a cache of its own; the time of one
//   --cache      bfloat16, fp8 (e4m3 with scales), or both with a comma: a row for each
//   --engine     packed new tokens, compressed tokens in the pages of their tokens, window and raw tokens in pages
//   --kernels    the kernels of a step: registers, shared memory, clusters that fit
//   --chunk      instead of steps: prefill of the last so many tokens of the context, and nsa_attention for the same
//                queries on contiguous tensors of what the cache holds, in bfloat16, in turn; medians of replays, the
//                stages of plain calls, and how far the results are apart. With --engine the packed call alone
//   --mixed      with them: the last sequence has the whole chunk, the others one token each
//
// D = 128, bfloat16 (the cache: --cache), MLP φ, default hyperparameters, pages of 128 tokens in
// shuffled order. Every time is of a replay of a graph, in microseconds, of 48 steps: lengths grow from step to step,
// so that one sequence completes a compression block in three of them. Before a step 192 MB are read, so that its cache
// is not in the second-level cache (writing them would leave 60 MB to be written back during the step); "warm" is
// without. Beside them the bytes that a step must read (of the blocks of all its queries together; φ's weights where a
// block is completed), and how long these take at the rate of a copy.
#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "cuda_device.cuh"
#include "nsa/decode.h"

namespace {

using namespace nsa;
using namespace nsa::bench;

constexpr std::int64_t kDim = 128, kPage = 128;
constexpr int kSteps = 48;
constexpr std::size_t kFlush = 192 << 20;

struct Options {
  std::int64_t context = 65536;
  std::vector<std::int64_t> batches{32, 8, 1}, added{1};
  std::vector<DType> caches{DType::kBFloat16};
  std::string selection = "own", json;
  int layers = 0;
  std::int64_t chunk = 0, heads = 64, kv_heads = 4;
  bool ragged = false, kernels = false, engine = false, mixed = false;
};

[[noreturn]] void refuse(const std::string& why) {
  std::fprintf(stderr, "cuda_decode: %s\n", why.c_str());
  std::exit(2);
}
std::vector<std::int64_t> numbers(const std::string& name, const std::string& text) {
  std::vector<std::int64_t> all;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    char* rest = nullptr;
    all.push_back(std::strtoll(text.substr(at, end - at).c_str(), &rest, 10));
    if (*rest || all.back() < 1) refuse(name + " " + text + ": numbers from 1 on, with commas");
    at = end + 1;
  }
  return all;
}
Options options_of(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--ragged") {
      o.ragged = true;
      continue;
    }
    if (name == "--engine") {
      o.engine = true;
      continue;
    }
    if (name == "--mixed") {
      o.mixed = true;
      continue;
    }
    if (name == "--kernels") {
      o.kernels = true;
      continue;
    }
    if (i + 1 == argc) refuse(name + ": unknown, or without a value");
    const std::string value = argv[++i];
    if (name == "--context") {
      o.context = numbers(name, value)[0];
    } else if (name == "--chunk") {
      o.chunk = numbers(name, value)[0];
    } else if (name == "--heads") {
      o.heads = numbers(name, value)[0];
    } else if (name == "--kv-heads") {
      o.kv_heads = numbers(name, value)[0];
    } else if (name == "--batch") {
      o.batches = numbers(name, value);
    } else if (name == "--new") {
      o.added = numbers(name, value);
    } else if (name == "--cache" && (value == "bfloat16" || value == "fp8" || value == "bfloat16,fp8")) {
      o.caches.clear();
      if (value != "fp8") o.caches.push_back(DType::kBFloat16);
      if (value != "bfloat16") o.caches.push_back(DType::kFloat8E4M3);
    } else if (name == "--layers") {
      o.layers = static_cast<int>(numbers(name, value)[0]);
    } else if (name == "--json") {
      o.json = value;
    } else if (name == "--selection" && (value == "own" || value == "random" || value == "clustered")) {
      o.selection = value;
    } else {
      refuse(name + " " + value + ": not an option");
    }
  }
  for (const std::int64_t m : o.added)
    if (m > kMaxDecodeTokens) refuse("--new " + std::to_string(m) + ": at most 16");
  if (o.heads % o.kv_heads) refuse("--kv-heads " + std::to_string(o.kv_heads) + ": no divisor of --heads");
  if (o.mixed && !(o.chunk && o.engine)) refuse("--mixed: with --chunk and --engine");
  if (o.chunk >= o.context) refuse("--chunk " + std::to_string(o.chunk) + ": less than --context");
  return o;
}

const char* name_of_cache(DType stored) { return stored == DType::kFloat8E4M3 ? "fp8" : "bfloat16"; }

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

__global__ void read_all(const uint4* p, std::size_t count, unsigned* out) {
  unsigned x = 0;
  for (std::size_t i = blockIdx.x * 256ull + threadIdx.x; i < count; i += gridDim.x * 256ull) {
    const uint4 y = p[i];
    x ^= y.x ^ y.y ^ y.z ^ y.w;
  }
  if (x == 0x5eed) *out = x;
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

unsigned random_number() {
  static unsigned x = 1;
  x = x * 1664525u + 1013904223u;
  return x >> 8;
}

/// Blocks for every query and KV head: the first one, the last two, and others; `kept` of five of the query before.
std::vector<int> made_up_blocks(std::int64_t batch, std::int64_t m, std::int64_t kv_heads, std::int64_t shortest,
                                const NSAConfig& cfg, unsigned kept) {
  std::vector<int> all;
  const int blocks = static_cast<int>(shortest / cfg.block_size);
  std::vector<std::set<int>> before(static_cast<std::size_t>(batch * kv_heads));
  std::vector<std::vector<int>> rows(static_cast<std::size_t>(batch * m * kv_heads));
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t r = 0; r < m; ++r)
      for (std::int64_t h = 0; h < kv_heads; ++h) {
        std::set<int>& last = before[static_cast<std::size_t>(b * kv_heads + h)];
        std::set<int> now{0, blocks - 1, blocks - 2};
        for (const int block : last)
          if (static_cast<int>(now.size()) < cfg.topk && random_number() % 5 < kept) now.insert(block);
        while (static_cast<int>(now.size()) < std::min(cfg.topk, blocks))
          now.insert(static_cast<int>(random_number() % static_cast<unsigned>(blocks)));
        last = now;
        std::vector<int>& row = rows[static_cast<std::size_t>((b * m + r) * kv_heads + h)];
        row.assign(now.begin(), now.end());
        row.resize(static_cast<std::size_t>(cfg.topk), -1);
      }
  for (const auto& row : rows) all.insert(all.end(), row.begin(), row.end());
  return all;
}

/// What an engine would have: packed new tokens, compressed ones in the pages of their tokens, all else in pages, too.
void to_memory_of_an_engine(Tensors& device, DecodeParams& p, std::int64_t batch, std::int64_t m, std::int64_t pages,
                            DType stored, const Options& options) {
  KVCacheView& c = p.cache;
  const std::int64_t kv_heads = options.kv_heads;
  std::vector<int> starts{0};
  for (std::int64_t b = 0; b < batch; ++b)
    starts.push_back(starts.back() + static_cast<int>(options.mixed && b + 1 < batch ? 1 : m));
  c.block_table_c = {};
  for (TensorView* t : {&c.k_c, &c.v_c})
    *t = device.random({batch * pages, kPage / p.cfg.kernel_stride, kv_heads, kDim}, 0.3f, 0, stored);
  for (TensorView* t : {&c.k_swa_ring, &c.v_swa_ring})
    *t = device.random({batch * pages, kPage, kv_heads, kDim}, 1, 0, stored);
  for (TensorView* t : {&c.k_cmp_ring, &c.v_cmp_ring}) *t = device.random({batch * pages, kPage, kv_heads, kDim});
  c.block_table_swa = page_table(device, batch, pages), c.block_table_cmp = page_table(device, batch, pages);
  for (TensorView* t : {&p.q, &p.k_cmp, &p.v_cmp, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa, &p.gates, &p.o, &p.indices,
                        &p.imposed_indices})
    if (t->defined())
      *t = TensorView::contiguous(t->data, t->dtype, {starts.back(), t->size(2), t->size(3)}, t->device);
  p.query_start_loc = device.integers(starts, {batch + 1}), p.max_query_len = m;
}

/// A cache of sequences of these lengths, random, with room for `appended` tokens, and one step's arguments.
DecodeParams make_step(Tensors& device, const std::vector<int>& lengths, std::int64_t m, std::int64_t appended,
                       DType stored, const Options& options) {
  DecodeParams p;
  const NSAConfig& cfg = p.cfg;
  const auto batch = static_cast<std::int64_t>(lengths.size());
  const std::int64_t room = *std::max_element(lengths.begin(), lengths.end()) + appended,
                     pages = (room + kPage - 1) / kPage, pages_c = (cfg.num_compressed(room) + kPage - 1) / kPage;
  KVCacheView& c = p.cache;
  for (TensorView* t : {&c.k_slc, &c.v_slc})
    *t = device.random({batch * pages, kPage, options.kv_heads, kDim}, 1, 0, stored);
  for (TensorView* t : {&c.k_c, &c.v_c})
    *t = device.random({batch * pages_c, kPage, options.kv_heads, kDim}, 0.3f, 0, stored);
  for (TensorView* t : {&c.k_swa_ring, &c.v_swa_ring})
    *t = device.random({batch, cfg.window_size + kRollback, options.kv_heads, kDim}, 1, 0, stored);
  if (stored == DType::kFloat8E4M3)
    for (TensorView* t : {&c.k_scale, &c.v_scale}) *t = device.floats({1, 1, 1, 1}, {options.kv_heads});
  for (TensorView* t : {&c.k_cmp_ring, &c.v_cmp_ring})
    *t = device.random({batch, cfg.kernel_size + kRollback, options.kv_heads, kDim});
  c.block_table = page_table(device, batch, pages);
  c.block_table_c = page_table(device, batch, pages_c);
  c.cache_seqlens = device.integers(lengths, {batch});
  c.overflow = device.integers({0}, {1});
  p.q = device.random({batch, m, options.heads, kDim});
  for (TensorView* t : {&p.k_cmp, &p.v_cmp, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa})
    *t = device.random({batch, m, options.kv_heads, kDim});
  p.gates = device.random({batch, m, options.heads, 3}, 0.1f, 0.5f);
  for (CompressionWeights* w : {&p.weights_k, &p.weights_v})
    *w = {CompressionKind::kMlp,
          device.random({options.kv_heads, cfg.kernel_size, kDim}, 0.02f),
          device.random({options.kv_heads, cfg.kernel_size * kDim, 2 * kDim}, 0.016f),
          {},
          device.random({options.kv_heads, 2 * kDim, kDim}, 0.06f),
          {}};
  p.o = device.tensor(DType::kBFloat16, {batch, m, options.heads, kDim});
  if (options.selection == "own") {
    p.indices = device.tensor(DType::kInt32, {batch, m, options.kv_heads, cfg.topk});
  } else {
    const int shortest = *std::min_element(lengths.begin(), lengths.end());
    p.imposed_indices = device.integers(
        made_up_blocks(batch, m, options.kv_heads, shortest, cfg, options.selection == "clustered" ? 4 : 0),
        {batch, m, options.kv_heads, cfg.topk});
  }
  if (options.engine) to_memory_of_an_engine(device, p, batch, m, pages, stored, options);
  return p;
}

/// Selected tokens that the queries of a step read together, over all sequences, of one KV head.
double selected_tokens(const DecodeParams& p, std::int64_t batch, std::int64_t kv_heads) {
  const TensorView& indices = p.imposed_indices.defined() ? p.imposed_indices : p.indices;
  std::vector<int> all(static_cast<std::size_t>(indices.numel()));
  check(cudaMemcpy(all.data(), indices.data, all.size() * sizeof(int), cudaMemcpyDeviceToHost), "cudaMemcpy");
  const std::int64_t topk = indices.size(-1), m = indices.numel() / (batch * kv_heads * topk);
  std::size_t blocks = 0;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < kv_heads; ++h) {
      std::set<int> any;
      for (std::int64_t r = 0; r < m; ++r)
        for (std::int64_t i = 0; i < topk; ++i)
          any.insert(all[static_cast<std::size_t>(((b * m + r) * kv_heads + h) * topk + i)]);
      any.erase(-1);
      blocks += any.size();
    }
  return static_cast<double>(blocks * static_cast<std::size_t>(p.cfg.block_size)) / kv_heads;
}

class Graph {
 public:
  template <class Body>
  Graph(cudaStream_t stream, const Body& body) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    body();
    check(cudaStreamEndCapture(stream, &graph_), "capture");
    check(cudaGraphInstantiate(&replay_, graph_, 0), "graph");
  }
  Graph(const Graph&) = delete;
  ~Graph() {
    cudaGraphExecDestroy(replay_);
    cudaGraphDestroy(graph_);
  }
  void launch(cudaStream_t stream) const { check(cudaGraphLaunch(replay_, stream), "replay"); }
  std::size_t size() const {
    std::size_t count = 0;
    check(cudaGraphGetNodes(graph_, nullptr, &count), "nodes");
    return count;
  }
  /// A line for each kernel.
  void print_kernels() const {
    std::size_t count = size();
    std::vector<cudaGraphNode_t> nodes(count);
    check(cudaGraphGetNodes(graph_, nodes.data(), &count), "nodes");
    for (const cudaGraphNode_t node : nodes) {
      cudaKernelNodeParams params{};
      if (cudaGraphKernelNodeGetParams(node, &params) != cudaSuccess) continue;
      cudaFuncAttributes about{};
      const char* name = "";
      check(cudaFuncGetAttributes(&about, params.func), "attributes");
      check(cudaFuncGetName(&name, params.func), "name");
      cudaLaunchAttributeValue cluster{};
      check(cudaGraphKernelNodeGetAttribute(node, cudaLaunchAttributeClusterDimension, &cluster), "cluster");
      std::printf("    %.60s: %u x %u x %u blocks of %u threads, %d registers, %zu + %u bytes of shared memory", name,
                  params.gridDim.x, params.gridDim.y, params.gridDim.z, params.blockDim.x, about.numRegs,
                  about.sharedSizeBytes, params.sharedMemBytes);
      if (cluster.clusterDim.x > 1) {
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val = cluster;
        cudaLaunchConfig_t config{};
        config.gridDim = params.gridDim, config.blockDim = params.blockDim;
        config.dynamicSmemBytes = params.sharedMemBytes, config.attrs = &attribute, config.numAttrs = 1;
        int fit = 0;
        check(cudaOccupancyMaxActiveClusters(&fit, params.func, &config), "clusters");
        std::printf(", %d clusters of %u fit", fit, cluster.clusterDim.x);
      }
      std::printf("\n");
    }
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

void run(std::int64_t batch, std::int64_t m, DType stored, const Options& options, double rate, cudaStream_t stream,
         std::string& json) {
  std::vector<int> lengths;  // sequences complete their blocks at different steps
  for (std::int64_t b = 0; b < batch; ++b) {
    const double share = batch > 1 ? static_cast<double>(b) / static_cast<double>(batch - 1) : 0.5;
    const double length = options.ragged ? 1024 * std::pow(2.0 * static_cast<double>(options.context) / 1024, share)
                                         : static_cast<double>(options.context);
    lengths.push_back(static_cast<int>(length) - static_cast<int>(b * 5 % 16));
  }
  Tensors device;
  const std::int64_t appended = (4 * kSteps + 8) * m;
  const DecodeParams p = make_step(device, lengths, m, appended, stored, options);
  Context context;
  context.stream = stream;
  check(workspace_size(p, context.workspace_size), "workspace_size");
  context.workspace = device.take(context.workspace_size);
  auto* const flush = static_cast<uint4*>(device.take(kFlush));
  auto* const ignored = static_cast<unsigned*>(device.take(sizeof(unsigned)));
  check(cudaDeviceSynchronize(), "fill");

  check(decode(p, context), "decode");
  const Graph step(stream, [&] { check(decode(p, context), "decode"); });
  const Events events;
  std::vector<float> cold, warm;
  for (int i = 0; i < kSteps; ++i) {
    read_all<<<1024, 256, 0, stream>>>(flush, kFlush / sizeof(uint4), ignored);
    cold.push_back(events.time(stream, [&] { step.launch(stream); }));
  }
  for (int i = 0; i < kSteps; ++i) warm.push_back(events.time(stream, [&] { step.launch(stream); }));
  int overflow = 0;
  check(cudaMemcpy(&overflow, p.cache.overflow.data, sizeof(int), cudaMemcpyDeviceToHost), "cudaMemcpy");
  if (overflow) std::printf("  a step had no room: these times are of nothing\n");

  double of_layer = 0;
  if (options.layers) {
    Tensors memory;
    std::vector<DecodeParams> layers;
    for (int i = 0; i < options.layers; ++i) layers.push_back(make_step(memory, lengths, m, appended, stored, options));
    const Graph chain(stream, [&] {
      for (const DecodeParams& layer : layers) check(decode(layer, context), "decode");
    });
    std::vector<float> times;
    for (int i = 0; i < kSteps; ++i) times.push_back(events.time(stream, [&] { chain.launch(stream); }));
    of_layer = median(times) / options.layers;
  }

  const auto token =
      static_cast<double>(options.kv_heads * kDim * 2 * size_of(stored));  // a key and a value of all heads
  double known = 0, dense = 0, completes = 1;
  for (const int length : lengths) {
    known += static_cast<double>(p.cfg.num_compressed(length)) + std::min<double>(p.cfg.window_size + m - 1, length);
    dense += length;
    completes *= 1 - std::min(1.0, static_cast<double>(m) / p.cfg.kernel_stride);
  }
  const double phi = 2.0 * static_cast<double>(p.weights_k.w1.numel() + p.weights_k.w2.numel()) * 2 * (1 - completes);
  const double bytes = (known + selected_tokens(p, batch, options.kv_heads)) * token + phi;
  const double mean = std::accumulate(cold.begin(), cold.end(), 0.0) / kSteps;
  const double worst = *std::max_element(cold.begin(), cold.end());
  const char* const cache = name_of_cache(stored);
  std::printf("  %5lld %4lld %9s %9.1f %8.1f %8.1f %8.1f", static_cast<long long>(batch), static_cast<long long>(m),
              cache, median(cold), mean, worst, median(warm));
  if (options.layers) std::printf(" %8.1f", of_layer);
  std::printf("   %8.1f %8.1f %10.1f %9zu %9.1f\n", bytes / 1e6, bytes / rate, dense * token / rate, step.size(),
              static_cast<double>(context.workspace_size) / (1 << 20));
  if (options.kernels) step.print_kernels();
  std::fflush(stdout);
  char text[512];
  std::snprintf(
      text, sizeof text,
      R"({"batch": %lld, "new": %lld, "cache": "%s", "median": %.1f, "mean": %.1f, "worst": %.1f, "warm": %.1f, )"
      R"("layer": %.1f, "megabytes": %.1f, "floor": %.1f, "dense_floor": %.1f, "launches": %zu, )"
      R"("workspace_mib": %.1f})",
      static_cast<long long>(batch), static_cast<long long>(m), cache, median(cold), mean, worst, median(warm),
      of_layer, bytes / 1e6, bytes / rate, dense * token / rate, step.size(),
      static_cast<double>(context.workspace_size) / (1 << 20));
  json += (json.empty() ? "\n  " : ",\n  ") + std::string(text);
}

/// Microseconds of the stages of a call, in order.
template <class Call>
std::vector<std::pair<std::string, float>> stages_of(cudaStream_t stream, Context context, const Call& call) {
  std::vector<std::pair<std::string, cudaEvent_t>> marks;
  const std::function<void(const char*)> mark = [&](const char* stage) {
    cudaEvent_t event;
    check(cudaEventCreate(&event), "event");
    check(cudaEventRecord(event, stream), "event");
    marks.emplace_back(stage, event);
  };
  context.on_stage = &mark;
  mark("");
  check(call(context), "call");
  mark("the rest");
  check(cudaStreamSynchronize(stream), "call");
  std::vector<std::pair<std::string, float>> stages;
  for (std::size_t i = 1; i < marks.size(); ++i) {
    float ms;
    check(cudaEventElapsedTime(&ms, marks[i - 1].second, marks[i].second), "event");
    stages.emplace_back(marks[i].first, ms * 1000);
  }
  for (const auto& [name, event] : marks) cudaEventDestroy(event);
  return stages;
}
void print_stages(const std::vector<std::vector<std::pair<std::string, float>>>& calls) {
  for (std::size_t i = 0; i < calls[0].size(); ++i) {
    std::vector<float> times;
    for (const auto& call : calls) times.push_back(call[i].second);
    std::printf("      %-32s %9.1f\n", calls[0][i].first.c_str(), median(times));
  }
}

std::vector<int> to_host(const TensorView& integers) {
  std::vector<int> all(static_cast<std::size_t>(integers.numel()));
  check(cudaMemcpy(all.data(), integers.data, all.size() * sizeof(int), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return all;
}

__global__ void widen(const __nv_fp8_e4m3* from, __nv_bfloat16* to, std::size_t count) {
  for (std::size_t i = blockIdx.x * 256ull + threadIdx.x; i < count; i += gridDim.x * 256ull)
    to[i] = __float2bfloat16(static_cast<float>(from[i]));
}

/// Rows [from, from + count) of one batch of a tensor to rows of another, whose rows are alike; e4m3 becomes bfloat16.
void copy_rows(const TensorView& t, std::int64_t batch, std::int64_t from, std::int64_t count, const TensorView& to,
               std::int64_t to_batch, std::int64_t to_row) {
  const auto at = [](const TensorView& x, std::int64_t b, std::int64_t row) {
    return x.as<char>() + (b * x.stride[0] + row * x.stride[1]) * static_cast<std::int64_t>(size_of(x.dtype));
  };
  const auto elements = static_cast<std::size_t>(count * t.stride[1]);
  char *const source = at(t, batch, from), *const target = at(to, to_batch, to_row);
  if (t.dtype == to.dtype) {
    check(cudaMemcpy(target, source, elements * size_of(t.dtype), cudaMemcpyDeviceToDevice), "cudaMemcpy");
  } else {
    widen<<<256, 256>>>(reinterpret_cast<const __nv_fp8_e4m3*>(source), reinterpret_cast<__nv_bfloat16*>(target),
                        elements);
  }
}
/// The tokens of all sequences side by side.
void copy_pages(const TensorView& pages, const TensorView& table, const TensorView& to) {
  const std::vector<int> numbers = to_host(table);
  for (std::int64_t b = 0; b < to.size(0); ++b)
    for (std::int64_t row = 0; row < to.size(1); row += kPage)
      copy_rows(pages, numbers[static_cast<std::size_t>(b * table.size(1) + row / kPage)], 0,
                std::min(kPage, to.size(1) - row), to, b, row);
}

/// Of the largest element, and the share of elements with the same bits.
std::pair<double, double> difference(const TensorView& a, const TensorView& b) {
  std::vector<std::uint16_t> x(static_cast<std::size_t>(a.numel())), y(x.size());
  check(cudaMemcpy(x.data(), a.data, x.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
  check(cudaMemcpy(y.data(), b.data, y.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
  const auto value = [](std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); };
  float most = 0, apart = 0;
  std::size_t same = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    most = std::max(most, std::abs(value(y[i]))), apart = std::max(apart, std::abs(value(x[i]) - value(y[i])));
    same += x[i] == y[i];
  }
  return {apart / most, static_cast<double>(same) / static_cast<double>(x.size())};
}

void run_chunk(std::int64_t batch, DType stored, const Options& options, cudaStream_t stream) {
  constexpr int kRepeats = 15, kStaged = 5;
  const std::int64_t m = options.chunk, all = options.context;
  const std::vector<int> lengths(static_cast<std::size_t>(batch), static_cast<int>(all - m));
  Tensors device;
  const DecodeParams p = make_step(device, lengths, m, m, stored, options);
  if (stored == DType::kFloat8E4M3)  // what the chunk adds to the window: numbers that e4m3 has
    for (const TensorView* t : {&p.k_swa, &p.v_swa})
      copy_rows(device.random({1, batch * m, options.kv_heads, kDim}, 1, 0, stored), 0, 0, batch * m, *t, 0, 0);
  NsaAttentionParams a;
  a.q = p.q, a.gates = p.gates, a.cfg = p.cfg, a.imposed_indices = p.imposed_indices;
  for (TensorView* t : {&a.k_slc, &a.v_slc, &a.k_swa, &a.v_swa})
    *t = device.tensor(DType::kBFloat16, {batch, all, options.kv_heads, kDim});
  for (TensorView* t : {&a.k_c, &a.v_c})
    *t = device.tensor(DType::kBFloat16, {batch, p.cfg.num_compressed(all), options.kv_heads, kDim});
  a.o = device.tensor(DType::kBFloat16, {batch, m, options.heads, kDim});
  Context of_chunk, of_attention;
  check(workspace_size(p, of_chunk.workspace_size), "workspace_size");
  check(workspace_size(a, of_attention.workspace_size), "workspace_size");
  const std::size_t memory = of_chunk.workspace_size;
  of_chunk.stream = of_attention.stream = stream;
  of_chunk.workspace = of_attention.workspace =
      device.take(std::max(of_chunk.workspace_size, of_attention.workspace_size));
  of_attention.workspace_size = of_chunk.workspace_size =
      std::max(of_chunk.workspace_size, of_attention.workspace_size);
  auto* const flush = static_cast<uint4*>(device.take(kFlush));
  auto* const ignored = static_cast<unsigned*>(device.take(sizeof(unsigned)));
  check(cudaDeviceSynchronize(), "fill");
  const auto begin = [&] {  // as if nothing had been appended
    check(cudaMemcpyAsync(p.cache.cache_seqlens.data, lengths.data(), lengths.size() * sizeof(int),
                          cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    read_all<<<1024, 256, 0, stream>>>(flush, kFlush / sizeof(uint4), ignored);
  };
  const auto chunk = [&](const Context& context) { return prefill(p, context); };
  const auto attention = [&](const Context& context) { return nsa_attention(a, context); };
  // What the cache holds and the chunk adds; of the window what its queries see, zeros before.
  for (const auto& [ring, fresh, to] :
       {std::tuple{p.cache.k_swa_ring, p.k_swa, a.k_swa}, std::tuple{p.cache.v_swa_ring, p.v_swa, a.v_swa}}) {
    check(cudaMemset(to.data, 0, static_cast<std::size_t>(to.numel()) * 2), "cudaMemset");
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t token = std::max<std::int64_t>(all - m - p.cfg.window_size + 1, 0); token < all - m; ++token)
        copy_rows(ring, b, token % ring.size(1), 1, to, b, token);
      copy_rows(fresh, b, 0, m, to, b, all - m);
    }
  }
  check(chunk(of_chunk), "prefill");
  check(cudaStreamSynchronize(stream), "prefill");
  copy_pages(p.cache.k_slc, p.cache.block_table, a.k_slc), copy_pages(p.cache.v_slc, p.cache.block_table, a.v_slc);
  copy_pages(p.cache.k_c, p.cache.block_table_c, a.k_c), copy_pages(p.cache.v_c, p.cache.block_table_c, a.v_c);
  check(cudaDeviceSynchronize(), "copies");
  check(attention(of_attention), "nsa_attention");
  check(cudaStreamSynchronize(stream), "nsa_attention");
  const auto [apart, same] = difference(p.o, a.o);
  const Graph chunk_graph(stream, [&] { check(chunk(of_chunk), "prefill"); });
  const Graph attention_graph(stream, [&] { check(attention(of_attention), "nsa_attention"); });
  const Events events;
  std::vector<float> chunk_times, attention_times;
  for (int i = 0; i < kRepeats; ++i) {
    begin();
    chunk_times.push_back(events.time(stream, [&] { chunk_graph.launch(stream); }));
    begin();
    attention_times.push_back(events.time(stream, [&] { attention_graph.launch(stream); }));
  }
  int overflow = 0;
  check(cudaMemcpy(&overflow, p.cache.overflow.data, sizeof(int), cudaMemcpyDeviceToHost), "cudaMemcpy");
  if (overflow) std::printf("  a chunk had no room: these times are of nothing\n");
  std::printf("  %5lld %7lld %9s %10.1f %13.1f %7.3f %9zu %9.1f %9.2g %8.3f\n", static_cast<long long>(batch),
              static_cast<long long>(m), name_of_cache(stored), median(chunk_times), median(attention_times),
              median(chunk_times) / median(attention_times), chunk_graph.size(),
              static_cast<double>(memory) / (1 << 20), apart, same);
  std::vector<std::vector<std::pair<std::string, float>>> chunk_stages, attention_stages;
  for (int i = 0; i < kStaged; ++i) {
    begin();
    chunk_stages.push_back(stages_of(stream, of_chunk, chunk));
    begin();
    attention_stages.push_back(stages_of(stream, of_attention, attention));
  }
  if (batch == 1) {
    std::printf("    prefill\n");
    print_stages(chunk_stages);
    std::printf("    nsa_attention\n");
    print_stages(attention_stages);
  }
  if (options.kernels) chunk_graph.print_kernels();
  std::fflush(stdout);
}

/// Packed new tokens in memory of an engine.
void run_packed_chunk(std::int64_t batch, DType stored, const Options& options, cudaStream_t stream) {
  const std::int64_t m = options.chunk;
  const std::vector<int> lengths(static_cast<std::size_t>(batch), static_cast<int>(options.context - m));
  Tensors device;
  const DecodeParams p = make_step(device, lengths, m, m, stored, options);
  Context context;
  check(workspace_size(p, context.workspace_size), "workspace_size");
  context.stream = stream;
  context.workspace = device.take(context.workspace_size);
  check(cudaDeviceSynchronize(), "fill");
  check(prefill(p, context), "prefill");
  const Graph graph(stream, [&] { check(prefill(p, context), "prefill"); });
  const Events events;
  std::vector<float> times;
  for (int i = 0; i < 9; ++i) {
    check(cudaMemcpyAsync(p.cache.cache_seqlens.data, lengths.data(), lengths.size() * sizeof(int),
                          cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    times.push_back(events.time(stream, [&] { graph.launch(stream); }));
  }
  std::printf("  %5lld %7lld %9s %10.1f %31zu %9.1f\n", static_cast<long long>(batch), static_cast<long long>(m),
              name_of_cache(stored), median(times), graph.size(),
              static_cast<double>(context.workspace_size) / (1 << 20));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = options_of(argc, argv);
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "device");
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  if (options.chunk > 0) {
    std::printf("%s; prefill of the last tokens of %lld, us\n", properties.name,
                static_cast<long long>(options.context));
    std::printf("  %5s %7s %9s %10s %13s %7s %9s %9s %9s %8s\n", "batch", "chunk", "cache", "prefill", "nsa_attention",
                "ratio", "launches", "MiB", "apart", "same");
    for (const std::int64_t batch : options.batches)
      for (const DType stored : options.caches)
        (options.engine ? run_packed_chunk : run_chunk)(batch, stored, options, stream);
    return 0;
  }
  const double rate = copy_rate(stream);
  std::printf("%s, copies %.2f TB/s; a step at %lld tokens of context%s, %s selection, us\n", properties.name,
              rate / 1e6, static_cast<long long>(options.context), options.ragged ? ", ragged" : "",
              options.selection.c_str());
  std::printf("  %5s %4s %9s %9s %8s %8s %8s", "batch", "new", "cache", "median", "mean", "worst", "warm");
  if (options.layers) std::printf(" %8s", "layer");
  std::printf("   %8s %8s %10s %9s %9s\n", "MB", "floor", "dense", "launches", "MiB");
  std::string json;
  for (const std::int64_t batch : options.batches)
    for (const std::int64_t m : options.added)
      for (const DType stored : options.caches) run(batch, m, stored, options, rate, stream, json);
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << R"({"problem": "H=64 Hkv=4 D=128 bfloat16, MLP phi, defaults, pages of 128", "unit": "us", "context": )"
         << options.context << R"(, "ragged": )" << (options.ragged ? "true" : "false") << R"(, "selection": ")"
         << options.selection << R"(", "layers": )" << options.layers << R"(, "bytes_per_us": )" << rate
         << R"(, "steps": [)" << json << "\n ]}\n";
    if (!file.flush()) refuse("--json " + options.json + ": cannot be written");
  }
  cudaStreamDestroy(stream);
  return 0;
}
