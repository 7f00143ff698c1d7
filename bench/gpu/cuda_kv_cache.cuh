// What the programs that time calls with a KV cache share: their common options, the cache and the arguments of a call,
// replays of graphs.
//
//   --context    tokens of context          --batch      sequences          --heads, --kv-heads
//   --capacity   tokens of each sequence of the cache, if that is more than it gets
//   --key-dim    of queries and keys (128); values have 128
//   --cache      bfloat16, fp8 (e4m3 with scales), or both with a comma: a row for each
//   --selection  own: the call selects its blocks. random, clustered, model-like: given blocks (src/bench/selection.h)
//   --engine     packed new tokens, compressed tokens in the pages of their tokens, window and raw tokens in pages
//   --kernels    the kernels of a call: registers, shared memory, clusters that fit
//
// bfloat16 (the cache: --cache), MLP φ, default hyperparameters, pages of 128 tokens in shuffled order.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cerrno>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "bench/selection.h"
#include "cuda_device.cuh"
#include "nsa/decode.h"

namespace nsa::bench {

constexpr std::int64_t kDim = 128, kPage = 128;  // of values

/// Options that the programs have in common.
struct CommonOptions {
  std::int64_t context = 65536, heads = 64, kv_heads = 4, key_dim = kDim;
  std::int64_t capacity = 0;  // tokens of a sequence, where that is more than it gets
  std::vector<std::int64_t> batches{32, 8, 1};
  std::vector<DType> caches{DType::kBFloat16};
  std::string selection = "own";
  bool engine = false, kernels = false;
  bool mixed = false;  // with engine: the last sequence has all new tokens of a call, the others one each
};

inline bool is_pattern(const std::string& name) {
  return name == "own" || name == "random" || name == "clustered" || name == "model-like";
}

[[noreturn]] inline void refuse(const std::string& why) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, why.c_str());
  std::exit(2);
}
inline std::vector<std::int64_t> numbers(const std::string& name, const std::string& text) {
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
/// Reads the common options, `flags`, and others by `take`, which says whether it knows them.
inline void read_options(int argc, char** argv, CommonOptions& options, std::map<std::string, bool*> flags,
                         const std::function<bool(const std::string& name, const std::string& value)>& take) {
  flags.insert({{"--engine", &options.engine}, {"--kernels", &options.kernels}});
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (const auto flag = flags.find(name); flag != flags.end()) {
      *flag->second = true;
      continue;
    }
    if (i + 1 == argc) refuse(name + ": unknown, or without a value");
    const std::string value = argv[++i];
    if (name == "--context") {
      options.context = numbers(name, value)[0];
    } else if (name == "--capacity") {
      options.capacity = numbers(name, value)[0];
    } else if (name == "--heads") {
      options.heads = numbers(name, value)[0];
    } else if (name == "--kv-heads") {
      options.kv_heads = numbers(name, value)[0];
    } else if (name == "--key-dim") {
      options.key_dim = numbers(name, value)[0];
    } else if (name == "--batch") {
      options.batches = numbers(name, value);
    } else if (name == "--cache" && (value == "bfloat16" || value == "fp8" || value == "bfloat16,fp8")) {
      options.caches.clear();
      if (value != "fp8") options.caches.push_back(DType::kBFloat16);
      if (value != "bfloat16") options.caches.push_back(DType::kFloat8E4M3);
    } else if (name == "--selection" && is_pattern(value)) {
      options.selection = value;
    } else if (!take(name, value)) {
      refuse(name + " " + value + ": not an option");
    }
  }
  if (options.heads % options.kv_heads)
    refuse("--kv-heads " + std::to_string(options.kv_heads) + ": no divisor of --heads");
}

inline const char* name_of_cache(DType stored) { return stored == DType::kFloat8E4M3 ? "fp8" : "bfloat16"; }

inline double median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// The device's name, and the stream that everything timed runs on.
struct TimedDevice {
  TimedDevice() {
    check(cudaGetDeviceProperties(&properties, 0), "device");
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  }
  TimedDevice(const TimedDevice&) = delete;
  ~TimedDevice() { cudaStreamDestroy(stream); }
  const char* name() const { return properties.name; }
  cudaDeviceProp properties;
  cudaStream_t stream;
};

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

