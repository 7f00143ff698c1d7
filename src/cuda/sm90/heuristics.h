// Kernels for compute capability 9.0 (H100, H200), for bfloat16 and float16. They take the arguments of their portable
// counterparts. Where there is no such kernel for a call, the portable one serves.
//
// They suppose finite inputs: a masked score times an infinite value would not be zero. So each call first looks at
// what could leak (nonfinite.h); if a flag is set there these kernels return at once and the portable ones, launched
// after them, do the work.
#pragma once

#include <optional>
#include <string>

#include "cuda/sm90/compress/compress.h"
#include "cuda/sm90/decode/append/append_compress.h"
#include "cuda/sm90/decode/step_attend.h"
#include "cuda/sm90/range_attention/range_attention.h"
#include "cuda/sm90/select_blocks/compressed_select.h"
#include "cuda/sm90/selected_attention/selected_attention.h"
#include "nsa/backend.h"
#include "nsa/tensor.h"

namespace nsa::cuda::sm90 {

/// Null: there is none.
struct Kernels {
  cudaError_t (*range_forward)(const RangeArgs&, cudaStream_t) = nullptr;
  /// Query by query, over unions of neighbouring queries' blocks, and block by block. At most one of the
  /// last two is set. If the first is set, too, both are launched, and the indices decide which does the work
  /// (loop_order.h).
  cudaError_t (*selected_query_major)(const SelectedArgs&, const LoopOrder&, cudaStream_t) = nullptr;
  cudaError_t (*selected_union)(const SelectedArgs&, const LoopOrder&, cudaStream_t) = nullptr;
  cudaError_t (*selected_block_major)(const selected_attention::BlockMajorArgs&, cudaStream_t) = nullptr;
  /// With a second branch of the same queries: the sum of both, where the second one says.
  cudaError_t (*range_d_q)(const BackwardArgs&, const BackwardArgs* second, cudaStream_t) = nullptr;
  cudaError_t (*selected_d_q)(const BackwardArgs&, cudaStream_t) = nullptr;
  /// The same from the dS that selected_d_kv has left (selected_ds.h).
  cudaError_t (*selected_d_q_of_ds)(const BackwardArgs&, cudaStream_t) = nullptr;
  cudaError_t (*range_d_kv)(const BackwardArgs&, cudaStream_t) = nullptr;
  cudaError_t (*selected_d_kv)(const BackwardArgs&, cudaStream_t) = nullptr;
  cudaError_t (*compressed_select)(const select_blocks::CompressedSelectArgs&, cudaStream_t) = nullptr;
  cudaError_t (*window_combine)(const range_attention::WindowCombineArgs&, cudaStream_t) = nullptr;
};

inline bool any(const Kernels& k) {
  return k.range_forward || k.selected_query_major || k.selected_block_major || k.range_d_q || k.selected_d_q ||
         k.range_d_kv || k.selected_d_kv;
}

/// What the choice of kernels looks at.
struct AttentionDesc {
  DType dtype = DType::kBFloat16;
  std::int64_t key_dim = 0, value_dim = 0;
  int group = 0;       // G
  int block_size = 0;  // selected attention, else 0
  int topk = 0;        // selected attention, else 0
  bool tma_compatible = true;
  std::optional<NSAConfig> selection;  // block selection together with the compressed attention it follows from
};

/// What the choice of the kernels of compress and compress_backward looks at.
struct CompressDesc {
  DType dtype = DType::kBFloat16;
  CompressionKind kind = CompressionKind::kMlp;
  std::int64_t dim = 0, hidden = 0;  // D; E, or D for linear
  std::int64_t rows = 1;             // compressed ones
  bool tma_compatible = true;
};

/// Null: there is none.
struct CompressKernels {
  cudaError_t (*compress)(const compress::CompressWork&, cudaStream_t) = nullptr;
  cudaError_t (*hidden)(const compress::CompressWork&, cudaStream_t) = nullptr;
  cudaError_t (*gradients)(const compress::CompressWork&, cudaStream_t) = nullptr;
};

/// What the choice of a decode step's kernels looks at.
struct StepDesc {
  DType dtype = DType::kBFloat16;
  std::int64_t key_dim = 0, value_dim = 0;
  std::int64_t group = 0;     // G
  std::int64_t capacity = 0;  // tokens that a sequence of the cache may have
  NSAConfig cfg;
  bool float8 = false;  // the cache is in e4m3
  bool tma_compatible = true;
  CompressionKind phi_k = CompressionKind::kMlp, phi_v = CompressionKind::kMlp;
  std::int64_t hidden_k = 0, hidden_v = 0;  // columns of φ's first weights, 0 for the mean
  bool phi_compatible = true;               // tokens and weights of φ: as tma_compatible
  std::int64_t queries = 1;                 // of all sequences and KV heads
  std::int64_t tokens = 1;                  // new ones of a sequence, an upper bound
  bool chooses = true;                      // blocks; else they are given
  int num_sms = 132;                        // SMs of the device
  bool batch_invariant = false;             // a query's bits do not depend on how many there are
};

/// Null: there is none.
struct StepKernels {
  cudaError_t (*attend)(const decode::StepAttendArgs&, cudaStream_t) = nullptr;
  cudaError_t (*append_compress)(const decode::AppendCompressArgs&,
                                 cudaStream_t) = nullptr;  // null: by portable kernels
  decode::ClusterShape shape;                              // of attend's clusters
  bool longest_first = false;                              // there are more clusters than a device holds
};

/// What decides whether a chunk of the prompt behind what a cache holds is attended to by the kernels of a forward
/// pass.
struct ChunkDesc {
  AttentionDesc attention;  // with a selection
  std::int64_t tokens = 0;  // the most new ones of a sequence
  std::int64_t sequences = 1;
  std::int64_t packed_rows = 0;  // of new tokens, 0: they are not packed
};

/// The kernels that serve a call on a GPU of compute capability 9.0. Which they are depends on the arguments alone.
Kernels choose_kernels(const AttentionDesc& call);
CompressKernels choose_kernels(const CompressDesc& call);
StepKernels choose_kernels(const StepDesc& call);

/// The clusters that attend to a step's queries: of those with the most warps that a device holds all at once. Which
/// they are decides in what order sums are taken, and so the last bits.
decode::ClusterShape cluster_shape(const StepDesc& call);

/// Why a call has none of these kernels: "float32", "head dims 80/80", ... Null: it has.
const char* unsupported_reason(const AttentionDesc& call);
const char* unsupported_reason(const CompressDesc& call);
const char* unsupported_reason(const StepDesc& call);
const char* unsupported_reason(const ChunkDesc& call);
/// Why what a step does before it attends has none, though unsupported_reason() is null.
const char* append_compress_unsupported_reason(const StepDesc& call);
/// Why selected attention has none, or block selection together with compressed attention, though
/// unsupported_reason() is null.
const char* selected_unsupported_reason(const AttentionDesc& call);
const char* selection_unsupported_reason(const AttentionDesc& call);

/// A line per operation, as nsa::describe_kernels.
std::string describe(const KernelQuery& query);

/// Whether they can be used on the device `index`: it may be another one, or NSA_CUDA_KERNELS=portable forbids them.
bool device_supported(int index);
/// Whether NSA_BATCH_INVARIANT=1: a query has the same bits whatever else a step has.
bool batch_invariant();
/// choose_kernels(), or none where they do not serve; the log says why.
Kernels kernels_for(int index, const AttentionDesc& call);
CompressKernels kernels_for(int index, const CompressDesc& call);
StepKernels kernels_for(int index, const StepDesc& call);
/// Whether there is no unsupported_reason().
bool serves(int index, const ChunkDesc& call);

}  // namespace nsa::cuda::sm90
