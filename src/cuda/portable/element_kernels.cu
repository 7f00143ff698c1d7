// One instance of the kernels that depend on the element type only: compiled with NSA_ELEMENT.
#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/position_gradient.cuh"
#include "cuda/portable/combine.cuh"
#include "cuda/portable/compress.cuh"
#include "cuda/portable/instances.h"
#include "cuda/portable/rotate.cuh"
#include "cuda/portable/select_blocks.cuh"

namespace nsa::cuda::portable {
namespace {

using T = NSA_ELEMENT;

unsigned row_warps(int batches, int rows, int heads, int threads) {
  return static_cast<unsigned>(ceil_div(static_cast<std::int64_t>(batches) * rows * heads * 32, threads));
}

cudaError_t run_combine(const CombineArgs& args, int batches, cudaStream_t stream) {
  const unsigned blocks = row_warps(batches, args.rows, args.heads, 256);
  return launch(args.fallback, combine<T>, args.fallback.flag ? std::min(blocks, 264u) : blocks, 256, 0, stream, args,
                batches);
}

cudaError_t run_combine_backward(const CombineBackwardArgs& args, int batches, cudaStream_t stream) {
  if (args.heads == 0) return cudaSuccess;
  const CombineTile tile(args.heads);
  const dim3 grid(static_cast<unsigned>(ceil_div(args.rows, tile.positions)), batches,
                  static_cast<unsigned>(ceil_div(args.heads, tile.heads)));
  const auto kernel = args.branches == 1 ? combine_backward<T, 1> : combine_backward<T, 3>;
  return launch(kernel, grid, 256, 0, stream, args, tile);
}

template <template <class> class Op>
Op<T> make_op(const CompressArgs& args, int m, int n, int outer, int inner) {
  Op<T> op;
  static_cast<CompressArgs&>(op) = args;
  op.m = m;
  op.n = n;
  op.outer = outer;
  op.inner = inner;
  return op;
}
template <class Tiles, class Op>
cudaError_t run_tiles(const Op& op, int m, int n, int count, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(n, Tiles::kColumns)), static_cast<unsigned>(ceil_div(m, Tiles::kRows)),
                  count);
  return launch(gemm<T, Op, Tiles>, grid, Tiles::kThreads, GemmShape<T, Op, Tiles>::kMemory, stream, op);
}
template <template <class> class Op>
cudaError_t run_gemm(const CompressArgs& args, int m, int n, int outer, int inner, int count, cudaStream_t stream) {
  return run_tiles<ManyRows<T>>(make_op<Op>(args, m, n, outer, inner), m, n, count, stream);
}
/// A layer of phi: n(args) columns, inner(args) terms, for count(args) heads. It may have few rows: a step of a cache.
template <template <class> class Op, class N, class Inner, class Count>
cudaError_t run_layer(const CompressPair& pair, int m, const N& n, const Inner& inner, const Count& count,
                      cudaStream_t stream) {
  OneOrTwo<Op<T>> both{};
  int most = 0, counts = 0;
  for (int i = 0; i < pair.problems; ++i) {
    const CompressArgs& args = pair.problem[i];
    both.op[i] = make_op<Op>(args, m, n(args), 1, inner(args));
    most = std::max(most, n(args));
    counts += count(args);
  }
  both.heads = count(pair.problem[0]);
  if constexpr (!std::is_same_v<Op<T>, Constants<T>>) {  // these are one row
    if constexpr (sizeof(T) == 2) {
      constexpr int kFilled = 128;  // thread blocks that fill most devices
      const std::int64_t blocks = ceil_div(m, VeryManyRows::kRows) * ceil_div(most, VeryManyRows::kColumns) * counts;
      if (blocks >= kFilled) return run_tiles<VeryManyRows>(both, m, most, counts, stream);
    }
    if (m > 256) return run_tiles<ManyRows<T>>(both, m, most, counts, stream);
  }
  return run_tiles<SkinnyGemm<T>>(both, m, most, counts, stream);
}

int heads_of(const CompressArgs& args) { return args.geometry.kv_heads; }
int sets_of(const CompressArgs& args) { return args.shared ? 1 : heads_of(args); }
int raw_of(const CompressArgs& args) { return args.geometry.kernel_size * args.dim; }
int hidden_of(const CompressArgs& args) { return args.hidden; }

cudaError_t write_tables(const CompressPair& pair, cudaStream_t stream) {
  const CompressArgs& args = pair.problem[0];
  const auto rows = static_cast<std::size_t>(args.rows + 1) * pair.problems;  // the tables follow each other
  cudaError_t error = cudaMemsetAsync(args.first_token, 0xff, rows * sizeof(*args.first_token), stream);
  if (error == cudaSuccess && args.group)
    error = cudaMemsetAsync(args.group, 0, static_cast<std::size_t>(args.groups) * 16, stream);
  if (error != cudaSuccess) return error;
  return launch(compress_tables<T>, dim3(args.geometry.batches, pair.problems), 256, 0, stream, pair);
}

/// The tables, the constants and the first layer.
cudaError_t first_layer(const CompressPair& pair, cudaStream_t stream) {
  cudaError_t error = write_tables(pair, stream);
  if (error == cudaSuccess) error = run_layer<Constants>(pair, 1, hidden_of, raw_of, sets_of, stream);
  if (error != cudaSuccess) return error;
  return run_layer<FirstLayer>(pair, pair.problem[0].rows, hidden_of, raw_of, heads_of, stream);
}

