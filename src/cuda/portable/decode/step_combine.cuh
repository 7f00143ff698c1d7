// What a step adds to the kernels of a forward pass: compressed tokens to their pages, the branches to one output.
#pragma once

#include "cuda/portable/decode/splits.cuh"
#include "cuda/portable/decode/step_params.h"
#include "cuda/portable/rotate.cuh"

namespace nsa::cuda::portable {

/// Grid x: token of the step, y: kind of tokens, z: sequence.
template <class T>
__global__ void __launch_bounds__(128) quantise_tokens(const __grid_constant__ QuantiseArgs args) {
  const auto& tokens = args.tokens[blockIdx.y];
  const int b = blockIdx.z, pairs = tokens.dim / 2;
  for (int token = blockIdx.x; token < args.geometry.q_len; token += gridDim.x)
    for (int e = threadIdx.x; e < args.geometry.kv_heads * pairs; e += blockDim.x) {
      const int head = e / pairs, column = e % pairs * 2;
      const T* const from = tokens.from.at<T>(b, token, head) + column;
      *reinterpret_cast<unsigned short*>(tokens.to.at<Float8>(b, token, head) + column) =
          static_cast<unsigned short>(to_float8(to_float(from[0]), to_float(from[1]), tokens.scales[head]));
    }
}

/// Grid x: block of the step, y: sequence.
template <class T>
__global__ void __launch_bounds__(128) store_compressed(const __grid_constant__ StoreArgs args) {
  const StepGeometry& p = args.geometry;
  const DeviceSequence s = sequence_of(p, blockIdx.y);
  const int j = blockIdx.x, i = num_compressed(p, s.k_len - s.q_len) + j;
  if (i >= num_compressed(p, s.k_len)) return;
  const int half = args.key_dim / 2;
  const auto store = [&](const Slots& slots, int head, int column, T x, const HeadScales& scales) {
    if (args.float8) {
      const auto stored = static_cast<unsigned char>(to_float8(to_float(x), 0, scales[head]));
      slots.at<unsigned char>(s.index, i, head)[column] = stored;
    } else {
      slots.at<T>(s.index, i, head)[column] = x;
    }
  };
  const std::int64_t position = static_cast<std::int64_t>(i) * p.kernel_stride;
  for (int e = threadIdx.x; e < p.kv_heads * half; e += blockDim.x) {
    const int head = e / half, column = e % half;
    const T* from = args.keys.at<T>(s.index, j, head) + column;
    T pair[2] = {from[0], from[half]};
    if (args.rotation.cos) rotate_pair(args.rotation, position, column, 1, false, pair, pair);
    store(args.key_slots, head, column, pair[0], args.key_scales);
    store(args.key_slots, head, column + half, pair[1], args.key_scales);
  }
  for (int e = threadIdx.x; e < p.kv_heads * args.value_dim; e += blockDim.x) {
    const int head = e / args.value_dim, column = e % args.value_dim;
    store(args.value_slots, head, column, args.values.at<T>(s.index, j, head)[column], args.value_scales);
  }
}

/// combine for a step. A thread block per row, of at most 32 chunks, a warp per branch; rows without a query get o = 0
/// and indices = -1; packed ones have them by clear_rows. Grid x: query, y: head, z: sequence.
template <class T>
__global__ void __launch_bounds__(32 * kBranches) combine_step(const __grid_constant__ StepCombineArgs args) {
  const StepGeometry& p = args.geometry;
  const int r = blockIdx.x, h = blockIdx.y, b = blockIdx.z, lane = threadIdx.x % 32, branch = threadIdx.x / 32;
  const DeviceSequence s = sequence_of(p, b);
  const int column = lane * Chunk<T>::kSize;
  const int row = s.q_begin + r;
  if (p.starts && r >= s.q_len) return;
  const bool mine = column < args.rows.dim;
  Chunk<T> sum{};
  if (r < s.q_len) {
    __shared__ Chunk<T> branches[kBranches][32];
    const Splits& splits = args.splits[branch];
    Chunk<T> x{};
    if (splits.num_splits > 0) {
      const KeyRange range = branch == kSelected ? KeyRange{0, splits.num_splits}
                                                 : splits_of(p, splits, branch == kWindow ? args.window : 0, s, r);
      const auto softmax = [&](int split) { return splits.softmax[splits.at(p, split, b, r, h)]; };
      const MergedSoftmax<32> merged(range, softmax);
      if (mine)
#pragma unroll 8
        for (int split = range.first; split < range.last; ++split)
          merged.add(softmax(split), splits.o_accum + splits.at(p, split, b, r, h) * args.rows.dim + column, x);
    } else if (mine) {
      x = Chunk<T>::load(args.rows.branch[branch].at<T>(s.batch, row, h) + column);
    }
    branches[branch][lane] = x;
    __syncthreads();
    if (branch > 0) return;
    const T* gates = args.rows.gates.at<T>(s.batch, row, h);
    const float value_scale = args.value_scales[h / p.group];
    for (int i = 0; i < kBranches; ++i) {
      const float gate = to_float(gates[i]) * value_scale;
      const Chunk<T>& y = branches[i][lane];
#pragma unroll
      for (int j = 0; j < Chunk<T>::kSize; ++j) sum.x[j] += gate * y.x[j];
    }
  } else if (branch > 0) {
    return;
  } else if (args.indices.data && h < p.kv_heads) {
    for (int i = lane; i < args.topk; i += 32) args.indices.at<int>(s.batch, row, h)[i] = -1;
  }
  if (mine) sum.store(args.rows.o.at<T>(s.batch, row, h) + column);
}

/// Packed rows that no sequence has: o = 0 and indices = -1. A thread block per row.
template <class T>
__global__ void __launch_bounds__(128) clear_rows(const __grid_constant__ StepCombineArgs args) {
  const StepGeometry& p = args.geometry;
  bool computed = false;
  for (int b = threadIdx.x; b < p.batches; b += blockDim.x) {
    const DeviceSequence s = sequence_of(p, b);
    computed |= static_cast<int>(blockIdx.x) >= s.q_begin && static_cast<int>(blockIdx.x) < s.q_begin + s.q_len;
  }
  if (__syncthreads_or(computed)) return;
  for (int h = 0; h < p.heads; ++h)
    for (int i = threadIdx.x; i < args.rows.dim / 2; i += blockDim.x)
      store_pair(args.rows.o.at<T>(0, blockIdx.x, h) + 2 * i, 0, 0);
  if (args.indices.data)
    for (int i = threadIdx.x; i < p.kv_heads * args.topk; i += blockDim.x)
      args.indices.at<int>(0, blockIdx.x, i / args.topk)[i % args.topk] = -1;
}

}  // namespace nsa::cuda::portable
