// Times every stage of NSA on one GPU, forward and backward, through the public API.
//   cuda_stages [--heads 64] [--kv-heads 4] [--key-dim 128] [--kernel-size 32] [--kernel-stride 16] [--block-size 64]
//               [--forward] [--idle] [--only TEXT] [length ...]
// B = 1, values of 128, bfloat16, MLP phi and the mean, otherwise default hyperparameters; given blocks, random and
// model-like (src/bench/selection.h). --forward leaves out the backward, --only all rows without TEXT in their names.
// Medians of 7 calls in milliseconds, L2 flushed before each; with --idle the host waits for the flush, so that its
// time until the first launch counts. Each row has its workspace, and the rows of its stages follow.
#include <cmath>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "bench/selection.h"
#include "cuda_device.cuh"
#include "nsa/operations.h"

namespace {

using namespace nsa;
using namespace nsa::bench;

/// Only rows with this in their names are timed.
std::string_view only;
/// Calls begin on an idle device.
bool idle = false;

/// The time of every stage of a call, by events.
class Stages {
 public:
  Stages() { check(cudaEventCreate(&begin), "event"); }

  /// Where a call begins.
  void start() {
    used_ = 0;
    check(cudaEventRecord(begin), "event");
  }
  void mark(const char* name) {
    if (used_ == marks_.size()) {
      marks_.emplace_back();
      check(cudaEventCreate(&marks_.back().second), "event");
    }
    marks_[used_].first = name;
    check(cudaEventRecord(marks_[used_++].second), "event");
  }
  /// Adds what the call took, which is over. A stage may come several times.
  void finish() {
    std::vector<std::pair<std::string, float>> call;
    cudaEvent_t from = begin;
    for (std::size_t i = 0; i < used_; ++i) {
      float ms;
      check(cudaEventElapsedTime(&ms, from, marks_[i].second), "event");
      from = marks_[i].second;
      const auto same = std::ranges::find(call, marks_[i].first, &std::pair<std::string, float>::first);
      if (same == call.end()) {
        call.emplace_back(marks_[i].first, ms);
      } else {
        same->second += ms;
      }
    }
    calls_.push_back(std::move(call));
  }
  void print() const {
    for (std::size_t i = 0; !calls_.empty() && i < calls_[0].size(); ++i) {
      std::vector<float> times;
      for (const auto& call : calls_) times.push_back(call[i].second);
      std::ranges::sort(times);
      std::printf("    %-38s %9.3f ms\n", calls_[0][i].first.c_str(), times[times.size() / 2]);
    }
  }

  cudaEvent_t begin;

 private:
  std::vector<std::pair<const char*, cudaEvent_t>> marks_;
  std::size_t used_ = 0;
  std::vector<std::vector<std::pair<std::string, float>>> calls_;
};

template <class Params>
void time(const char* name, const Params& params, Status (*operation)(const Params&, const Context&), void* flush) {
  Context context;
  check(workspace_size(params, context.workspace_size), name);
  check(cudaMalloc(&context.workspace, context.workspace_size + 256), "cudaMalloc");
  if (std::string_view(name).find(only) == std::string_view::npos) {  // others need its results
    check(operation(params, context), name);
    check(cudaFree(context.workspace), "cudaFree");
    return;
  }
  Stages stages;
  const std::function<void(const char*)> mark = [&](const char* stage) { stages.mark(stage); };
  context.on_stage = &mark;
  cudaEvent_t end;
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < 9; ++i) {
    check(cudaMemsetAsync(flush, i, 256 << 20), "flush");
    if (idle) check(cudaDeviceSynchronize(), "flush");
    stages.start();
    check(operation(params, context), name);
    check(cudaEventRecord(end), "event");
    check(cudaEventSynchronize(end), name);
    float ms;
    check(cudaEventElapsedTime(&ms, stages.begin, end), "event");
    if (i < 2) continue;
    times.push_back(ms);
    stages.finish();
  }
  check(cudaFree(context.workspace), "cudaFree");
  std::sort(times.begin(), times.end());
  std::printf("  %-40s %9.3f ms   workspace %8.1f MiB\n", name, times[times.size() / 2],
              static_cast<double>(context.workspace_size) / (1 << 20));
  stages.print();
  std::fflush(stdout);
}

