// The backend that tests of the operations are linked with. All tensors lie in host memory, whatever the backend.
#pragma once

#include "support/outputs.h"

namespace nsa::test {

struct Operations {
  Operation<CompressParams> compress;
  Operation<CompressBackwardParams> compress_backward;
  Operation<CompressedAttentionParams> compressed_attention;
  Operation<CompressedAttentionBackwardParams> compressed_attention_backward;
  Operation<SelectBlocksParams> select_blocks;
  Operation<SelectedAttentionParams> selected_attention;
  Operation<SelectedAttentionBackwardParams> selected_attention_backward;
  Operation<SlidingWindowAttentionParams> sliding_window_attention;
  Operation<SlidingWindowAttentionBackwardParams> sliding_window_attention_backward;
  Operation<CombineParams> combine;
  Operation<CombineBackwardParams> combine_backward;
  Operation<NsaAttentionParams> nsa_attention;
  Operation<NsaAttentionBackwardParams> nsa_attention_backward;
  Operation<NativeSparseAttentionParams> native_sparse_attention;
  Operation<NativeSparseAttentionBackwardParams> native_sparse_attention_backward;
  double floor;  // see within_bound
  /// Whether other kernels, which round otherwise, compute in 16-bit types where an input is not finite.
  bool (*has_fallback)();
};

extern const Operations under_test;

/// Of the rule for indices, for those that nsa_attention chooses: the scores of other kernels may be 16-bit.
inline double rho_of_whole(DType dtype) { return dtype != DType::kFloat32 && under_test.has_fallback() ? 1e-3 : 1e-5; }

/// Whether two results have the same bits, or, where `nonfinite` inputs may have made other kernels compute one of
/// them, agree within what 16-bit types resolve; indices then in 97 % of their rows.
bool agree(const TensorView& a, const TensorView& b, bool nonfinite);

/// What the backend does not support is replaced by what it does.
std::vector<Case> supported(std::vector<Case> cases);
/// The same for cases in which nothing attends: compress takes more head dims.
std::vector<Case> supported_by_compress(std::vector<Case> cases);

/// One output of run_all.
struct Result {
  std::string name;  // operation.output
  Rows rows;
  Tensor value;
};

/// Every operation on a problem's tensors, forward and backward; the whole with indices of its own.
std::vector<Result> run_all(const Problem& p, const Context& context = kCpu);
/// Every sequence of a call has the bits of a call of its own.
void expect_packed_equals_alone(const Problem& p);

}  // namespace nsa::test
