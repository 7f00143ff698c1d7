// One instance of append_compress: compiled with NSA_ELEMENT.
//
// The first clusters have a set of weights of φ each and share out its first layer's sum: every thread block streams
// some rows of W1, for all of its columns, and multiplies them with the raw tokens of the completed blocks. The other
// thread blocks have a sequence each: they check its capacity, write its plan and append its tokens. The rings
// hold more tokens than anybody reads, so nothing has to wait until old tokens have been read.
//
//   W1 and tokens in stages │ exchange: z, SiLU │ second layer, shared out by its rows │ exchange: rotation, pages
//
// Nearly all of this is executed once, from cold caches: it takes as long as its instructions, rather than as its
// bytes. So there are few of them, and what is needed last is asked for first.
#include "cuda/sm90/decode/append/append.cuh"
#include "cuda/sm90/decode/append/compress_rows.cuh"

namespace nsa::cuda::sm90::decode {
namespace {

/// kKeys, kValues: columns of the first layer / 64.
template <class T, int kKeys, int kValues, bool kFloat8>
__global__ void __launch_bounds__(kThreads, kKeys + kValues > 9 ? 1 : 2)
    append_compress(const __grid_constant__ AppendCompressArgs args) {
  extern __shared__ __align__(128) char memory[];
  __shared__ CompressShared<T> shared_memory;
  griddepcontrol_wait();
  launch_dependents();  // step_attend begins with what was there before the step, and with what this kernel waited for
  const int cluster = blockIdx.x / kCompressRanks, of_keys = args.sides[0].clusters, of_values = args.sides[1].clusters;
  if (cluster < of_keys) {
    compress_completed<T, kKeys, kFloat8>(args, args.sides[0], cluster, shared_memory, memory);
  } else if (cluster < of_keys + of_values) {
    compress_completed<T, kValues, kFloat8>(args, args.sides[1], cluster - of_keys, shared_memory, memory);
  } else {
    const int b = blockIdx.x - (of_keys + of_values) * kCompressRanks;
    if (b < args.geometry.batches) append<T, kFloat8>(args, b);
  }
}

template <class T, bool kFloat8>
cudaError_t launch_stored(const AppendCompressArgs& args, cudaStream_t stream) {
  const CompressSide &keys = args.sides[0], &values = args.sides[1];
  const int clusters = keys.clusters + values.clusters + (args.geometry.batches + kCompressRanks - 1) / kCompressRanks;
  const int bytes = std::max(CompressMemory(keys).bytes(), CompressMemory(values).bytes());
  const auto launch = [&](auto kernel) {
    return launch_cluster(kernel, kCompressRanks, true, clusters * kCompressRanks, kThreads, bytes, stream, args);
  };
  // A side without a cluster goes with any.
  const int of_keys = (keys.clusters ? keys : values).hidden / 64;
  const int of_values = (values.clusters ? values : keys).hidden / 64;
  if (of_keys == 6 && of_values == 4) return launch(append_compress<T, 6, 4, kFloat8>);
  if (of_keys == 3 && of_values == 2) return launch(append_compress<T, 3, 2, kFloat8>);
  if (of_keys != of_values) return cudaErrorInvalidValue;
  switch (of_keys) {
    case 0:
    case 1:
      return launch(append_compress<T, 1, 1, kFloat8>);
    case 2:
      return launch(append_compress<T, 2, 2, kFloat8>);
    case 3:
      return launch(append_compress<T, 3, 3, kFloat8>);
    case 4:
      return launch(append_compress<T, 4, 4, kFloat8>);
    case 6:
      return launch(append_compress<T, 6, 6, kFloat8>);
    default:
      return launch(append_compress<T, 8, 8, kFloat8>);
  }
}
}  // namespace

template <class T>
cudaError_t launch_append_compress(const AppendCompressArgs& args, cudaStream_t stream) {
  return args.sides[0].scales.data ? launch_stored<T, true>(args, stream) : launch_stored<T, false>(args, stream);
}
template cudaError_t launch_append_compress<NSA_ELEMENT>(const AppendCompressArgs&, cudaStream_t);

}  // namespace nsa::cuda::sm90::decode
