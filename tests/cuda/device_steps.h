// Steps and chunks with a cache on a device, and what every way of serving them must give.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <optional>

#include "decode_support.h"
#include "device.h"
#include "support/environment.h"

namespace nsa::test {

/// Served by the kernels for Hopper where there are any.
inline StreamCase hopper_case(std::int64_t group, std::int64_t length, const NSAConfig& cfg,
                              DType dtype = DType::kBFloat16) {
  return with(Backend::kCUDA, dtype, [&](StreamCase& c) {
    c.dk = c.dv = 64;
    c.group = group;
    c.length = length;
    c.page_size = 48;
    c.kind = CompressionKind::kLinear;
    c.cfg = cfg;
  });
}

/// The same with a cache in e4m3.
inline StreamCase in_float8(StreamCase c) {
  for (std::int64_t h = 0; h < c.kv_heads; ++h)
    c.k_scale.push_back(h % 2 ? 0.5f : 0.02f), c.v_scale.push_back(h % 2 ? 0.01f : 3.0f);
  return c;
}

/// The arguments of steps of m tokens with a cache, all of them on the device. Rows of the stream go in by advance().
class DeviceSteps {
 public:
  DeviceSteps(const Stream& stream, KVCache& cache, std::int64_t m, bool rotate = false)
      : stream_(stream),
        m_(m),
        num_new_(DType::kInt32, {stream.c.batch}),
        o_(stream.c.dtype, {stream.c.batch, m, stream.c.kv_heads * stream.c.group, stream.c.dv}),
        indices_(DType::kInt32, {stream.c.batch, m, stream.c.kv_heads, stream.c.cfg.topk}) {
    fill_value(num_new_, static_cast<double>(m));
    p_.cache = cache.view();
    for (const auto& [from, to] : inputs()) {
      inputs_.emplace_back(from->view().dtype,
                           std::vector<std::int64_t>{stream.c.batch, m, from->view().size(2), from->view().size(3)});
      *to = inputs_.back();
    }
    p_.weights_k = stream.weights_k.view(), p_.weights_v = stream.weights_v.view();
    p_.cfg = stream.c.cfg;
    p_.rope_cos = stream.rope_cos, p_.rope_sin = stream.rope_sin;
    p_.rotate = rotate;
    p_.num_new = num_new_;
    p_.o = o_, p_.indices = indices_;
    expect_ok(to_device(p_, copies_));
    expect_ok(workspace_size(p_, context_.workspace_size));
    workspace_.emplace(context_.workspace_size);
    context_.workspace = workspace_->data;
  }

  /// Sets what the next step takes: the stream's tokens from `begin` on, for every sequence.
  void advance(std::int64_t begin) {
    std::size_t n = 0;
    for (const auto& [from, to] : inputs()) {
      const Tensor& rows = inputs_[n++];
      assign(slice(from->view(), 1, begin, begin + m_), rows);
      const DeviceMemory& memory = copies_.of(rows.view().data);
      ASSERT_EQ(cudaMemcpy(memory.data, rows.view().data, memory.bytes, cudaMemcpyHostToDevice), cudaSuccess);
    }
  }

  Status step(cudaStream_t stream = nullptr) {
    Context context = context_;
    context.stream = stream;
    return (m_ > kMaxDecodeTokens ? prefill : decode)(p_, context);
  }

  /// Steps get less memory than they need.
  void starve() { context_.workspace_size -= 256; }

  /// o, indices and the whole cache, as they are on the device, in host memory that the cache owns.
  void fetch() const { expect_ok(copies_.copy_back()); }
  const Tensor& o() const { return o_; }
  const Tensor& indices() const { return indices_; }

 private:
  std::vector<std::pair<const Tensor*, TensorView*>> inputs() {
    return {{&stream_.q, &p_.q},         {&stream_.gates, &p_.gates}, {&stream_.k_cmp, &p_.k_cmp},
            {&stream_.v_cmp, &p_.v_cmp}, {&stream_.k_slc, &p_.k_slc}, {&stream_.v_slc, &p_.v_slc},
            {&stream_.k_swa, &p_.k_swa}, {&stream_.v_swa, &p_.v_swa}};
  }

