// decode and prefill: arguments of kernels, and their launches.
#include "cuda/operations/cache_views.h"
#include "cuda/operations/operations.h"
#include "cuda/operations/select_blocks.h"
#include "cuda/portable/decode/step.cuh"
#include "cuda/portable/decode/step_kernels.h"

namespace nsa::cuda {
namespace {

using namespace portable;  // all kernels of a cache are

constexpr std::int64_t kMaxTokens = 1 << 30;  // of a sequence
// Keys of the splits of a decode step.
constexpr std::int64_t kWindowSplit = 128, kSelectedSplit = 256;
constexpr std::int64_t kCompressedSplit = 256;  // at least
constexpr std::int64_t kMaxSplits = 64;         // of the compressed keys, for up to 64 rows of queries

/// One step. The methods take their memory first and launch nothing while it is only measured.
class Step {
 public:
  /// given: the cache that params' cache is, without what it does not have.
  Step(const DecodeParams& params, const KVCacheView& given, Execution& execution)
      : p_(params),
        e_(execution),
        shares_window_(given.shares_window()),
        shares_raw_values_(given.shares_raw_values()) {}

  Status run() {
    describe();
    if (hopper_.append_compress) {
      if (Status s = append_compress_on_hopper(); !s.ok()) return s;
      return attend_on_hopper();
    }
    if (Status s = plan(); !s.ok()) return s;
    if (Status s = quantise(); !s.ok()) return s;
    if (Status s = compress_completed(); !s.ok()) return s;
    if (hopper_.attend) {  // reads the new tokens where they are appended
      if (Status s = clear(); !s.ok()) return s;
      if (Status s = append_to_rings(nullptr); !s.ok()) return s;
      return attend_on_hopper();
    }
    if (gathers_) {
      e_.stage_done("append, compress");
      if (Status s = clear(); !s.ok()) return s;
      if (Status s = attend_chunk(p_, geometry_, chunk_tokens(), e_); !s.ok()) return s;
    } else if (Status s = float8() ? attend<Float8Tokens>() : attend<CachedTokens>(); !s.ok())
      return s;
    // Last, as queries see tokens that the new ones replace in the rings.
    return append_to_rings(p_.cache.advance ? p_.cache.cache_seqlens.as<int>() : nullptr);
  }

 private:
  bool packed() const { return p_.query_start_loc.defined(); }
  std::int64_t batches() const { return p_.cache.cache_seqlens.size(0); }
  /// The most new tokens of a sequence.
  std::int64_t tokens() const {
    return packed() && p_.max_query_len > 0 ? std::min(p_.max_query_len, p_.q.size(1)) : p_.q.size(1);
  }
  std::int64_t heads() const { return p_.q.size(2); }
  std::int64_t kv_heads() const { return p_.k_cmp.size(2); }
  int window_size() const { return cuda::window_size(p_.cfg); }
  int positions() const { return to_int(p_.rope_cos.defined() ? p_.rope_cos.size(0) : kMaxTokens); }
  const int* num_new() const { return p_.num_new.defined() ? p_.num_new.as<const int>() : nullptr; }
  bool float8() const { return p_.cache.k_slc.dtype == DType::kFloat8E4M3; }
  bool measuring() const { return e_.arena.measuring(); }
  bool uses_splits() const { return tokens() <= kMaxDecodeTokens; }
  /// True if blocks are chosen: none are given, or the caller wants the indices.
  bool selects() const { return !p_.block_indices.defined() || p_.indices.defined(); }
  std::int64_t score_row() const { return scratch_keys_of(p_.cfg, geometry_); }
  TensorView take(std::initializer_list<std::int64_t> shape, DType dtype) {
    return take_like(e_.arena, TensorView::contiguous(nullptr, dtype, shape, p_.q.device), dtype);
  }

