// Times decode steps on one GPU, through the public API.
//
//   cuda_decode [--context 65536] [--batch 32,8,1] [--new 1] [--selection own|random|clustered|model-like]
//               [--ragged] [--layers 0] [--cache bfloat16] [--heads 64] [--kv-heads 4] [--key-dim 128]
//               [--engine] [--kernels] [--json FILE]
//
//   --new        new tokens of a step
//   --ragged     lengths between 1024 and twice the context, evenly on a logarithmic scale
//   --layers     also a graph of so many steps, each with a cache of its own; the time of one
//   The other options and the problem: cuda_kv_cache.cuh.
//
// Every time is of a replay of a graph, in microseconds, of 48 steps: lengths grow from step to step, so that one
// sequence completes a compression block in three of them. Before a step 192 MB are read, so that its KV cache is
// not in L2; "warm" is without, "completing" the median of steps that complete a block. The output also has
// the bytes that a step must read (of the blocks of all its queries together; φ's weights where a block is completed),
// and how long these take at the rate of a copy.
#include <cmath>
#include <fstream>
#include <numeric>
#include <set>
#include <string>

#include "cuda_kv_cache.cuh"

namespace {

using namespace nsa;
using namespace nsa::bench;

constexpr int kSteps = 48;

struct Options : CommonOptions {
  std::vector<std::int64_t> added{1};
  std::string json;
  int layers = 0;
  bool ragged = false;
};

Options options_of(int argc, char** argv) {
  Options o;
  read_options(argc, argv, o, {{"--ragged", &o.ragged}}, [&o](const std::string& name, const std::string& value) {
    if (name == "--new") {
      o.added = numbers(name, value);
    } else if (name == "--layers") {
      o.layers = static_cast<int>(numbers(name, value)[0]);
    } else if (name == "--json") {
      o.json = value;
    } else {
      return false;
    }
    return true;
  });
  for (const std::int64_t m : o.added)
    if (m > kMaxDecodeTokens) refuse("--new " + std::to_string(m) + ": at most 16");
  return o;
}

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

/// Selected tokens that the queries of a step read together, over all sequences, of one KV head.
double selected_tokens(const DecodeParams& p, std::int64_t batch, std::int64_t kv_heads) {
  const TensorView& indices = p.block_indices.defined() ? p.block_indices : p.indices;
  const std::vector<int> all = to_host(indices);
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
  const DecodeParams p = make_params(device, lengths, m, appended, stored, options);
  Context context;
  context.stream = stream;
  check(workspace_size(p, context.workspace_size), "workspace_size");
  context.workspace = device.take(context.workspace_size);
  const Flush flush(device);
  check(cudaDeviceSynchronize(), "fill");

  check(decode(p, context), "decode");
  const Graph step(stream, [&] { check(decode(p, context), "decode"); });
  const Events events;
  std::vector<float> cold, warm, completing;
  for (int i = 0; i < kSteps; ++i) {
    flush.read(stream);
    cold.push_back(events.time(stream, [&] { step.launch(stream); }));
    if (std::any_of(lengths.begin(), lengths.end(), [&](int length) {
          return p.cfg.num_compressed(length + (i + 2) * m) > p.cfg.num_compressed(length + (i + 1) * m);
        }))
      completing.push_back(cold.back());
  }
  for (int i = 0; i < kSteps; ++i) warm.push_back(events.time(stream, [&] { step.launch(stream); }));
  if (to_host(p.cache.overflow)[0]) std::printf("  a step exceeded the capacity: these times are of nothing\n");

  double of_layer = 0;
  if (options.layers) {
    Tensors memory;
    std::vector<DecodeParams> layers;
    for (int i = 0; i < options.layers; ++i)
      layers.push_back(make_params(memory, lengths, m, appended, stored, options));
    const Graph chain(stream, [&] {
      for (const DecodeParams& layer : layers) check(decode(layer, context), "decode");
    });
    std::vector<float> times;
    for (int i = 0; i < kSteps; ++i) times.push_back(events.time(stream, [&] { chain.launch(stream); }));
    of_layer = median(times) / options.layers;
  }

  // A key and a value of all heads.
  const auto token = static_cast<double>(options.kv_heads * (options.key_dim + kDim) * size_of(stored));
  double known = 0, dense = 0, completes = 1;
  for (const int length : lengths) {
    known += static_cast<double>(p.cfg.num_compressed(length)) + std::min<double>(p.cfg.window_size + m - 1, length);
    dense += length;
    completes *= 1 - std::min(1.0, static_cast<double>(m) / p.cfg.kernel_stride);
  }
  double phi = 0;
  for (const CompressionWeights* w : {&p.weights_k, &p.weights_v})
    phi += 2.0 * static_cast<double>(w->w1.numel() + w->w2.numel()) * (1 - completes);
  const double bytes = (known + selected_tokens(p, batch, options.kv_heads)) * token + phi;
  const double mean = std::accumulate(cold.begin(), cold.end(), 0.0) / kSteps;
  const double worst = *std::max_element(cold.begin(), cold.end());
  const double completed = completing.empty() ? 0 : median(completing);
  const char* const cache = name_of_cache(stored);
  std::printf("  %5lld %4lld %9s %9.1f %8.1f %8.1f %8.1f %8.1f", static_cast<long long>(batch),
              static_cast<long long>(m), cache, median(cold), mean, worst, completed, median(warm));
  if (options.layers) std::printf(" %8.1f", of_layer);
  std::printf("   %8.1f %8.1f %10.1f %9zu %9.1f\n", bytes / 1e6, bytes / rate, dense * token / rate, step.size(),
              static_cast<double>(context.workspace_size) / (1 << 20));
  if (options.kernels) step.print_kernels();
  std::fflush(stdout);
  char text[512];
  std::snprintf(
      text, sizeof text,
      R"({"batch": %lld, "new": %lld, "cache": "%s", "median": %.1f, "mean": %.1f, "worst": %.1f, "completing": %.1f, )"
      R"("warm": %.1f, "layer": %.1f, "megabytes": %.1f, "floor": %.1f, "dense_floor": %.1f, "launches": %zu, )"
      R"("workspace_mib": %.1f})",
      static_cast<long long>(batch), static_cast<long long>(m), cache, median(cold), mean, worst, completed,
      median(warm), of_layer, bytes / 1e6, bytes / rate, dense * token / rate, step.size(),
      static_cast<double>(context.workspace_size) / (1 << 20));
  json += (json.empty() ? "\n  " : ",\n  ") + std::string(text);
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = options_of(argc, argv);
  const TimedDevice device;
  const double rate = copy_rate(device.stream);
  std::printf("%s, copies %.2f TB/s; a step at %lld tokens of context%s, %s selection, us\n", device.name(), rate / 1e6,
              static_cast<long long>(options.context), options.ragged ? ", ragged" : "", options.selection.c_str());
  std::printf("  %5s %4s %9s %9s %8s %8s %8s %8s", "batch", "new", "cache", "median", "mean", "worst", "completing",
              "warm");
  if (options.layers) std::printf(" %8s", "layer");
  std::printf("   %8s %8s %10s %9s %9s\n", "MB", "floor", "dense", "launches", "MiB");
  std::string json;
  for (const std::int64_t batch : options.batches)
    for (const std::int64_t m : options.added)
      for (const DType stored : options.caches) run(batch, m, stored, options, rate, device.stream, json);
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    const std::string dims = options.key_dim == kDim ? "" : std::to_string(options.key_dim) + "/";
    file << R"({"problem": "H=)" << options.heads << " Hkv=" << options.kv_heads << " D=" << dims << kDim
         << R"( bfloat16, MLP phi, defaults, pages of 128", "unit": "us", "context": )" << options.context
         << R"(, "ragged": )" << (options.ragged ? "true" : "false") << R"(, "selection": ")" << options.selection
         << R"(", "layers": )" << options.layers << R"(, "bytes_per_us": )" << rate << R"(, "steps": [)" << json
         << "\n ]}\n";
    if (!file.flush()) refuse("--json " + options.json + ": cannot be written");
  }
  return 0;
}
