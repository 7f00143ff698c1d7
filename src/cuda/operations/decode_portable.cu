// A step's portable kernels: their memory, arguments and launches.
#include "cuda/operations/decode_step.h"
#include "cuda/operations/select_blocks.h"
#include "cuda/portable/decode/step.cuh"

namespace nsa::cuda {
namespace {

using namespace portable;  // all kernels of a cache are

// Keys of the splits of a decode step.
constexpr std::int64_t kWindowSplit = 128, kSelectedSplit = 256;
constexpr std::int64_t kCompressedSplit = 256;  // at least
constexpr std::int64_t kMaxSplits = 64;         // of the compressed keys, for up to 64 rows of queries

/// The methods take their memory first and launch nothing while it is only measured.
class PortableStep {
 public:
  explicit PortableStep(const DecodeStep& step)
      : step_(step),
        p_(step.p),
        e_(step.e),
        fresh_k_slc_(p_.k_slc),
        fresh_v_slc_(p_.v_slc),
        fresh_k_swa_(p_.k_swa),
        fresh_v_swa_(p_.v_swa) {}

  Status plan();
  Status quantise();
  Status compress_completed();
  /// The packed rows of o and indices that no sequence has.
  Status clear();
  Status attend() { return step_.float8() ? attend_branches<Float8Tokens>() : attend_branches<CachedTokens>(); }
  ChunkTokens chunk_tokens() const;
  /// Advances the lengths, if they are given.
  Status append_to_rings(int* lengths);

 private:
  std::int64_t score_row() const { return scratch_keys_of(p_.cfg, step_.geometry); }
  TensorView take(std::initializer_list<std::int64_t> shape, DType dtype) {
    return take_like(e_.arena, TensorView::contiguous(nullptr, dtype, shape, p_.q.device), dtype);
  }
  Splits take_splits(std::int64_t count, std::int64_t size);
  Status move(const TokenMove* moves, int count, std::int64_t tokens, int* lengths);
  static TokenMove move_of(const TensorView& fresh, const Slots& slots, const TensorView& gathered = {}) {
    const DType dtype = fresh.dtype;
    return {.fresh = in_bytes(strided(fresh), dtype),
            .slots = in_bytes(slots, dtype),
            .gathered = in_bytes(strided(gathered), dtype),
            .vectors = vectors_of(fresh)};
  }
  template <class Tokens>
  Tokens tokens_of(const CachedTokens& tokens, const TensorView& scale) const;
  template <class Args>
  Args attention_args(const CachedTokens& k, const CachedTokens& v, const Splits& splits, BranchIndex branch) const;
  template <class Tokens>
  StepRangeArgs<Tokens> range_args(BranchIndex branch) const;
  StepCombineArgs combine_args() const;
  template <class Tokens>
  const StepAttentionKernels<Tokens>& attention_kernels() const {
    return *step_attention_kernels<Tokens>(p_.q.dtype, p_.q.size(3), p_.o.size(3));
  }
  template <class Tokens>
  Status attend_branches();
  template <class Tokens>
  Status attend_ranges();
  template <class Tokens>
  Status attend_range(BranchIndex branch);
  template <class Tokens>
  Status select();
  template <class Tokens>
  Status attend_selected();
  Status combine();

  const DecodeStep& step_;
  const DecodeParams& p_;
  Execution& e_;
  TensorView fresh_k_slc_, fresh_v_slc_, fresh_k_swa_, fresh_v_swa_;  // the step's tokens as the cache stores them
  TensorView indices_, attended_;                                     // own and those attended to
  // What the branches give: in a decode step splits, otherwise rows.
  Splits splits_[kBranches];
  float* scores_ = nullptr;  // of the compressed keys (StepRangesArgs)
  TensorView o_[kBranches], lse_;
};

Status PortableStep::plan() {
  if (step_.measuring()) return {};
  const PlanArgs args = step_.plan_args();
  return status_of(launch(plan_step, dim3(static_cast<unsigned>(step_.batches())), 256, 0, e_.stream, args),
                   "plan_step");
}

Status PortableStep::move(const TokenMove* moves, int count, std::int64_t tokens, int* lengths) {
  MoveArgs args{};
  args.geometry = step_.geometry;
  std::copy_n(moves, count, args.moves);
  args.lengths = lengths;
  const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(tokens, 1024)), count, step_.geometry.batches);
  return status_of(launch(move_tokens, grid, 128, 0, e_.stream, args), "move_tokens");
}

