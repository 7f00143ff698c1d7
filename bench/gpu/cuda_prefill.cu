// Times prefill of a chunk behind a cache on one GPU, through the public API.
//
//   cuda_prefill [--chunk 8192] [--context 65536] [--batch 32,8,1] [--selection own|random|clustered|model-like]
//                [--cache bfloat16] [--heads 64] [--kv-heads 4] [--engine] [--mixed] [--kernels]
//
//   --chunk      the last so many tokens of the context are new
//   --mixed      with --engine: the last sequence has the whole chunk, the others one token each
//   The other options and the problem: cuda_kv_cache.cuh.
//
// Alternates with nsa_attention for the same queries on contiguous tensors of what the cache holds, in bfloat16:
// medians of 15 replays of a graph, in microseconds, 192 MB read before each, so that nothing is in
// L2; the stages of plain calls, if there is one sequence; and how far the results are apart. With --engine the
// packed call alone: medians of 9 replays, one after another.
#include <bit>
#include <cmath>
#include <functional>
#include <string>
#include <tuple>
#include <utility>

#include "cuda_kv_cache.cuh"

namespace {

using namespace nsa;
using namespace nsa::bench;

struct Options : CommonOptions {
  std::int64_t chunk = 8192;
};

Options options_of(int argc, char** argv) {
  Options o;
  read_options(argc, argv, o, {{"--mixed", &o.mixed}}, [&o](const std::string& name, const std::string& value) {
    if (name != "--chunk") return false;
    o.chunk = numbers(name, value)[0];
    return true;
  });
  if (o.mixed && !o.engine) refuse("--mixed: with --engine");
  if (o.chunk >= o.context) refuse("--chunk " + std::to_string(o.chunk) + ": less than --context");
  return o;
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

/// As if nothing had been appended.
void take_back(const DecodeParams& p, const std::vector<int>& lengths, cudaStream_t stream) {
  check(cudaMemcpyAsync(p.cache.cache_seqlens.data, lengths.data(), lengths.size() * sizeof(int),
                        cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
}

void run_chunk(std::int64_t batch, DType stored, const Options& options, cudaStream_t stream) {
  constexpr int kRepeats = 15, kStaged = 5;
  const std::int64_t m = options.chunk, all = options.context;
  const std::vector<int> lengths(static_cast<std::size_t>(batch), static_cast<int>(all - m));
  Tensors device;
  const DecodeParams p = make_params(device, lengths, m, m, stored, options);
  if (stored == DType::kFloat8E4M3)  // what the chunk adds to the window: numbers that e4m3 has
    for (const TensorView* t : {&p.k_swa, &p.v_swa})
      copy_rows(device.random({1, batch * m, options.kv_heads, t->size(-1)}, 1, 0, stored), 0, 0, batch * m, *t, 0, 0);
  NsaAttentionParams a;
  a.q = p.q, a.gates = p.gates, a.cfg = p.cfg, a.block_indices = p.block_indices;
  const auto whole = [&](std::int64_t tokens, TensorView& k, TensorView& v) {
    k = device.tensor(DType::kBFloat16, {batch, tokens, options.kv_heads, options.key_dim});
    v = device.tensor(DType::kBFloat16, {batch, tokens, options.kv_heads, kDim});
  };
  whole(all, a.k_slc, a.v_slc), whole(all, a.k_swa, a.v_swa), whole(p.cfg.num_compressed(all), a.k_c, a.v_c);
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
  const Flush flush(device);
  check(cudaDeviceSynchronize(), "fill");
  const auto begin = [&] {
    take_back(p, lengths, stream);
    flush.read(stream);
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
  if (to_host(p.cache.overflow)[0]) std::printf("  a chunk exceeded the capacity: these times are of nothing\n");
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
  const DecodeParams p = make_params(device, lengths, m, m, stored, options);
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
    take_back(p, lengths, stream);
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
  const TimedDevice device;
  std::printf("%s; prefill of the last tokens of %lld, us\n", device.name(), static_cast<long long>(options.context));
  std::printf("  %5s %7s %9s %10s %13s %7s %9s %9s %9s %8s\n", "batch", "chunk", "cache", "prefill", "nsa_attention",
              "ratio", "launches", "MiB", "apart", "same");
  for (const std::int64_t batch : options.batches)
    for (const DType stored : options.caches)
      (options.engine ? run_packed_chunk : run_chunk)(batch, stored, options, device.stream);
  return 0;
}