  void describe();
  PlanArgs plan_args() const;
  Status plan();
  Status quantise();
  Status compress_completed();
  Status append_compress_on_hopper();
  template <class Tokens>
  Status attend();
  Status attend_on_hopper();
  ChunkTokens chunk_tokens() const;
  Status append_to_rings(int* lengths);
  Status move(const TokenMove* moves, int count, std::int64_t tokens, int* lengths);
  TokenMove move_of(const TensorView& fresh, const Slots& slots, const TensorView& gathered = {}) const {
    const DType dtype = fresh.dtype;
    return {in_bytes(strided(fresh), dtype), in_bytes(slots, dtype), in_bytes(strided(gathered), dtype),
            vectors_of(fresh)};
  }

  /// A ring finds its sequences' numbers in the plan.
  Slots recent(const TensorView& tokens, const TensorView& table) const {
    const int* numbers = geometry_.plan ? &geometry_.plan->sequence : nullptr;
    return cuda::recent(tokens, table, numbers, sizeof(StepPlan) / sizeof(int));
  }
  Slots window(const TensorView& tokens) const { return recent(tokens, p_.cache.block_table_swa); }
  Slots raw_keys() const { return recent(p_.cache.k_cmp_ring, p_.cache.block_table_cmp); }
  Slots raw_values() const { return recent(p_.cache.v_cmp_ring, raw_value_table()); }
  const TensorView& raw_value_table() const {
    return shares_raw_values_ ? p_.cache.block_table : p_.cache.block_table_cmp;
  }
  /// What Hopper's kernels find tokens by; no table: a ring.
  static sm90::decode::CachedTensor cached(const Slots& slots, const TensorView& pages, const TensorView& table) {
    return {in_bytes(slots, pages.dtype), to_int(pages.size(0)), table.defined() ? to_int(table.size(1)) : 0};
  }
  const TensorView& compressed_table() const {
    return p_.cache.block_table_c.defined() ? p_.cache.block_table_c : p_.cache.block_table;
  }
  Splits take_splits(std::int64_t count, std::int64_t size);
  template <class Args>
  Args attention_args(const CachedTokens& k, const CachedTokens& v, const Splits& splits, BranchIndex branch) const;
  template <class Tokens>
  Tokens tokens_of(const CachedTokens& tokens, const TensorView& scale) const;
  template <class Tokens>
  const StepAttentionKernels<Tokens>& attention_kernels() const {
    return *step_attention_kernels<Tokens>(p_.q.dtype, p_.q.size(3), p_.o.size(3));
  }
  template <class Tokens>
  StepRangeArgs<Tokens> range_args(BranchIndex branch) const;
  template <class Tokens>
  Status attend_ranges();
  template <class Tokens>
  Status attend_range(BranchIndex branch);
  template <class Tokens>
  Status select();
  template <class Tokens>
  Status attend_selected();
  Status clear();
  StepCombineArgs combine_args() const;
  Status combine();

  sm90::StepKernels hopper_kernels() const;

