// The forward operations of the portable backend but compress: arguments of kernels, and their launches.
#include <initializer_list>

#include "cuda/portable/host.h"
#include "cuda/sm90/ways.h"

namespace nsa::cuda::portable {

namespace {

/// Packed rows past the last sequence: o = 0, lse = -inf, indices = -1, gradients = 0. Also fills whole tensors.
struct FillArgs {
  const int* cu = nullptr;  // null: all rows
  int sequences = 0;
  bool compressed = false;  // the rows are compressed tokens of the sequences
  int kernel_size = 0, kernel_stride = 0;
  Strided rows;  // of 4-byte or 2-byte elements, (rows, heads, columns)
  int count = 0, heads = 0, columns = 0, element = 0;
  unsigned value = 0;
};

__global__ void __launch_bounds__(128) fill_tail(const __grid_constant__ FillArgs args) {
  __shared__ int begin;
  if (threadIdx.x == 0) begin = args.compressed ? 0 : args.cu[args.sequences];
  __syncthreads();
  if (args.compressed) {
    int mine = 0;
    for (int i = threadIdx.x; i < args.sequences; i += blockDim.x) {
      const int length = args.cu[i + 1] - args.cu[i];
      mine += length < args.kernel_size ? 0 : (length - args.kernel_size) / args.kernel_stride + 1;
    }
    if (mine) atomicAdd(&begin, mine);
    __syncthreads();
  }
  for (int row = max(begin, 0) + blockIdx.x; row < args.count; row += gridDim.x) {
    for (int i = threadIdx.x; i < args.heads * args.columns; i += blockDim.x) {
      const std::int64_t at = row * args.rows.row + i / args.columns * args.rows.head + i % args.columns;
      if (args.element == 4) {
        static_cast<unsigned*>(args.rows.data)[at] = args.value;
      } else {
        static_cast<unsigned short*>(args.rows.data)[at] = static_cast<unsigned short>(args.value);
      }
    }
  }
}

}  // namespace

Status fill(const TensorView& t, const TensorView& cu, unsigned value, const NSAConfig* compressed,
            cudaStream_t stream) {
  if (!t.defined() || !cu.defined() || t.numel() == 0) return {};
  FillArgs args;
  args.cu = cu.as<const int>();
  args.sequences = to_int(cu.size(0)) - 1;
  if (compressed) {
    args.compressed = true;
    args.kernel_size = compressed->kernel_size;
    args.kernel_stride = compressed->kernel_stride;
  }
  args.element = to_int(static_cast<std::int64_t>(size_of(t.dtype)));
  args.value = value;
  if (t.rank == 2) {  // lse (H, total)
    args.rows = {t.data, 0, t.stride[1], t.stride[0]};
    args.count = to_int(t.size(1));
    args.heads = to_int(t.size(0));
    args.columns = 1;
  } else {
    args.rows = strided(t);
    args.count = to_int(t.size(0));
    args.heads = to_int(t.size(1));
    args.columns = to_int(t.size(2));
  }
  return status_of(launch(fill_tail, static_cast<unsigned>(std::min(args.count, 512)), 128, 0, stream, args),
                   "fill_tail");
}

namespace {

constexpr unsigned kMinusInfinity = 0xff800000u;

/// For kernels that suppose finite values: a flag that is set where there are others. The first kernel that asks has
/// the values of all branches looked at.
class Finiteness {
 public:
  Finiteness(std::initializer_list<TensorView> values, Execution& e) : dtype_(values.begin()->dtype) {
    inputs_.flag = e.arena.take<int>(1);
    const TensorView* before = nullptr;
    sm90::Checked* next = inputs_.tensors;
    for (const TensorView& t : values) {
      const bool again = before && t.data == before->data && t.stride == before->stride;
      if (!again) *next++ = checked(t);
      before = &t;
    }
  }

  int* flag() const { return inputs_.flag; }
  Status look(Execution& e) {
    if (looked_) return {};
    looked_ = true;
    return status_of(find_nonfinite(dtype_, inputs_, e.stream), "find_nonfinite");
  }

