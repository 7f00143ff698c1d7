// Checks of the compression function's weights and of the compressed keys' rotation, which several operations take.
#pragma once

#include <string>

#include "core/validation/check.h"

namespace nsa {

/// `prefix` names the parameter ("weights."); `Hkv` and `D` are those of the tensor that is compressed.
void check_weights(Checker& check, const std::string& prefix, const CompressionWeights& weights, const NSAConfig& cfg,
                   Dim Hkv, Dim D);

/// Gradients of those weights that were asked for, in the shapes of the weights.
void check_weight_gradients(Checker& check, const std::string& prefix, const CompressionWeights& gradients,
                            const CompressionWeights& weights);

/// The angles that rotate compressed keys, both tables or none; returns their positions.
std::int64_t check_rotation(Checker& check, const TensorView& cos, const TensorView& sin, const Dim& Dk);

}  // namespace nsa