  const DecodeParams& p_;
  Execution& e_;
  bool shares_window_, shares_raw_values_;  // nothing is appended to the memory that another branch has
  StepGeometry geometry_;
  StepPlan* plan_ = nullptr;
  sm90::StepKernels hopper_;
  bool gathers_ = false;  // a chunk by the kernels of a forward pass
  Slots k_c_, v_c_, k_slc_, v_slc_;
  TensorView fresh_k_slc_, fresh_v_slc_, fresh_k_swa_, fresh_v_swa_;  // the step's tokens as the cache stores them
  float scale_ = 0;
  TensorView indices_, attended_;  // own and those attended to
  // What the branches give: in a decode step splits, otherwise rows.
  Splits splits_[kBranches];
  float* scores_ = nullptr;  // of the compressed keys (StepRangesArgs)
  TensorView o_[kBranches], lse_;
};

/// What all ways of a step need to know. The plan is written by its first kernel.
void Step::describe() {
  const KVCacheView& cache = p_.cache;
  k_c_ = compressed(cache.k_c, cache, p_.cfg), v_c_ = compressed(cache.v_c, cache, p_.cfg);
  k_slc_ = paged(cache.k_slc, cache.block_table), v_slc_ = paged(cache.v_slc, cache.block_table);
  fresh_k_slc_ = p_.k_slc, fresh_v_slc_ = p_.v_slc, fresh_k_swa_ = p_.k_swa, fresh_v_swa_ = p_.v_swa;
  scale_ = static_cast<float>(scale_of(p_.softmax_scale, p_.q));
  const std::int64_t capacity = std::min(cache.block_table.size(1) * cache.k_slc.size(1), kMaxTokens);
  static_cast<Geometry&>(geometry_) = geometry_of(p_.q, kv_heads(), capacity, 0, {}, p_.cfg);
  geometry_.batches = to_int(batches()), geometry_.q_len = to_int(tokens());
  geometry_.counted = !cache.advance;
  if (packed()) geometry_.starts = p_.query_start_loc.as<const int>(), geometry_.rows = to_int(p_.q.size(1));
  plan_ = e_.arena.take<StepPlan>(batches());
  geometry_.plan = plan_;
  hopper_ = hopper_kernels();
  gathers_ = !uses_splits() && gathers_chunk(p_, geometry_);
}

PlanArgs Step::plan_args() const {
  const KVCacheView& cache = p_.cache;
  PlanArgs args{};
  args.geometry = geometry_;
  args.plan = plan_;
  args.lengths = cache.cache_seqlens.as<const int>();
  args.num_new = num_new();
  args.overflow = cache.overflow.as<int>();
  args.tables[kTokenTable] = page_table(cache.k_slc, cache.block_table);
  args.tables[kCompressedTable] = page_table(cache.k_c, cache.block_table_c);
  args.tables[kWindowTable] = page_table(cache.k_swa_ring, cache.block_table_swa);
  args.tables[kRawTable] = page_table(cache.k_cmp_ring, cache.block_table_cmp);
  args.window_size = window_size();
  args.positions = positions();
  return args;
}

Status Step::plan() {
  if (measuring()) return {};
  const PlanArgs args = plan_args();
  return status_of(launch(plan_step, dim3(static_cast<unsigned>(batches())), 256, 0, e_.stream, args), "plan_step");
}

Status Step::move(const TokenMove* moves, int count, std::int64_t tokens, int* lengths) {
  MoveArgs args{};
  args.geometry = geometry_;
  std::copy_n(moves, count, args.moves);
  args.lengths = lengths;
  const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(tokens, 1024)), count, geometry_.batches);
  return status_of(launch(move_tokens, grid, 128, 0, e_.stream, args), "move_tokens");
}

/// New tokens as a cache in e4m3 stores them: what is in q's type until here moves as bytes from here on.
Status Step::quantise() {
  if (!float8()) return {};
  QuantiseArgs args{};
  args.geometry = geometry_;
  args.geometry.batches = to_int(p_.q.size(0)), args.geometry.q_len = to_int(p_.q.size(1));
  int count = 0;
  for (const auto& [fresh, scale] : {std::pair{&fresh_k_slc_, &p_.cache.k_scale},
                                     {&fresh_v_slc_, &p_.cache.v_scale},
                                     {&fresh_k_swa_, &p_.cache.k_scale},
                                     {&fresh_v_swa_, &p_.cache.v_scale}}) {
    const TensorView from = *fresh;
    *fresh = take_like(e_.arena, from, DType::kFloat8E4M3);
    args.tokens[count++] = {strided(from), strided(*fresh), to_int(from.size(3)), scales_of(*scale)};
  }
  args.kinds = count;
  if (measuring()) return {};
  return status_of(step_element_kernels(p_.q.dtype)->quantise(args, e_.stream), "quantise_tokens");
}

