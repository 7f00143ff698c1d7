#include "lm/bench_problem.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "lm/phi_init.h"

namespace nsa::lm {
namespace {

constexpr double kBackwardCost = 2.5;  // five products of the same size instead of two

at::ScalarType dtype_of(const BenchShape& shape) { return shape.bfloat16 ? at::kBFloat16 : at::kFloat; }

std::int64_t bytes_of(std::initializer_list<TensorView> views) {
  std::int64_t bytes = 0;
  for (const auto& view : views) {
    if (view.defined()) bytes += view.numel() * static_cast<std::int64_t>(size_of(view.dtype));
  }
  return bytes;
}

at::Tensor like(const at::Tensor& tensor) {
  return tensor.defined() ? at::empty(tensor.sizes(), tensor.options()) : at::Tensor();
}

/// While it lives, torch's attention on CUDA runs on this back end or throws.
class OneBackEnd {
 public:
  explicit OneBackEnd(const std::string& form) { set(form == "cudnn", form == "flash2", false); }
  OneBackEnd(const OneBackEnd&) = delete;
  ~OneBackEnd() { set(true, true, true); }

 private:
  static void set(bool cudnn, bool flash, bool others) {
    auto& torch = at::globalContext();
    torch.setSDPUseCuDNN(cudnn);
    torch.setSDPUseFlash(flash);
    torch.setSDPUseMemEfficient(others);
    torch.setSDPUseMath(others);
  }
};

}  // namespace

BenchProblem::BenchProblem(const BenchShape& shape, std::int64_t length)
    : shape_(shape), length_(length), blocks_(shape.nsa.num_compressed(length)) {
  const at::NoGradGuard no_grad;
  context_.num_threads = shape.threads;
  const auto& cfg = shape.nsa;
  for (std::int64_t t = 0; t < length; ++t) {
    const std::int64_t reach = static_cast<std::int64_t>(cfg.topk - 1) * cfg.block_size + t % cfg.block_size + 1;
    compressed_pairs_ += static_cast<double>(cfg.num_compressed(t + 1));
    selected_pairs_ += static_cast<double>(std::min(t + 1, reach));
    window_pairs_ += static_cast<double>(std::min<std::int64_t>(t + 1, cfg.window_size));
    causal_pairs_ += static_cast<double>(t + 1);
  }
  const auto keep = [&](at::Tensor tensor) {
    storage_.push_back(tensor);
    return view_of(tensor);
  };
  const auto options = at::TensorOptions(shape.device).dtype(dtype_of(shape));
  const auto random = [&](std::int64_t heads, std::int64_t width) {
    return at::randn({1, length, heads, width}, shape.device).to(dtype_of(shape));
  };
  const auto empty = [&](std::int64_t rows, std::int64_t heads, std::int64_t width) {
    return at::empty({1, rows, heads, width}, options);
  };
  const auto heads = shape.num_heads, kv_heads = shape.num_kv_heads, dk = shape.head_dim, dv = shape.v_head_dim;
  k_ = random(kv_heads, dk);
  v_ = random(kv_heads, dv);
  d_o_ = random(heads, dv);

  auto& p = attention_;
  p.q = keep(random(heads, dk));
  p.k_slc = p.k_swa = view_of(k_);
  p.v_slc = p.v_swa = view_of(v_);
  p.gates = keep(random(heads, 3).sigmoid());
  p.cfg = cfg;
  for (auto* o : {&p.o, &p.o_cmp, &p.o_slc, &p.o_swa}) *o = keep(empty(length, heads, dv));
  for (auto* lse : {&p.lse_cmp, &p.lse_slc, &p.lse_swa})
    *lse = keep(at::empty({1, heads, length}, options.dtype(at::kFloat)));
  p.indices = keep(at::empty({1, length, kv_heads, cfg.topk}, options.dtype(at::kInt)));
  p.k_c = keep(empty(blocks_, kv_heads, dk));
  p.v_c = keep(empty(blocks_, kv_heads, dv));
  for (const auto& [x, out] : {std::pair(view_of(k_), p.k_c), std::pair(view_of(v_), p.v_c)}) {
    const CompressParams mean{.k = x, .weights = {.kind = CompressionKind::kMean}, .cfg = cfg, .out = out};
    run(nsa::compress, mean);
  }
}

// ------------------------------------------------------------------------------------------------------------- costs

double BenchProblem::gflop(double pairs, double channels) const {
  return 2e-9 * pairs * channels * static_cast<double>(shape_.num_heads);
}

double BenchProblem::compress_gflop(CompressionKind phi) const {
  double total = 0;
  for (const std::int64_t dim : {shape_.head_dim, shape_.v_head_dim}) {
    const double d = static_cast<double>(dim), flat = d * shape_.nsa.kernel_size;
    if (phi == CompressionKind::kMean) total += flat;
    if (phi == CompressionKind::kLinear) total += 2 * flat * d;
    if (phi == CompressionKind::kMlp) total += 2 * flat * 2 * d + 2 * 2 * d * d;
  }
  return 1e-9 * total * static_cast<double>(blocks_ * shape_.num_kv_heads);
}

std::int64_t BenchProblem::compress_bytes() const {
  return bytes_of({view_of(k_), view_of(v_), attention_.k_c, attention_.v_c});
}

// ---------------------------------------------------------------------------------------------------------- compress

BenchProblem::Side BenchProblem::make_side(CompressionKind phi, bool keys) const {
  const auto dim = keys ? shape_.head_dim : shape_.v_head_dim;
  const std::int64_t tokens = shape_.nsa.kernel_size, hidden = 2 * dim;
  Side side;
  side.x = keys ? k_ : v_;
  side.out = at::empty({1, blocks_, shape_.num_kv_heads, dim}, side.x.options());
  side.d_out = at::randn(side.out.sizes(), side.x.device()).to(side.x.scalar_type());
  side.d_x = like(side.x);
  auto& weights = side.weights;
  weights.kind = phi;
  if (phi == CompressionKind::kLinear) weights.w1 = mean_weight(1, tokens, dim);
  if (phi == CompressionKind::kMlp) {
    weights.w1 = at::randn({1, tokens * dim, hidden});
    weights.w2 = at::randn({1, hidden, dim});
    initialise_mlp(weights.w1, weights.w2, tokens);
    weights.b2 = at::zeros({1, dim});
  }
  if (phi != CompressionKind::kMean) {
    weights.pe = at::zeros({1, tokens, dim});
    weights.b1 = at::zeros({1, weights.w1.size(2)});
  }
  weights = weights.to(side.x.options());
  side.d_weights = {phi, like(weights.pe), like(weights.w1), like(weights.b1), like(weights.w2), like(weights.b2)};
  return side;
}

CompressParams BenchProblem::compress_params(const Side& side) const {
  return {.k = view_of(side.x), .weights = side.weights.views(), .cfg = shape_.nsa, .out = view_of(side.out)};
}

CompressBackwardParams BenchProblem::compress_backward_params(const Side& side) const {
  return {.forward = compress_params(side),
          .d_out = view_of(side.d_out),
          .d_k = view_of(side.d_x),
          .d_weights = side.d_weights.views()};
}

std::function<void()> BenchProblem::compress_work(CompressionKind phi, bool backward) const {
  const at::NoGradGuard no_grad;
  const auto sides =
      std::make_shared<const std::array<Side, 2>>(std::array{make_side(phi, true), make_side(phi, false)});
  return [this, sides, backward] {
    for (const auto& side : *sides) {
      if (backward) {
        run(nsa::compress_backward, compress_backward_params(side));
      } else {
        run(nsa::compress, compress_params(side));
      }
    }
  };
}

// ------------------------------------------------------------------------------------------------- whole and by parts

BenchCase BenchProblem::whole(CompressionKind phi, bool backward) {
  const double dk = static_cast<double>(shape_.head_dim), dv = static_cast<double>(shape_.v_head_dim);
  const double forward_gflop =
      gflop(compressed_pairs_ + selected_pairs_ + window_pairs_, dk + dv) + compress_gflop(phi);
  auto forward = attention_;
  if (!backward) {  // keep nothing that only the backward needs
    forward.indices = forward.o_cmp = forward.o_slc = forward.o_swa = {};
    forward.lse_cmp = forward.lse_slc = forward.lse_swa = {};
  }
  const auto bytes = compress_bytes() + bytes_of({forward.q, forward.k_c, forward.v_c, forward.gates, forward.o}) +
                     2 * bytes_of({view_of(k_), view_of(v_)});
  auto compress_both = compress_work(phi, false);
  auto attend = [this, forward, compress_both] {
    compress_both();
    run(nsa::nsa_attention, forward);
  };
  if (!backward) return {"forward", name_of(phi), forward_gflop, bytes, attend};
  backward_operations();  // makes room for the gradients
  return {"forward_backward", name_of(phi), (1 + kBackwardCost) * forward_gflop, 3 * bytes,
          [this, attend, compress_back = compress_work(phi, true)] {
            attend();
            run(nsa::nsa_attention_backward, backward_);
            compress_back();
          }};
}

std::vector<BenchCase> BenchProblem::operations(const std::vector<CompressionKind>& phis, bool backward) {
  std::vector<BenchCase> cases;
  for (const auto phi : phis) {
    cases.push_back({backward ? "compress_backward" : "compress", name_of(phi),
                     (backward ? 2 : 1) * compress_gflop(phi), (backward ? 2 : 1) * compress_bytes(),
                     compress_work(phi, backward)});
  }
  for (auto& each : backward ? backward_operations() : forward_operations()) cases.push_back(std::move(each));
  return cases;
}

std::vector<BenchCase> BenchProblem::forward_operations() {
  const auto& p = attention_;
  const double dk = static_cast<double>(shape_.head_dim), both = dk + static_cast<double>(shape_.v_head_dim);
  const CompressedAttentionParams compressed{
      .q = p.q, .k_c = p.k_c, .v_c = p.v_c, .cfg = p.cfg, .o = p.o_cmp, .lse = p.lse_cmp};
  const SelectBlocksParams select{.q = p.q, .k_c = p.k_c, .lse = p.lse_cmp, .cfg = p.cfg, .indices = p.indices};
  const SelectedAttentionParams selected{.q = p.q,
                                         .k = p.k_slc,
                                         .v = p.v_slc,
                                         .indices = p.indices,
                                         .block_size = p.cfg.block_size,
                                         .o = p.o_slc,
                                         .lse = p.lse_slc};
  const SlidingWindowAttentionParams window{
      .q = p.q, .k = p.k_swa, .v = p.v_swa, .window_size = p.cfg.window_size, .o = p.o_swa, .lse = p.lse_swa};
  const CombineParams combination{.o_cmp = p.o_cmp, .o_slc = p.o_slc, .o_swa = p.o_swa, .gates = p.gates, .o = p.o};
  return {
      {"compressed_attention", "", gflop(compressed_pairs_, both), bytes_of({p.q, p.k_c, p.v_c, p.o_cmp, p.lse_cmp}),
       [=, this] { run(nsa::compressed_attention, compressed); }},
      {"select_blocks", "", gflop(compressed_pairs_, dk), bytes_of({p.q, p.k_c, p.lse_cmp, p.indices}),
       [=, this] { run(nsa::select_blocks, select); }},
      {"selected_attention", "", gflop(selected_pairs_, both),
       bytes_of({p.q, p.k_slc, p.v_slc, p.indices, p.o_slc, p.lse_slc}),
       [=, this] { run(nsa::selected_attention, selected); }},
      {"sliding_window_attention", "", gflop(window_pairs_, both),
       bytes_of({p.q, p.k_swa, p.v_swa, p.o_swa, p.lse_swa}),
       [=, this] { run(nsa::sliding_window_attention, window); }},
      {"combine", "", 5e-9 * static_cast<double>(p.o.numel()), bytes_of({p.o_cmp, p.o_slc, p.o_swa, p.gates, p.o}),
       [=, this] { run(nsa::combine, combination); }},
  };
}

std::vector<BenchCase> BenchProblem::backward_operations() {
  auto& b = backward_;
  if (!b.forward.q.defined()) {
    run(nsa::nsa_attention, attention_);
    b.forward = attention_;
    b.d_o = view_of(d_o_);
    const auto gradient = [&](TensorView like) {
      std::vector<std::int64_t> sizes(like.shape.begin(), like.shape.begin() + like.rank);
      storage_.push_back(at::empty(sizes, k_.options()));
      return view_of(storage_.back());
    };
    b.d_q = gradient(b.forward.q);
    b.d_k_c = gradient(b.forward.k_c);
    b.d_v_c = gradient(b.forward.v_c);
    b.d_k_slc = gradient(b.forward.k_slc);
    b.d_v_slc = gradient(b.forward.v_slc);
    b.d_k_swa = gradient(b.forward.k_swa);
    b.d_v_swa = gradient(b.forward.v_swa);
    b.d_gates = gradient(b.forward.gates);
  }
  const auto& p = b.forward;
  const double channels = kBackwardCost * static_cast<double>(shape_.head_dim + shape_.v_head_dim);
  const CompressedAttentionBackwardParams compressed{
      .forward = {.q = p.q, .k_c = p.k_c, .v_c = p.v_c, .cfg = p.cfg, .o = p.o_cmp, .lse = p.lse_cmp},
      .d_o = b.d_o,
      .d_q = b.d_q,
      .d_k_c = b.d_k_c,
      .d_v_c = b.d_v_c};
  const SelectedAttentionBackwardParams selected{.forward = {.q = p.q,
                                                             .k = p.k_slc,
                                                             .v = p.v_slc,
                                                             .indices = p.indices,
                                                             .block_size = p.cfg.block_size,
                                                             .o = p.o_slc,
                                                             .lse = p.lse_slc},
                                                 .d_o = b.d_o,
                                                 .d_q = b.d_q,
                                                 .d_k = b.d_k_slc,
                                                 .d_v = b.d_v_slc};
  const SlidingWindowAttentionBackwardParams window{
      .forward =
          {.q = p.q, .k = p.k_swa, .v = p.v_swa, .window_size = p.cfg.window_size, .o = p.o_swa, .lse = p.lse_swa},
      .d_o = b.d_o,
      .d_q = b.d_q,
      .d_k = b.d_k_swa,
      .d_v = b.d_v_swa};
  const auto queries = bytes_of({p.q, p.o, b.d_o, b.d_q, p.lse_cmp});
  return {
      {"compressed_attention_backward", "", gflop(compressed_pairs_, channels), queries + 2 * bytes_of({p.k_c, p.v_c}),
       [=, this] { run(nsa::compressed_attention_backward, compressed); }},
      {"selected_attention_backward", "", gflop(selected_pairs_, channels),
       queries + 2 * bytes_of({p.k_slc, p.v_slc, p.indices}),
       [=, this] { run(nsa::selected_attention_backward, selected); }},
      {"sliding_window_attention_backward", "", gflop(window_pairs_, channels),
       queries + 2 * bytes_of({p.k_swa, p.v_swa}), [=, this] { run(nsa::sliding_window_attention_backward, window); }},
  };
}

// -------------------------------------------------------------------------------------------------- dense attention

BenchCase BenchProblem::plain(bool backward) {
  const auto& p = attention_;
  const SlidingWindowAttentionParams forward{
      .q = p.q, .k = p.k_swa, .v = p.v_swa, .window_size = length_, .o = p.o_swa, .lse = p.lse_swa};
  const double cost = gflop(causal_pairs_, static_cast<double>(shape_.head_dim + shape_.v_head_dim));
  const auto bytes = bytes_of({p.q, p.k_swa, p.v_swa, p.o_swa, p.lse_swa});
  if (!backward) {
    return {"plain_forward", "", cost, bytes, [=, this] { run(nsa::sliding_window_attention, forward); }};
  }
  backward_operations();  // makes room for the gradients
  const SlidingWindowAttentionBackwardParams gradients{.forward = forward,
                                                       .d_o = backward_.d_o,
                                                       .d_q = backward_.d_q,
                                                       .d_k = backward_.d_k_swa,
                                                       .d_v = backward_.d_v_swa};
  return {"plain_forward_backward", "", (1 + kBackwardCost) * cost, 3 * bytes, [=, this] {
            run(nsa::sliding_window_attention, forward);
            run(nsa::sliding_window_attention_backward, gradients);
          }};
}

std::vector<std::string> BenchProblem::dense_forms(at::Device device) {
  if (device.is_cpu()) return {"expanded", "gqa"};
  return {"cudnn", "flash2"};
}

BenchCase BenchProblem::dense(const std::string& form, bool backward) {
  const auto leaf = [&](const at::Tensor& x) { return x.detach().requires_grad_(backward); };
  const auto q = leaf(storage_.front()), k = leaf(k_), v = leaf(v_);
  const auto d_o = d_o_.transpose(1, 2);
  const auto heads = shape_.num_heads, group = heads / shape_.num_kv_heads;
  const bool gqa = form != "expanded";
  const auto arrange = [=](const at::Tensor& x) {
    if (gqa) return x.transpose(1, 2);
    const auto sizes = x.sizes();  // (1, S, Hkv, D)
    return x.unsqueeze(3)
        .expand({sizes[0], sizes[1], sizes[2], group, sizes[3]})
        .reshape({sizes[0], sizes[1], heads, sizes[3]})
        .transpose(1, 2);
  };
  const auto work = [=, on_host = shape_.device.is_cpu()] {
    std::optional<OneBackEnd> alone;
    if (!on_host) alone.emplace(form);
    const at::AutoGradMode mode(backward);
    const auto o = at::scaled_dot_product_attention(q.transpose(1, 2), arrange(k), arrange(v), {}, 0.0,
                                                    /*is_causal=*/true, {}, gqa);
    if (!backward) return;
    o.backward(d_o);
    for (const auto& x : {q, k, v}) x.mutable_grad().reset();
  };
  const double cost = gflop(causal_pairs_, static_cast<double>(shape_.head_dim + shape_.v_head_dim));
  const auto bytes = bytes_of({attention_.q, attention_.k_swa, attention_.v_swa, attention_.o});
  return {backward ? "dense_forward_backward" : "dense_forward", form, (backward ? 1 + kBackwardCost : 1) * cost,
          (backward ? 3 : 1) * bytes, work};
}

}  // namespace nsa::lm