  const Stream& stream_;
  std::int64_t m_;
  std::vector<Tensor> inputs_;
  Tensor num_new_, o_, indices_;
  DecodeParams p_;
  DeviceCopies copies_;
  Context context_;
  std::optional<DeviceMemory> workspace_;
};

/// A cache that holds the first `length` tokens of every sequence, with capacity for all.
inline KVCache filled_cache(const Stream& stream, std::int64_t length) {
  const StreamCase& c = stream.c;
  KVCache cache = make_cache(c);
  Results ignored(c);
  const std::vector<std::int64_t> all(static_cast<std::size_t>(c.batch), c.length);
  expect_ok(cache.reserve(all));
  if (length > 0) {
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(c.batch), length);
    expect_ok(Feed{stream, cache}(counts, ignored));
  }
  return cache;
}

inline void expect_same_cache(KVCache& a, KVCache& b) {
  const KVCacheView x = a.view(), y = b.view();
  EXPECT_TRUE(same_bits(x.k_slc, y.k_slc));
  EXPECT_TRUE(same_bits(x.v_slc, y.v_slc));
  EXPECT_TRUE(same_bits(x.k_c, y.k_c));
  EXPECT_TRUE(same_bits(x.v_c, y.v_c));
  EXPECT_TRUE(same_bits(x.k_swa_ring, y.k_swa_ring));
  EXPECT_TRUE(same_bits(x.v_swa_ring, y.v_swa_ring));
  EXPECT_TRUE(same_bits(x.k_cmp_ring, y.k_cmp_ring));
  EXPECT_TRUE(same_bits(x.v_cmp_ring, y.v_cmp_ring));
  EXPECT_TRUE(same_bits(x.cache_seqlens, y.cache_seqlens));
}

/// The same blocks but for ties within rounding.
inline void expect_alike(const TensorView& indices, const TensorView& expected) {
  const std::vector<double> own = values_of(indices), other = values_of(expected);
  std::size_t same = 0;
  for (std::size_t i = 0; i < own.size(); ++i) same += own[i] == other[i];
  EXPECT_GE(static_cast<double>(same) / static_cast<double>(own.size()), 0.99);
}

/// Steps of these sizes behind `start` tokens give what one forward gives: with its blocks given but for rounding,
/// with their own selection the same blocks but for ties within rounding.
inline void expect_forward(const StreamCase& c, std::int64_t start, const std::vector<std::int64_t>& sizes) {
  const Stream stream(c);
  const Forward forward(stream);
  const double tolerance = c.dtype == DType::kFloat32 ? 1e-5 : 0.01;
  for (const bool given : {true, false}) {
    KVCache cache = filled_cache(stream, start);
    Results results(c);
    const Feed feed{stream, cache, given ? &forward.indices : nullptr};
    for (const std::int64_t m : sizes) expect_ok(feed({m, m}, results));
    const auto fed = [&](const TensorView& t) { return slice(t, 1, start, cache.length(0)); };
    if (given) expect_close(fed(results.o), fed(forward.o), tolerance);
    expect_alike(fed(results.indices), fed(forward.indices));
  }
}

/// Steps of these sizes behind `start` tokens by the kernels that serve here and by the portable ones. each_way(body)
/// calls body() for each way of the former.
inline void expect_portable(
    const StreamCase& c, std::int64_t start, const std::vector<std::int64_t>& sizes,
    const std::function<void(const std::function<void()>&)>& each_way = [](const auto& body) { body(); }) {
  const Stream stream(c);
  const KVCache filled = filled_cache(stream, start);
  std::int64_t end = 0;
  const auto feed = [&](Results& to, const Tensor* blocks) {
    KVCache cache = filled;
    for (const std::int64_t m : sizes) expect_ok(Feed{stream, cache, blocks}({m, m}, to));
    end = cache.length(0);
  };
  Results portable(c);
  {
    const Environment wish("NSA_CUDA_KERNELS", "portable");
    feed(portable, nullptr);
  }
  const auto fed = [&](const TensorView& t) { return slice(t, 1, start, end); };
  each_way([&] {
    Results results(c), given(c);
    feed(results, nullptr);
    feed(given, &portable.indices);
    expect_close(fed(given.o), fed(portable.o), 0.01);
    expect_alike(fed(results.indices), fed(portable.indices));
    EXPECT_NE(same_bits(fed(given.o), fed(portable.o)), hopper_kernels_run()) << "are other kernels";
  });
}