/// The tokens of the blocks that the step completes, laid out for compress; the results go to their pages. The tokens
/// of the selection branch go to theirs on the way.
Status Step::compress_completed() {
  const std::int64_t blocks = ceil_div(tokens(), p_.cfg.kernel_stride);  // that a sequence may complete
  const std::int64_t raw_tokens = (blocks - 1) * p_.cfg.kernel_stride + p_.cfg.kernel_size;
  const std::int64_t B = batches(), h = kv_heads(), Dk = p_.k_cmp.size(3), Dv = p_.v_cmp.size(3);
  const DType dtype = p_.q.dtype;
  const TensorView raw_k = take({B, raw_tokens, h, Dk}, dtype), raw_v = take({B, raw_tokens, h, Dv}, dtype);
  const TensorView k = take({B, blocks, h, Dk}, dtype), v = take({B, blocks, h, Dv}, dtype);
  if (!measuring()) {
    const TokenMove moves[] = {move_of(p_.k_cmp, raw_keys(), raw_k), move_of(p_.v_cmp, raw_values(), raw_v),
                               move_of(fresh_k_slc_, k_slc_), move_of(fresh_v_slc_, v_slc_)};
    if (Status s = move(moves, 4, std::max(tokens(), raw_tokens), nullptr); !s.ok()) return s;
  }
  const int* completed = geometry_.plan ? &geometry_.plan->completed : nullptr;
  constexpr int kStep = sizeof(StepPlan) / sizeof(int);
  const CompressParams keys{raw_k, p_.weights_k, p_.cfg, {}, k}, values{raw_v, p_.weights_v, p_.cfg, {}, v};
  if (Status s = compress(keys, &values, completed, kStep, e_); !s.ok() || measuring()) return s;
  StoreArgs args{};
  args.geometry = geometry_;
  args.keys = strided(k), args.values = strided(v);
  args.key_slots = k_c_, args.value_slots = v_c_;
  args.key_dim = to_int(Dk), args.value_dim = to_int(Dv);
  args.rotation = rotation_of(p_.rope_cos, p_.rope_sin);
  args.float8 = float8();
  args.key_scales = scales_of(p_.cache.k_scale), args.value_scales = scales_of(p_.cache.v_scale);
  return status_of(step_element_kernels(dtype)->store_compressed(args, to_int(blocks), e_.stream), "store_compressed");
}

Splits Step::take_splits(std::int64_t count, std::int64_t size) {
  count = std::max<std::int64_t>(count, 1);
  const std::int64_t rows = count * batches() * tokens() * heads();
  return {to_int(count), to_int(size), e_.arena.take<float2>(rows), e_.arena.take<float>(rows * p_.o.size(3))};
}

template <class Tokens>
Status Step::attend() {
  indices_ =
      p_.indices.defined() ? p_.indices : take({p_.q.size(0), p_.q.size(1), kv_heads(), p_.cfg.topk}, DType::kInt32);
  attended_ = p_.block_indices.defined() ? p_.block_indices : indices_;
  if (uses_splits()) {
    // Splits of the compressed keys grow with the capacity, and with the rows, all of which have sums in every split.
    const std::int64_t keys = p_.cfg.num_compressed(geometry_.k_len);
    const std::int64_t most = std::max<std::int64_t>(kMaxSplits / ceil_div(tokens() * geometry_.group, 64), 4);
    const std::int64_t size =
        std::max(ceil_div(ceil_div(keys, most), kCompressedSplit), std::int64_t{1}) * kCompressedSplit;
    splits_[kCompressed] = take_splits(ceil_div(keys, size), size);
    const std::int64_t blocks = std::max<std::int64_t>(kSelectedSplit / p_.cfg.block_size, 1);
    splits_[kSelected] = take_splits(ceil_div(p_.cfg.topk, blocks), blocks);
    // From the window of the first query to the last query, wherever they lie.
    const std::int64_t seen = std::min<std::int64_t>(window_size() + tokens() - 1, geometry_.k_len);
    splits_[kWindow] = take_splits(ceil_div(seen, kWindowSplit) + 1, kWindowSplit);
    if (selects() && tokens() * geometry_.group <= kScoredRows)
      scores_ = e_.arena.take<float>(batches() * tokens() * heads() * score_row());
  } else {
    for (TensorView& o : o_) o = take_like(e_.arena, p_.o, p_.o.dtype);
    lse_ = take({p_.q.size(0), heads(), p_.q.size(1)}, DType::kFloat32);
  }
  if (Status s = clear(); !s.ok()) return s;
  // The branches of a chunk share the memory of their lse.
  if (Status s = uses_splits() ? attend_ranges<Tokens>() : attend_range<Tokens>(kCompressed); !s.ok()) return s;
  if (Status s = select<Tokens>(); !s.ok()) return s;
  if (Status s = attend_selected<Tokens>(); !s.ok()) return s;
  if (!uses_splits())
    if (Status s = attend_range<Tokens>(kWindow); !s.ok()) return s;
  return combine();
}

