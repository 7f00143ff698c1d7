// Every argument that is not allowed is refused, and the message names it, what came and what is allowed.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "support/problem.h"

namespace nsa::test {
namespace {

template <class Params>
struct Refusal {
  std::function<void(Params&)> spoil;
  std::string message;  // the whole message
};

/// The call as it is succeeds; each spoiled copy of it is refused with its message.
template <class Params>
void expect_refused(Status (*operation)(const Params&, const Context&), const Params& good,
                    const std::vector<Refusal<Params>>& refusals) {
  const Status fine = operation(good, {Backend::kReference});
  ASSERT_TRUE(fine.ok()) << fine.message();
  for (const Refusal<Params>& refusal : refusals) {
    Params params = good;
    refusal.spoil(params);
    const Status status = operation(params, {});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), refusal.message);
  }
}

Case batched_case() {
  Case c;
  c.q_lens = {40, 40};
  c.k_lens = {48, 48};
  c.kv_heads = 2;
  c.group = 3;
  c.dk = 16;
  c.dv = 8;
  c.cfg = small_config();
  c.cfg.kernel_size = 8;
  c.cfg.kernel_stride = 4;
  c.cfg.topk = 3;
  return c;
}

Case packed_case() {
  Case c = batched_case();
  c.packed = true;
  c.q_lens = {5, 0, 30};
  c.k_lens = {7, 0, 33};
  return c;
}

