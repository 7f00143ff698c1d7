#include "cuda/sm90/heuristics.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/log.h"
#include "cuda/common/device.h"
#include "cuda/sm90/selected_attention/loop_order.h"

namespace nsa::cuda::sm90 {
namespace {

template <class T, int Dk, int Dv>
Kernels instances() {
  return {range_attention::launch_range_forward<T, Dk, Dv>,
          selected_attention::launch_selected_query_major<T, Dk, Dv>,
          selected_attention::launch_selected_union<T, Dk, Dv>,
          selected_attention::launch_selected_block_major<T, Dk, Dv>,
          range_attention::launch_range_d_q<T, Dk, Dv>,
          selected_attention::launch_selected_d_q<T, Dk, Dv>,
          selected_attention::launch_selected_d_q_of_ds<T, Dk, Dv>,
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
constexpr int kMaxBlockMajor = 2, kMaxEitherOrder = 7;

/// Leaves the loop orders of selected attention that can be the faster one.
void choose_loop_order(Kernels& kernels, int group, int topk) {
  if (!selected_attention::has_union(group, topk)) kernels.selected_union = nullptr;
  if (group > kMaxEitherOrder) kernels.selected_block_major = nullptr;
  if (group <= kMaxBlockMajor && kernels.selected_block_major) kernels.selected_query_major = nullptr;
}

/// Of strides shorter than this a scratch of single keys is too large (64k tokens, 8: 1.4 GB). What a block is made of
/// must lie in a window of keys when the last 64 of them come.
constexpr int kMinStride = 8, kMaxStrides = select_blocks::CompressedSelectScratch::kRingKeys - 64;

/// Of shorter chunks the portable kernels are done sooner, at least those of several sequences.
constexpr std::int64_t kMinChunk = 128;
/// Of packed ones, for each sequence: the calls of the short ones fill the rows of all behind them.
constexpr std::int64_t kMinPackedChunk = 512;

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

/// Whatever else the call may be.
Kernels all_kernels(const AttentionDesc& call) {
  if (call.dtype == DType::kBFloat16) return instances<Bf16>(call.key_dim, call.value_dim);
  if (call.dtype == DType::kFloat16) return instances<Half>(call.key_dim, call.value_dim);
  return {};
}
CompressKernels all_kernels(const CompressDesc& call) {
  if (call.dtype == DType::kBFloat16) return compress_instances<Bf16>(call.dim);
  if (call.dtype == DType::kFloat16) return compress_instances<Half>(call.dim);
  return {};
}

template <class T, bool kFloat8>
StepKernels step_instances(std::int64_t key_dim, std::int64_t value_dim) {
  const auto with = [](auto attend) { return StepKernels{attend, decode::launch_append_compress<T>}; };
  if (key_dim == 64 && value_dim == 64) return with(decode::launch_step_attend<T, 64, 64, kFloat8>);
  if (key_dim == 128 && value_dim == 128) return with(decode::launch_step_attend<T, 128, 128, kFloat8>);
  if (key_dim == 192 && value_dim == 128) return with(decode::launch_step_attend<T, 192, 128, kFloat8>);
  return {};
}
template <class T>
StepKernels step_instances(const StepDesc& call) {
  return call.float8 ? step_instances<T, true>(call.key_dim, call.value_dim)
                     : step_instances<T, false>(call.key_dim, call.value_dim);
}
StepKernels all_kernels(const StepDesc& call) {
  if (call.dtype == DType::kBFloat16) return step_instances<Bf16>(call);
  if (call.dtype == DType::kFloat16) return step_instances<Half>(call);
  return {};
}

decode::StepMemory step_memory(const StepDesc& call, decode::ClusterShape shape) {
  const NSAConfig& cfg = call.cfg;
  return {shape,
          static_cast<int>(call.group),
          decode::BlockKeys(cfg),
          static_cast<int>(call.key_dim),
          static_cast<int>(call.value_dim),
          call.float8,
          cfg.topk,
          cfg.num_compressed(call.capacity),
          call.capacity / cfg.block_size + 1};
}

/// Thread blocks of a step's clusters that an SM holds.
std::int64_t blocks_at_once(const StepDesc& call, decode::ClusterShape shape) {
  constexpr std::int64_t kMemory = 228 * 1024, kReserved = 1024;  // of an SM; for each thread block
  const int tiles = decode::step_tiles(static_cast<int>(call.group));
  return std::min<std::int64_t>(decode::blocks_per_sm(shape, tiles, call.key_dim, call.float8),
                                kMemory / (step_memory(call, shape).bytes() + kReserved));
}

/// Clusters that a device holds at once: the SMs of one lie close together, which leaves over a tenth of
/// them.
std::int64_t clusters_at_once(decode::ClusterShape shape, std::int64_t blocks, int num_sms) {
  return blocks * num_sms * (shape.ranks > 2 ? 10 : 11) / (11 * shape.ranks);
}

/// Of fewer new tokens, or fewer queries for two SMs, each query has a cluster to itself. Block
/// selection goes over the compressed keys twice. At 64k tokens 2.9 queries took as long, 3.9 took 7 % less; with a
/// choice 3.9 took 10 % longer, 5.8 took 3 to 13 % less.
constexpr std::int64_t kMinSharedTokens = 3, kSharedPerTwoSms = 3, kSharedChoosingPerTwoSms = 5;

/// Whether thread blocks of four queries serve the step: each takes as long as several clusters of one query.
bool shares_queries(const StepDesc& call) {
  if (call.key_dim != call.value_dim || call.key_dim > 128 || call.float8 || call.group > decode::kTileRows)
    return false;
  const decode::QueriesMemory memory(decode::BlockKeys(call.cfg), static_cast<int>(call.key_dim), call.cfg.topk,
                                     call.capacity / call.cfg.block_size + 1);
  const std::int64_t least = call.chooses ? kSharedChoosingPerTwoSms : kSharedPerTwoSms;
  return memory.fits() && call.tokens >= kMinSharedTokens && 2 * call.queries > least * call.num_sms;
}

/// Clusters of a step.
std::int64_t clusters_of(const StepDesc& call, decode::ClusterShape shape) {
  const std::int64_t tiles = (call.tokens + shape.queries - 1) / shape.queries;
  return call.queries / call.tokens * tiles * decode::step_clusters(static_cast<int>(call.group));
}

constexpr const char* kNoDevice = "NSA_CUDA_KERNELS=portable, or no GPU of capability 9.0";

/// The log's line where the portable kernels serve. why null: they don't.
void log_portable(const char* what, const char* why) {
  if (why) log_detail(std::string(what) + ": portable kernels: " + why);
}

}  // namespace

const char* unsupported_reason(const AttentionDesc& call) {
  if (call.dtype != DType::kBFloat16 && call.dtype != DType::kFloat16) return "neither bfloat16 nor float16";
  if (!any(all_kernels(call))) return "head dims other than 64/64, 128/128 and 192/128";
  // Rows of a tile are the heads of a group for some queries, or sixteen of its heads.
  if (call.group < 1 || (call.group > 16 && call.group % 16 != 0))
    return "a group of more than 16 heads that is no multiple of 16";
  if (!call.tma_compatible) return "addresses or strides that are no multiples of 16 bytes";
  return nullptr;
}

const char* selected_unsupported_reason(const AttentionDesc& call) {
  if (call.block_size != 32 && call.block_size != 64 && call.block_size != 128)
    return "blocks other than of 32, 64 or 128 tokens";
  if (call.topk < 1 || call.topk > 64) return "more than 64 blocks for a query";
  return nullptr;
}

const char* selection_unsupported_reason(const AttentionDesc& call) {
  if (!call.selection) return "no block selection";
  // Slices of a group are warp tiles of a thread block's tile.
  if (call.group > 16 * select_blocks::WarpTiles::kWarpTiles) return "too many heads in a group";
  const NSAConfig& cfg = *call.selection;
  if (!select_blocks::adds_keys_up(cfg.kernel_size, cfg.kernel_stride, cfg.block_size)) return nullptr;
  if (cfg.kernel_stride < kMinStride) return "a stride of compression below 8";
  if (cfg.kernel_size + cfg.block_size > kMaxStrides * cfg.kernel_stride) return "blocks of too many compressed keys";
  return nullptr;
}

Kernels choose_kernels(const AttentionDesc& call) {
  if (unsupported_reason(call)) return {};
  Kernels kernels = all_kernels(call);
  if (selected_unsupported_reason(call)) {
    kernels.selected_query_major = nullptr;
    kernels.selected_union = nullptr;
    kernels.selected_block_major = nullptr;
    kernels.selected_d_q = nullptr;
    kernels.selected_d_kv = nullptr;
  }
  // Pairs of rows are stored: those of one query.
  if (call.group % 2 != 0 || !kernels.selected_d_kv) kernels.selected_d_q_of_ds = nullptr;
  choose_loop_order(kernels, call.group, call.topk);
  if (selection_unsupported_reason(call)) kernels.compressed_select = nullptr;
  return kernels;
}

const char* unsupported_reason(const CompressDesc& call) {
  if (call.kind == CompressionKind::kMean) return "the mean has no GEMM";
  if (call.dtype != DType::kBFloat16 && call.dtype != DType::kFloat16) return "neither bfloat16 nor float16";
  if (!all_kernels(call).compress) return "head dims other than 64, 128 and 192";
  // Hidden units are the columns of a tensor map (multiples of 16 bytes) and accumulators.
  if (call.hidden % 8 != 0 || call.hidden > compress::CompressWork::kNarrowHidden)
    return "hidden units that are no multiple of 8, or too many";
  if (!call.tma_compatible) return "addresses or strides that are no multiples of 16 bytes";
  if (call.rows == 0) return "no compressed key";
  return nullptr;
}

CompressKernels choose_kernels(const CompressDesc& call) {
  return unsupported_reason(call) ? CompressKernels{} : all_kernels(call);
}

const char* unsupported_reason(const StepDesc& call) {
  if (call.dtype != DType::kBFloat16 && call.dtype != DType::kFloat16) return "neither bfloat16 nor float16";
  if (!all_kernels(call).attend) return "head dims other than 64/64, 128/128 and 192/128";
  const NSAConfig& cfg = call.cfg;
  if (cfg.block_size != 32 && cfg.block_size != 64 && cfg.block_size != 128)
    return "blocks other than of 32, 64 or 128 tokens";
  if (cfg.topk > decode::kMaxBlocks) return "more than 64 blocks for a query";
  const int keys = cfg.block_size / cfg.kernel_stride, strides = cfg.kernel_size / cfg.kernel_stride;
  if (keys < 2 || keys > decode::kTileKeys) return "blocks of less than 2 or more than 16 compressed keys";
  if (strides > keys + 1) return "compression blocks longer than a selection block and a stride";
  if (!call.tma_compatible)
    return "addresses or strides that are no multiples of 16 bytes, or strides of more than 2 GiB";
  if (!step_memory(call, {}).fits()) return "a cache of too many tokens for a sequence";
  return nullptr;
}

const char* append_compress_unsupported_reason(const StepDesc& call) {
  if (!call.phi_compatible) return "addresses or strides that are no multiples of 16 bytes";
  constexpr int kSlice = decode::kCompressRanks * decode::kCompressStageRows;
  const auto fits = [&](CompressionKind kind, std::int64_t dim, std::int64_t hidden) {
    const std::int64_t tiles = hidden / 64;
    return kind == CompressionKind::kMean || (call.cfg.kernel_size * dim % kSlice == 0 && hidden % 64 == 0 &&
                                              tiles >= 1 && tiles <= 8 && tiles != 5 && tiles != 7);
  };
  if (!fits(call.phi_k, call.key_dim, call.hidden_k) || !fits(call.phi_v, call.value_dim, call.hidden_v))
    return "hidden units other than 64, 128, 192, 256, 384 or 512, or l D no multiple of 512";
  if (call.phi_k != CompressionKind::kMean && call.phi_v != CompressionKind::kMean && call.hidden_k != call.hidden_v &&
      !(call.hidden_k == 384 && call.hidden_v == 256) && !(call.hidden_k == 192 && call.hidden_v == 128))
    return "hidden units of keys and of values that have no kernel together";
  return nullptr;
}

const char* unsupported_reason(const ChunkDesc& call) {
  if (const char* why = unsupported_reason(call.attention)) return why;
  if (const char* why = selected_unsupported_reason(call.attention)) return why;
  if (const char* why = selection_unsupported_reason(call.attention)) return why;
  if (call.tokens < kMinChunk) return "few new tokens";
  // Which sequences are long is not known here, and each costs as much as some hundred tokens.
  if (call.packed_rows > 0 && call.sequences > 1 && call.packed_rows < kMinPackedChunk * call.sequences)
    return "few packed new tokens for so many sequences";
  return nullptr;
}

decode::ClusterShape cluster_shape(const StepDesc& call) {
  decode::ClusterShape best;
  if (call.batch_invariant) return best;
  if (shares_queries(call)) return decode::kSharedQueries;
  const int group = static_cast<int>(call.group);
  std::int64_t most = 0, most_blocks = 0;
  for (const decode::ClusterShape shape : decode::kClusterShapes) {
    if (!decode::has_kernel(shape, decode::step_tiles(group), call.key_dim, call.float8) ||
        !step_memory(call, shape).fits())
      continue;
    const std::int64_t blocks = blocks_at_once(call, shape);
    const std::int64_t clusters = clusters_at_once(shape, blocks, call.num_sms);
    if (call.queries * decode::step_clusters(group) <= clusters) return shape;
    // Of several waves few, and of clusters of others on the same SM, which work where one waits.
    if (clusters > most || (clusters == most && blocks >= most_blocks))
      best = shape, most = clusters, most_blocks = blocks;
  }
  return best;
}

StepKernels choose_kernels(const StepDesc& call) {
  if (unsupported_reason(call)) return {};
  StepKernels kernels = all_kernels(call);
  kernels.shape = cluster_shape(call);
  const std::int64_t at_once = kernels.shape == decode::kSharedQueries
                                   ? call.num_sms
                                   : clusters_at_once(kernels.shape, blocks_at_once(call, kernels.shape), call.num_sms);
  kernels.longest_first = clusters_of(call, kernels.shape) > at_once;
  if (append_compress_unsupported_reason(call)) kernels.append_compress = nullptr;
  return kernels;
}

std::string describe(const KernelQuery& query) {
  AttentionDesc call;
  call.dtype = query.dtype;
  call.key_dim = query.key_dim, call.value_dim = query.value_dim;
  call.group = static_cast<int>(query.num_heads / query.num_kv_heads);
  CompressDesc phi;
  phi.dtype = query.dtype, phi.kind = query.phi, phi.dim = query.key_dim;
  const std::int64_t hidden = query.phi_hidden > 0 ? query.phi_hidden : 2 * query.key_dim;
  phi.hidden = query.phi == CompressionKind::kMlp ? hidden : query.key_dim;
  const auto portable = [](const char* why) { return std::string("portable kernels: ") + why; };
  const char* const why = unsupported_reason(call);
  const auto attention = [&](const char* kernels) { return why ? portable(why) : std::string(kernels); };
  std::string text;
  const auto line = [&](const char* operation, const std::string& served) {
    text += (text.empty() ? "" : "\n") + std::string(operation) + ": " + served;
  };
  line("compress", unsupported_reason(phi) ? portable(unsupported_reason(phi)) : "sm90 compress, forward and backward");
  line("compressed_attention", attention("sm90 range_attention, forward and backward"));
  call.selection = query.cfg;
  const char* const unselected = why ? why : selection_unsupported_reason(call);
  line("select_blocks", unselected ? portable(unselected) : "sm90 compressed_select, with the attention in one pass");
  call.selection = {}, call.block_size = query.cfg.block_size, call.topk = query.cfg.topk;
  const char* const unserved = why ? why : selected_unsupported_reason(call);
  const Kernels k = choose_kernels(call);
  line("selected_attention", unserved                  ? portable(unserved)
                             : !k.selected_query_major ? "sm90 block-major, d_q and d_kv"
                             : k.selected_union ? "sm90 query-major or over unions, as the indices decide, d_q and d_kv"
                             : k.selected_block_major
                                 ? "sm90 query-major or block-major, as the indices decide, d_q and d_kv"
                                 : "sm90 query-major, d_q and d_kv");
  line("sliding_window_attention", attention("sm90 range_attention, forward and backward"));
  line("combine", attention("with the window's forward in nsa_attention, else portable kernels"));
  StepDesc step{query.dtype, query.key_dim, query.value_dim, call.group, 1 << 16, query.cfg};
  step.phi_k = step.phi_v = query.phi;
  const auto columns = [&](std::int64_t dim) {
    return query.phi == CompressionKind::kMlp ? (query.phi_hidden > 0 ? query.phi_hidden : 2 * dim) : dim;
  };
  step.hidden_k = columns(query.key_dim), step.hidden_v = columns(query.value_dim);
  line("decode", unsupported_reason(step) ? portable(unsupported_reason(step))
                 : append_compress_unsupported_reason(step)
                     ? "sm90 step_attend; compress by " + portable(append_compress_unsupported_reason(step))
                     : "sm90 append_compress and step_attend");
  ChunkDesc chunk{.attention = call, .tokens = kMinChunk};
  chunk.attention.selection = query.cfg;
  line("prefill",
       unsupported_reason(chunk) ? portable(unsupported_reason(chunk)) : "sm90 as nsa_attention, over what it gathers");
  return text;
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

bool batch_invariant() {
  const char* wish = std::getenv("NSA_BATCH_INVARIANT");
  return wish && std::strcmp(wish, "1") == 0;
}

Kernels kernels_for(int index, const AttentionDesc& call) {
  const bool supported = device_supported(index);
  if (logs_details()) {
    const char* const why = supported ? unsupported_reason(call) : kNoDevice;
    log_portable(call.block_size ? "selected attention" : "attention", why);
    if (!why && call.block_size) log_portable("selected attention", selected_unsupported_reason(call));
    if (!why && call.selection) log_portable("block selection", selection_unsupported_reason(call));
  }
  return supported ? choose_kernels(call) : Kernels{};
}
CompressKernels kernels_for(int index, const CompressDesc& call) {
  const bool supported = device_supported(index);
  if (logs_details()) log_portable("compress", supported ? unsupported_reason(call) : kNoDevice);
  return supported ? choose_kernels(call) : CompressKernels{};
}
StepKernels kernels_for(int index, const StepDesc& call) {
  const bool supported = device_supported(index);
  if (logs_details()) {
    const char* const why = supported ? unsupported_reason(call) : kNoDevice;
    log_portable("decode", why);
    if (!why) log_portable("compress of a step", append_compress_unsupported_reason(call));
  }
  if (!supported) return {};
  StepDesc here = call;
  if (sm_count(here.num_sms) != cudaSuccess) cudaGetLastError();
  here.batch_invariant = batch_invariant();
  return choose_kernels(here);
}

bool serves(int index, const ChunkDesc& call) {
  const char* const why = device_supported(index) ? unsupported_reason(call) : kNoDevice;
  if (logs_details()) log_portable("prefill", why);
  return !why;
}

}  // namespace nsa::cuda::sm90
