// Compression of l tokens into one (eq. 7): out[i] = phi(k[i*d : i*d + l] + pe).
#include <cmath>

#include "core/backend.h"
#include "reference/reference.h"

namespace nsa::reference {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// y = x W + b of one row x; b may be absent.
std::vector<double> affine(const std::vector<double>& x, const Matrix& w, const Matrix& b, DType precision) {
  std::vector<double> y(static_cast<std::size_t>(w.cols()));
  for (std::int64_t j = 0; j < w.rows(); ++j) axpy(x[j], w[j], y.data(), w.cols());
  if (b.rows()) axpy(1, b[0], y.data(), w.cols());
  for (double& value : y) value = rounded(value, precision);
  return y;
}

/// Gradients of y = x W + b: adds to those of W and b, returns that of x.
std::vector<double> affine_backward(const std::vector<double>& x, const Matrix& w, const double* d_y, Matrix& d_w,
                                    Matrix& d_b, DType precision) {
  std::vector<double> d_x(static_cast<std::size_t>(w.rows()));
  for (std::int64_t j = 0; j < w.rows(); ++j) {
    axpy(x[j], d_y, d_w[j], w.cols());
    d_x[j] = rounded(dot(w[j], d_y, w.cols()), precision);
  }
  if (d_b.rows()) axpy(1, d_y, d_b[0], w.cols());
  return d_x;
}

/// phi of one KV head: its slice of the weights, or the shared one.
struct Phi {
  CompressionKind kind;
  std::int64_t l, D;
  Matrix pe, w1, b1, w2, b2;
  DType precision;

  Phi(const CompressParams& params, std::int64_t head, DType precision)
      : kind(params.weights.kind), l(params.cfg.kernel_size), D(params.k.size(-1)), precision(precision) {
    const auto slice = [&](const TensorView& weight) { return load(slice_of(weight, weight.size(0) == 1 ? 0 : head)); };
    pe = slice(params.weights.pe), w1 = slice(params.weights.w1), b1 = slice(params.weights.b1);
    w2 = slice(params.weights.w2), b2 = slice(params.weights.b2);
  }

  /// The block's tokens plus pe, flattened token-major.
  std::vector<double> flatten(const Matrix& k, std::int64_t first) const {
    std::vector<double> x;
    for (std::int64_t r = 0; r < l; ++r)
      for (std::int64_t c = 0; c < D; ++c)
        x.push_back(pe.rows() ? rounded(k[first + r][c] + pe[r][c], precision) : k[first + r][c]);
    return x;
  }

  std::vector<double> operator()(const std::vector<double>& x) const {
    if (kind == CompressionKind::kLinear) return affine(x, w1, b1, precision);
    if (kind == CompressionKind::kMlp) return affine(silu(affine(x, w1, b1, precision)), w2, b2, precision);
    std::vector<double> mean(static_cast<std::size_t>(D));
    for (std::int64_t r = 0; r < l; ++r) axpy(1.0 / static_cast<double>(l), &x[r * D], mean.data(), D);
    return mean;
  }

  std::vector<double> silu(std::vector<double> z) const {
    for (double& value : z) value = rounded(value * sigmoid(value), precision);
    return z;
  }

  /// Adds to the gradients of the weights, returns that of the flattened block.
  std::vector<double> backward(const std::vector<double>& x, const double* d_y, Phi& d) const {
    if (kind == CompressionKind::kLinear) return affine_backward(x, w1, d_y, d.w1, d.b1, precision);
    if (kind == CompressionKind::kMlp) {
      const std::vector<double> z = affine(x, w1, b1, precision);
      std::vector<double> d_z = affine_backward(silu(z), w2, d_y, d.w2, d.b2, precision);
      for (std::size_t e = 0; e < z.size(); ++e) {
        const double s = sigmoid(z[e]);
        d_z[e] = rounded(d_z[e] * s * (1 + z[e] * (1 - s)), precision);
      }
      return affine_backward(x, w1, d_z.data(), d.w1, d.b1, precision);
    }
    std::vector<double> d_x(x.size());
    for (std::int64_t r = 0; r < l; ++r) axpy(1.0 / static_cast<double>(l), d_y, &d_x[r * D], D);
    return d_x;
  }