static __global__ void read_all(const uint4* p, std::size_t count, unsigned* out) {
  unsigned x = 0;
  for (std::size_t i = blockIdx.x * 256ull + threadIdx.x; i < count; i += gridDim.x * 256ull) {
    const uint4 y = p[i];
    x ^= y.x ^ y.y ^ y.z ^ y.w;
  }
  if (x == 0x5eed) *out = x;
}

/// Memory that is read before a call, so that the call's is not in L2 (writing it would leave 60 MB
/// to be written back during the call).
class Flush {
 public:
  explicit Flush(Tensors& device)
      : memory_(static_cast<uint4*>(device.take(kBytes))),
        ignored_(static_cast<unsigned*>(device.take(sizeof(unsigned)))) {}
  void read(cudaStream_t stream) const {
    read_all<<<1024, 256, 0, stream>>>(memory_, kBytes / sizeof(uint4), ignored_);
  }

 private:
  static constexpr std::size_t kBytes = 192 << 20;
  uint4* memory_;
  unsigned* ignored_;
};

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

inline std::vector<int> to_host(const TensorView& integers) {
  std::vector<int> all(static_cast<std::size_t>(integers.numel()));
  check(cudaMemcpy(all.data(), integers.data, all.size() * sizeof(int), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return all;
}

/// Pages of one kind for every sequence, in shuffled order.
inline TensorView page_table(Tensors& device, std::int64_t batch, std::int64_t pages) {
  const std::int64_t count = batch * pages;
  std::int64_t step = count * 5 / 8 + 1;
  while (std::gcd(step, count) != 1) ++step;
  std::vector<int> table;
  for (std::int64_t i = 0; i < count; ++i) table.push_back(static_cast<int>(i * step % count));
  return device.integers(table, {batch, pages});
}

/// (batch, m, kv_heads, topk): blocks of the new tokens behind `context` others.
inline std::vector<int> given_blocks(Selection selection, const NSAConfig& cfg, std::int64_t batch, std::int64_t m,
                                     std::int64_t kv_heads, std::int64_t context) {
  const auto heads_last = chosen_blocks(selection, cfg, context + m, batch * kv_heads, kModelOverlap, context);
  std::vector<int> all;
  all.reserve(heads_last.size());
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t r = 0; r < m; ++r) {
      const auto row = heads_last.begin() + (r * batch + b) * kv_heads * cfg.topk;
      all.insert(all.end(), row, row + kv_heads * cfg.topk);
    }
  return all;
}

/// Random ones.
inline void keys_and_values(Tensors& device, TensorView& k, TensorView& v, const std::array<std::int64_t, 3>& shape,
                            std::int64_t key_dim, float deviation = 1, DType dtype = DType::kBFloat16) {
  const auto [first, second, kv_heads] = shape;
  k = device.random({first, second, kv_heads, key_dim}, deviation, 0, dtype);
  v = device.random({first, second, kv_heads, kDim}, deviation, 0, dtype);
}

/// What an engine would have: packed new tokens, compressed ones in the pages of their tokens, all else in pages, too.
inline void to_memory_of_an_engine(Tensors& device, DecodeParams& p, std::int64_t batch, std::int64_t m,
                                   std::int64_t pages, DType stored, const CommonOptions& options) {
  KVCacheView& c = p.cache;
  const std::int64_t kv_heads = options.kv_heads;
  std::vector<int> starts{0};
  for (std::int64_t b = 0; b < batch; ++b)
    starts.push_back(starts.back() + static_cast<int>(options.mixed && b + 1 < batch ? 1 : m));
  c.block_table_c = {};
  const std::int64_t all = batch * pages, key_dim = options.key_dim;
  keys_and_values(device, c.k_c, c.v_c, {all, kPage / p.cfg.kernel_stride, kv_heads}, key_dim, 0.3f, stored);
  keys_and_values(device, c.k_swa_ring, c.v_swa_ring, {all, kPage, kv_heads}, key_dim, 1, stored);
  keys_and_values(device, c.k_cmp_ring, c.v_cmp_ring, {all, kPage, kv_heads}, key_dim);
  c.block_table_swa = page_table(device, batch, pages), c.block_table_cmp = page_table(device, batch, pages);
  for (TensorView* t :
       {&p.q, &p.k_cmp, &p.v_cmp, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa, &p.gates, &p.o, &p.indices, &p.block_indices})
    if (t->defined())
      *t = TensorView::contiguous(t->data, t->dtype, {starts.back(), t->size(2), t->size(3)}, t->device);
  p.query_start_loc = device.integers(starts, {batch + 1}), p.max_query_len = m;
}

/// A cache of sequences of these lengths, random, with capacity for `appended` tokens or more, and one call's
/// arguments.
inline DecodeParams make_params(Tensors& device, const std::vector<int>& lengths, std::int64_t m, std::int64_t appended,
                                DType stored, const CommonOptions& options) {
  DecodeParams p;
  const NSAConfig& cfg = p.cfg;
  const auto batch = static_cast<std::int64_t>(lengths.size());
  const std::int64_t capacity =
                         std::max(*std::max_element(lengths.begin(), lengths.end()) + appended, options.capacity),
                     pages = (capacity + kPage - 1) / kPage,
                     pages_c = (cfg.num_compressed(capacity) + kPage - 1) / kPage;
  KVCacheView& c = p.cache;
  const std::int64_t kv_heads = options.kv_heads, key_dim = options.key_dim;
  keys_and_values(device, c.k_slc, c.v_slc, {batch * pages, kPage, kv_heads}, key_dim, 1, stored);
  keys_and_values(device, c.k_c, c.v_c, {batch * pages_c, kPage, kv_heads}, key_dim, 0.3f, stored);
  keys_and_values(device, c.k_swa_ring, c.v_swa_ring, {batch, cfg.window_size + kRollback, kv_heads}, key_dim, 1,
                  stored);
  if (stored == DType::kFloat8E4M3)
    for (TensorView* t : {&c.k_scale, &c.v_scale}) *t = device.floats({1, 1, 1, 1}, {options.kv_heads});
  keys_and_values(device, c.k_cmp_ring, c.v_cmp_ring, {batch, cfg.kernel_size + kRollback, kv_heads}, key_dim);
  c.block_table = page_table(device, batch, pages);
  c.block_table_c = page_table(device, batch, pages_c);
  c.cache_seqlens = device.integers(lengths, {batch});
  c.overflow = device.integers({0}, {1});
  p.q = device.random({batch, m, options.heads, key_dim});
  for (const auto& [k, v] : {std::pair{&p.k_cmp, &p.v_cmp}, {&p.k_slc, &p.v_slc}, {&p.k_swa, &p.v_swa}})
    keys_and_values(device, *k, *v, {batch, m, kv_heads}, key_dim);
  p.gates = device.random({batch, m, options.heads, 3}, 0.1f, 0.5f);
  for (const auto& [w, dim] : {std::pair{&p.weights_k, key_dim}, {&p.weights_v, kDim}})
    *w = {CompressionKind::kMlp,
          device.random({kv_heads, cfg.kernel_size, dim}, 0.02f),
          device.random({kv_heads, cfg.kernel_size * dim, 2 * dim}, 0.016f),
          {},
          device.random({kv_heads, 2 * dim, dim}, 0.06f),
          {}};
  p.o = device.tensor(DType::kBFloat16, {batch, m, options.heads, kDim});
  if (options.selection == "own") {
    p.indices = device.tensor(DType::kInt32, {batch, m, options.kv_heads, cfg.topk});
  } else {
    const int shortest = *std::min_element(lengths.begin(), lengths.end());
    p.block_indices =
        device.integers(given_blocks(parse_selection(options.selection), cfg, batch, m, options.kv_heads, shortest),
                        {batch, m, options.kv_heads, cfg.topk});
  }
  if (options.engine) to_memory_of_an_engine(device, p, batch, m, pages, stored, options);
  return p;
}

}  // namespace nsa::bench