/// New tokens as a cache in e4m3 stores them: what is in q's type until here moves as bytes from here on.
Status PortableStep::quantise() {
  if (!step_.float8()) return {};
  QuantiseArgs args{};
  args.geometry = step_.geometry;
  args.geometry.batches = to_int(p_.q.size(0)), args.geometry.q_len = to_int(p_.q.size(1));
  int count = 0;
  for (const auto& [fresh, scale] : {std::pair{&fresh_k_slc_, &p_.cache.k_scale},
                                     {&fresh_v_slc_, &p_.cache.v_scale},
                                     {&fresh_k_swa_, &p_.cache.k_scale},
                                     {&fresh_v_swa_, &p_.cache.v_scale}}) {
    const TensorView from = *fresh;
    *fresh = take_like(e_.arena, from, DType::kFloat8E4M3);
    args.tokens[count++] = {
        .from = strided(from), .to = strided(*fresh), .dim = to_int(from.size(3)), .scales = scales_of(*scale)};
  }
  args.kinds = count;
  if (step_.measuring()) return {};
  return status_of(step_element_kernels(p_.q.dtype)->quantise(args, e_.stream), "quantise_tokens");
}

/// The tokens of the blocks that the step completes, laid out for compress; the results go to their pages. The tokens
/// of the selection branch go to theirs on the way.
Status PortableStep::compress_completed() {
  const std::int64_t blocks = ceil_div(step_.tokens(), p_.cfg.kernel_stride);  // that a sequence may complete
  const std::int64_t raw_tokens = (blocks - 1) * p_.cfg.kernel_stride + p_.cfg.kernel_size;
  const std::int64_t B = step_.batches(), h = step_.kv_heads(), Dk = p_.k_cmp.size(3), Dv = p_.v_cmp.size(3);
  const DType dtype = p_.q.dtype;
  const TensorView raw_k = take({B, raw_tokens, h, Dk}, dtype), raw_v = take({B, raw_tokens, h, Dv}, dtype);
  const TensorView k = take({B, blocks, h, Dk}, dtype), v = take({B, blocks, h, Dv}, dtype);
  if (!step_.measuring()) {
    const TokenMove moves[] = {move_of(p_.k_cmp, step_.raw_keys(), raw_k), move_of(p_.v_cmp, step_.raw_values(), raw_v),
                               move_of(fresh_k_slc_, step_.k_slc), move_of(fresh_v_slc_, step_.v_slc)};
    if (Status s = move(moves, 4, std::max(step_.tokens(), raw_tokens), nullptr); !s.ok()) return s;
  }
  const int* completed = step_.geometry.plan ? &step_.geometry.plan->completed : nullptr;
  constexpr int kStep = sizeof(StepPlan) / sizeof(int);
  const CompressParams keys{raw_k, p_.weights_k, p_.cfg, {}, k}, values{raw_v, p_.weights_v, p_.cfg, {}, v};
  if (Status s = compress(keys, &values, completed, kStep, e_); !s.ok() || step_.measuring()) return s;
  StoreArgs args{};
  args.geometry = step_.geometry;
  args.keys = strided(k), args.values = strided(v);
  args.key_slots = step_.k_c, args.value_slots = step_.v_c;
  args.key_dim = to_int(Dk), args.value_dim = to_int(Dv);
  args.rotation = rotation_of(p_.rope_cos, p_.rope_sin);
  args.float8 = step_.float8();
  args.key_scales = scales_of(p_.cache.k_scale), args.value_scales = scales_of(p_.cache.v_scale);
  return status_of(step_element_kernels(dtype)->store_compressed(args, to_int(blocks), e_.stream), "store_compressed");
}

Splits PortableStep::take_splits(std::int64_t count, std::int64_t size) {
  count = std::max<std::int64_t>(count, 1);
  const std::int64_t rows = count * step_.batches() * step_.tokens() * step_.heads();
  return {.num_splits = to_int(count),
          .size = to_int(size),
          .softmax = e_.arena.take<float2>(rows),
          .o_accum = e_.arena.take<float>(rows * p_.o.size(3))};
}