/// One graph of a step of m tokens, replayed until there are `grown` more.
inline void expect_replays_as_calls(const StreamCase& c, std::int64_t start, std::int64_t grown,
                                    const std::vector<std::int64_t>& sizes, bool rotate = false) {
  for (const std::int64_t m : sizes) {
    const Stream stream(c);
    KVCache called = filled_cache(stream, start), replayed = filled_cache(stream, start);
    DeviceSteps calls(stream, called, m, rotate), graph_calls(stream, replayed, m, rotate);
    cudaStream_t capture;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    ASSERT_EQ(cudaStreamCreateWithFlags(&capture, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(capture, cudaStreamCaptureModeGlobal), cudaSuccess);
    expect_ok(graph_calls.step(capture));
    ASSERT_EQ(cudaStreamEndCapture(capture, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
    for (std::int64_t at = start; at + m <= start + grown; at += m) {
      calls.advance(at), graph_calls.advance(at);
      expect_ok(calls.step());
      ASSERT_EQ(cudaGraphLaunch(replay, capture), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(capture), cudaSuccess);
      calls.fetch(), graph_calls.fetch();
      EXPECT_TRUE(same_bits(calls.o(), graph_calls.o())) << "m = " << m << ", tokens from " << at;
      EXPECT_TRUE(same_bits(calls.indices(), graph_calls.indices())) << "m = " << m << ", tokens from " << at;
    }
    EXPECT_EQ(replayed.length(0), start + grown);
    expect_same_cache(called, replayed);
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(capture);
  }
}

/// Sequence 1 is led astray; sequence 0 must not notice, and nothing of sequence 1 may change.
inline void expect_overflow(const StreamCase& c, std::int64_t length, std::int64_t m) {
  const Stream stream(c);
  KVCache sound = filled_cache(stream, length);
  DeviceSteps expected(stream, sound, m);
  expected.advance(length);
  expect_ok(expected.step());
  expected.fetch();
  const std::int64_t page = length / c.page_size;
  struct Lie {
    const char* what;
    TensorView KVCacheView::*view;
    std::int64_t at;
    std::int32_t value;
  };
  for (const Lie& lie : {Lie{"no such page", &KVCacheView::block_table, page, 1 << 20},
                         Lie{"negative page", &KVCacheView::block_table, 3, -7},
                         Lie{"no such compressed page", &KVCacheView::block_table_c, 0, INT32_MAX},
                         Lie{"negative length", &KVCacheView::cache_seqlens, 0, -5},
                         Lie{"length past the capacity", &KVCacheView::cache_seqlens, 0,
                             static_cast<std::int32_t>(c.length + c.page_size - 1)},
                         Lie{"length past every number", &KVCacheView::cache_seqlens, 0, INT32_MAX}}) {
    SCOPED_TRACE(lie.what);
    KVCache cache = filled_cache(stream, length), before = cache;
    const TensorView view = cache.view().*lie.view;
    std::int32_t& slot = view.as<std::int32_t>()[view.stride[0] + lie.at];
    slot = lie.value;
    DeviceSteps steps(stream, cache, m);
    steps.advance(length);
    expect_ok(steps.step());
    steps.fetch();
    EXPECT_EQ(slot, lie.value);
    EXPECT_EQ(cache.check().code(), StatusCode::kOutOfCapacity);
    const auto of = [](const TensorView& t, std::int64_t b) { return slice(t, 0, b, b + 1); };
    EXPECT_TRUE(same_bits(of(steps.o(), 0), of(expected.o(), 0)));
    EXPECT_TRUE(same_bits(of(steps.indices(), 0), of(expected.indices(), 0)));
    for (const double x : values_of(of(steps.o(), 1))) ASSERT_EQ(x, 0);
    for (const double x : values_of(of(steps.indices(), 1))) ASSERT_EQ(x, -1);
    for (const auto ring :
         {&KVCacheView::k_swa_ring, &KVCacheView::v_swa_ring, &KVCacheView::k_cmp_ring, &KVCacheView::v_cmp_ring})
      EXPECT_TRUE(same_bits(of(cache.view().*ring, 1), of(before.view().*ring, 1)));
  }
}

}  // namespace nsa::test
