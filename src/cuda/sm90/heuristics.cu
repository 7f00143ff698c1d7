#include <cstdlib>
#include <cstring>

#include "cuda/sm90/heuristics.h"

namespace nsa::cuda::sm90 {
namespace {

template <class T, int Dk, int Dv>
Kernels instances() {
  return {range_attention::launch_range_forward<T, Dk, Dv>,
          selected_attention::launch_selected_query_major<T, Dk, Dv>,
          selected_attention::launch_selected_block_major<T, Dk, Dv>,
          range_attention::launch_range_d_q<T, Dk, Dv>,
          selected_attention::launch_selected_d_q<T, Dk, Dv>,
          range_attention::launch_range_d_kv<T, Dk, Dv>,
          selected_attention::launch_selected_d_kv<T, Dk, Dv>,
          select_blocks::launch_compressed_select<T, Dk, Dv>,
          range_attention::launch_window_combine<T, Dk, Dv>};
}
template <class T>
Kernels instances(std::int64_t key_dim, std::int64_t value_dim) {
  if (key_dim == 64 && value_dim == 64) return instances<T, 64, 64>();
  if (key_dim == 128 && value_dim == 128) return instances<T, 128, 128>();
  if (key_dim == 192 && value_dim == 128) return instances<T, 192, 128>();
  return {};
}

/// Selected attention goes block by block up to the first G, from there up to the second one as the indices decide
/// (loop_order.h), beyond it query by query. Block by block it takes about as long whatever G is and however queries
/// choose. Query by query the time falls with G, and where neighbours choose alike: with G = 2 it is then a tenth less
/// (and four times as much where they do not), with G = 4 half (and twice as much), with G = 8 even where they do not
/// it is a seventh more only.
constexpr int kMostBlockMajor = 2, kMostEitherOrder = 7;

/// Leaves the loop orders of selected attention that can be the faster one.
void choose_loop_order(Kernels& kernels, int group) {
  if (group > kMostEitherOrder) kernels.selected_block_major = nullptr;
  if (group <= kMostBlockMajor && kernels.selected_block_major) kernels.selected_query_major = nullptr;
}

/// Of strides shorter than this a scratch of single keys is too large (64k tokens, 8: 1.4 GB). What a block is made of
/// must lie in a window of keys when the last 64 of them come.
constexpr int kLeastStride = 8, kMostStrides = select_blocks::CompressedSelectScratch::kRingKeys - 64;

/// Slices of a group are warp tiles of a thread block's tile.
bool selects(const AttentionDesc& call) {
  if (!call.selection || call.group < 1 || call.group > 16 * select_blocks::WarpTiles::kWarpTiles) return false;
  const NSAConfig& cfg = *call.selection;
  return !select_blocks::adds_keys_up(cfg.kernel_size, cfg.kernel_stride, cfg.block_size) ||
         (cfg.kernel_stride >= kLeastStride && cfg.kernel_size + cfg.block_size <= kMostStrides * cfg.kernel_stride);
}

template <class T, int D>
CompressKernels compress_instances() {
  return {compress::launch_compress<T, D>, compress::launch_compress_hidden<T, D>,
          compress::launch_compress_gradients<T, D>};
}
template <class T>
CompressKernels compress_instances(std::int64_t dim) {
  return dim == 64    ? compress_instances<T, 64>()
         : dim == 128 ? compress_instances<T, 128>()
         : dim == 192 ? compress_instances<T, 192>()
                      : CompressKernels{};
}

}  // namespace

Kernels choose_kernels(const AttentionDesc& call) {
  Kernels kernels;
  if (!call.tma_compatible) return kernels;
  // Rows of a tile are the heads of a group for some queries, or sixteen of its heads.
  if (call.group < 1 || (call.group > 16 && call.group % 16 != 0)) return kernels;
  if (call.dtype == DType::kBFloat16) kernels = instances<Bf16>(call.key_dim, call.value_dim);
  if (call.dtype == DType::kFloat16) kernels = instances<Half>(call.key_dim, call.value_dim);
  const bool blocks = call.block_size == 32 || call.block_size == 64 || call.block_size == 128;
  if (!blocks || call.topk < 1 || call.topk > 64) {
    kernels.selected_query_major = nullptr;
    kernels.selected_block_major = nullptr;
    kernels.selected_d_q = nullptr;
    kernels.selected_d_kv = nullptr;
  }
  choose_loop_order(kernels, call.group);
  if (!selects(call)) kernels.compressed_select = nullptr;
  return kernels;
}

CompressKernels choose_kernels(const CompressDesc& call) {
  // The mean is no product. Hidden units are the columns of a tensor map (multiples of 16 bytes) and accumulators.
  if (!call.tma_compatible || call.kind == CompressionKind::kMean) return {};
  if (call.hidden % 8 != 0 || call.hidden > compress::CompressWork::kNarrowHidden) return {};
  if (call.rows == 0) return {};
  if (call.dtype == DType::kBFloat16) return compress_instances<Bf16>(call.dim);
  if (call.dtype == DType::kFloat16) return compress_instances<Half>(call.dim);
  return {};
}

bool device_supported(int index) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  const char* wish = std::getenv("NSA_CUDA_KERNELS");
  return major == 9 && minor == 0 && !(wish && std::strcmp(wish, "portable") == 0);
}

Kernels kernels_for(int index, const AttentionDesc& call) {
  return device_supported(index) ? choose_kernels(call) : Kernels{};
}
CompressKernels kernels_for(int index, const CompressDesc& call) {
  return device_supported(index) ? choose_kernels(call) : CompressKernels{};
}

}  // namespace nsa::cuda::sm90