template <class Tokens>
Tokens Step::tokens_of(const CachedTokens& tokens, const TensorView& scale) const {
  Tokens all{};
  static_cast<CachedTokens&>(all) = tokens;
  if constexpr (std::is_same_v<Tokens, Float8Tokens>) all.scales = scales_of(scale);
  return all;
}

template <class Args>
Args Step::attention_args(const CachedTokens& k, const CachedTokens& v, const Splits& splits,
                          BranchIndex branch) const {
  Args args{};
  args.geometry = geometry_;
  args.q = strided(p_.q);
  args.k = tokens_of<decltype(args.k)>(k, p_.cache.k_scale);
  args.v = tokens_of<decltype(args.v)>(v, p_.cache.v_scale);
  args.o = strided(o_[branch]);
  args.lse = per_row(lse_);
  args.scale = scale_;
  args.splits = splits;
  return args;
}

template <class Tokens>
StepRangeArgs<Tokens> Step::range_args(BranchIndex branch) const {
  using Args = StepRangeArgs<Tokens>;
  if (branch == kCompressed) return attention_args<Args>({k_c_, {}}, {v_c_, {}}, splits_[kCompressed], kCompressed);
  auto args = attention_args<Args>({window(p_.cache.k_swa_ring), strided(fresh_k_swa_)},
                                   {window(p_.cache.v_swa_ring), strided(fresh_v_swa_)}, splits_[kWindow], kWindow);
  args.window = window_size();
  return args;
}

template <class Tokens>
Status Step::attend_ranges() {
  if (measuring()) return {};
  const int row_tiles = to_int(ceil_div(tokens() * geometry_.group, kStepRows));
  const StepRangesArgs<Tokens> args{range_args<Tokens>(kCompressed), range_args<Tokens>(kWindow), row_tiles, scores_,
                                    score_row()};
  return status_of(attention_kernels<Tokens>().ranges(args, e_.stream), "step_ranges");
}

template <class Tokens>
Status Step::attend_range(BranchIndex branch) {
  if (measuring()) return {};
  return status_of(attention_kernels<Tokens>().range_forward(range_args<Tokens>(branch), e_.stream), "range_forward");
}

template <class Tokens>
Status Step::attend_selected() {
  if (measuring()) return {};
  auto args = attention_args<StepSelectedArgs<Tokens>>({k_slc_, {}}, {v_slc_, {}}, splits_[kSelected], kSelected);
  args.indices = strided(attended_);
  args.topk = p_.cfg.topk;
  args.block_size = p_.cfg.block_size;
  return status_of(attention_kernels<Tokens>().selected_forward(args, e_.stream), "selected_forward");
}