TEST(Refused, EveryHyperparameter) {
  const NSAConfig good;
  const std::vector<Refusal<NSAConfig>> refusals = {
      {[](auto& c) { c.kernel_size = 0; }, "kernel_size = 0: must be >= 1"},
      {[](auto& c) { c.kernel_stride = 0; }, "kernel_stride = 0: must be >= 1"},
      {[](auto& c) { c.kernel_stride = -16; }, "kernel_stride = -16: must be >= 1"},
      {[](auto& c) { c.kernel_size = 40; }, "kernel_stride = 16: must be a divisor of kernel_size = 40"},
      {[](auto& c) { c.kernel_size = 96, c.kernel_stride = 48; },
       "kernel_stride = 48: must be a divisor of block_size = 64"},
      {[](auto& c) { c.block_size = 0; }, "block_size = 0: must be a positive multiple of 16"},
      {[](auto& c) { c.block_size = 72; }, "block_size = 72: must be a positive multiple of 16"},
      {[](auto& c) { c.topk = 0; }, "topk = 0: must be >= 1"},
      {[](auto& c) { c.topk = 2; }, "topk = 2: must be >= init_blocks + local_blocks = 1 + 2"},
      {[](auto& c) { c.init_blocks = 2147483647; },
       "topk = 16: must be >= init_blocks + local_blocks = 2147483647 + 2"},
      {[](auto& c) { c.init_blocks = -1; }, "init_blocks = -1: must be >= 0"},
      {[](auto& c) { c.local_blocks = 0; }, "local_blocks = 0: must be >= 1"},
      {[](auto& c) { c.window_size = 0; }, "window_size = 0: must be >= 1"},
  };
  EXPECT_TRUE(good.validate().ok());
  for (const auto& refusal : refusals) {
    NSAConfig cfg = good;
    refusal.spoil(cfg);
    EXPECT_EQ(cfg.validate().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(cfg.validate().message(), refusal.message);
  }
}

TEST(Refused, Compress) {
  Case c = batched_case();
  c.kind = CompressionKind::kMlp;
  const Problem problem(c);
  const Tensor out = problem.compressed_rows(c.dk, c.dtype);
  CompressParams good = problem.compress_keys();
  good.out = out;
  using P = CompressParams;
  expect_refused<P>(
      compress, good,
      {
          {[](P& p) { p.cfg.kernel_size = 0; }, "compress: kernel_size = 0: must be >= 1"},
          {[](P& p) { p.k = {}; }, "compress: k: not given: expected float32 (B, S, Hkv, D)"},
          {[](P& p) { p.k.dtype = DType::kInt32; },
           "compress: k: int32 (2, 48, 2, 16): expected float32, bfloat16, float16 or float64"},
          {[](P& p) { p.k.stride[3] = 2; },
           "compress: k: float32 (2, 48, 2, 16): the last dimension has stride 2, expected 1"},
          {[](P& p) { p.k.data = nullptr; }, "compress: k: float32 (2, 48, 2, 16): the data pointer is null"},
          {[](P& p) { p.k.data = static_cast<char*>(p.k.data) + 2; },
           "compress: k: float32 (2, 48, 2, 16): begins at an address that is no multiple of 4"},
          {[](P& p) { p.weights.w1 = {}; },
           "compress: weights.w1: not given: expected float32 (P = 2, kernel_size * D = 128, E)"},
          {[](P& p) { p.weights.w1.shape[1] = 64; },
           "compress: weights.w1: float32 (2, 64, 32): expected the shape (P = 2, kernel_size * D = 128, E)"},
          {[](P& p) { p.weights.w1.dtype = DType::kBFloat16; },
           "compress: weights.w1: bfloat16 (2, 128, 32): expected float32 as k"},
          {[](P& p) { p.weights.w2.shape[1] = 31; },
           "compress: weights.w2: float32 (2, 31, 16): expected the shape (P = 2, E = 32, D = 16)"},
          {[](P& p) { p.weights.b1.shape[0] = 1; },
           "compress: weights.b1: float32 (1, 32): expected the shape (P = 2, E = 32)"},
          {[](P& p) { p.weights.pe.shape[0] = 3; },
           "compress: weights.pe: float32 (3, 8, 16): the first size must be Hkv = 2 or 1"},
          {[](P& p) { p.weights.kind = CompressionKind::kMean; },
           "compress: weights.pe: float32 (2, 8, 16): must not be given for kind mean"},
          {[](P& p) { p.weights.kind = CompressionKind::kLinear, p.weights.b1.shape[1] = p.weights.w1.shape[2] = 16; },
           "compress: weights.w2: float32 (2, 32, 16): must not be given for kind linear"},
          {[](P& p) { p.out = {}; },
           "compress: out: not given: expected float32 (B = 2, N_c(S) = 11, Hkv = 2, D = 16)"},
          {[](P& p) { p.out.shape[1] = 12; },
           "compress: out: float32 (2, 12, 2, 16): expected the shape (B = 2, N_c(S) = 11, Hkv = 2, D = 16)"},
          {[](P& p) { p.out.stride[0] = 0; },
           "compress: out: float32 (2, 11, 2, 16): dimension 0 of an output has stride 0"},
          {[](P& p) {
             p.out.device = {DeviceType::kCUDA, 1};
           },
           "compress: out: on cuda:1: expected cpu as k"},
          {[](P& p) { p.out.data = p.k.data; }, "compress: out: an output at the same address as k"},
      });
}

TEST(Refused, CompressPacked) {
  const Problem problem(packed_case());
  const Tensor out = problem.compressed_rows(16, DType::kFloat32);
  Tensor falling(DType::kInt32, {3});
  falling.set({0}, 0), falling.set({1}, 9), falling.set({2}, 5);
  Tensor late(DType::kInt32, {2});
  late.set({0}, 1), late.set({1}, 5);
  Tensor beyond(DType::kInt32, {2});
  beyond.set({0}, 0), beyond.set({1}, 41);
  const Tensor none(DType::kInt32, {0});
  CompressParams good = problem.compress_keys();
  good.out = out;
  using P = CompressParams;
  expect_refused<P>(
      compress, good,
      {
          {[&](P& p) { p.cu_seqlens = falling; },
           "compress: cu_seqlens[2] = 5: must not be less than cu_seqlens[1] = 9"},
          {[&](P& p) { p.cu_seqlens = late; }, "compress: cu_seqlens[0] = 1: must be 0"},
          {[&](P& p) { p.cu_seqlens = beyond; },
           "compress: cu_seqlens[1] = 41: must not exceed the rows of the tensor, 40"},
          {[&](P& p) { p.cu_seqlens = none; }, "compress: cu_seqlens: int32 (0): expected B + 1 offsets, the first 0"},
          {[&](P& p) { p.cu_seqlens.dtype = DType::kFloat32; }, "compress: cu_seqlens: float32 (4): expected int32"},
          {[&](P& p) { p.cu_seqlens.stride[0] = 2; },
           "compress: cu_seqlens: int32 (4): the last dimension has stride 2, expected 1"},
          {[&](P& p) { p.out.shape[0] = 9; },
           "compress: out: float32 (9, 2, 16): expected the shape (floor(total / kernel_stride) = 10, Hkv = 2, D = "
           "16)"},
      });
}

TEST(Refused, CompressBackward) {
  Case c = batched_case();
  c.kind = CompressionKind::kLinear;
  const Problem problem(c);
  const Tensor d_out = problem.compressed_rows(c.dk, c.dtype), d_k = problem.key_rows(c.dk, c.dtype);
  fill_normal(d_out, 1);
  CompressBackwardParams good{problem.compress_keys(), d_out, d_k, {}};
  using P = CompressBackwardParams;
  expect_refused<P>(
      compress_backward, good,
      {
          {[](P& p) { p.d_out = {}; },
           "compress_backward: d_out: not given: expected float32 (B = 2, N_c(S) = 11, Hkv = 2, D = 16)"},
          {[](P& p) { p.d_k.shape[1] = 47; },
           "compress_backward: d_k: float32 (2, 47, 2, 16): expected the shape (B = 2, S = 48, Hkv = 2, D = 16)"},
          {[](P& p) { p.d_weights.w1 = p.forward.weights.w1, p.d_weights.w1.shape[0] = 1; },
           "compress_backward: d_weights.w1: float32 (1, 128, 16): expected the shape (2, 128, 16)"},
          {[](P& p) { p.d_weights.w1 = p.forward.weights.w1; },
           "compress_backward: d_weights.w1: an output at the same address as weights.w1"},
          {[](P& p) { p.d_weights.w2 = p.forward.weights.w1; },
           "compress_backward: d_weights.w2: asked for, but the weight is not given"},
      });
}

TEST(Refused, CompressedAttention) {
  const Case c = batched_case();
  const Problem problem(c);
  const Tensor o = problem.query_rows(c.heads(), c.dv, c.dtype), lse = problem.lse_rows(DType::kFloat32);
  CompressedAttentionParams good = problem.compressed();
  good.o = o, good.lse = lse;
  using P = CompressedAttentionParams;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_refused<P>(
      compressed_attention, good,
      {
          {[](P& p) { p.cfg.topk = 0; }, "compressed_attention: topk = 0: must be >= 1"},
          {[](P& p) { p.q.rank = 3; },
           "compressed_attention: q: float32 (2, 40, 6): expected the shape (B, Sq, H, Dk)"},
          {[](P& p) { p.k_c.dtype = DType::kBFloat16; },
           "compressed_attention: k_c: bfloat16 (2, 11, 2, 16): expected float32 as q"},
          {[](P& p) { p.k_c.shape[3] = 8; },
           "compressed_attention: k_c: float32 (2, 11, 2, 8): expected the shape (B = 2, N_c(Sk), Hkv, Dk = 16)"},
          {[](P& p) { p.v_c.shape[1] = 10; },
           "compressed_attention: v_c: float32 (2, 10, 2, 8): expected the shape (B = 2, N_c(Sk) = 11, Hkv = 2, Dv)"},
          {[](P& p) { p.q.shape[2] = 5; }, "compressed_attention: H = 5, Hkv = 2: Hkv must divide H, both >= 1"},
          {[](P& p) { p.k_c.shape[2] = p.v_c.shape[2] = 0; },
           "compressed_attention: H = 6, Hkv = 0: Hkv must divide H, both >= 1"},
          {[](P& p) { p.seqlen_k.reset(); },
           "compressed_attention: k_c: 11 compressed tokens: seqlen_k = 40 (not given: Sq) makes 9"},
          {[](P& p) { p.seqlen_k = 52; }, "compressed_attention: k_c: 11 compressed tokens: seqlen_k = 52 makes 12"},
          {[](P& p) { p.seqlen_k = 39; }, "compressed_attention: Sq = 40, Sk = 39: Sq must not exceed Sk"},
          {[](P& p) { p.seqlen_k = -1; }, "compressed_attention: seqlen_k = -1: must be >= 0 and below 2^31"},
          {[&](P& p) { p.softmax_scale = nan; }, "compressed_attention: softmax_scale = nan: must be finite"},
          {[](P& p) { p.softmax_scale = -1e39; },
           "compressed_attention: softmax_scale = -1e+39: must be below 2^128, the range of float32"},
          {[](P& p) { p.q.rank = 7; }, "compressed_attention: q: float32 of rank 7: expected the shape (B, Sq, H, Dk)"},
          {[](P& p) { p.o.stride[1] = -48; },
           "compressed_attention: o: float32 (2, 40, 6, 8): dimension 1 of an output has stride -48"},
          {[](P& p) { p.o.stride[2] = 7; },
           "compressed_attention: o: float32 (2, 40, 6, 8): dimension 2 of an output has stride 7: its elements "
           "overlap"},
          {[](P& p) { p.lse.stride[0] = p.lse.stride[2] * 240 - 1; },
           "compressed_attention: lse: float32 (2, 6, 40): dimension 0 of an output has stride 239: its elements "
           "overlap"},
          {[](P& p) { p.o.shape[3] = 16; },
           "compressed_attention: o: float32 (2, 40, 6, 16): expected the shape (B = 2, Sq = 40, H = 6, Dv = 8)"},
          {[](P& p) { p.lse.dtype = DType::kBFloat16; },
           "compressed_attention: lse: bfloat16 (2, 6, 40): expected float32"},
          {[](P& p) { std::swap(p.lse.shape[1], p.lse.shape[2]); },
           "compressed_attention: lse: float32 (2, 40, 6): expected the shape (B = 2, H = 6, Sq = 40)"},
          {[](P& p) { p.q.device.type = DeviceType::kCUDA; },
           "compressed_attention: k_c: on cpu: expected cuda:0 as q"},
          {[](P& p) { p.packed.cu_seqlens_k = p.lse; },
           "compressed_attention: cu_seqlens_k: given without cu_seqlens_q"},
      });
}

TEST(Refused, CompressedAttentionPacked) {
  const Case c = packed_case();
  const Problem problem(c);
  const Tensor o = problem.query_rows(c.heads(), c.dv, c.dtype), lse = problem.lse_rows(DType::kFloat32);
  Tensor fewer_keys(DType::kInt32, {4});
  for (int i = 0; i < 4; ++i) fewer_keys.set({i}, i == 0 ? 0 : i == 3 ? 40 : 4);
  CompressedAttentionParams good = problem.compressed();
  good.o = o, good.lse = lse;
  using P = CompressedAttentionParams;
  expect_refused<P>(
      compressed_attention, good,
      {
          {[](P& p) { p.seqlen_k = 40; },
           "compressed_attention: seqlen_k: only for batched calls; cu_seqlens_k has the lengths here"},
          {[&](P& p) { p.packed.cu_seqlens_k = fewer_keys; },
           "compressed_attention: cu_seqlens_q: sequence 0 has 5 queries, but only 4 keys in cu_seqlens_k"},
          {[](P& p) { p.packed.cu_seqlens_k.shape[0] = 3; },
           "compressed_attention: cu_seqlens_k: int32 (3): expected the shape (B + 1 = 4)"},
          {[](P& p) { p.packed.max_seqlen_q = 29; },
           "compressed_attention: max_seqlen_q = 29: cu_seqlens_q has a sequence of 30"},
          {[](P& p) { p.packed.max_seqlen_k = 32; },
           "compressed_attention: max_seqlen_k = 32: cu_seqlens_k has a sequence of 33"},
          {[](P& p) { p.packed.max_seqlen_q = -1; },
           "compressed_attention: max_seqlen_q = -1: must be >= 0 (0: the total)"},
          {[](P& p) { p.k_c.shape[0] = p.v_c.shape[0] = 9; },
           "compressed_attention: k_c: 9 rows: expected floor(total_k / kernel_stride), at least 10"},
      });
}

TEST(Refused, SelectBlocks) {
  const Case c = batched_case();
  const Problem problem(c);
  const Tensor indices = problem.query_rows(c.kv_heads, c.cfg.topk, DType::kInt32);
  SelectBlocksParams good = problem.selection();
  good.indices = indices;
  using P = SelectBlocksParams;
  expect_refused<P>(
      select_blocks, good,
      {
          {[](P& p) { p.noise = -0.5; }, "select_blocks: noise = -0.5: must be finite and >= 0"},
          {[](P& p) { p.noise = HUGE_VAL; }, "select_blocks: noise = inf: must be finite and >= 0"},
          {[](P& p) { p.lse = {}; }, "select_blocks: lse: not given: expected float32 (B = 2, H = 6, Sq = 40)"},
          {[](P& p) { p.indices.shape[3] = 4; },
           "select_blocks: indices: int32 (2, 40, 2, 4): expected the shape (B = 2, Sq = 40, Hkv = 2, topk = 3)"},
          {[](P& p) { p.indices.dtype = DType::kFloat32; },
           "select_blocks: indices: float32 (2, 40, 2, 3): expected int32"},
          {[](P& p) { p.seqlen_k = 60; }, "select_blocks: k_c: 11 compressed tokens: seqlen_k = 60 makes 14"},
      });
}

TEST(Refused, SelectedAttention) {
  const Case c = batched_case();
  const Problem problem(c);
  const Tensor o = problem.query_rows(c.heads(), c.dv, c.dtype), lse = problem.lse_rows(DType::kFloat32);
  SelectedAttentionParams good = problem.selected();
  good.o = o, good.lse = lse;
  using P = SelectedAttentionParams;
  expect_refused<P>(
      selected_attention, good,
      {
          {[](P& p) { p.block_size = 0; }, "selected_attention: block_size = 0: must be a positive multiple of 16"},
          {[](P& p) { p.block_size = 24; }, "selected_attention: block_size = 24: must be a positive multiple of 16"},
          {[](P& p) { p.k.shape[1] = p.v.shape[1] = 39; },
           "selected_attention: Sq = 40, Sk = 39: Sq must not exceed Sk"},
          {[](P& p) { p.v.shape[2] = 1; },
           "selected_attention: v: float32 (2, 48, 1, 8): expected the shape (B = 2, Sk = 48, Hkv = 2, Dv)"},
          {[](P& p) { p.indices.shape[2] = 6; },
           "selected_attention: indices: int32 (2, 40, 6, 3): expected the shape (B = 2, Sq = 40, Hkv = 2, n)"},
          {[](P& p) { p.k.shape[0] = 1; },
           "selected_attention: k: float32 (1, 48, 2, 16): expected the shape (B = 2, Sk, Hkv, Dk = 16)"},
          {[](P& p) { p.k.shape[1] = std::int64_t{1} << 31; },
           "selected_attention: k: float32 (2, 2147483648, 2, 16): sizes must be below 2^31"},
      });
}

TEST(Refused, SlidingWindowAttentionBackward) {
  const Case c = batched_case();
  const Problem problem(c);
  const Tensor o = problem.query_rows(c.heads(), c.dv, c.dtype), lse = problem.lse_rows(DType::kFloat32);
  const Tensor d_q = problem.query_rows(c.heads(), c.dk, c.dtype);
  SlidingWindowAttentionParams forward = problem.window();
  forward.o = o, forward.lse = lse;
  ASSERT_TRUE(sliding_window_attention(forward, {Backend::kReference}).ok());
  SlidingWindowAttentionBackwardParams good{forward, problem.d_o, d_q, {}, {}};
  using P = SlidingWindowAttentionBackwardParams;
  expect_refused<P>(
      sliding_window_attention_backward, good,
      {
          {[](P& p) { p.forward.window_size = 0; }, "sliding_window_attention_backward: window_size = 0: must be >= 1"},
          {[](P& p) { p.forward.lse = {}; },
           "sliding_window_attention_backward: lse: not given: expected float32 (B = 2, H = 6, Sq = 40)"},
          {[](P& p) { p.d_o.dtype = DType::kFloat64; },
           "sliding_window_attention_backward: d_o: float64 (2, 40, 6, 8): expected float32 as q"},
          {[](P& p) { p.d_q.data = p.forward.o.data; },
           "sliding_window_attention_backward: d_q: an output at the same address as o"},
          {[](P& p) { p.d_q.stride[2] = 0; },
           "sliding_window_attention_backward: d_q: float32 (2, 40, 6, 16): dimension 2 of an output has stride 0"},
      });
}

TEST(Refused, Combine) {
  const Case c = batched_case();
  const Problem problem(c);
  const Tensor o = problem.query_rows(c.heads(), c.dv, c.dtype);
  CombineParams good = problem.combination();
  good.o = o;
  using P = CombineParams;
  expect_refused<P>(combine, good,
                    {
                        {[](P& p) { p.o_slc.shape[1] = 39; },
                         "combine: o_slc: float32 (2, 39, 6, 8): expected the shape (B = 2, Sq = 40, H = 6, Dv = 8)"},
                        {[](P& p) { p.gates.shape[3] = 2; },
                         "combine: gates: float32 (2, 40, 6, 2): expected the shape (B = 2, Sq = 40, H = 6, 3)"},
                        {[](P& p) { p.gates.dtype = DType::kBFloat16; },
                         "combine: gates: bfloat16 (2, 40, 6, 3): expected float32 as o_cmp"},
                    });
}

TEST(Refused, NumbersThatNameNothing) {
  const Case c = batched_case();
  const Problem problem(c);
  const Tensor o = problem.query_rows(c.heads(), c.dv, c.dtype);
  const auto message = [&](auto&& change) {
    CombineParams params = problem.combination();
    params.o = o;
    Context context;
    for (TensorView* const view : {&params.o_cmp, &params.o_slc, &params.o_swa, &params.gates, &params.o})
      change(*view, context);
    return combine(params, context).message();
  };
  EXPECT_EQ(message([](TensorView& view, Context&) { view.dtype = DType{77}; }),
            "combine: o_cmp: unknown (2, 40, 6, 8): expected float32, bfloat16, float16 or float64");
  EXPECT_EQ(message([](TensorView& view, Context&) { view.device.type = DeviceType{9}; }),
            "combine: o_cmp: on no known device: must be on the cpu or a CUDA device");
  EXPECT_EQ(message([i = 0](TensorView& view, Context&) mutable { view.device.index = i++; }),
            "combine: o_slc: on cpu:1: expected cpu as o_cmp");
  EXPECT_EQ(message([](TensorView&, Context& context) { context.backend = Backend{55}; }),
            "combine: backend = 55: must be kAuto, kReference, kCPU or kCUDA");
  EXPECT_EQ(message([](TensorView& view, Context&) {
              view = TensorView::contiguous(view.data, view.dtype, {1, 1, 1, 1, 1, 1});
            }),
            "combine: o_cmp: float32 of rank 6: expected the shape (B, Sq, H, Dv)");
}

TEST(Refused, Threads) {
  const Case c = batched_case();
  const Problem problem(c);
  const Tensor o = problem.query_rows(c.heads(), c.dv, c.dtype);
  CombineParams params = problem.combination();
  params.o = o;
  for (const int threads : {-1, 1025, 1 << 30}) {
    const Status status = combine(params, {.num_threads = threads});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "combine: num_threads = " + std::to_string(threads) + ": must be 0 ... 1024");
  }
}

