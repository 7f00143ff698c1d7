// Replays a dumped call on any backend and compares its outputs with the oracle's.
#include <ATen/core/grad_mode.h>
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/error.h"
#include "bridge/call.h"
#include "nsa/backend.h"
#include "replay/replay.h"

namespace nsa::replay {
namespace {

using Shape = std::vector<std::int64_t>;

/// (B, Sq, H, D) -> (B, H, Sq); (total, H, D) -> (H, total)
Shape log_sum_shape(at::IntArrayRef q) { return q.size() == 4 ? Shape{q[0], q[2], q[1]} : Shape{q[1], q[0]}; }

/// `like` with its last dimension replaced.
Shape with_width(at::IntArrayRef like, std::int64_t width) {
  Shape shape(like.begin(), like.end());
  shape.back() = width;
  return shape;
}

/// The indices of queries (…, H, D) for keys (…, Hkv, D).
Shape indices_shape(at::IntArrayRef q, at::IntArrayRef k, std::int64_t topk) {
  Shape shape = with_width(q, topk);
  shape[shape.size() - 2] = k[k.size() - 2];
  return shape;
}

Status replay_compress(CallArguments& a, const Context& context) {
  CompressParams p{
      .k = a.in("k"), .weights = a.weights("weights."), .cfg = a.config(), .cu_seqlens = a.in("cu_seqlens")};
  Shape shape(a.shape("k").begin(), a.shape("k").end());
  auto& rows = shape[shape.size() - 3];
  rows = p.cfg.compressed_rows(rows, p.cu_seqlens.defined());
  p.out = a.out("out", shape);
  return nsa::compress(p, context);
}

/// Gradients of the weights whose names begin with `prefix`.
CompressionWeights weight_gradients(CallArguments& a, const std::string& prefix) {
  const auto gradient = [&](const char* name) { return a.out_like("d_" + prefix + name, prefix + name); };
  return {.pe = gradient("pe"), .w1 = gradient("w1"), .b1 = gradient("b1"), .w2 = gradient("w2"), .b2 = gradient("b2")};
}

Status replay_compress_backward(CallArguments& a, const Context& context) {
  CompressBackwardParams p;
  p.forward = {.k = a.in("k"), .weights = a.weights("weights."), .cfg = a.config(), .cu_seqlens = a.in("cu_seqlens")};
  p.d_out = a.in("d_out");
  p.d_k = a.out_like("d_k", "k");
  p.d_weights = weight_gradients(a, "weights.");
  return nsa::compress_backward(p, context);
}

std::optional<std::int64_t> keys_length(const CallArguments& a, const DumpedCall& call) {
  if (!call.scalars.count("seqlen_k")) return std::nullopt;
  return a.scalar<std::int64_t>("seqlen_k");
}

CompressedAttentionParams compressed_params(CallArguments& a, const DumpedCall& call) {
  return {.q = a.in("q"),
          .k_c = a.in("k_c"),
          .v_c = a.in("v_c"),
          .cfg = a.config(),
          .softmax_scale = a.softmax_scale(),
          .seqlen_k = keys_length(a, call),
          .packed = a.packed(),
          .o = a.in("o"),
          .lse = a.in("lse")};
}

SelectedAttentionParams selected_params(CallArguments& a) {
  return {.q = a.in("q"),
          .k = a.in("k"),
          .v = a.in("v"),
          .indices = a.in("indices"),
          .block_size = a.scalar<int>("block_size"),
          .softmax_scale = a.softmax_scale(),
          .packed = a.packed(),
          .o = a.in("o"),
          .lse = a.in("lse")};
}

SlidingWindowAttentionParams window_params(CallArguments& a) {
  return {.q = a.in("q"),
          .k = a.in("k"),
          .v = a.in("v"),
          .window_size = a.scalar<std::int64_t>("window_size"),
          .softmax_scale = a.softmax_scale(),
          .packed = a.packed(),
          .o = a.in("o"),
          .lse = a.in("lse")};
}

/// The outputs of attention to keys whose values are the tensor `values`.
template <class Params>
Params with_outputs(CallArguments& a, Params p, const char* values) {
  p.o = a.out("o", with_width(a.shape("q"), a.shape(values).back()));
  p.lse = a.out("lse", log_sum_shape(a.shape("q")), at::kFloat);
  return p;
}

template <class Params, class Forward>
Params token_backward(CallArguments& a, const Forward& forward) {
  return {.forward = forward,
          .d_o = a.in("d_o"),
          .d_q = a.out_like("d_q", "q"),
          .d_k = a.out_like("d_k", "k"),
          .d_v = a.out_like("d_v", "v")};
}

Status replay_select(CallArguments& a, const DumpedCall& call, const Context& context) {
  SelectBlocksParams p{.q = a.in("q"),
                       .k_c = a.in("k_c"),
                       .lse = a.in("lse"),
                       .cfg = a.config(),
                       .softmax_scale = a.softmax_scale(),
                       .seqlen_k = keys_length(a, call),
                       .noise = a.scalar<double>("noise"),
                       .seed = a.scalar<std::uint64_t>("seed"),
                       .packed = a.packed()};
  p.indices = a.out("indices", indices_shape(a.shape("q"), a.shape("k_c"), p.cfg.topk), at::kInt);
  return nsa::select_blocks(p, context);
}

NsaAttentionParams whole_params(CallArguments& a) {
  return {.q = a.in("q"),
          .k_c = a.in("k_c"),
          .v_c = a.in("v_c"),
          .k_slc = a.in("k_slc"),
          .v_slc = a.in("v_slc"),
          .k_swa = a.in("k_swa"),
          .v_swa = a.in("v_swa"),
          .gates = a.in("gates"),
          .cfg = a.config(),
          .softmax_scale = a.softmax_scale(),
          .noise = a.scalar<double>("noise"),
          .seed = a.scalar<std::uint64_t>("seed"),
          .packed = a.packed(),
          .block_indices = a.in("block_indices"),
          .indices = a.in("indices"),
          .o_cmp = a.in("o_cmp"),
          .o_slc = a.in("o_slc"),
          .o_swa = a.in("o_swa"),
          .lse_cmp = a.in("lse_cmp"),
          .lse_slc = a.in("lse_slc"),
          .lse_swa = a.in("lse_swa")};
}

/// Fresh outputs of the attention behind keys and values named so.
void add_outputs(CallArguments& a, NsaAttentionParams& p, const char* keys, const char* values) {
  const auto o = with_width(a.shape("q"), a.shape(values).back()), lse = log_sum_shape(a.shape("q"));
  p.indices = a.out("indices", indices_shape(a.shape("q"), a.shape(keys), p.cfg.topk), at::kInt);
  p.o = a.out("o", o);
  p.o_cmp = a.out("o_cmp", o);
  p.o_slc = a.out("o_slc", o);
  p.o_swa = a.out("o_swa", o);
  p.lse_cmp = a.out("lse_cmp", lse, at::kFloat);
  p.lse_slc = a.out("lse_slc", lse, at::kFloat);
  p.lse_swa = a.out("lse_swa", lse, at::kFloat);
}

Status replay_nsa_attention(CallArguments& a, const at::Tensor& given, const Context& context) {
  auto p = whole_params(a);
  if (given.defined()) p.block_indices = bridge::view_of(given);
  add_outputs(a, p, "k_c", "v_c");
  return nsa::nsa_attention(p, context);
}

Status replay_nsa_attention_backward(CallArguments& a, const Context& context) {
  return nsa::nsa_attention_backward({.forward = whole_params(a),
                                      .d_o = a.in("d_o"),
                                      .d_q = a.out_like("d_q", "q"),
                                      .d_k_c = a.out_like("d_k_c", "k_c"),
                                      .d_v_c = a.out_like("d_v_c", "v_c"),
                                      .d_k_slc = a.out_like("d_k_slc", "k_slc"),
                                      .d_v_slc = a.out_like("d_v_slc", "v_slc"),
                                      .d_k_swa = a.out_like("d_k_swa", "k_swa"),
                                      .d_v_swa = a.out_like("d_v_swa", "v_swa"),
                                      .d_gates = a.out_like("d_gates", "gates")},
                                     context);
}

NativeSparseAttentionParams layer_params(CallArguments& a) {
  return {.k_cmp = a.in("k_cmp"),
          .v_cmp = a.in("v_cmp"),
          .weights_k = a.weights("weights_k."),
          .weights_v = a.weights("weights_v."),
          .rope_cos = a.in("rope_cos"),
          .rope_sin = a.in("rope_sin"),
          .attention = whole_params(a)};
}

Status replay_layer(CallArguments& a, const at::Tensor& given, const Context& context) {
  auto p = layer_params(a);
  if (given.defined()) p.attention.block_indices = bridge::view_of(given);
  add_outputs(a, p.attention, "k_cmp", "v_cmp");
  return nsa::native_sparse_attention(p, context);
}

Status replay_layer_backward(CallArguments& a, const Context& context) {
  return nsa::native_sparse_attention_backward({.forward = layer_params(a),
                                                .d_o = a.in("d_o"),
                                                .d_q = a.out_like("d_q", "q"),
                                                .d_k_cmp = a.out_like("d_k_cmp", "k_cmp"),
                                                .d_v_cmp = a.out_like("d_v_cmp", "v_cmp"),
                                                .d_k_slc = a.out_like("d_k_slc", "k_slc"),
                                                .d_v_slc = a.out_like("d_v_slc", "v_slc"),
                                                .d_k_swa = a.out_like("d_k_swa", "k_swa"),
                                                .d_v_swa = a.out_like("d_v_swa", "v_swa"),
                                                .d_gates = a.out_like("d_gates", "gates"),
                                                .d_weights_k = weight_gradients(a, "weights_k."),
                                                .d_weights_v = weight_gradients(a, "weights_v.")},
                                               context);
}

Status replay_combine(CallArguments& a, bool backward, const Context& context) {
  CombineParams p{.o_cmp = a.in("o_cmp"), .o_slc = a.in("o_slc"), .o_swa = a.in("o_swa"), .gates = a.in("gates")};
  if (!backward) {
    p.o = a.out_like("o", "o_cmp");
    return nsa::combine(p, context);
  }
  return nsa::combine_backward({.forward = p,
                                .d_o = a.in("d_o"),
                                .d_o_cmp = a.out_like("d_o_cmp", "o_cmp"),
                                .d_o_slc = a.out_like("d_o_slc", "o_slc"),
                                .d_o_swa = a.out_like("d_o_swa", "o_swa"),
                                .d_gates = a.out_like("d_gates", "gates")},
                               context);
}

Status replay_decode(CallArguments& a, const at::Tensor& given, bool prefill, const Context& context) {
  DecodeParams p;
  for (const auto& [name, view] : {std::pair{"q", &p.q},
                                   {"k_cmp", &p.k_cmp},
                                   {"v_cmp", &p.v_cmp},
                                   {"k_slc", &p.k_slc},
                                   {"v_slc", &p.v_slc},
                                   {"k_swa", &p.k_swa},
                                   {"v_swa", &p.v_swa},
                                   {"gates", &p.gates},
                                   {"cache.block_table", &p.cache.block_table},
                                   {"cache.block_table_c", &p.cache.block_table_c},
                                   {"cache.block_table_swa", &p.cache.block_table_swa},
                                   {"cache.block_table_cmp", &p.cache.block_table_cmp},
                                   {"cache.k_scale", &p.cache.k_scale},
                                   {"cache.v_scale", &p.cache.v_scale},
                                   {"query_start_loc", &p.query_start_loc},
                                   {"rope_cos", &p.rope_cos},
                                   {"rope_sin", &p.rope_sin},
                                   {"num_new", &p.num_new},
                                   {"block_indices", &p.block_indices}}) {
    *view = a.in(name);
  }
  p.weights_k = a.weights("weights_k.");
  p.weights_v = a.weights("weights_v.");
  p.cfg = a.config();
  p.softmax_scale = a.softmax_scale();
  p.cache.advance = !a.has_scalar("cache.advance");  // noted if false
  p.rotate = a.has_scalar("rotate");
  if (a.has_scalar("max_query_len")) p.max_query_len = a.scalar<std::int64_t>("max_query_len");
  if (given.defined()) p.block_indices = bridge::view_of(given);
  p.indices = a.out("indices", indices_shape(a.shape("q"), a.shape("k_cmp"), p.cfg.topk), at::kInt);
  p.o = a.out("o", with_width(a.shape("q"), a.shape("v_cmp").back()));
  for (const auto& [name, view] : {std::pair{"cache.k_slc", &p.cache.k_slc},
                                   {"cache.v_slc", &p.cache.v_slc},
                                   {"cache.k_c", &p.cache.k_c},
                                   {"cache.v_c", &p.cache.v_c},
                                   {"cache.k_swa_ring", &p.cache.k_swa_ring},
                                   {"cache.v_swa_ring", &p.cache.v_swa_ring},
                                   {"cache.k_cmp_ring", &p.cache.k_cmp_ring},
                                   {"cache.v_cmp_ring", &p.cache.v_cmp_ring},
                                   {"cache.cache_seqlens", &p.cache.cache_seqlens},
                                   {"cache.overflow", &p.cache.overflow}}) {
    const bool optional =
        !p.cache.advance && (view == &p.cache.k_swa_ring || view == &p.cache.v_swa_ring || view == &p.cache.v_cmp_ring);
    if (!optional || a.has(name)) *view = a.state(name);
  }
  // A dump has copies of what were the same tensors.
  if (p.cache.shares_window()) p.k_swa = p.k_slc, p.v_swa = p.v_slc;
  if (p.cache.shares_raw_values()) p.v_cmp = p.v_slc;
  return prefill ? nsa::prefill(p, context) : nsa::decode(p, context);
}

Difference difference_of(const std::string& name, const at::Tensor& got, const at::Tensor& oracle) {
  Difference d{.name = name};
  d.is_integer = !got.is_floating_point();
  if (d.is_integer) {
    const auto same = got.eq(oracle);
    if (same.numel() > 0) d.rows_equal = (same.dim() > 1 ? same.all(-1) : same).to(at::kDouble).mean().item<double>();
    return d;
  }
  const auto x = got.to(at::kDouble).contiguous(), y = oracle.to(at::kDouble).contiguous();
  const auto *a = x.const_data_ptr<double>(), *b = y.const_data_ptr<double>();
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    if (std::isfinite(a[i]) && std::isfinite(b[i])) {
      d.max_error = std::max(d.max_error, std::fabs(a[i] - b[i]));
      d.max_oracle = std::max(d.max_oracle, std::fabs(b[i]));
    } else if (!(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])))) {
      ++d.not_finite_differ;
    }
  }
  return d;
}

}  // namespace