template <class Tokens>
Status Step::select() {
  if (!selects()) return {};
  StepSelectArgs<Tokens> args{};
  args.geometry = geometry_;
  args.q = strided(p_.q);
  args.k = tokens_of<Tokens>({k_c_, {}}, p_.cache.k_scale);
  args.lse = per_row(lse_);
  args.indices = strided(indices_);
  args.splits = splits_[kCompressed];
  args.scores = scores_;
  set_selection(args, p_.cfg, scale_);
  const int count = selecting_blocks(args);
  const std::int64_t rows = uses_splits() ? batches() * kv_heads() * tokens() : count * args.queries;
  args.scratch = e_.arena.take<float>(rows * (args.scratch_keys + args.scratch_blocks));
  if (measuring()) return {};
  const StepSelectKernels<Tokens>& kernels = step_element_kernels(p_.q.dtype)->of<Tokens>();
  const int key_dim = to_int(p_.q.size(3));
  return status_of(uses_splits() ? kernels.select_with_splits(args, key_dim, e_.stream)
                                 : kernels.select_blocks(args, key_dim, count, e_.stream),
                   "select_blocks");
}

/// Of the packed rows of o and indices all; those of queries follow.
Status Step::clear() {
  if (measuring() || !packed()) return {};
  return status_of(step_element_kernels(p_.q.dtype)->clear(combine_args(), e_.stream), "clear_rows");
}

StepCombineArgs Step::combine_args() const {
  StepCombineArgs args{};
  args.geometry = geometry_;
  for (int i = 0; i < kBranches; ++i) args.rows.branch[i] = strided(o_[i]), args.splits[i] = splits_[i];
  args.rows.gates = strided(p_.gates);
  args.rows.o = strided(p_.o);
  args.rows.rows = to_int(tokens());
  args.rows.heads = to_int(heads());
  args.rows.dim = to_int(p_.o.size(3));
  args.value_scales = scales_of(p_.cache.v_scale);
  args.window = window_size();
  args.indices = strided(p_.indices);
  args.topk = p_.cfg.topk;
  return args;
}

Status Step::combine() {
  if (measuring()) return {};
  return status_of(step_element_kernels(p_.q.dtype)->combine(combine_args(), e_.stream), "combine_step");
}

/// Advances the lengths, if they are given.
Status Step::append_to_rings(int* lengths) {
  if (measuring()) return {};
  const KVCacheView& cache = p_.cache;
  TokenMove moves[4] = {move_of(p_.k_cmp, raw_keys())};
  int count = 1;
  if (!shares_raw_values_) moves[count++] = move_of(p_.v_cmp, raw_values());
  if (!shares_window_) {
    moves[count++] = move_of(fresh_k_swa_, window(cache.k_swa_ring));
    moves[count++] = move_of(fresh_v_swa_, window(cache.v_swa_ring));
  }
  return move(moves, count, tokens(), lengths);
}

/// The kernels of compute capability 9.0 that can serve this step here.
sm90::StepKernels Step::hopper_kernels() const {
  if (!uses_splits()) return {};
  constexpr std::int64_t kMax = 1 << 30;  // bytes are counted in 32 bits
  const KVCacheView& cache = p_.cache;
  sm90::StepDesc call{p_.q.dtype, p_.q.size(3), p_.o.size(3), geometry_.group, geometry_.k_len, p_.cfg};
  call.float8 = float8();
  for (const TensorView* t :
       {&p_.q, &cache.k_c, &cache.v_c, &cache.k_slc, &cache.v_slc, &cache.k_swa_ring, &cache.v_swa_ring}) {
    const Strided rows = strided(*t);
    // Rows in e4m3 begin at multiples of 16 bytes (supports_layout).
    const bool compatible = t->dtype == DType::kFloat8E4M3 || sm90::tma_compatible(rows);
    call.tma_compatible &= compatible && rows.row < kMax && rows.head < kMax;
  }
  call.phi_k = p_.weights_k.kind, call.phi_v = p_.weights_v.kind;
  for (const CompressionWeights* w : {&p_.weights_k, &p_.weights_v}) {
    if (w->w1.defined()) (w == &p_.weights_k ? call.hidden_k : call.hidden_v) = w->w1.size(2);
    for (const Weights& t : {weights_of(w->pe), weights_of(w->w1), weights_of(w->w2)})
      call.phi_compatible &= sm90::tma_compatible({t.data, t.head, t.row, 0});
  }
  for (const TensorView* t : {&p_.k_cmp, &p_.v_cmp, &cache.k_cmp_ring, &cache.v_cmp_ring}) {
    const Strided rows = strided(*t);
    call.phi_compatible &= sm90::tma_compatible(rows) && rows.row < kMax && rows.head < kMax;
  }
  call.queries = batches() * tokens() * kv_heads(), call.tokens = tokens(), call.chooses = selects();
  return sm90::kernels_for(p_.q.device.index, call);
}

