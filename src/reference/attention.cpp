#include "reference/attention.h"

#include <cmath>
#include <limits>

namespace nsa::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Probabilities of the visible keys of one query, and the logarithm of their softmax's denominator.
struct Softmax {
  std::vector<double> p;
  double lse = -kInfinity;
};

Softmax softmax(const Attention& a, const double* q, const Matrix& k, const std::vector<std::int64_t>& visible) {
  Softmax result;
  if (visible.empty()) return result;
  double max = -kInfinity, sum = 0;
  for (std::int64_t j : visible) {
    result.p.push_back(rounded(a.scale * dot(q, k[j], k.cols()), a.precision));
    max = std::max(max, result.p.back());
  }
  for (double s : result.p) sum += std::exp(s - max);
  result.lse = max + std::log(sum);
  for (double& s : result.p) s = rounded(std::exp(s - result.lse), a.precision);
  return result;
}

/// The keys or values of one KV head of a sequence.
MatrixView keys_of(const Attention& a, const TensorView& tensor, const Sequence& s, std::int64_t kv_head) {
  return a.compressed_keys ? head_of(tensor, s.batch, s.c_begin, s.c_len, kv_head)
                           : head_of(tensor, s.batch, s.k_begin, s.k_len, kv_head);
}

MatrixView queries_of(const TensorView& tensor, const Sequence& s, std::int64_t head) {
  return head_of(tensor, s.batch, s.q_begin, s.q_len, head);
}

MatrixView lse_of_head(const TensorView& lse, const Sequence& s, std::int64_t head) {
  if (!lse.defined()) return {};
  const int dim = lse.rank - 2;
  return {.tensor = lse,
          .offset = lse_offset(lse, s.batch, s.q_begin) + head * lse.stride[dim],
          .row_stride = lse.stride[dim + 1],
          .rows = s.q_len,
          .cols = 1};
}

}  // namespace

double softmax_scale_of(const std::optional<double>& scale, const TensorView& q) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))));
}

void attend(const Attention& a, const TensorView& o, const TensorView& lse) {
  fill(o, 0);
  fill(lse, -kInfinity);
  const std::int64_t group = a.q.size(-2) / a.k.size(-2);
  for (const Sequence& s : a.sequences)
    for (std::int64_t head = 0; head < a.q.size(-2); ++head) {
      const Matrix q = load(queries_of(a.q, s, head));
      const Matrix k = load(keys_of(a, a.k, s, head / group)), v = load(keys_of(a, a.v, s, head / group));
      Matrix o_head(s.q_len, v.cols()), lse_head(s.q_len, 1);
      for (std::int64_t i = 0; i < s.q_len; ++i) {
        const std::vector<std::int64_t> visible = a.visible(s, head / group, i);
        const Softmax row = softmax(a, q[i], k, visible);
        for (std::size_t n = 0; n < visible.size(); ++n) axpy(row.p[n], v[visible[n]], o_head[i], v.cols());
        lse_head[i][0] = row.lse;
      }
      store(o_head, queries_of(o, s, head), a.precision);
      store(lse_head, lse_of_head(lse, s, head), DType::kFloat64);
    }
}

void attend_backward(const Attention& a, const TensorView& d_o, const TensorView& d_q, const TensorView& d_k,
                     const TensorView& d_v) {
  for (const TensorView& gradient : {d_q, d_k, d_v}) fill(gradient, 0);
  const std::int64_t group = a.q.size(-2) / a.k.size(-2);
  for (const Sequence& s : a.sequences)
    for (std::int64_t kv_head = 0; kv_head < a.k.size(-2); ++kv_head) {
      const Matrix k = load(keys_of(a, a.k, s, kv_head)), v = load(keys_of(a, a.v, s, kv_head));
      Matrix d_k_head(k.rows(), k.cols()), d_v_head(v.rows(), v.cols());
      for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const Matrix q = load(queries_of(a.q, s, head)), d_o_head = load(queries_of(d_o, s, head));
        Matrix d_q_head(q.rows(), q.cols());
        for (std::int64_t i = 0; i < s.q_len; ++i) {
          const std::vector<std::int64_t> visible = a.visible(s, kv_head, i);
          const Softmax row = softmax(a, q[i], k, visible);
          std::vector<double> d_p;
          for (std::int64_t j : visible) d_p.push_back(rounded(dot(d_o_head[i], v[j], v.cols()), a.precision));
          const double delta = dot(row.p.data(), d_p.data(), static_cast<std::int64_t>(d_p.size()));  // = o . d_o
          for (std::size_t n = 0; n < visible.size(); ++n) {
            const std::int64_t j = visible[n];
            const double d_s = a.scale * rounded(row.p[n] * (d_p[n] - delta), a.precision);
            axpy(d_s, k[j], d_q_head[i], k.cols());
            axpy(d_s, q[i], d_k_head[j], k.cols());
            axpy(row.p[n], d_o_head[i], d_v_head[j], v.cols());
          }
        }
        store(d_q_head, queries_of(d_q, s, head), a.precision);
      }
      store(d_k_head, keys_of(a, d_k, s, kv_head), a.precision);
      store(d_v_head, keys_of(a, d_v, s, kv_head), a.precision);
    }
}

}  // namespace nsa::reference
