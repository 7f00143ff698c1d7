#include "cuda/operations/stored_selection.h"

namespace nsa::cuda {

StoredSelection::StoredSelection(const Branch& b, const TensorView& d_o, bool queries, const TensorView& d_k,
                                 const TensorView& d_v)
    : whole_(b.geometry) {
  if (!b.indices || !queries || !(d_k.defined() || d_v.defined())) return;
  if (!hopper_kernels(b, d_o).selected_d_q_of_ds) return;
  const std::int64_t row = selected_ds_row(whole_, to_int(b.indices->size(-1)), b.block_size);
  windows_ = selected_windows(whole_, row, wanted_d_s_bytes().value_or(selected_ds_budget(whole_)));
  const bool several = whole_.cu_q ? windows_.size() > 1 : !windows_.empty() && windows_[0].count < whole_.q_len;
  if (!several) return;
  const std::int64_t width = b.q.size(-1) + b.v.size(-1);
  sums_ = {.data = nullptr,
           .batch = whole_.cu_q ? 0 : whole_.k_len * whole_.kv_heads * width,
           .row = whole_.kv_heads * width,
           .head = width};
  floats_ = end_prefix(whole_).k * sums_.row;
}

void StoredSelection::take_sums(Arena& arena) {
  if (floats_ > 0) sums_.data = arena.take<float>(floats_);
}

Status StoredSelection::begin(Execution& e) const {
  if (floats_ == 0) return {};
  const std::size_t bytes = static_cast<std::size_t>(floats_) * sizeof(float);
  return status_of(cudaMemsetAsync(sums_.data, 0, bytes, e.stream), "cudaMemsetAsync");
}

void StoredSelection::take_windows(const Prepared& whole, const Arena& rest, Arena& arena) const {
  for (const QuerySpan& span : windows_) {
    Arena after = rest;
    window(whole, span, after);
    if (after.used() > arena.used()) arena.take<char>(static_cast<std::int64_t>(after.used() - arena.used()));
  }
}

Prepared StoredSelection::window(const Prepared& whole, const QuerySpan& span, Arena& arena) const {
  Prepared x = span_of(whole, span);
  Geometry& g = x.args.geometry;
  SelectedWindows& windows = x.args.windows;
  windows.stored = true;
  windows.several = floats_ > 0;
  windows.sums = sums_;
  if (!whole_.cu_q) {
    const std::int64_t first = span.sequence * sums_.batch;
    if (windows.sums.data) windows.sums.data = static_cast<float*>(windows.sums.data) + first;
    windows.cut = (span.first > 0 ? SelectedWindows::kBefore : 0) |
                  (span.first + span.count < whole_.q_len ? SelectedWindows::kAfter : 0);
  } else {
    g = whole_;
    g.q_len = std::min(g.q_len, span.count);
    g.total_q = span.count;
    if (Strided& sum = x.args.sum_to; sum.data) sum.data = static_cast<float*>(sum.data) + span.first * sum.row;
  }
  if (whole_.cu_q && windows.several) {
    const std::int64_t count = std::int64_t{g.batches} + 1;
    x.cut = {.first = span.first,
             .count = span.count,
             .cu_q = arena.take<int>(count),
             .cu_k = arena.take<int>(count),
             .cuts = arena.take<int>(count)};
    if (x.cut.cu_q) g.cu_q = x.cut.cu_q, g.cu_k = x.cut.cu_k, windows.cuts = x.cut.cuts;
  }
  take_key_memory(x, true, arena);
  const InverseIndex& lists = x.args.lists;
  x.args.selected_ds = SelectedDs(lists.entries * g.kv_heads, g.group);
  x.args.selected_ds.data = arena.take<char>(x.args.selected_ds.bytes(x.args.block_size));
  return x;
}

Status StoredSelection::run_keys(const Prepared& window, Execution& e) const {
  if (window.cut.count > 0)
    if (Status s = status_of(cut_sequences(whole_, window.cut, e.stream), "cut_sequences"); !s.ok()) return s;
  if (Status s = status_of(build_inverse_index(window.inverse, e.stream), "build_inverse_index"); !s.ok()) return s;
  return status_of(window.hopper.selected_d_kv(window.args, e.stream), "selected_d_kv");
}

Status StoredSelection::run_queries(const Prepared& window, Execution& e) const {
  return status_of(window.hopper.selected_d_q_of_ds(window.args, e.stream), "selected_d_q_of_ds");
}

}  // namespace nsa::cuda
