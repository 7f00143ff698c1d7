#include "cuda/sm90/common/tensor_map.h"

namespace nsa::cuda::sm90 {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// The driver's function, found without linking the driver.
cudaError_t find(Encode& encode) {
  static void* found = nullptr;  // the same in every thread
  if (!found) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) return error;
    if (result != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
    found = entry;
  }
  encode = reinterpret_cast<Encode>(found);
  return cudaSuccess;
}

cuuint64_t size(std::int64_t n) { return static_cast<cuuint64_t>(n > 0 ? n : 1); }
/// Of a dimension of n: where n is 1 the stride does not matter but must be valid.
cuuint64_t stride(std::int64_t elements, std::int64_t n) { return static_cast<cuuint64_t>(n > 1 ? elements * 2 : 16); }

/// bf16 or fp16: the bits are copied, and zeros are zeros.
template <int kRank>
cudaError_t make(CUtensorMap& map, void* data, const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                 const cuuint32_t (&box)[kRank]) {
  Encode encode = nullptr;
  if (const cudaError_t error = find(encode); error != cudaSuccess) return error;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  if (!data)
    data = reinterpret_cast<void*>(1 << 20);  // of a tensor without elements: nothing is read, but the driver checks
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, data, sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

bool tma_compatible(const Strided& t) {
  const auto good = [](std::int64_t stride) { return stride >= 0 && stride % 8 == 0; };
  return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && good(t.batch) && good(t.row) && good(t.head);
}

cudaError_t make_tensor_map(CUtensorMap& map, const Strided& t, int columns, int heads, std::int64_t rows, int batches,
                            int box_heads, int box_rows) {
  return make<4>(map, t.data, {size(columns), size(heads), size(rows), size(batches)},
                 {stride(t.head, heads), stride(t.row, rows), stride(t.batch, batches)},
                 {64, static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows), 1});
}

cudaError_t make_spread_tensor_map(CUtensorMap& map, const Strided& t, int columns, int heads, std::int64_t rows,
                                   int batches) {
  const std::int64_t groups = spread_rows(rows) / 8;
  // Fifteen rows from the start of a group on: a box may begin at any of its eight.
  return make<5>(
      map, t.data, {size(columns), size(groups), groups > 0 ? 15u : 1u, size(heads), size(batches)},
      {stride(t.row * 8, groups), stride(t.row, groups > 0 ? 15 : 1), stride(t.head, heads), stride(t.batch, batches)},
      {64, 8, 8, 1, 1});
}

cudaError_t make_step_tensor_map(CUtensorMap& map, const Strided& t, int columns, int heads, std::int64_t rows,
                                 int batches, int step, int box_rows, bool last) {
  const std::int64_t steps = rows / step + last, residues = last ? rows % step : step;
  return make<5>(
      map, t.data, {size(columns), size(residues), size(steps), size(heads), size(batches)},
      {stride(t.row, residues), stride(t.row * step, steps), stride(t.head, heads), stride(t.batch, batches)},
      {64, 1, static_cast<cuuint32_t>(box_rows), 1, 1});
}

}  // namespace nsa::cuda::sm90
