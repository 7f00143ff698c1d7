#include <exception>
#include <limits>
#include <string>

#include "core/layout.h"
#include "core/validation/check.h"
#include "core/validation/validate.h"

namespace nsa {
namespace {

struct CompressShapes {
  explicit CompressShapes(bool packed) : packed(packed) {}

  bool packed;
  Dim B{"B"}, S{"S"}, total{"total"}, rows{packed ? "floor(total / kernel_stride)" : "N_c(S)"}, Hkv{"Hkv"}, D{"D"};
  Shape k = packed ? Shape{&total, &Hkv, &D} : Shape{&B, &S, &Hkv, &D};
  Shape out = packed ? Shape{&rows, &Hkv, &D} : Shape{&B, &rows, &Hkv, &D};
};

void check_forward(Checker& check, CompressShapes& shapes, const CompressParams& params) {
  check.config(params.cfg);
  check.tensor("k", params.k, Access::kInput, shapes.k);
  check.require(shapes.Hkv.value > 0 && shapes.D.value > 0, "k: ", params.k, ": Hkv and D must be >= 1");
  if (!check.ok()) return;
  check_weights(check, "weights.", params.weights, params.cfg, shapes.Hkv, shapes.D);
  check.call().packed = shapes.packed;
  check.call().problem.key_dim = 0;
  check.call().problem.value_dim = shapes.D.value;
  if (shapes.packed) {
    Dim count{"B + 1"};
    check.int32("cu_seqlens", params.cu_seqlens, Access::kInput, {&count});
    check.offsets("cu_seqlens", params.cu_seqlens, shapes.total.value);
  }
  shapes.rows.value = params.cfg.compressed_rows(shapes.packed ? shapes.total.value : shapes.S.value, shapes.packed);
}

}  // namespace

Status validate(const CompressParams& params, Call& call) {
  Checker check(call);
  CompressShapes shapes(params.cu_seqlens.defined());
  check_forward(check, shapes, params);
  check.tensor("out", params.out, Access::kOutput, shapes.out);
  return check.finish();
}

Status validate(const CompressBackwardParams& params, Call& call) {
  Checker check(call);
  CompressShapes shapes(params.forward.cu_seqlens.defined());
  check_forward(check, shapes, params.forward);
  check.incoming_gradient("d_out", params.d_out, shapes.out);
  check.optional_tensor("d_k", params.d_k, Access::kOutput, shapes.k);
  check_weight_gradients(check, "d_weights.", params.d_weights, params.forward.weights);
  return check.finish();
}

Status compressed_cu_seqlens(const TensorView& cu_seqlens, const NSAConfig& cfg, const TensorView& out) try {
  Call call;
  Checker check(call);
  Dim count{"B + 1"};
  check.config(cfg);
  check.int32("cu_seqlens", cu_seqlens, Access::kInput, {&count});
  check.int32("out", out, Access::kOutput, {&count});
  check.require(cu_seqlens.device.type == DeviceType::kCPU, "cu_seqlens: must be in host memory");
  check.offsets("cu_seqlens", cu_seqlens, std::numeric_limits<std::int32_t>::max());
  if (Status status = check.finish(); !status.ok()) return status;
  std::int64_t end = 0;
  const auto write = [&](std::int64_t i) {
    out.as<std::int32_t>()[i * out.stride[0]] = static_cast<std::int32_t>(end);
  };
  write(0);
  for (std::int64_t b = 0; b + 1 < count.value; ++b) {
    end += cfg.num_compressed(int32_at(cu_seqlens, b + 1) - int32_at(cu_seqlens, b));
    write(b + 1);
  }
  return {};
} catch (const std::exception& error) {
  return Status::internal(std::string("compressed_cu_seqlens: ") + error.what());
}

}  // namespace nsa