  /// Gradients of the same shapes, zero.
  Phi zeros() const {
    Phi result = *this;
    for (Matrix* m : {&result.pe, &result.w1, &result.b1, &result.w2, &result.b2}) *m = Matrix(m->rows(), m->cols());
    return result;
  }
};

/// Compression looks only at keys: the sequences of self-attention over them.
std::vector<Sequence> sequences(const CompressParams& params) {
  Packed packed;
  packed.cu_seqlens_q = params.cu_seqlens;
  return sequences_of(params.k, params.k.rank == 4 ? params.k.size(1) : 0, packed, params.cfg);
}

}  // namespace

Status run(const CompressParams& params, DType precision) {
  fill(params.out, 0);
  for (std::int64_t head = 0; head < params.k.size(-2); ++head) {
    const Phi phi(params, head, precision);
    for (const Sequence& s : sequences(params)) {
      const Matrix k = load(head_of(params.k, s.batch, s.k_begin, s.k_len, head));
      Matrix out(s.c_len, phi.D);
      for (std::int64_t i = 0; i < s.c_len; ++i)
        axpy(1, phi(phi.flatten(k, i * params.cfg.kernel_stride)).data(), out[i], phi.D);
      store(out, head_of(params.out, s.batch, s.c_begin, s.c_len, head), precision);
    }
  }
  return {};
}

Status run(const CompressBackwardParams& params, DType precision) {
  const CompressParams& f = params.forward;
  fill(params.d_k, 0);
  const std::int64_t heads = f.k.size(-2);
  Phi d_phi = Phi(f, 0, precision).zeros();
  for (std::int64_t head = 0; head < heads; ++head) {
    const Phi phi(f, head, precision);
    for (const Sequence& s : sequences(f)) {
      const Matrix k = load(head_of(f.k, s.batch, s.k_begin, s.k_len, head));
      const Matrix d_out = load(head_of(params.d_out, s.batch, s.c_begin, s.c_len, head));
      Matrix d_k(s.k_len, phi.D);
      for (std::int64_t i = 0; i < s.c_len; ++i) {
        const std::int64_t first = i * f.cfg.kernel_stride;
        const std::vector<double> d_x = phi.backward(phi.flatten(k, first), d_out[i], d_phi);
        for (std::int64_t r = 0; r < phi.l; ++r) {
          axpy(1, &d_x[r * phi.D], d_k[first + r], phi.D);
          if (phi.pe.rows()) axpy(1, &d_x[r * phi.D], d_phi.pe[r], phi.D);
        }
      }
      store(d_k, head_of(params.d_k, s.batch, s.k_begin, s.k_len, head), precision);
    }
    // Each weight is per head or shared: a per-head gradient is complete now, a shared one after the last head.
    const auto finish = [&](Matrix& gradient, const TensorView& weight, const TensorView& d_weight) {
      const bool shared = weight.defined() && weight.size(0) == 1;
      if (shared && head + 1 < heads) return;
      store(gradient, slice_of(d_weight, shared ? 0 : head), precision);
      gradient = Matrix(gradient.rows(), gradient.cols());
    };
    finish(d_phi.pe, f.weights.pe, params.d_weights.pe);
    finish(d_phi.w1, f.weights.w1, params.d_weights.w1);
    finish(d_phi.b1, f.weights.b1, params.d_weights.b1);
    finish(d_phi.w2, f.weights.w2, params.d_weights.w2);
    finish(d_phi.b2, f.weights.b2, params.d_weights.b2);
  }
  return {};
}

Status run(const CompressParams& params, const Context&) { return run(params, DType::kFloat64); }

Status run(const CompressBackwardParams& params, const Context&) { return run(params, DType::kFloat64); }

}  // namespace nsa::reference