TEST(Refused, NsaAttention) {
  const Case c = batched_case();
  const Problem problem(c);
  const Tensor o = problem.query_rows(c.heads(), c.dv, c.dtype);
  NsaAttentionParams good = problem.whole();
  good.o = o;
  using P = NsaAttentionParams;
  expect_refused<P>(
      nsa_attention, good,
      {
          {[](P& p) { p.k_c.shape[1] = 10; },
           "nsa_attention: k_c: float32 (2, 10, 2, 16): expected the shape (B = 2, N_c(Sk) = 11, Hkv = 2, Dk = 16)"},
          {[](P& p) { p.v_swa.shape[3] = 16; },
           "nsa_attention: v_swa: float32 (2, 48, 2, 16): expected the shape (B = 2, Sk = 48, Hkv = 2, Dv = 8)"},
          {[](P& p) { p.block_indices = p.gates; },
           "nsa_attention: block_indices: float32 (2, 40, 6, 3): expected int32"},
          {[](P& p) { p.noise = -1; }, "nsa_attention: noise = -1: must be finite and >= 0"},
          {[](P& p) { p.o_cmp = p.o; }, "nsa_attention: o: an output at the same address as o_cmp"},
      });
  using B = NsaAttentionBackwardParams;
  B backward{good, problem.d_o, {}, {}, {}, {}, {}, {}, {}, {}};
  const Status status = nsa_attention_backward(backward);
  EXPECT_EQ(status.message(),
            "nsa_attention_backward: indices: not given: expected int32 (B = 2, Sq = 40, Hkv = 2, topk = 3)");
}