 private:
  DType dtype_;
  sm90::NonfiniteArgs inputs_{};
  bool looked_ = false;
};

/// args: of the portable kernel. Where there are others, fast() launches them before.
template <class Args, class Fast>
Status run(const char* name, Args& args, bool any_fast, const Fast& fast,
           cudaError_t (*portable)(const Args&, cudaStream_t), Finiteness& values, Execution& e) {
  if (any_fast) {
    args.redo.flag = values.flag();
    if (Status s = values.look(e); !s.ok()) return s;
    if (Status s = fast(); !s.ok()) return s;
  }
  return status_of(portable(args, e.stream), name);
}

/// Rows past the last sequence.
Status fill_outputs(const TensorView& o, const TensorView& lse, const Packed& packed, Execution& e) {
  if (Status s = fill(o, packed.cu_seqlens_q, 0, nullptr, e.stream); !s.ok()) return s;
  return fill(lse, packed.cu_seqlens_q, kMinusInfinity, nullptr, e.stream);
}

RangeArgs range_args(const Branch& b, const TensorView& o, const TensorView& lse) {
  return {b.geometry, strided(b.q), strided(b.k), strided(b.v),
          strided(o), per_row(lse), b.window,     static_cast<float>(b.scale)};
}

/// The ways of the selected branch on Hopper, and what they need (sm90/selected_by_block.h, sm90/ways.h).
struct SelectedWays {
  InverseArgs inverse{};
  void* scratch = nullptr;

