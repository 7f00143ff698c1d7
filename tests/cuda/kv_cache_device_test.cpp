// What only a cache on a device has: a host that runs ahead of it, graphs, memory of another allocator.
#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <map>
#include <thread>

#include "device.h"
#include "kv_cache_support.h"

namespace nsa::test {
namespace {

class KVCacheOnDevice : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess); }
  void TearDown() override { EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess); }

  KVCacheOptions options(std::int64_t batch, std::int64_t num_pages, std::int64_t num_prefixes) const {
    KVCacheOptions options = options_of(batch, num_pages, num_prefixes);
    options.stream = stream;
    return options;
  }
  static std::vector<double> values(const TensorView& view) { return values_of(under_test.fetch(view)); }

  cudaStream_t stream = nullptr;
  Vocabulary vocabulary;
};

/// The stream waits until it is opened, at most ten seconds.
struct Gate {
  std::atomic<bool> open = false, late = false;
  static void wait(void* gate) {
    Gate& self = *static_cast<Gate*>(gate);
    const auto begin = std::chrono::steady_clock::now();
    while (!self.open && !self.late) {
      self.late = std::chrono::steady_clock::now() - begin > std::chrono::seconds(10);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
};

/// Many changes of the same numbers, and more at a time than there is pinned memory for at first.
void change(KVCache& cache, int from, int to) {
  for (int i = from; i < to; ++i) {
    const std::int64_t length = 32 + i % 48;
    std::int64_t count = 0;
    expect_ok(cache.reserve({length, 0, 0}));
    expect_ok(cache.appended({length, 0, 0}));
    expect_ok(cache.rollback(0, length));  // the device has it, too, without a step
    expect_ok(cache.keep_prefix(0, numbers(i % 5, length), count));
    expect_ok(cache.fork(0, 1, length - i % 20));
    expect_ok(cache.rollback(1, length - 20));
    expect_ok(cache.match_prefix(2, numbers(i % 5, length), count));
    for (const int b : {0, 1, 2}) cache.release(b);
    expect_ok(cache.reserve({i % 96, 96 - i % 96, 0}));
    for (const int b : {0, 1, 2}) cache.release(b);
  }
}

TEST_F(KVCacheOnDevice, NoChangeWaitsForTheStream) {
  KVCache at_once = make(options(3, 0, 3)), behind = make(options(3, 0, 3));
  for (KVCache* cache : {&at_once, &behind}) {
    for (int b = 0; b < 3; ++b) cache->release(b);
    change(*cache, 1, 2);  // what a first launch waits for
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int i = 2; i < 12; ++i) {
    change(at_once, i, i + 1);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
  // Each row by itself, so that what the first upload brought is there in the end.
  const std::vector<std::vector<std::int64_t>> last = {{70, 0, 0}, {70, 50, 0}, {70, 50, 90}};
  for (const auto& lengths : last) {
    expect_ok(at_once.reserve(lengths));
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
  Gate gate;
  ASSERT_EQ(cudaLaunchHostFunc(stream, Gate::wait, &gate), cudaSuccess);
  change(behind, 2, 12);
  for (const auto& lengths : last) expect_ok(behind.reserve(lengths));
  EXPECT_FALSE(gate.late) << "a change has waited for the stream";
  gate.open = true;
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  const KVCacheView a = at_once.view(), b = behind.view();
  for (const auto table : {&KVCacheView::block_table, &KVCacheView::block_table_c, &KVCacheView::cache_seqlens})
    EXPECT_EQ(values(a.*table), values(b.*table));
  expect_ok(behind.check());
}

TEST_F(KVCacheOnDevice, GraphReplaysWhileLengthsGrow) {
  constexpr std::int64_t kBatch = 4;
  KVCache cache = make(options(kBatch, 18, 2)), alone = make(options(1, 0, 0));
  std::vector<Ids> texts(kBatch);
  const auto feed = [&](std::int64_t b, const Ids& ids) {
    Ids& text = texts[static_cast<std::size_t>(b)];
    text.insert(text.end(), ids.begin(), ids.end());
    std::vector<std::int64_t> lengths;
    for (const Ids& each : texts) lengths.push_back(std::ssize(each));
    expect_ok(cache.reserve(lengths));
    vocabulary.append(cache, b, ids);
  };
  feed(0, numbers(0, 32)), feed(1, numbers(20, 13));
  std::int64_t kept = 0;
  expect_ok(cache.keep_prefix(0, numbers(0, 32), kept));
  EXPECT_EQ(kept, 32);

  Vocabulary::Step step = vocabulary.step(cache, std::vector<Ids>(kBatch, Ids{0}));
  DecodeParams on_host = step.params;
  DeviceCopies copies;
  Context context{.stream = stream};
  expect_ok(to_device(step.params, copies));
  expect_ok(workspace_size(step.params, context.workspace_size));
  const DeviceMemory workspace(context.workspace_size);
  context.workspace = workspace.data;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  expect_ok(decode(step.params, context));
  const std::vector<std::int64_t> lengths(kBatch, 40);
  const Status refused = cache.reserve(lengths);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(), "KVCache: its stream is being captured: only steps belong into a graph");
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);

  for (int i = 0; i < 60 && !HasFailure(); ++i) {
    SCOPED_TRACE("replay " + std::to_string(i));
    if (i == 10) {
      texts[2].assign(texts[0].begin(), texts[0].end() - 2);
      expect_ok(cache.fork(0, 2, std::ssize(texts[2])));
    } else if (i == 25) {
      cache.release(1);
      texts[1].clear();
      std::int64_t length = 0;
      expect_ok(cache.match_prefix(1, numbers(0, 60), length));
      EXPECT_EQ(length, 32);
      texts[1] = numbers(0, 32);
    } else if (i % 9 == 8) {
      for (const std::int64_t b : {0, 2}) {
        Ids& text = texts[static_cast<std::size_t>(b)];
        if (text.size() < 12) continue;
        text.resize(text.size() - 11);
        expect_ok(cache.rollback(b, std::ssize(text)));
      }
    }
    std::vector<Ids> next(kBatch);
    std::vector<std::int64_t> after, counts;
    for (std::int64_t b = 0; b < kBatch; ++b) {
      Ids& text = texts[static_cast<std::size_t>(b)];
      const bool takes = !text.empty() && (i + b) % 5 != 0 && std::ssize(text) < kCapacity;
      if (takes) next[static_cast<std::size_t>(b)] = {static_cast<std::int32_t>((7 * i + 3 * b) % kVocabulary)};
      text.insert(text.end(), next[static_cast<std::size_t>(b)].begin(), next[static_cast<std::size_t>(b)].end());
      after.push_back(std::ssize(text)), counts.push_back(takes);
    }
    expect_ok(cache.reserve(after));
    const Vocabulary::Step inputs = vocabulary.step(cache, next);
    for (const auto input :
         {&DecodeParams::q, &DecodeParams::k_cmp, &DecodeParams::v_cmp, &DecodeParams::k_slc, &DecodeParams::v_slc,
          &DecodeParams::k_swa, &DecodeParams::v_swa, &DecodeParams::num_new}) {
      const DeviceMemory& memory = copies.of((on_host.*input).data);
      ASSERT_EQ(cudaMemcpyAsync(memory.data, (inputs.params.*input).data, memory.bytes, cudaMemcpyHostToDevice, stream),
                cudaSuccess);
    }
    ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    expect_ok(cache.appended(counts));
    for (std::int64_t b = 0; b < kBatch; ++b) EXPECT_EQ(cache.length(b), after[static_cast<std::size_t>(b)]);
    expect_ok(cache.check());
    for (std::int64_t b = 0; b < kBatch; ++b) EXPECT_EQ(cache.length(b), after[static_cast<std::size_t>(b)]);
    const Tensor o = under_test.fetch(step.params.o);
    for (std::int64_t b = 0; b < kBatch; ++b) {
      if (counts[static_cast<std::size_t>(b)] == 0) continue;
      expect_ok(alone.reserve({after[static_cast<std::size_t>(b)]}));
      EXPECT_EQ(values_of(slice(o, 0, b, b + 1)), vocabulary.append(alone, 0, texts[static_cast<std::size_t>(b)]))
          << "sequence " << b;
      alone.release(0);
    }
  }
  EXPECT_EQ(cudaGraphExecDestroy(replay), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(KVCacheOnDevice, AReleaseInACaptureIsRefusedByTheNextCall) {
  KVCache cache = make(options(2, 0, 0));
  expect_ok(cache.reserve({32, 0}));
  cudaGraph_t graph;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  cache.release(0);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cache.reserve({32, 0}).message(), "KVCache: its stream is being captured: only steps belong into a graph");
  EXPECT_EQ(values(cache.view().block_table)[1], 1) << "nothing has changed";
  cache.release(0);
  expect_ok(cache.reserve({0, 16}));
  EXPECT_EQ(values(cache.view().block_table)[0], -1);
}

TEST_F(KVCacheOnDevice, MemoryOfTheCallersAllocator) {
  std::map<void*, std::size_t> held;
  bool none = false;
  KVCacheOptions all = options(2, 0, 1);
  all.k_scale = all.v_scale = {0.5f};
  all.allocator.allocate = [&](std::size_t bytes, void* on) -> void* {
    void* data = nullptr;
    EXPECT_EQ(on, stream);
    if (none || cudaMalloc(&data, bytes) != cudaSuccess) return nullptr;
    EXPECT_EQ(cudaMemset(data, 0xff, bytes), cudaSuccess);
    held[data] = bytes;
    return data;
  };
  all.allocator.release = [&](void* data, std::size_t bytes, void*) {
    EXPECT_EQ(held[data], bytes);
    held.erase(data);
    EXPECT_EQ(cudaFree(data), cudaSuccess);
  };
  {
    KVCache cache = make(all);
    const KVCacheView view = cache.view();
    for (const TensorView& t : {view.k_slc, view.v_c, view.k_swa_ring, view.v_cmp_ring, view.block_table}) {
      EXPECT_EQ(t.device, all.device);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.data) % 256, 0u);
    }
    EXPECT_EQ(values(view.k_scale), std::vector<double>{0.5});
    EXPECT_EQ(values(view.block_table), std::vector<double>(12, -1));
    EXPECT_EQ(values(view.cache_seqlens), std::vector<double>(2, 0));
    expect_ok(cache.reserve({20, 0}));
    KVCache copy = cache;
    expect_ok(copy.reserve({20, 40}));
    EXPECT_EQ(values(copy.view().block_table)[6], 2);
    EXPECT_EQ(values(cache.view().block_table)[6], -1);
    none = true;
    EXPECT_EQ(KVCache::create(all, copy).code(), StatusCode::kInternal);
  }
  EXPECT_TRUE(held.empty());
}

TEST_F(KVCacheOnDevice, WithoutKernelsRefused) {
  KVCacheOptions other = options(1, 0, 0);
  other.dtype = DType::kFloat64;
  KVCache cache;
  EXPECT_EQ(KVCache::create(other, cache).code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace nsa::test