TEST(Refused, Float8OutsideOfACache) {
  // One message per way in: the tensor that decides the type, one that follows it, a weight, a gradient, an output.
  const Case c = batched_case();
  const Problem problem(c);
  const Tensor o = problem.query_rows(c.heads(), c.dv, c.dtype);
  NsaAttentionParams whole = problem.whole();
  whole.o = o;
  using P = NsaAttentionParams;
  expect_refused<P>(nsa_attention, whole,
                    {{[](P& p) { p.q.dtype = DType::kFloat8E4M3; },
                      "nsa_attention: q: float8_e4m3fn (2, 40, 6, 16): expected float32, bfloat16, float16 or float64"},
                     {[](P& p) { p.k_slc.dtype = DType::kFloat8E4M3; },
                      "nsa_attention: k_slc: float8_e4m3fn (2, 48, 2, 16): expected float32 as q"},
                     {[](P& p) { p.gates.dtype = DType::kFloat8E4M3; },
                      "nsa_attention: gates: float8_e4m3fn (2, 40, 6, 3): expected float32 as q"},
                     {[](P& p) { p.o.dtype = DType::kFloat8E4M3; },
                      "nsa_attention: o: float8_e4m3fn (2, 40, 6, 8): expected float32 as q"}});
  CombineBackwardParams backward;
  backward.forward = problem.combination(), backward.d_o = o;
  backward.d_o.dtype = DType::kFloat8E4M3;
  EXPECT_EQ(combine_backward(backward).message(),
            "combine_backward: d_o: float8_e4m3fn (2, 40, 6, 8): expected float32 as o_cmp");
}