  SelectedWays(const Branch& b, const sm90::Kernels& hopper, Arena& arena) {
    if (!b.indices || !hopper.selected_by_block) return;
    const Geometry& g = b.geometry;
    inverse = take_lists(b, arena);
    if (hopper.selected_forward) inverse.ways.times = arena.take<WayTimes>(std::int64_t{g.batches} * g.kv_heads);
    scratch = arena.take<char>(sm90::BlockWindows(g, inverse.lists, inverse.topk, b.v.size(-1)).bytes());
  }
  Status run(const SelectedArgs& args, const sm90::Kernels& hopper, Execution& e) const {
    const Ways& ways = inverse.ways;
    if (ways.times)
      if (Status s = status_of(sm90::find_ways(inverse, e.stream), "find_ways"); !s.ok()) return s;
    if (hopper.selected_by_block) {
      if (Status s = status_of(build_inverse_index(inverse, e.stream), "build_inverse_index"); !s.ok()) return s;
      Status s =
          status_of(hopper.selected_by_block({args, inverse.lists, ways, scratch}, e.stream), "selected_by_block");
      if (!s.ok()) return s;
    }
    if (!hopper.selected_forward) return {};
    return status_of(hopper.selected_forward(args, ways, e.stream), "selected_forward");
  }
};

/// The attention of one branch.
template <class Params>
Status forward(const Params& p, Finiteness& values, Execution& e) {
  const Branch b = branch_of(p);
  const TensorView &o = p.o, &lse = p.lse;
  const sm90::Kernels hopper = hopper_kernels(b, o);
  const SelectedWays ways(b, hopper, e.arena);
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  const AttentionKernels& kernels = kernels_of(b.q, b.v);
  if (Status s = fill_outputs(o, lse, p.packed, e); !s.ok()) return s;
  if (b.indices) {
    SelectedArgs args{b.geometry,          strided(b.q),
                      strided(b.k),        strided(b.v),
                      strided(o),          per_row(lse),
                      strided(*b.indices), to_int(b.indices->size(-1)),
                      b.block_size,        static_cast<float>(b.scale)};
    return run(
        "selected_forward", args, hopper.selected_forward || hopper.selected_by_block,
        [&] { return ways.run(args, hopper, e); }, kernels.selected_forward, values, e);
  }
  RangeArgs args = range_args(b, o, lse);
  return run(
      "range_forward", args, hopper.range_forward != nullptr,
      [&] { return status_of(hopper.range_forward(args, e.stream), "range_forward"); }, kernels.range_forward, values,
      e);
}

/// All but the scratch.
SelectArgs select_args(const SelectBlocksParams& p) {
  const bool packed = p.packed.packed();
  SelectArgs args{};
  args.geometry = geometry_of(p.q, p.k_c.size(-2), p.seqlen_k.value_or(packed ? 0 : p.q.size(1)),
                              packed ? raw_total(p.k_c, p.cfg) : 0, p.packed, p.cfg);
  args.q = strided(p.q);
  args.k = strided(p.k_c);
  args.lse = per_row(p.lse);
  args.indices = strided(p.indices);
  set_selection(args, p.cfg, scale_of(p.softmax_scale, p.q));
  args.noise = static_cast<float>(p.noise);
  args.seed = p.seed;
  return args;
}
std::int64_t scratch_floats(const SelectArgs& args, int thread_blocks) {
  return thread_blocks * args.queries * (args.scratch_keys + args.scratch_blocks);
}

CombineArgs combine_args(const CombineParams& p) {
  const Rows r = rows_of(p.o, 2);
  return {{strided(p.o_cmp), strided(p.o_slc), strided(p.o_swa)},
          strided(p.gates),
          strided(p.o),
          r.rows,
          to_int(p.o.size(-2)),
          to_int(p.o.size(-1)),
          {}};
}

/// The choice of blocks together with the compressed attention `cmp`: by one kernel where there is one.
Status compressed_and_select(const CompressedAttentionParams& cmp, const SelectBlocksParams& p, Finiteness& values,
                             Execution& e) {
  const Branch b = branch_of(cmp);
  const sm90::Kernels hopper = hopper_kernels(b, cmp.o, p.cfg);
  if (!hopper.compressed_select) {
    if (Status s = forward(cmp, values, e); !s.ok()) return s;
    return select_blocks(p, e);
  }
  SelectArgs select = select_args(p);
  const int count = selecting_blocks(select);
  // The kernels that stand in come later: they can have the same scratch.
  const std::int64_t bytes =
      std::max(sm90::CompressedSelectScratch(b.geometry, b.q.size(-1), select.block_size).bytes(),
               scratch_floats(select, count) * 4);
  void* scratch = e.arena.take<char>(bytes);
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  if (Status s = fill_outputs(cmp.o, cmp.lse, cmp.packed, e); !s.ok()) return s;
  if (Status s = fill(p.indices, p.packed.cu_seqlens_q, 0xffffffffu, nullptr, e.stream); !s.ok()) return s;
  if (Status s = values.look(e); !s.ok()) return s;
  int* flag = values.flag();
  RangeArgs range = range_args(b, cmp.o, cmp.lse);
  range.redo.flag = select.redo.flag = flag;
  select.scratch = static_cast<float*>(scratch);
  sm90::CompressedSelectArgs args{};
  args.range = range;
  args.indices = select.indices;
  args.topk = select.topk;
  args.block_size = select.block_size;
  args.init_blocks = select.init_blocks;
  args.local_blocks = select.local_blocks;
  args.noise = select.noise;
  args.share = select.share;
  args.seed = select.seed;
  args.flag = flag;
  args.scratch = scratch;
  if (Status s = status_of(hopper.compressed_select(args, e.stream), "compressed_select"); !s.ok()) return s;
  if (Status s = status_of(kernels_of(b.q, b.v).range_forward(range, e.stream), "range_forward"); !s.ok()) return s;
  return status_of(element_kernels(p.q.dtype)->select_blocks(select, to_int(p.q.size(-1)), count, e.stream),
                   "select_blocks");
}

/// The sliding window and the sum of the branches by one kernel. swa.o may be undefined.
Status window_and_combine(const SlidingWindowAttentionParams& swa, CombineParams sum, const sm90::Kernels& hopper,
                          Finiteness& values, Execution& e) {
  const Branch b = branch_of(swa);
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  if (swa.o.defined())
    if (Status s = fill(swa.o, swa.packed.cu_seqlens_q, 0, nullptr, e.stream); !s.ok()) return s;
  if (Status s = fill(swa.lse, swa.packed.cu_seqlens_q, kMinusInfinity, nullptr, e.stream); !s.ok()) return s;
  if (Status s = values.look(e); !s.ok()) return s;
  RangeArgs range = range_args(b, swa.o, swa.lse);
  range.redo.flag = values.flag();
  const sm90::WindowCombineArgs args{range, strided(sum.o_cmp), strided(sum.o_slc), strided(sum.gates), strided(sum.o)};
  if (Status s = status_of(hopper.window_combine(args, e.stream), "window_combine"); !s.ok()) return s;
  // The kernels that stand in have two steps; what is between them may lie in o itself.
  sum.o_swa = swa.o.defined() ? swa.o : sum.o;
  range.o = strided(sum.o_swa);
  if (Status s = status_of(kernels_of(b.q, b.v).range_forward(range, e.stream), "range_forward"); !s.ok()) return s;
  CombineArgs combine = combine_args(sum);
  combine.redo.flag = values.flag();
  return status_of(element_kernels(sum.o.dtype)->combine(combine, rows_of(sum.o, 2).batches, e.stream), "combine");
}

}  // namespace

Status compressed_attention(const CompressedAttentionParams& p, Execution& e) {
  Finiteness values({p.v_c}, e);
  return forward(p, values, e);
}
Status selected_attention(const SelectedAttentionParams& p, Execution& e) {
  Finiteness values({p.v}, e);
  return forward(p, values, e);
}
Status sliding_window_attention(const SlidingWindowAttentionParams& p, Execution& e) {
  Finiteness values({p.v}, e);
  return forward(p, values, e);
}

Status select_blocks(const SelectBlocksParams& p, Execution& e) {
  SelectArgs args = select_args(p);
  const int count = selecting_blocks(args);
  args.scratch = e.arena.take<float>(scratch_floats(args, count));
  if (e.arena.measuring()) return {};
  if (!e.arena.enough()) return out_of_workspace(e.arena);
  if (Status s = fill(p.indices, p.packed.cu_seqlens_q, 0xffffffffu, nullptr, e.stream); !s.ok()) return s;
  return status_of(element_kernels(p.q.dtype)->select_blocks(args, to_int(p.q.size(-1)), count, e.stream),
                   "select_blocks");
}

Status combine(const CombineParams& p, Execution& e) {
  if (e.arena.measuring()) return {};
  return status_of(element_kernels(p.o.dtype)->combine(combine_args(p), rows_of(p.o, 2).batches, e.stream), "combine");
}

Status nsa_attention(const NsaAttentionParams& p, Execution& e) {
  // What the caller does not want to keep lives in the workspace.
  NsaAttentionParams kept = p;
  TensorView lse;
  lse.dtype = DType::kFloat32;
  lse.device = p.q.device;
  lse.rank = p.q.rank - 1;
  if (p.q.rank == 4) {
    lse.shape = {p.q.size(0), p.q.size(2), p.q.size(1)};
  } else {
    lse.shape = {p.q.size(1), p.q.size(0)};
  }
  const sm90::Kernels hopper = hopper_kernels(branch_of(branches_of(kept).swa), p.o);
  for (auto t : {&NsaAttentionParams::o_cmp, &NsaAttentionParams::o_slc, &NsaAttentionParams::o_swa}) {
    const bool passes_by = t == &NsaAttentionParams::o_swa && hopper.window_combine;
    if (!(kept.*t).defined() && !passes_by) kept.*t = take_like(e.arena, p.o, p.o.dtype);
  }
  for (auto t : {&NsaAttentionParams::lse_cmp, &NsaAttentionParams::lse_slc, &NsaAttentionParams::lse_swa})
    if (!(kept.*t).defined()) kept.*t = take_like(e.arena, lse, DType::kFloat32);
  if (!kept.indices.defined()) {
    TensorView indices = p.q;
    indices.shape[static_cast<std::size_t>(p.q.rank - 2)] = p.k_c.size(-2);
    indices.shape[static_cast<std::size_t>(p.q.rank - 1)] = p.cfg.topk;
    kept.indices = take_like(e.arena, indices, DType::kInt32);
  }
  const Branches b = branches_of(kept);
  const SelectBlocksParams select{kept.q,         kept.k_c,   kept.lse_cmp, kept.cfg,    kept.softmax_scale,
                                  b.cmp.seqlen_k, kept.noise, kept.seed,    kept.packed, kept.indices};
  const CombineParams sum{kept.o_cmp, kept.o_slc, kept.o_swa, kept.gates, kept.o};
  Finiteness values({p.v_c, p.v_slc, p.v_swa}, e);
  if (Status s = compressed_and_select(b.cmp, select, values, e); !s.ok()) return s;
  e.stage_done("compressed attention, selection");
  // Causal attention is the faster one there. Not by the portable kernels: a sequence has the same bits packed or
  // alone.
  const bool causal = b.all_selected && hopper_kernels(branch_of(b.causal), p.o).range_forward;
  if (Status s = causal ? forward(b.causal, values, e) : forward(b.slc, values, e); !s.ok()) return s;
  e.stage_done("selected attention");
  if (hopper.window_combine) {
    if (Status s = window_and_combine(b.swa, sum, hopper, values, e); !s.ok()) return s;
  } else {
    if (Status s = forward(b.swa, values, e); !s.ok()) return s;
    if (Status s = combine(sum, e); !s.ok()) return s;
  }
  e.stage_done("sliding window, combine");
  if (e.arena.measuring()) return {};
  return fill(p.o, p.packed.cu_seqlens_q, 0, nullptr, e.stream);  // rows past the end: the gates there may be NaN
}

}  // namespace nsa::cuda::portable