Status Step::append_compress_on_hopper() {
  if (measuring()) return {};
  const KVCacheView& cache = p_.cache;
  sm90::decode::AppendCompressArgs args{plan_args()};
  const HeadScales none, k_scales = scales_of(cache.k_scale), v_scales = scales_of(cache.v_scale);
  const auto append = [&](const TensorView& fresh, const Slots& slots, const TensorView& pages, const TensorView& table,
                          const HeadScales& scales) -> sm90::decode::Append {
    return {in_bytes(strided(fresh), fresh.dtype), cached(slots, pages, table), vectors_of(fresh), scales};
  };
  args.appends[0] = append(p_.k_slc, k_slc_, cache.k_slc, cache.block_table, k_scales);
  args.appends[1] = append(p_.v_slc, v_slc_, cache.v_slc, cache.block_table, v_scales);
  args.appends[2] = append(p_.k_swa, window(cache.k_swa_ring), cache.k_swa_ring, cache.block_table_swa, k_scales);
  args.appends[3] = append(p_.v_swa, window(cache.v_swa_ring), cache.v_swa_ring, cache.block_table_swa, v_scales);
  args.appends[4] = append(p_.k_cmp, raw_keys(), cache.k_cmp_ring, cache.block_table_cmp, none);
  args.appends[5] = append(p_.v_cmp, raw_values(), cache.v_cmp_ring, raw_value_table(), none);
  if (shares_window_) args.appends[2].vectors = args.appends[3].vectors = 0;
  if (shares_raw_values_) args.appends[5].vectors = 0;
  const auto side = [&](const TensorView& fresh, const sm90::decode::CachedTensor& raw, const Slots& out,
                        const TensorView& pages, const CompressionWeights& w) {
    sm90::decode::CompressSide side{};
    side.fresh = strided(fresh), side.raw = raw, side.out = cached(out, pages, compressed_table());
    side.pe = weights_of(w.pe), side.w1 = weights_of(w.w1), side.b1 = weights_of(w.b1);
    side.w2 = weights_of(w.w2), side.b2 = weights_of(w.b2);
    side.dim = to_int(fresh.size(3));
    side.mlp = w.kind == CompressionKind::kMlp;
    if (w.w1.defined()) side.hidden = to_int(w.w1.size(2)), side.clusters = to_int(w.w1.size(0));
    return side;
  };
  args.sides[0] = side(p_.k_cmp, args.appends[4].to, k_c_, cache.k_c, p_.weights_k);
  args.sides[1] = side(p_.v_cmp, args.appends[5].to, v_c_, cache.v_c, p_.weights_v);
  args.sides[0].scales = k_scales, args.sides[1].scales = v_scales;
  args.rotation = rotation_of(p_.rope_cos, p_.rope_sin);
  args.o = strided(p_.o), args.indices = strided(p_.indices);
  args.value_dim = to_int(p_.o.size(3)), args.topk = p_.cfg.topk;
  return status_of(hopper_.append_compress(args, e_.stream), "append_compress");
}

