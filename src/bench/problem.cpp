#include "bench/problem.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <memory>
#include <optional>

#include "bridge/compression.h"

namespace nsa::bench {
namespace {

constexpr double kNearestQueries = 1e-4;  // the least 1 - rho of neighbouring queries

at::ScalarType dtype_of(const Dims& shape) { return shape.bfloat16 ? at::kBFloat16 : at::kFloat; }

at::Tensor like(const at::Tensor& tensor) {
  return tensor.defined() ? at::empty(tensor.sizes(), tensor.options()) : at::Tensor();
}

SelectedAttentionParams selected(const NsaAttentionParams& p) {
  return {.q = p.q,
          .k = p.k_slc,
          .v = p.v_slc,
          .indices = p.block_indices.defined() ? p.block_indices : p.indices,
          .block_size = p.cfg.block_size,
          .o = p.o_slc,
          .lse = p.lse_slc};
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

std::vector<std::int32_t> given_blocks(const Shape& shape, std::int64_t length) {
  if (shape.selection == Selection::kRecorded) return shape.recorded.of(length, shape.num_kv_heads);
  return chosen_blocks(shape.selection, shape.nsa, length, shape.num_kv_heads,
                       shape.neighbour_overlap.value_or(kModelOverlap));
}

Problem::Problem(const Shape& shape, std::int64_t length)
    : shape_(shape), length_(length), blocks_(shape.nsa.num_compressed(length)), costs_(shape, length) {
  const at::NoGradGuard no_grad;
  context_.num_threads = shape.threads;
  const auto& cfg = shape.nsa;
  const auto heads = shape.num_heads, kv_heads = shape.num_kv_heads, dk = shape.head_dim, dv = shape.v_head_dim;
  q_ = random(heads, dk);
  k_ = random(kv_heads, dk);
  v_ = random(kv_heads, dv);
  auto& p = attention_;
  p.q = bridge::view_of(q_);
  p.k_slc = p.k_swa = bridge::view_of(k_);
  p.v_slc = p.v_swa = bridge::view_of(v_);
  p.gates = keep(random(heads, 3).sigmoid());
  p.cfg = cfg;
  p.o = keep(at::empty({1, length, heads, dv}, q_.options()));
  if (auto blocks = given_blocks(shape, length); !blocks.empty()) {
    given_overlap_ = bench::neighbour_overlap(blocks, cfg, kv_heads);
    const auto on_host = at::from_blob(blocks.data(), {1, length, kv_heads, cfg.topk}, at::kInt);
    p.block_indices = keep(on_host.clone().to(shape.device));
  }
  p.k_c = keep(at::empty({1, blocks_, kv_heads, dk}, q_.options()));
  p.v_c = keep(at::empty({1, blocks_, kv_heads, dv}, q_.options()));
  for (const auto& [x, out] : {std::pair(bridge::view_of(k_), p.k_c), std::pair(bridge::view_of(v_), p.v_c)}) {
    const CompressParams mean{.k = x, .weights = {.kind = CompressionKind::kMean}, .cfg = cfg, .out = out};
    run(nsa::compress, mean);
  }
  if (shape.selection == Selection::kOwn && shape.neighbour_overlap) correlate_queries(*shape.neighbour_overlap);
}

/// Makes the queries a stationary walk, q_t = rho q_(t-1) + sqrt(1 - rho^2) noise, whose rho gives the overlap: by
/// bisection on the blocks that the selector chooses.
void Problem::correlate_queries(double overlap) {
  const auto noise = q_.clone();
  double low = 0, high = 1;  // of log(1 - rho) over its last value
  for (int step = 0; step < 10; ++step) {
    const double middle = (low + high) / 2, rho = 1 - std::pow(kNearestQueries, middle);
    q_.copy_(noise);
    q_.narrow(1, 1, length_ - 1).mul_(std::sqrt(1 - rho * rho));
    double weight = rho;
    for (std::int64_t shift = 1; shift < length_ && weight > 1e-4; shift *= 2, weight *= weight)
      q_.narrow(1, shift, length_ - shift).add_(q_.narrow(1, 0, length_ - shift).mul(weight));
    (neighbour_overlap().value_or(1) < overlap ? low : high) = middle;
  }
}

std::optional<double> Problem::neighbour_overlap() const {
  if (attention_.block_indices.defined()) return given_overlap_;
  const auto indices = new_indices();
  auto forward = attention_;
  forward.indices = bridge::view_of(indices);
  run(nsa::nsa_attention, forward);
  const auto on_host = indices.cpu();
  const auto* const blocks = on_host.const_data_ptr<std::int32_t>();
  return bench::neighbour_overlap({blocks, static_cast<std::size_t>(on_host.numel())}, shape_.nsa, shape_.num_kv_heads);
}

TensorView Problem::keep(const at::Tensor& tensor) {
  storage_.push_back(tensor);
  return bridge::view_of(tensor);
}

/// In the dtype from the start: in float32 the queries of a million tokens would not fit.
at::Tensor Problem::random(std::int64_t heads, std::int64_t width) const {
  return at::randn({1, length_, heads, width}, at::TensorOptions(shape_.device).dtype(dtype_of(shape_)));
}

at::Tensor Problem::new_indices() const {
  return at::empty({1, length_, shape_.num_kv_heads, shape_.nsa.topk}, q_.options().dtype(at::kInt));
}

/// Room for what the operations hand to each other and what the backward needs.
void Problem::keep_branches() {
  auto& p = attention_;
  if (p.indices.defined()) return;
  const auto heads = shape_.num_heads;
  const auto options = q_.options();
  for (auto* o : {&p.o_cmp, &p.o_slc, &p.o_swa}) *o = keep(at::empty({1, length_, heads, shape_.v_head_dim}, options));
  for (auto* lse : {&p.lse_cmp, &p.lse_slc, &p.lse_swa})
    *lse = keep(at::empty({1, heads, length_}, options.dtype(at::kFloat)));
  p.indices = keep(new_indices());
}

/// Room for the gradients, and a forward for them to start from.
void Problem::keep_gradients() {
  auto& b = backward_;
  if (b.forward.q.defined()) return;
  keep_branches();
  run(nsa::nsa_attention, attention_);
  b.forward = attention_;
  d_o_ = random(shape_.num_heads, shape_.v_head_dim);
  b.d_o = bridge::view_of(d_o_);
  const auto gradient = [&](const TensorView& like) {
    const std::vector<std::int64_t> sizes(like.shape.begin(), like.shape.begin() + like.rank);
    return keep(at::empty(sizes, k_.options()));
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

// ---------------------------------------------------------------------------------------------------------- compress

Problem::Side Problem::make_side(CompressionKind phi, bool keys) const {
  const auto dim = keys ? shape_.head_dim : shape_.v_head_dim;
  const std::int64_t tokens = shape_.nsa.kernel_size, hidden = 2 * dim;
  Side side;
  side.x = keys ? k_ : v_;
  side.out = at::empty({1, blocks_, shape_.num_kv_heads, dim}, side.x.options());
  side.d_out = at::randn(side.out.sizes(), side.x.device()).to(side.x.scalar_type());
  side.d_x = like(side.x);
  auto& weights = side.weights;
  weights.kind = phi;
  if (phi == CompressionKind::kLinear) weights.w1 = bridge::mean_weight(1, tokens, dim);
  if (phi == CompressionKind::kMlp) {
    weights.w1 = at::randn({1, tokens * dim, hidden});
    weights.w2 = at::randn({1, hidden, dim});
    bridge::initialise_mlp(weights.w1, weights.w2, tokens);
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

CompressParams Problem::compress_params(const Side& side) const {
  return {.k = bridge::view_of(side.x),
          .weights = side.weights.views(),
          .cfg = shape_.nsa,
          .out = bridge::view_of(side.out)};
}

CompressBackwardParams Problem::compress_backward_params(const Side& side) const {
  return {.forward = compress_params(side),
          .d_out = bridge::view_of(side.d_out),
          .d_k = bridge::view_of(side.d_x),
          .d_weights = side.d_weights.views()};
}

std::function<void()> Problem::compress_work(CompressionKind phi, bool backward) const {
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

// ------------------------------------------------------------------------------------------------- end to end and by
// parts

Case Problem::end_to_end(CompressionKind phi, bool backward) {
  if (backward) keep_gradients();
  auto forward = attention_;
  if (!backward) {  // keep nothing that only the backward needs
    forward.indices = forward.o_cmp = forward.o_slc = forward.o_swa = {};
    forward.lse_cmp = forward.lse_slc = forward.lse_swa = {};
  }
  if (forward.block_indices.defined() && !forward.indices.defined())  // or no blocks would be selected
    forward.indices = keep(new_indices());
  const auto compress_back = backward ? compress_work(phi, true) : nullptr;
  const auto work = [this, forward, compress_both = compress_work(phi, false), compress_back](const StageMark& mark) {
    compress_both();
    mark("compress");
    run(nsa::nsa_attention, forward, &mark);
    if (!compress_back) return;
    run(nsa::nsa_attention_backward, backward_, &mark);
    compress_back();
    mark("compress_backward");
  };
  const std::string op = backward ? "forward_backward" : "forward";
  Case task{.op = op,
            .variant = name_of(phi),
            .cost = cost(op, phi),
            .work = [work] { work([](const char*) {}); },
            .staged = {}};
  if (shape_.device.is_cuda()) task.staged = work;
  return task;
}

std::vector<Case> Problem::operations(const std::vector<CompressionKind>& phis, bool backward) {
  std::vector<Case> cases;
  const std::string op = backward ? "compress_backward" : "compress";
  for (const auto phi : phis) {
    cases.push_back(
        {.op = op, .variant = name_of(phi), .cost = cost(op, phi), .work = compress_work(phi, backward), .staged = {}});
  }
  for (auto& each : backward ? backward_operations() : forward_operations()) cases.push_back(std::move(each));
  return cases;
}

std::vector<Case> Problem::forward_operations() {
  keep_branches();
  const auto& p = attention_;
  const CompressedAttentionParams compressed{
      .q = p.q, .k_c = p.k_c, .v_c = p.v_c, .cfg = p.cfg, .o = p.o_cmp, .lse = p.lse_cmp};
  const SelectBlocksParams select{.q = p.q, .k_c = p.k_c, .lse = p.lse_cmp, .cfg = p.cfg, .indices = p.indices};
  const SlidingWindowAttentionParams window{
      .q = p.q, .k = p.k_swa, .v = p.v_swa, .window_size = p.cfg.window_size, .o = p.o_swa, .lse = p.lse_swa};
  const CombineParams combination{.o_cmp = p.o_cmp, .o_slc = p.o_slc, .o_swa = p.o_swa, .gates = p.gates, .o = p.o};
  return {
      operation("compressed_attention", nsa::compressed_attention, compressed),
      operation("select_blocks", nsa::select_blocks, select),
      operation("selected_attention", nsa::selected_attention, selected(p)),
      operation("sliding_window_attention", nsa::sliding_window_attention, window),
      operation("combine", nsa::combine, combination),
  };
}

std::vector<Case> Problem::backward_operations() {
  keep_gradients();
  const auto& b = backward_;
  const auto& p = b.forward;
  const CompressedAttentionBackwardParams compressed{
      .forward = {.q = p.q, .k_c = p.k_c, .v_c = p.v_c, .cfg = p.cfg, .o = p.o_cmp, .lse = p.lse_cmp},
      .d_o = b.d_o,
      .d_q = b.d_q,
      .d_k_c = b.d_k_c,
      .d_v_c = b.d_v_c};
  const SelectedAttentionBackwardParams selection{
      .forward = selected(p), .d_o = b.d_o, .d_q = b.d_q, .d_k = b.d_k_slc, .d_v = b.d_v_slc};
  const SlidingWindowAttentionBackwardParams window{
      .forward =
          {.q = p.q, .k = p.k_swa, .v = p.v_swa, .window_size = p.cfg.window_size, .o = p.o_swa, .lse = p.lse_swa},
      .d_o = b.d_o,
      .d_q = b.d_q,
      .d_k = b.d_k_swa,
      .d_v = b.d_v_swa};
  return {
      operation("compressed_attention_backward", nsa::compressed_attention_backward, compressed),
      operation("selected_attention_backward", nsa::selected_attention_backward, selection),
      operation("sliding_window_attention_backward", nsa::sliding_window_attention_backward, window),
  };
}

// -------------------------------------------------------------------------------------------------- dense attention

Case Problem::plain(bool backward) {
  keep_branches();
  const auto& p = attention_;
  const SlidingWindowAttentionParams forward{
      .q = p.q, .k = p.k_swa, .v = p.v_swa, .window_size = length_, .o = p.o_swa, .lse = p.lse_swa};
  if (!backward) return operation("plain_forward", nsa::sliding_window_attention, forward);
  keep_gradients();
  const SlidingWindowAttentionBackwardParams gradients{.forward = forward,
                                                       .d_o = backward_.d_o,
                                                       .d_q = backward_.d_q,
                                                       .d_k = backward_.d_k_swa,
                                                       .d_v = backward_.d_v_swa};
  Case both = operation("plain_forward_backward", nsa::sliding_window_attention_backward, gradients);
  both.work = [=, this, back = both.work] {
    run(nsa::sliding_window_attention, forward);
    back();
  };
  return both;
}

std::vector<std::string> Problem::dense_forms() const {
  if (shape_.device.is_cpu()) return {"expanded", "gqa"};
  if (shape_.flash3) return {"cudnn", "flash2", "flash3"};
  return {"cudnn", "flash2"};
}

std::function<void()> Problem::flash3_work(bool backward) const {
  return [=, this, &flash3 = *shape_.flash3] {
    const at::NoGradGuard no_grad;
    const auto out = flash3.forward(q_, k_, v_);
    if (backward) flash3.backward(d_o_, q_, k_, v_, out);
  };
}

Case Problem::dense(const std::string& form, bool backward) {
  const std::string op = backward ? "dense_forward_backward" : "dense_forward";
  if (backward) keep_gradients();
  if (form == "flash3") {
    return {.op = op, .variant = form, .cost = costs_.of(op), .work = flash3_work(backward), .staged = {}};
  }
  const auto leaf = [&](const at::Tensor& x) { return x.detach().requires_grad_(backward); };
  const auto q = leaf(q_), k = leaf(k_), v = leaf(v_);
  const auto d_o = backward ? d_o_.transpose(1, 2) : at::Tensor();
  const auto heads = shape_.num_heads, group = heads / shape_.num_kv_heads;
  const auto narrower = form == "flash2" ? shape_.head_dim - shape_.v_head_dim : 0;
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
    const auto values = narrower > 0 ? at::constant_pad_nd(v, {0, narrower}) : v;
    auto o = at::scaled_dot_product_attention(q.transpose(1, 2), arrange(k), arrange(values), {}, 0.0,
                                              /*is_causal=*/true, {}, gqa);
    if (narrower > 0) o = o.narrow(-1, 0, v.size(-1));
    if (!backward) return;
    o.backward(d_o);
    for (const auto& x : {q, k, v}) x.mutable_grad().reset();
  };
  return {.op = op, .variant = form, .cost = costs_.of(op), .work = work, .staged = {}};
}

}  // namespace nsa::bench