void run(std::int64_t s, std::int64_t h, std::int64_t kv, std::int64_t dk, const NSAConfig& cfg, bool backward) {
  constexpr std::int64_t dv = 128;
  const std::int64_t l = cfg.kernel_size, nc = cfg.num_compressed(s);
  Tensors dev;
  void* flush = dev.take(256 << 20);
  const auto heads = [&](std::int64_t n, std::int64_t dim) { return dev.random({1, s, n, dim}); };
  const TensorView q = heads(h, dk), k_cmp = heads(kv, dk), k_slc = heads(kv, dk), v_slc = heads(kv, dv),
                   k_swa = heads(kv, dk), v_swa = heads(kv, dv);
  const TensorView d_o = heads(h, dv), gates = dev.random({1, s, h, 3}, 0.1f, 0.5f);
  const auto out = [&] { return dev.tensor(DType::kBFloat16, {1, s, h, dv}); };
  const auto lse = [&] { return dev.tensor(DType::kFloat32, {1, h, s}); };
  CompressionWeights w{CompressionKind::kMlp,
                       dev.random({kv, l, dk}, 0.02f),
                       dev.random({kv, l * dk, 2 * dk}, 0.016f),
                       {},
                       dev.random({kv, 2 * dk, dk}, 0.06f),
                       {}};
  const TensorView k_c = dev.random({1, nc, kv, dk}), v_c = dev.random({1, nc, kv, dv});
  const auto given = [&](Selection pattern) {
    return dev.integers(chosen_blocks(pattern, cfg, s, kv), {1, s, kv, cfg.topk});
  };
  const TensorView random = given(Selection::kRandom), model_like = given(Selection::kModelLike);
  std::printf("S = %lld, H = %lld, Hkv = %lld, keys of %lld", static_cast<long long>(s), static_cast<long long>(h),
              static_cast<long long>(kv), static_cast<long long>(dk));
  if (!(cfg == NSAConfig{}))
    std::printf(", l = %d, d = %d, l' = %d", cfg.kernel_size, cfg.kernel_stride, cfg.block_size);
  std::printf("\n");

  const TensorView compressed = dev.tensor(DType::kBFloat16, {1, nc, kv, dk});
  CompressParams compress{k_cmp, w, cfg, {}, compressed};
  time("compress (mlp, one of k, v)", compress, nsa::compress, flush);
  CompressBackwardParams compress_back{compress, compressed, dev.tensor(DType::kBFloat16, {1, s, kv, dk}), w};
  compress_back.d_weights.pe = dev.tensor(DType::kBFloat16, {kv, l, dk});
  compress_back.d_weights.w1 = dev.tensor(DType::kBFloat16, {kv, l * dk, 2 * dk});
  compress_back.d_weights.w2 = dev.tensor(DType::kBFloat16, {kv, 2 * dk, dk});
  if (backward) time("compress backward", compress_back, nsa::compress_backward, flush);
  const CompressParams mean{k_cmp, {CompressionKind::kMean, {}, {}, {}, {}, {}}, cfg, {}, compressed};
  time("compress (mean, one of k, v)", mean, nsa::compress, flush);
  const CompressBackwardParams mean_back{mean, compressed, compress_back.d_k, mean.weights};
  if (backward) time("compress backward (mean)", mean_back, nsa::compress_backward, flush);

  NsaAttentionParams whole{};
  whole.q = q, whole.k_c = k_c, whole.v_c = v_c, whole.k_slc = k_slc, whole.v_slc = v_slc, whole.k_swa = k_swa,
  whole.v_swa = v_swa;
  whole.gates = gates;
  whole.cfg = cfg;
  whole.block_indices = random;
  whole.o = out();
  whole.indices = dev.tensor(DType::kInt32, {1, s, kv, 16});
  whole.o_cmp = out(), whole.o_slc = out(), whole.o_swa = out();
  whole.lse_cmp = lse(), whole.lse_slc = lse(), whole.lse_swa = lse();

  CompressedAttentionParams cmp{q, k_c, v_c, cfg, {}, s, {}, whole.o_cmp, whole.lse_cmp};
  time("compressed_attention", cmp, nsa::compressed_attention, flush);
  SelectBlocksParams select{q, k_c, whole.lse_cmp, cfg, {}, s, 0, 0, {}, whole.indices};
  time("select_blocks", select, nsa::select_blocks, flush);
  SelectedAttentionParams slc{q, k_slc, v_slc, random, cfg.block_size, {}, {}, whole.o_slc, whole.lse_slc};
  time("selected_attention, random", slc, nsa::selected_attention, flush);
  slc.indices = model_like;
  time("selected_attention, model-like", slc, nsa::selected_attention, flush);
  SlidingWindowAttentionParams swa{q, k_swa, v_swa, 512, {}, {}, whole.o_swa, whole.lse_swa};
  time("sliding_window_attention", swa, nsa::sliding_window_attention, flush);
  time("combine", CombineParams{whole.o_cmp, whole.o_slc, whole.o_swa, gates, whole.o}, nsa::combine, flush);
  time("nsa_attention, random", whole, nsa::nsa_attention, flush);
  whole.block_indices = model_like;
  time("nsa_attention, model-like", whole, nsa::nsa_attention, flush);
  if (!backward) return;

  const auto like = [&](const TensorView& t) {
    return dev.tensor(DType::kBFloat16, {1, t.size(1), t.size(2), t.size(3)});
  };
  const TensorView d_q = like(q);
  time("compressed_attention backward", CompressedAttentionBackwardParams{cmp, d_o, d_q, like(k_c), like(v_c)},
       nsa::compressed_attention_backward, flush);
  time("selected_attention backward, model-like",
       SelectedAttentionBackwardParams{slc, d_o, d_q, like(k_slc), like(v_slc)}, nsa::selected_attention_backward,
       flush);
  slc.indices = random;
  check(cudaDeviceSynchronize(), "sync");
  time("selected_attention backward, random", SelectedAttentionBackwardParams{slc, d_o, d_q, like(k_slc), like(v_slc)},
       nsa::selected_attention_backward, flush);
  time("sliding_window_attention backward",
       SlidingWindowAttentionBackwardParams{swa, d_o, d_q, like(k_swa), like(v_swa)},
       nsa::sliding_window_attention_backward, flush);
  NsaAttentionBackwardParams back{
      whole,       d_o,         d_q,         like(k_c),   like(v_c),
      like(k_slc), like(v_slc), like(k_swa), like(v_swa), dev.tensor(DType::kBFloat16, {1, s, h, 3})};
  time("nsa_attention backward, model-like", back, nsa::nsa_attention_backward, flush);
  back.forward.block_indices = random;
  time("nsa_attention backward, random", back, nsa::nsa_attention_backward, flush);
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device");
  std::printf("%s\n", device.name);
  std::vector<long long> lengths;
  long long heads = 64, kv_heads = 4, key_dim = 128;
  NSAConfig cfg;
  bool backward = true;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--forward") {
      backward = false;
    } else if (option == "--idle") {
      idle = true;
    } else if (option == "--only" && i + 1 < argc) {
      only = argv[++i];
    } else if (option == "--heads" && i + 1 < argc) {
      heads = std::atoll(argv[++i]);
    } else if (option == "--kv-heads" && i + 1 < argc) {
      kv_heads = std::atoll(argv[++i]);
    } else if (option == "--key-dim" && i + 1 < argc) {
      key_dim = std::atoll(argv[++i]);
    } else if (option == "--kernel-size" && i + 1 < argc) {
      cfg.kernel_size = std::atoi(argv[++i]);
    } else if (option == "--kernel-stride" && i + 1 < argc) {
      cfg.kernel_stride = std::atoi(argv[++i]);
    } else if (option == "--block-size" && i + 1 < argc) {
      cfg.block_size = std::atoi(argv[++i]);
    } else {
      lengths.push_back(std::atoll(argv[i]));
    }
  }
  if (lengths.empty()) lengths = {8192, 65536};
  for (long long s : lengths) run(s, heads, kv_heads, key_dim, cfg, backward);
  return 0;
}
