#include "core/validation/check_weights.h"

namespace nsa {

void check_weights(Checker& check, const std::string& prefix, const CompressionWeights& weights, const NSAConfig& cfg,
                   Dim Hkv, Dim D) {
  check.note(prefix + "kind", std::string(name_of(weights.kind)));
  Dim P{"P"}, E{"E"}, l{"kernel_size", cfg.kernel_size}, flat{"kernel_size * D", cfg.kernel_size * D.value};
  const bool linear = weights.kind == CompressionKind::kLinear, mlp = weights.kind == CompressionKind::kMlp;
  const auto weight = [&](const char* name, const TensorView& view, bool allowed, bool needed, const Shape& shape) {
    check.require(allowed || !view.defined(), prefix, name, ": ", view, ": must not be given for kind ",
                  name_of(weights.kind));
    if (!allowed || (!needed && !view.defined())) return;
    check.tensor(prefix + name, view, Access::kInput, shape);
    check.require(P.value == 1 || P.value == Hkv.value, prefix, name, ": ", view,
                  ": the first size must be Hkv = ", Hkv.value, " or 1");
  };
  weight("pe", weights.pe, linear || mlp, false, {&P, &l, &D});
  weight("w1", weights.w1, linear || mlp, true, {&P, &flat, linear ? &D : &E});
  weight("b1", weights.b1, linear || mlp, false, {&P, linear ? &D : &E});
  weight("w2", weights.w2, mlp, true, {&P, &E, &D});
  weight("b2", weights.b2, mlp, false, {&P, &D});
}

void check_weight_gradients(Checker& check, const std::string& prefix, const CompressionWeights& gradients,
                            const CompressionWeights& weights) {
  const auto gradient = [&](const char* name, const TensorView& view, const TensorView& weight) {
    if (!view.defined()) return;
    check.require(weight.defined(), prefix, name, ": asked for, but the weight is not given");
    if (!check.ok()) return;
    Dim sizes[TensorView::kMaxRank]{{""}, {""}, {""}, {""}};
    Shape shape;
    for (int i = 0; i < weight.rank; ++i) {
      sizes[i].value = weight.size(i);
      shape.push_back(&sizes[i]);
    }
    check.tensor(prefix + name, view, Access::kOutput, shape);
  };
  gradient("pe", gradients.pe, weights.pe);
  gradient("w1", gradients.w1, weights.w1);
  gradient("b1", gradients.b1, weights.b1);
  gradient("w2", gradients.w2, weights.w2);
  gradient("b2", gradients.b2, weights.b2);
}

std::int64_t check_rotation(Checker& check, const TensorView& cos, const TensorView& sin, const Dim& Dk) {
  check.require(cos.defined() == sin.defined(), cos.defined() ? "rope_sin" : "rope_cos",
                ": not given: rope_cos and rope_sin come together");
  if (!check.ok() || !cos.defined()) return 0;
  check.require(Dk.value % 2 == 0, "rope_cos: Dk = ", Dk.value, ": only an even head dim can be rotated");
  Dim positions{"max_positions"}, half{"Dk / 2", Dk.value / 2};
  check.float32("rope_cos", cos, Access::kInput, {&positions, &half});
  check.float32("rope_sin", sin, Access::kInput, {&positions, &half});
  return positions.value;
}

}  // namespace nsa
