#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/cache_step.h"
#include "core/strided.h"
#include "core/validation/check.h"
#include "core/validation/validate.h"

namespace nsa {
namespace {

/// The sizes of a cache and of a step.
struct Shapes {
  explicit Shapes(const NSAConfig& cfg)
      : topk{"topk", cfg.topk},
        swa_ring{"window_size + 32", std::int64_t{cfg.window_size} + kRollback},
        cmp_ring{"kernel_size + 32", std::int64_t{cfg.kernel_size} + kRollback} {}

  Dim B{"B"}, m{"m"}, T{"T"}, H{"H"}, Hkv{"Hkv"}, Dk{"Dk"}, Dv{"Dv"}, three{"", 3}, one{"", 1}, topk;
  Dim num_pages{"num_pages"}, page_size{"page_size"}, max_pages{"max_pages"};
  Dim num_pages_c{"num_pages_c"}, page_size_c{"page_size_c"}, max_pages_c{"max_pages_c"};
  Dim swa_ring, cmp_ring;
  std::int64_t max_positions = 0;  // that can be rotated
  bool packed = false;

  /// Of what has a row per new token.
  Shape new_tokens(Dim& heads, Dim& dim) { return packed ? Shape{&T, &heads, &dim} : Shape{&B, &m, &heads, &dim}; }
};

bool is_float8(const KVCacheView& cache) { return cache.k_slc.dtype == DType::kFloat8E4M3; }

/// Page numbers must exist; -1 is none.
void check_table(Checker& check, const char* name, const TensorView& given, std::int64_t num_pages) {
  const TensorView table = check.readable(given);
  if (!table.defined()) return;
  for (std::int64_t b = 0; b < table.size(0); ++b)
    for (std::int64_t p = 0; p < table.size(1); ++p) {
      const std::int64_t page = table.as<const std::int32_t>()[b * table.stride[0] + p * table.stride[1]];
      check.require(page >= -1 && page < num_pages, name, "[", b, ", ", p, "] = ", page, ": must be -1 or below ",
                    num_pages, ", the number of pages");
    }
}

void check_page_size(Checker& check, const char* name, const Dim& page_size) {
  check.require(page_size.value > 0 && page_size.value % 16 == 0, name, ": page_size = ", page_size.value,
                ": must be a positive multiple of 16");
}

/// Keys or values of a cache in the type of the call, or in e4m3.
void check_stored(Checker& check, bool float8, const char* name, const TensorView& tokens, const Shape& shape) {
  if (float8) {
    check.float8(name, tokens, Access::kState, shape, "cache.k_slc");
  } else {
    check.tensor(name, tokens, Access::kState, shape);
  }
}

/// The window or the raw tokens: a ring of a size, or pages of any. shares_v: values are elsewhere.
void check_recent(Checker& check, Shapes& s, bool float8, const char* k_name, const TensorView& k, const char* v_name,
                  const TensorView& v, bool shares_v, Dim& ring, const char* table_name, const TensorView& table) {
  Dim num_pages{"num_pages"}, page_size{"page_size"}, max_pages{"max_pages"};
  Dim &first = table.defined() ? num_pages : s.B, &rows = table.defined() ? page_size : ring;
  check_stored(check, float8, k_name, k, {&first, &rows, &s.Hkv, &s.Dk});
  if (!shares_v) check_stored(check, float8, v_name, v, {&first, &rows, &s.Hkv, &s.Dv});
  if (!table.defined() || !check.ok()) return;
  check.int32(table_name, table, Access::kInput, {&s.B, &max_pages});
  check_page_size(check, k_name, page_size);
  check_table(check, table_name, table, num_pages.value);
}

/// Compressed tokens in pages of their own, or with the tokens.
void check_compressed(Checker& check, Shapes& s, const KVCacheView& cache, const NSAConfig& cfg) {
  const bool own = cache.block_table_c.defined();
  Dim entries{"page_size / kernel_stride", s.page_size.value / std::max(1, cfg.kernel_stride)};
  Dim &num_pages = own ? s.num_pages_c : s.num_pages, &page_size = own ? s.page_size_c : entries;
  check.require(own || s.page_size.value % std::max(1, cfg.kernel_stride) == 0,
                "cache.k_slc: page_size = ", s.page_size.value,
                ": without block_table_c kernel_stride = ", cfg.kernel_stride, " must divide it");
  check_stored(check, is_float8(cache), "cache.k_c", cache.k_c, {&num_pages, &page_size, &s.Hkv, &s.Dk});
  check_stored(check, is_float8(cache), "cache.v_c", cache.v_c, {&num_pages, &page_size, &s.Hkv, &s.Dv});
  if (!own) return;
  check.int32("cache.block_table_c", cache.block_table_c, Access::kInput, {&s.B, &s.max_pages_c});
  check_page_size(check, "cache.k_c", s.page_size_c);
  check_table(check, "cache.block_table_c", cache.block_table_c, s.num_pages_c.value);
}

void check_cache(Checker& check, Shapes& s, const KVCacheView& cache, const NSAConfig& cfg) {
  const bool float8 = is_float8(cache);
  check_stored(check, float8, "cache.k_slc", cache.k_slc, {&s.num_pages, &s.page_size, &s.Hkv, &s.Dk});
  check_stored(check, float8, "cache.v_slc", cache.v_slc, {&s.num_pages, &s.page_size, &s.Hkv, &s.Dv});
  check.int32("cache.cache_seqlens", cache.cache_seqlens, Access::kState, {&s.B});
  check.int32("cache.block_table", cache.block_table, Access::kInput, {&s.B, &s.max_pages});
  check_page_size(check, "cache.k_slc", s.page_size);
  check_compressed(check, s, cache, cfg);
  const bool window = cache.advance || !cache.shares_window(), values = cache.advance || !cache.shares_raw_values();
  if (window)
    check_recent(check, s, float8, "cache.k_swa_ring", cache.k_swa_ring, "cache.v_swa_ring", cache.v_swa_ring, false,
                 s.swa_ring, "cache.block_table_swa", cache.block_table_swa);
  check.require(window || !cache.block_table_swa.defined(),
                "cache.block_table_swa: given without cache.k_swa_ring: must not be, as block_table has the window");
  check.require(values || !float8, "cache.v_cmp_ring: not given: must be for a cache in float8_e4m3fn");
  check_recent(check, s, false, "cache.k_cmp_ring", cache.k_cmp_ring, "cache.v_cmp_ring", cache.v_cmp_ring, !values,
               s.cmp_ring, "cache.block_table_cmp", cache.block_table_cmp);
  check.int32("cache.overflow", cache.overflow, Access::kState, {&s.one});
  check_table(check, "cache.block_table", cache.block_table, s.num_pages.value);
  if (!cache.advance) check.note("cache.advance", std::int64_t{0});
  const TensorView lengths = check.readable(cache.cache_seqlens);
  if (!lengths.defined()) return;
  for (std::int64_t b = 0; b < s.B.value; ++b)
    check.require(int32_at(lengths, b) >= 0, "cache.cache_seqlens[", b, "] = ", int32_at(lengths, b), ": must be >= 0");
}

void check_scales(Checker& check, Shapes& s, const KVCacheView& cache) {
  for (const auto& [name, scale] : {std::pair{"cache.k_scale", cache.k_scale}, {"cache.v_scale", cache.v_scale}})
    if (is_float8(cache)) {
      check.scales(name, scale, s.Hkv);
    } else {
      check.require(!scale.defined(), name, ": given for a cache in ", name_of(cache.k_slc.dtype), ": goes with ",
                    name_of(DType::kFloat8E4M3));
    }
}

/// Where packed new tokens are.
void check_packed(Checker& check, Shapes& s, const DecodeParams& params) {
  Dim starts{"B + 1", s.B.value + 1};
  check.int32("query_start_loc", params.query_start_loc, Access::kInput, {&starts});
  check.require(!params.num_new.defined(), "num_new: given beside query_start_loc, which says how many tokens are new");
  check.require(params.max_query_len >= 0, "max_query_len = ", params.max_query_len, ": must be >= 0");
  if (check.ok()) check.offsets("query_start_loc", params.query_start_loc, s.T.value);
  check.note("max_query_len", params.max_query_len);
  s.m.value = params.max_query_len > 0 ? params.max_query_len : s.T.value;
}

/// New tokens of memory that a cache does not have are those of the memory that it has for them.
void check_shared_tokens(Checker& check, const DecodeParams& params) {
  const bool window = params.cache.shares_window();
  for (const auto& [missing, name, fresh, with, source] :
       {std::tuple{window, "k_swa", &params.k_swa, "k_slc", &params.k_slc},
        {window, "v_swa", &params.v_swa, "v_slc", &params.v_slc},
        {params.cache.shares_raw_values(), "v_cmp", &params.v_cmp, "v_slc", &params.v_slc}})
    check.require(!missing || same_view(*fresh, *source), name, ": another tensor than ", with,
                  ": must be the same one for a cache that keeps both in cache.", with);
}

/// Only full pages can be shared: no page that the step writes to may be named a second time, but for neighbours in
/// block_table_cmp. `needed` has what each sequence needs of each table.
void check_written_pages(Checker& check, const std::vector<std::pair<std::int64_t, std::vector<PagesNeeded>>>& needed) {
  using Entry = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // page, sequence, column
  for (std::size_t i = 0; check.ok() && !needed.empty() && i < needed.front().second.size(); ++i) {
    const char* name = needed.front().second[i].table_name;
    const TensorView table = check.readable(needed.front().second[i].table);
    if (!table.defined()) return;
    const bool repeats = std::string_view(name) == "block_table_cmp";
    const auto each = [&](bool written, auto visit) {
      for (const auto& [b, tables] : needed) {
        const std::int64_t end = std::min(tables[i].end_page(), table.size(1));
        for (std::int64_t p = tables[i].first_page(); p < end; ++p) {
          const Entry entry{table_entry(table, b, p), b, p};
          bool writes = tables[i].writes(p);
          while (repeats && p + 1 < end && table_entry(table, b, p + 1) == std::get<0>(entry))
            writes |= tables[i].writes(++p);
          if (writes == written) visit(entry);
        }
      }
    };
    const auto refuse = [&](const Entry& entry, const Entry& writer) {
      const auto [page, b, p] = entry;
      check.require(page < 0, "cache.", name, "[", b, ", ", p, "] = ", page, ": [", std::get<1>(writer), ", ",
                    std::get<2>(writer),
                    "] is this page too, and the step writes to it: only full pages can be shared");
    };
    std::vector<Entry> writers;
    each(true, [&](const Entry& entry) { writers.push_back(entry); });
    std::ranges::sort(writers);
    for (std::size_t w = 1; w < writers.size(); ++w)
      if (std::get<0>(writers[w - 1]) == std::get<0>(writers[w])) refuse(writers[w], writers[w - 1]);
    // By page: few of the pages in the tables are written to. -1 is no page.
    std::vector<bool> is_written(writers.empty() ? 0 : std::max<std::int64_t>(std::get<0>(writers.back()), -1) + 1);
    for (const auto& [page, b, p] : writers)
      if (page >= 0) is_written[page] = true;
    each(false, [&](const Entry& entry) {
      const auto page = std::get<0>(entry);
      if (page < 0 || page >= std::ssize(is_written) || !is_written[page]) return;
      refuse(entry, *std::ranges::lower_bound(writers, Entry{page, -1, -1}));
    });
  }
}

/// Tokens that sequence b appends; the offsets of its table and rotation must hold them.
void check_new_tokens(Checker& check, const Shapes& s, const DecodeParams& params) {
  const TensorView lengths = check.readable(params.cache.cache_seqlens);
  const TensorView num_new = params.num_new.defined() ? check.readable(params.num_new) : TensorView{};
  const TensorView starts = s.packed ? check.readable(params.query_start_loc) : TensorView{};
  if (!lengths.defined() || (s.packed && !starts.defined())) return;
  std::vector<std::pair<std::int64_t, std::vector<PagesNeeded>>> needed;
  for (std::int64_t b = 0; b < s.B.value && check.ok(); ++b) {
    const std::int64_t added = num_new.defined() ? int32_at(num_new, b)
                               : s.packed        ? int32_at(starts, b + 1) - int32_at(starts, b)
                                                 : s.m.value;
    check.require(num_new.defined() || added <= s.m.value, "query_start_loc: sequence ", b, " has ", added,
                  " new tokens: at most max_query_len = ", s.m.value);
    check.require(added >= 0 && added <= s.m.value, "num_new[", b, "] = ", added, ": must be 0 ... m = ", s.m.value);
    check.require(params.cache.advance || added == 0 || int32_at(lengths, b) >= added, "cache.cache_seqlens[", b,
                  "] = ", int32_at(lengths, b), ": without advance it counts the new tokens too, ", added);
    const std::int64_t length = int32_at(lengths, b) + (params.cache.advance ? added : 0);
    check.require(length <= std::numeric_limits<std::int32_t>::max(), "cache.cache_seqlens[", b, "]: ", length,
                  " tokens after the step: must be below 2^31");
    const std::int64_t last = (params.cfg.num_compressed(length) - 1) * params.cfg.kernel_stride;
    // Beyond its table a sequence appends nothing, sets the overflow flag and rotates nothing.
    const bool fits = length <= params.cache.block_table.size(1) * params.cache.k_slc.size(1);
    check.require(!params.rope_cos.defined() || !fits || last < s.max_positions, "rope_cos: ", params.rope_cos,
                  ": sequence ", b, " rotates a compressed key at position ", last);
    check.require(!params.rotate || added == 0 || !fits || length <= s.max_positions, "rope_cos: ", params.rope_cos,
                  ": sequence ", b, " rotates a token at position ", length - 1);
    if (added > 0 && check.ok()) needed.emplace_back(b, pages_needed(params.cache, params.cfg, length - added, length));
  }
  check_written_pages(check, needed);
}

}  // namespace

Status validate(const DecodeParams& params, Call& call) {
  Checker check(call);
  Shapes s(params.cfg);
  check.config(params.cfg);
  s.packed = params.query_start_loc.defined();
  check.tensor("q", params.q, Access::kInput, s.new_tokens(s.H, s.Dk));
  check.require(s.packed || s.m.value >= 1, "q: ", params.q, ": m must be >= 1");
  check.tensor("k_cmp", params.k_cmp, Access::kInput, s.new_tokens(s.Hkv, s.Dk));
  check.tensor("v_cmp", params.v_cmp, Access::kInput, s.new_tokens(s.Hkv, s.Dv));
  check.tensor("k_slc", params.k_slc, Access::kInput, s.new_tokens(s.Hkv, s.Dk));
  check.tensor("v_slc", params.v_slc, Access::kInput, s.new_tokens(s.Hkv, s.Dv));
  check.tensor("k_swa", params.k_swa, Access::kInput, s.new_tokens(s.Hkv, s.Dk));
  check.tensor("v_swa", params.v_swa, Access::kInput, s.new_tokens(s.Hkv, s.Dv));
  check.tensor("gates", params.gates, Access::kInput, s.new_tokens(s.H, s.three));
  if (!check.ok()) return check.finish();
  check.require(s.H.value > 0 && s.Hkv.value > 0 && s.H.value % s.Hkv.value == 0, "H = ", s.H.value,
                ", Hkv = ", s.Hkv.value, ": Hkv must divide H, both >= 1");
  check.require(s.Dk.value > 0 && s.Dv.value > 0, "Dk = ", s.Dk.value, ", Dv = ", s.Dv.value, ": must be >= 1");
  check_cache(check, s, params.cache, params.cfg);
  check_scales(check, s, params.cache);
  check_shared_tokens(check, params);
  if (s.packed) check_packed(check, s, params);
  check_weights(check, "weights_k.", params.weights_k, params.cfg, s.Hkv, s.Dk);
  check_weights(check, "weights_v.", params.weights_v, params.cfg, s.Hkv, s.Dv);
  check.softmax_scale(params.softmax_scale);
  s.max_positions = check_rotation(check, params.rope_cos, params.rope_sin, s.Dk);
  check.require(!params.rotate || params.rope_cos.defined(),
                "rotate: given without rope_cos: goes with rope_cos and rope_sin");
  if (params.rotate) check.note("rotate", std::int64_t{1});
  check.optional_int32("num_new", params.num_new, Access::kInput, {&s.B});
  check.optional_int32("block_indices", params.block_indices, Access::kInput, s.new_tokens(s.Hkv, s.topk));
  check.tensor("o", params.o, Access::kOutput, s.new_tokens(s.H, s.Dv));
  check.optional_int32("indices", params.indices, Access::kOutput, s.new_tokens(s.Hkv, s.topk));
  check_new_tokens(check, s, params);
  call.problem.key_dim = s.Dk.value;
  call.problem.value_dim = s.Dv.value;
  return check.finish();
}

Status validate(const ForkParams& params, Call& call) {
  Checker check(call);
  Shapes s(params.cfg);
  check.config(params.cfg);
  check_cache(check, s, params.cache, params.cfg);
  check.require(params.parent >= 0 && params.parent < s.B.value, "parent = ", params.parent,
                ": must be 0 ... B - 1 = ", s.B.value - 1);
  check.require(params.child >= 0 && params.child < s.B.value && params.child != params.parent,
                "child = ", params.child, ": must be 0 ... B - 1 = ", s.B.value - 1, " and not the parent");
  check.note("parent", params.parent);
  check.note("child", params.child);
  check.note("length", params.length);
  if (!check.ok()) return check.finish();
  call.problem.key_dim = s.Dk.value;
  call.problem.value_dim = s.Dv.value;
  check.require(params.length >= 0, "length = ", params.length, ": must be >= 0");
  const TensorView lengths = check.readable(params.cache.cache_seqlens);
  if (!lengths.defined()) return check.finish();
  const std::int64_t parent_length = int32_at(lengths, params.parent);
  check.require(params.length >= 0 && params.length <= parent_length, "length = ", params.length,
                ": must be 0 ... the parent's length, ", parent_length);
  const bool rings = !params.cache.block_table_swa.defined() || !params.cache.block_table_cmp.defined();
  check.require(!rings || parent_length - params.length <= kRollback, "length = ", params.length, ": at most ",
                kRollback, " below the parent's length, ", parent_length, ": the rings hold no older tokens");
  return check.finish();
}

}  // namespace nsa