template <class Tokens>
Status PortableStep::attend_branches() {
  indices_ = p_.indices.defined() ? p_.indices
                                  : take({p_.q.size(0), p_.q.size(1), step_.kv_heads(), p_.cfg.topk}, DType::kInt32);
  attended_ = p_.block_indices.defined() ? p_.block_indices : indices_;
  if (step_.uses_splits()) {
    // Splits of the compressed keys grow with the capacity, and with the rows, all of which have sums in every split.
    const std::int64_t keys = p_.cfg.num_compressed(step_.geometry.k_len);
    const std::int64_t most =
        std::max<std::int64_t>(kMaxSplits / ceil_div(step_.tokens() * step_.geometry.group, 64), 4);
    const std::int64_t size =
        std::max(ceil_div(ceil_div(keys, most), kCompressedSplit), std::int64_t{1}) * kCompressedSplit;
    splits_[kCompressed] = take_splits(ceil_div(keys, size), size);
    const std::int64_t blocks = std::max<std::int64_t>(kSelectedSplit / p_.cfg.block_size, 1);
    splits_[kSelected] = take_splits(ceil_div(p_.cfg.topk, blocks), blocks);
    // From the window of the first query to the last query, wherever they lie.
    const std::int64_t seen = std::min<std::int64_t>(step_.window_size() + step_.tokens() - 1, step_.geometry.k_len);
    splits_[kWindow] = take_splits(ceil_div(seen, kWindowSplit) + 1, kWindowSplit);
    if (step_.selects() && step_.tokens() * step_.geometry.group <= kScoredRows)
      scores_ = e_.arena.take<float>(step_.batches() * step_.tokens() * step_.heads() * score_row());
  } else {
    for (TensorView& o : o_) o = take_like(e_.arena, p_.o, p_.o.dtype);
    lse_ = take({p_.q.size(0), step_.heads(), p_.q.size(1)}, DType::kFloat32);
  }
  if (Status s = clear(); !s.ok()) return s;
  // The branches of a chunk share the memory of their lse.
  if (Status s = step_.uses_splits() ? attend_ranges<Tokens>() : attend_range<Tokens>(kCompressed); !s.ok()) return s;
  if (Status s = select<Tokens>(); !s.ok()) return s;
  if (Status s = attend_selected<Tokens>(); !s.ok()) return s;
  if (!step_.uses_splits())
    if (Status s = attend_range<Tokens>(kWindow); !s.ok()) return s;
  return combine();
}

template <class Tokens>
Tokens PortableStep::tokens_of(const CachedTokens& tokens, const TensorView& scale) const {
  Tokens all{};
  static_cast<CachedTokens&>(all) = tokens;
  if constexpr (std::is_same_v<Tokens, Float8Tokens>) all.scales = scales_of(scale);
  return all;
}

template <class Args>
Args PortableStep::attention_args(const CachedTokens& k, const CachedTokens& v, const Splits& splits,
                                  BranchIndex branch) const {
  Args args{};
  args.geometry = step_.geometry;
  args.q = strided(p_.q);
  args.k = tokens_of<decltype(args.k)>(k, p_.cache.k_scale);
  args.v = tokens_of<decltype(args.v)>(v, p_.cache.v_scale);
  args.o = strided(o_[branch]);
  args.lse = per_row(lse_);
  args.scale = step_.scale;
  args.splits = splits;
  return args;
}

template <class Tokens>
StepRangeArgs<Tokens> PortableStep::range_args(BranchIndex branch) const {
  using Args = StepRangeArgs<Tokens>;
  if (branch == kCompressed)
    return attention_args<Args>({step_.k_c, {}}, {step_.v_c, {}}, splits_[kCompressed], kCompressed);
  auto args =
      attention_args<Args>({step_.window(p_.cache.k_swa_ring), strided(fresh_k_swa_)},
                           {step_.window(p_.cache.v_swa_ring), strided(fresh_v_swa_)}, splits_[kWindow], kWindow);
  args.window = step_.window_size();
  return args;
}

template <class Tokens>
Status PortableStep::attend_ranges() {
  if (step_.measuring()) return {};
  const int row_tiles = to_int(ceil_div(step_.tokens() * step_.geometry.group, kStepRows));
  const StepRangesArgs<Tokens> args{.compressed = range_args<Tokens>(kCompressed),
                                    .window = range_args<Tokens>(kWindow),
                                    .row_tiles = row_tiles,
                                    .scores = scores_,
                                    .scores_row = score_row()};
  return status_of(attention_kernels<Tokens>().ranges(args, e_.stream), "step_ranges");
}

template <class Tokens>
Status PortableStep::attend_range(BranchIndex branch) {
  if (step_.measuring()) return {};
  return status_of(attention_kernels<Tokens>().range_forward(range_args<Tokens>(branch), e_.stream), "range_forward");
}

template <class Tokens>
Status PortableStep::attend_selected() {
  if (step_.measuring()) return {};
  auto args =
      attention_args<StepSelectedArgs<Tokens>>({step_.k_slc, {}}, {step_.v_slc, {}}, splits_[kSelected], kSelected);
  args.indices = strided(attended_);
  args.topk = p_.cfg.topk;
  args.block_size = p_.cfg.block_size;
  return status_of(attention_kernels<Tokens>().selected_forward(args, e_.stream), "selected_forward");
}