Status Step::attend_on_hopper() {
  if (measuring()) return {};
  const KVCacheView& cache = p_.cache;
  const NSAConfig& cfg = p_.cfg;
  sm90::decode::StepAttendArgs args{};
  args.geometry = geometry_;
  args.q = strided(p_.q), args.gates = strided(p_.gates), args.o = strided(p_.o);
  args.given = strided(p_.block_indices), args.indices = strided(p_.indices);
  const auto branch = [](const Slots& keys, const Slots& values, const TensorView& pages,
                         const TensorView& table) -> sm90::decode::CachedBranch {
    return {cached(keys, pages, table), cached(values, pages, table)};
  };
  args.cached[kCompressed] = branch(k_c_, v_c_, cache.k_c, compressed_table());
  args.cached[kSelected] = branch(k_slc_, v_slc_, cache.k_slc, cache.block_table);
  args.cached[kWindow] =
      branch(window(cache.k_swa_ring), window(cache.v_swa_ring), cache.k_swa_ring, cache.block_table_swa);
  args.key_scales = scales_of(cache.k_scale), args.value_scales = scales_of(cache.v_scale);
  args.window = window_size();
  args.topk = cfg.topk;
  args.init_blocks = cfg.init_blocks, args.local_blocks = cfg.local_blocks;
  args.scale = scale_;
  args.lengths = cache.cache_seqlens.as<int>();
  args.advance = cache.advance;
  args.num_new = num_new();
  args.positions = positions();
  args.plan = plan_;
  args.block_keys = sm90::decode::BlockKeys(cfg);
  args.shape = hopper_.shape;
  const std::int64_t sequences = args.geometry.batches;
  args.longest_first = hopper_.longest_first && sequences > 1 && sequences <= sm90::decode::kMaxOrdered;
  return status_of(hopper_.attend(args, e_.stream), "step_attend");
}

ChunkTokens Step::chunk_tokens() const {
  return {.k_slc = {k_slc_, {}},
          .v_slc = {v_slc_, {}},
          .k_c = {k_c_, {}},
          .v_c = {v_c_, {}},
          .k_swa = {window(p_.cache.k_swa_ring), strided(fresh_k_swa_)},
          .v_swa = {window(p_.cache.v_swa_ring), strided(fresh_v_swa_)}};
}

/// Packed rows as a batch of one.
DecodeParams in_batches(DecodeParams p) {
  if (!p.query_start_loc.defined()) return p;
  for (TensorView* t : {&p.q, &p.k_cmp, &p.v_cmp, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa, &p.gates, &p.block_indices,
                        &p.o, &p.indices}) {
    if (!t->defined()) continue;
    t->rank = 4;
    t->shape = {1, t->shape[0], t->shape[1], t->shape[2]};
    t->stride = {0, t->stride[0], t->stride[1], t->stride[2]};
  }
  return p;
}

}  // namespace

Status run(const DecodeParams& given, Execution& e) {
  DecodeParams p = in_batches(given);
  if (KVCacheView& cache = p.cache; cache.shares_window())
    cache.k_swa_ring = cache.k_slc, cache.v_swa_ring = cache.v_slc, cache.block_table_swa = cache.block_table;
  if (p.cache.shares_raw_values()) p.cache.v_cmp_ring = p.cache.v_slc;
  if (p.q.numel() == 0) return {};
  if (!e.arena.measuring()) {  // before anything is written
    Execution needed;
    if (Status s = Step(p, given.cache, needed).run(); !s.ok()) return s;
    Arena all = e.arena;
    all.take<char>(static_cast<std::int64_t>(needed.arena.used()));
    if (!all.enough()) return out_of_workspace(all);
  }
  return Step(p, given.cache, e).run();
}

}  // namespace nsa::cuda