/// Without tables where a row's tokens are known from its number.
cudaError_t run_mean(CompressPair pair, cudaStream_t stream) {
  const CompressArgs& args = pair.problem[0];
  if (args.geometry.cu_q || args.completed) {
    if (const cudaError_t error = write_tables(pair, stream); error != cudaSuccess) return error;
  } else {
    for (CompressArgs& problem : pair.problem) problem.first_token = nullptr;
  }
  int most = 0;
  for (int i = 0; i < pair.problems; ++i) most = std::max(most, pair.problem[i].dim);
  const std::int64_t threads = std::int64_t{most} / Vector<T>::kSize * args.geometry.kv_heads;
  const int block = threads > 32 ? 64 : 32;
  return launch(mean_blocks<T>, dim3(args.rows, static_cast<unsigned>(ceil_div(threads, block)), pair.problems), block,
                block * std::min(args.geometry.kernel_size, kMeanRows) * 16, stream, pair);
}

cudaError_t run_mean_backward(CompressArgs args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  if (!args.d_k.data) return cudaSuccess;
  if (g.cu_q) {
    if (const cudaError_t error = write_tables({{args}, 1}, stream); error != cudaSuccess) return error;
  } else {
    args.group = nullptr;
  }
  const std::int64_t threads = ceil_div(g.kernel_stride, kMeanTokens) * g.kv_heads * (args.dim / Vector<T>::kSize);
  return launch(mean_backward<T>, dim3(args.groups, static_cast<unsigned>(ceil_div(threads, 256))), 256, 0, stream,
                args);
}

cudaError_t run_compress(const CompressPair& pair, cudaStream_t stream) {
  const CompressArgs& args = pair.problem[0];
  if (args.rows == 0) return cudaSuccess;
  if (!args.w1.data) return run_mean(pair, stream);
  const cudaError_t error = first_layer(pair, stream);
  if (error != cudaSuccess || !args.mlp) return error;
  return run_layer<SecondLayer>(
      pair, args.rows, [](const CompressArgs& x) { return x.dim; }, hidden_of, heads_of, stream);
}

cudaError_t run_compress_backward(const CompressArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  const int sets = sets_of(args), over = args.shared ? g.kv_heads : 1;
  if (!args.w1.data) return run_mean_backward(args, stream);
  // For linear the first layer's product is not needed.
  const CompressPair one{{args}, 1};
  cudaError_t error = args.mlp ? first_layer(one, stream) : write_tables(one, stream);
  if (error == cudaSuccess && args.mlp)
    error = run_gemm<HiddenGradient>(args, args.rows, args.hidden, 1, args.dim, g.kv_heads, stream);
  if (error == cudaSuccess && !args.mlp)
    error = launch(
        copy_output_gradient<T>,
        dim3(static_cast<unsigned>(ceil_div(static_cast<std::int64_t>(args.rows) * args.hidden, 256)), g.kv_heads), 256,
        0, stream, args);
  if (error == cudaSuccess)
    error = launch(hidden_sums<T>, dim3(static_cast<unsigned>(ceil_div(args.hidden, 32)), sets), dim3(32, 8), 0, stream,
                   args);
  if (error == cudaSuccess && args.d_k.data)
    error = run_gemm<TokenGradient>(args, args.groups, g.kernel_stride * args.dim, g.kernel_size / g.kernel_stride,
                                    args.hidden, g.kv_heads, stream);
  if (error == cudaSuccess && args.d_w1.data)
    error = run_gemm<FirstWeightGradient>(args, g.kernel_size * args.dim, args.hidden, over, args.rows, sets, stream);
  if (error == cudaSuccess && args.d_w2.data)
    error = run_gemm<SecondWeightGradient>(args, args.hidden, args.dim, over, args.rows, sets, stream);
  if (error == cudaSuccess && args.d_b2.data)
    error =
        launch(output_sums<T>, dim3(static_cast<unsigned>(ceil_div(args.dim, 32)), sets), dim3(32, 8), 0, stream, args);
  if (error == cudaSuccess && args.d_pe.data)
    error = launch(position_gradient<T>, dim3(static_cast<unsigned>(ceil_div(g.kernel_size * args.dim, 8)), sets), 256,
                   0, stream, args);
  return error;
}

cudaError_t run_rotate(const RotateArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  const std::int64_t most = g.k_len < g.kernel_size ? 0 : (g.k_len - g.kernel_size) / g.kernel_stride + 1;
  return launch(rotate_compressed<T>, dim3(static_cast<unsigned>(std::min<std::int64_t>(most, 1024)), g.batches), 256,
                0, stream, args);
}

cudaError_t run_select_blocks(const SelectArgs& args, int key_dim, int blocks_of_threads, cudaStream_t stream) {
  const auto run = [&]<int Dk>() {
    return launch(args.fallback, select_blocks<T, Dk, SelectArgs>, blocks_of_threads, 128, SelectShape<T, Dk>::kMemory,
                  stream, args);
  };
  return key_dim == 64    ? run.template operator()<64>()
         : key_dim == 128 ? run.template operator()<128>()
                          : run.template operator()<192>();
}

}  // namespace

template <>
const ElementKernels& element_instance<T>() {
  static constexpr ElementKernels table{run_combine,           run_combine_backward, run_compress,
                                        run_compress_backward, run_rotate,           run_select_blocks};
  return table;
}

}  // namespace nsa::cuda::portable