TEST(Refused, CompressedCuSeqlens) {
  Tensor offsets(DType::kInt32, {4});
  for (int i = 0; i < 4; ++i) offsets.set({i}, 31 * i + i / 2);  // lengths 31, 32, 31
  const Tensor out(DType::kInt32, {4});
  ASSERT_TRUE(compressed_cu_seqlens(offsets, {}, out).ok());
  EXPECT_EQ(values_of(out), (std::vector<double>{0, 0, 1, 1}));
  Tensor shorter(DType::kInt32, {3});
  EXPECT_EQ(compressed_cu_seqlens(offsets, {}, shorter).message(), "out: int32 (3): expected the shape (B + 1 = 4)");
  offsets.set({0}, 7);
  EXPECT_EQ(compressed_cu_seqlens(offsets, {}, out).message(), "cu_seqlens[0] = 7: must be 0");
}

// Sizes far beyond the data are legal, and take no more memory or time than the data do.

TEST(Bounded, BlocksBeyondTheSequence) {
  Case c = batched_case();
  c.cfg.block_size = 1 << 30;
  const Problem problem(c);
  NsaAttentionParams whole = problem.whole();
  const Tensor o(DType::kFloat32, {2, 40, 6, 8}), same(DType::kFloat32, {2, 40, 6, 8});
  whole.o = o;
  const Status status = nsa_attention(whole, {});
  ASSERT_TRUE(status.ok()) << status.message();
  whole.cfg.block_size = 64;  // all of the sequence, too
  whole.o = same;
  ASSERT_TRUE(nsa_attention(whole, {}).ok());
  EXPECT_TRUE(same_bits(o, same));
}