template <class Tokens>
Status PortableStep::select() {
  if (!step_.selects()) return {};
  StepSelectArgs<Tokens> args{};
  args.geometry = step_.geometry;
  args.q = strided(p_.q);
  args.k = tokens_of<Tokens>({step_.k_c, {}}, p_.cache.k_scale);
  args.lse = per_row(lse_);
  args.indices = strided(indices_);
  args.splits = splits_[kCompressed];
  args.scores = scores_;
  set_selection(args, p_.cfg, step_.scale);
  const int count = selecting_blocks(args);
  const std::int64_t rows =
      step_.uses_splits() ? step_.batches() * step_.kv_heads() * step_.tokens() : count * args.queries;
  args.scratch = e_.arena.take<float>(rows * (args.scratch_keys + args.scratch_blocks));
  if (step_.measuring()) return {};
  const StepSelectKernels<Tokens>& kernels = step_element_kernels(p_.q.dtype)->of<Tokens>();
  const int key_dim = to_int(p_.q.size(3));
  return status_of(step_.uses_splits() ? kernels.select_with_splits(args, key_dim, e_.stream)
                                       : kernels.select_blocks(args, key_dim, count, e_.stream),
                   "select_blocks");
}

Status PortableStep::clear() {
  if (step_.measuring() || !step_.packed()) return {};
  return status_of(step_element_kernels(p_.q.dtype)->clear(combine_args(), e_.stream), "clear_rows");
}

StepCombineArgs PortableStep::combine_args() const {
  StepCombineArgs args{};
  args.geometry = step_.geometry;
  for (int i = 0; i < kBranches; ++i) args.rows.branch[i] = strided(o_[i]), args.splits[i] = splits_[i];
  args.rows.gates = strided(p_.gates);
  args.rows.o = strided(p_.o);
  args.rows.rows = to_int(step_.tokens());
  args.rows.heads = to_int(step_.heads());
  args.rows.dim = to_int(p_.o.size(3));
  args.value_scales = scales_of(p_.cache.v_scale);
  args.window = step_.window_size();
  args.indices = strided(p_.indices);
  args.topk = p_.cfg.topk;
  return args;
}

Status PortableStep::combine() {
  if (step_.measuring()) return {};
  return status_of(step_element_kernels(p_.q.dtype)->combine(combine_args(), e_.stream), "combine_step");
}

Status PortableStep::append_to_rings(int* lengths) {
  if (step_.measuring()) return {};
  const KVCacheView& cache = p_.cache;
  TokenMove moves[4] = {move_of(p_.k_cmp, step_.raw_keys())};
  int count = 1;
  if (!step_.shares_raw_values) moves[count++] = move_of(p_.v_cmp, step_.raw_values());
  if (!step_.shares_window) {
    moves[count++] = move_of(fresh_k_swa_, step_.window(cache.k_swa_ring));
    moves[count++] = move_of(fresh_v_swa_, step_.window(cache.v_swa_ring));
  }
  return move(moves, count, step_.tokens(), lengths);
}

ChunkTokens PortableStep::chunk_tokens() const {
  return {.k_slc = {step_.k_slc, {}},
          .v_slc = {step_.v_slc, {}},
          .k_c = {step_.k_c, {}},
          .v_c = {step_.v_c, {}},
          .k_swa = {step_.window(p_.cache.k_swa_ring), strided(fresh_k_swa_)},
          .v_swa = {step_.window(p_.cache.v_swa_ring), strided(fresh_v_swa_)},
          .shares_window = step_.shares_window};
}

}  // namespace

Status run_portable(const DecodeStep& step, const sm90::StepKernels& kernels) {
  PortableStep portable(step);
  if (Status s = portable.plan(); !s.ok()) return s;
  if (Status s = portable.quantise(); !s.ok()) return s;
  if (Status s = portable.compress_completed(); !s.ok()) return s;
  if (kernels.attend) {  // reads the new tokens where they are appended
    if (Status s = portable.clear(); !s.ok()) return s;
    if (Status s = portable.append_to_rings(nullptr); !s.ok()) return s;
    return attend_on_hopper(step, kernels);
  }
  if (!step.uses_splits() && gathers_chunk(step.p, step.geometry)) {  // by the kernels of a forward pass
    step.e.stage_done("append, compress");
    if (Status s = portable.clear(); !s.ok()) return s;
    if (Status s = attend_chunk(step.p, step.geometry, portable.chunk_tokens(), step.e); !s.ok()) return s;
  } else if (Status s = portable.attend(); !s.ok()) {
    return s;
  }
  // Last, as queries see tokens that the new ones replace in the rings.
  return portable.append_to_rings(step.p.cache.advance ? step.p.cache.cache_seqlens.as<int>() : nullptr);
}

}  // namespace nsa::cuda