void replay(const DumpedCall& call, CallArguments& a, Backend backend, const at::Tensor& given) {
  const Context context{.backend = backend};
  const std::map<std::string, std::function<Status()>> operations = {
      {"compress", [&] { return replay_compress(a, context); }},
      {"compress_backward", [&] { return replay_compress_backward(a, context); }},
      {"compressed_attention",
       [&] { return nsa::compressed_attention(with_outputs(a, compressed_params(a, call), "v_c"), context); }},
      {"compressed_attention_backward",
       [&] {
         return nsa::compressed_attention_backward({.forward = compressed_params(a, call),
                                                    .d_o = a.in("d_o"),
                                                    .d_q = a.out_like("d_q", "q"),
                                                    .d_k_c = a.out_like("d_k_c", "k_c"),
                                                    .d_v_c = a.out_like("d_v_c", "v_c")},
                                                   context);
       }},
      {"select_blocks", [&] { return replay_select(a, call, context); }},
      {"selected_attention",
       [&] { return nsa::selected_attention(with_outputs(a, selected_params(a), "v"), context); }},
      {"selected_attention_backward",
       [&] {
         return nsa::selected_attention_backward(token_backward<SelectedAttentionBackwardParams>(a, selected_params(a)),
                                                 context);
       }},
      {"sliding_window_attention",
       [&] { return nsa::sliding_window_attention(with_outputs(a, window_params(a), "v"), context); }},
      {"sliding_window_attention_backward",
       [&] {
         return nsa::sliding_window_attention_backward(
             token_backward<SlidingWindowAttentionBackwardParams>(a, window_params(a)), context);
       }},
      {"combine", [&] { return replay_combine(a, false, context); }},
      {"combine_backward", [&] { return replay_combine(a, true, context); }},
      {"nsa_attention", [&] { return replay_nsa_attention(a, given, context); }},
      {"nsa_attention_backward", [&] { return replay_nsa_attention_backward(a, context); }},
      {"native_sparse_attention", [&] { return replay_layer(a, given, context); }},
      {"native_sparse_attention_backward", [&] { return replay_layer_backward(a, context); }},
      {"decode", [&] { return replay_decode(a, given, false, context); }},
      {"prefill", [&] { return replay_decode(a, given, true, context); }},
  };
  const auto operation = operations.find(call.operation);
  if (operation == operations.end()) {
    throw base::Error(
        fmt::format("{}: operation '{}' computes nothing that could be compared", call.path, call.operation));
  }
  if (const Status status = operation->second(); !status.ok()) {
    throw base::Error(fmt::format("{}: {}: {}", call.path, name_of(backend), status.message()));
  }
}

std::vector<Difference> compare_with_oracle(const DumpedCall& call) {
  const at::NoGradGuard no_grad;
  CallArguments mine(call, false), exact(call, true);
  replay(call, mine, Backend::kAuto);
  at::Tensor chosen;
  if (call.operation != "select_blocks" && !mine.has("block_indices")) {
    for (const auto& [name, tensor] : mine.outputs()) {
      if (name == "indices") chosen = tensor;
    }
  }
  replay(call, exact, Backend::kReference, chosen);
  std::vector<Difference> differences;
  for (std::size_t i = 0; i < mine.outputs().size(); ++i) {
    const auto& [name, tensor] = mine.outputs()[i];
    differences.push_back(difference_of(name, tensor, exact.outputs()[i].second));
  }
  return differences;
}

}  // namespace nsa::replay