TEST(Bounded, CompressionBlocksBeyondTheSequence) {
  Case c = batched_case();
  c.q_lens = {300, 300}, c.k_lens = {300, 300};
  const Problem problem(c);
  SelectBlocksParams params = problem.selection();
  params.cfg.kernel_size = 1 << 30, params.cfg.kernel_stride = 1;
  params.k_c = slice(params.k_c, 1, 0, 0);
  const Tensor indices(DType::kInt32, {2, 300, 2, params.cfg.topk});
  params.indices = indices;
  const Status status = select_blocks(params, {});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(indices.get({0, 299, 0, 0}), 0);  // no importances: the first block, and the local ones
}

TEST(Bounded, SequencesWithoutTokens) {
  constexpr std::int64_t kMany = std::numeric_limits<std::int32_t>::max();
  const auto empty = [](std::initializer_list<std::int64_t> shape) {
    return TensorView::contiguous(nullptr, DType::kFloat32, shape);
  };
  SlidingWindowAttentionParams params;
  params.q = params.o = empty({kMany, 0, 2, 8}), params.k = params.v = empty({kMany, 0, 1, 8});
  params.lse = empty({kMany, 2, 0});
  params.window_size = 4;
  const Status status = sliding_window_attention(params, {});
  EXPECT_TRUE(status.ok()) << status.message();

  // There is a gradient to write, zero: the sum over no blocks.
  Tensor w1(DType::kFloat32, {1, 128, 8}), b1(DType::kFloat32, {1, 8}), d_w1(DType::kFloat32, {1, 128, 8}),
      d_b1(DType::kFloat32, {1, 8});
  d_w1.set({0, 127, 7}, 5), d_b1.set({0, 7}, 5);
  CompressBackwardParams backward;
  CompressParams& forward = backward.forward;
  forward.k = backward.d_k = empty({kMany, 0, 1, 8}), forward.out = backward.d_out = empty({kMany, 0, 1, 8});
  forward.cfg = {.kernel_size = 16, .kernel_stride = 16, .block_size = 16, .topk = 3, .window_size = 4};
  forward.weights = {.kind = CompressionKind::kLinear, .w1 = w1, .b1 = b1};
  backward.d_weights.w1 = d_w1, backward.d_weights.b1 = d_b1;
  for (const Backend backend : {Backend::kReference, Backend::kCPU}) {
    const Status done = compress_backward(backward, {.backend = backend});
    ASSERT_TRUE(done.ok()) << done.message();
    EXPECT_EQ(d_w1.get({0, 127, 7}), 0);
    EXPECT_EQ(d_b1.get({0, 7}), 0);
    d_w1.set({0, 127, 7}, 5), d_b1.set({0, 7}, 5);
  }
}

TEST(Backends, WhatIsNotSupportedIsAnErrorWithTheReason) {
  const auto message = [](const Problem& problem, Backend backend) {
    nsa::Backend chosen;
    const Status status = choose_backend({problem.c.dtype, {}, problem.c.dk, problem.c.dv}, {backend, 0}, chosen);
    return status.ok() ? std::string(name_of(chosen)) : status.message();
  };
  Case c = batched_case();
  EXPECT_EQ(message(Problem(c), Backend::kAuto), "cpu");
  EXPECT_EQ(message(Problem(c), Backend::kReference), "reference");
  c.dtype = DType::kFloat64;
  EXPECT_EQ(message(Problem(c), Backend::kAuto),
            "backend cpu: float64: takes float32 and bfloat16 (the reference backend takes every type)");
  EXPECT_EQ(message(Problem(c), Backend::kReference), "reference");
  c.dtype = DType::kFloat32;
  c.dv = 12;
  EXPECT_EQ(message(Problem(c), Backend::kCPU),
            "backend cpu: head dim 12: takes multiples of 8 (the reference backend takes every head dim)");
  Backend chosen;
  const nsa::Problem on_gpu{DType::kFloat32, {DeviceType::kCUDA, 2}, 64, 64};
  EXPECT_EQ(choose_backend(on_gpu, {Backend::kCPU}, chosen).message(),
            "backend cpu: tensors on cuda:2: takes tensors in host memory");
  for (const Backend backend : {Backend::kReference, Backend::kCPU})
    EXPECT_EQ(supports(backend, {.dtype = DType::kFloat8E4M3}).message(),
              std::string("backend ") + name_of(backend) +
                  ": float8_e4m3fn: a cache may store it, no operation computes in it");
  EXPECT_EQ(choose_backend({}, {Backend::kCUDA}, chosen).message(),
            "backend cuda: tensors on the cpu: takes tensors on a CUDA device");
  if (device_count() == 0) {
    EXPECT_EQ(choose_backend(on_gpu, {}, chosen).code(), StatusCode::kUnsupported);
    EXPECT_EQ(supports(Backend::kCUDA, on_gpu).message().find("backend cuda: "), 0u);
  }
}

}  // namespace
}  // namespace nsa::test
