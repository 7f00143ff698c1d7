// Packed calls of very uneven sequences: the bits of every sequence, and memory that follows the rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "device.h"
#include "support/environment.h"
#include "under_test.h"

namespace nsa::test {
namespace {

/// Mostly short sequences, empty ones too, between two whose dK and dV are summed from parts in every branch.
Case uneven() {
  Case c{.dtype = DType::kBFloat16,
         .packed = true,
         .q_lens = {1500},
         .slack = 5,
         .kv_heads = 2,
         .group = 1,
         .cfg = small_config(),
         .kind = CompressionKind::kLinear};
  for (int i = 0; i < 40; ++i) c.q_lens.push_back(i % 7 == 3 ? 0 : i * 29 % 83 + 1);
  c.q_lens.push_back(1100);
  c.k_lens = c.q_lens;
  for (std::size_t i = 0; i < c.k_lens.size(); i += 3) c.k_lens[i] += 50;
  c.cfg.window_size = 1400;
  return c;
}

/// While it lives, only the portable kernels run.
struct PortableKernels : Environment {
  PortableKernels() : Environment("NSA_CUDA_KERNELS", "portable") {}
};

TEST(Packed, UnevenSequencesHaveTheBitsOfEachAlone) {
  const PortableKernels portable;  // the others promise it only within rounding
  expect_packed_equals_alone(Problem(uneven()));
}

/// The compressed branch's dS: stored of sequences alone, in one part or in many; of these packed ones it is not.
Case with_long_sequences() {
  Case c = uneven();
  c.q_lens = {5000, 300, 9000};
  c.k_lens = {5000, 2300, 9050};
  c.kv_heads = 1, c.group = 2;
  return c;
}

class StoredInParts : public testing::TestWithParam<const char*> {};

TEST_P(StoredInParts, LongSequencesHaveTheBitsOfEachAlone) {
  const PortableKernels portable;
  const Environment memory("NSA_CUDA_DS_MIB", GetParam());
  expect_packed_equals_alone(Problem(with_long_sequences()));
}

INSTANTIATE_TEST_SUITE_P(Packed, StoredInParts, testing::Values("0", "8", "4096"));

/// Root of the mean square of the finite values.
double size_of_values(const TensorView& tensor) {
  double sum = 0, count = 0;
  for (const double x : values_of(tensor))
    if (std::isfinite(x)) sum += x * x, ++count;
  return std::sqrt(sum / std::max(count, 1.0));
}

/// The same of the difference, relative to b's, or to `least` where that is more: where sums cancel, as in the
/// gradients of a sequence of one compressed key, what is left is noise.
double relative_difference(const TensorView& a, const TensorView& b, double least) {
  const std::vector<double> x = values_of(a), y = values_of(b);
  double difference = 0;
  for (std::size_t i = 0; i < x.size(); ++i)
    if (!(std::isinf(y[i]) && x[i] == y[i])) difference += (x[i] - y[i]) * (x[i] - y[i]);
  const double size = std::max(size_of_values(b), least);
  return std::sqrt(difference / static_cast<double>(std::max<std::size_t>(x.size(), 1))) / (size > 0 ? size : 1);
}

struct Shape {
  std::int64_t key_dim, group;
  const char* ds_mib = "";  // with little memory dS of the selection is stored for some queries at a time
  int block_size = 64;
  bool packed = true;

  friend void PrintTo(const Shape& s, std::ostream* out) {
    *out << "keys of " << s.key_dim << ", G = " << s.group << ", blocks of " << s.block_size << ", MiB: " << s.ds_mib
         << (s.packed ? "" : ", batched");
  }
};

class EveryKernel : public testing::TestWithParam<Shape> {};

TEST_P(EveryKernel, LongAndUnevenSequences) {
  // On a GPU with kernels of its own they serve these shapes; elsewhere the same ones run twice. Without NaN, where
  // they would stand back: rows past the compressed tokens as `compress` leaves them.
  Case c = uneven();
  if (!GetParam().packed) {
    c.packed = false, c.q_lens = {1800, 1800}, c.k_lens = {1840, 1840};
  } else if (!*GetParam().ds_mib) {
    c.q_lens.push_back(5000), c.k_lens.push_back(5000);
  }
  c.slack = 0, c.kv_heads = GetParam().group < 8 ? 2 : 1, c.group = GetParam().group;
  c.dk = GetParam().key_dim, c.dv = std::min<std::int64_t>(c.dk, 128);
  c.cfg = {.block_size = GetParam().block_size, .topk = 5, .window_size = 600};
  Problem p(c);
  const Sequence last = sequences_of(c).back();
  if (c.packed)
    for (const Tensor* t : {&p.k_c, &p.v_c}) fill_value(slice(*t, 0, last.c_begin + last.c_len, t->view().size(0)), 0);
  std::vector<Result> own;
  {
    const Environment memory("NSA_CUDA_DS_MIB", GetParam().ds_mib);
    own = run_all(p);
  }
  const PortableKernels portable;
  const std::vector<Result> expected = run_all(p);
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (own[i].rows == Rows::kNone || own[i].value.view().dtype == DType::kInt32) continue;
    // A whole chooses its blocks itself, of which a few may differ where importances are alike.
    const bool whole = own[i].name.starts_with("nsa_attention") || own[i].name.starts_with("native_sparse_attention");
    const double least = 0.02 * size_of_values(expected[i].value);
    for (const Sequence& s : sequences_of(c))
      EXPECT_LE(
          relative_difference(part_of(own[i].value, own[i].rows, s), part_of(expected[i].value, own[i].rows, s), least),
          whole ? 0.3 : 0.02)
          << own[i].name << " of sequence " << s.index << " of " << s.q_len << " queries";
  }
}

INSTANTIATE_TEST_SUITE_P(Packed, EveryKernel,
                         testing::Values(Shape{128, 16}, Shape{192, 16}, Shape{128, 3}, Shape{64, 1}, Shape{128, 4},
                                         // Not stored; windows of less than 2048 rows.
                                         Shape{128, 16, "0"}, Shape{128, 16, "12"}, Shape{192, 16, "12"},
                                         Shape{64, 8, "6"}, Shape{128, 4, "6"}, Shape{64, 2, "3"}, Shape{128, 32, "24"},
                                         Shape{128, 6, "8"}, Shape{128, 16, "24", 128}, Shape{64, 4, "3", 32},
                                         Shape{128, 16, "12", 64, false}, Shape{192, 16, "12", 64, false},
                                         Shape{128, 4, "6", 64, false}, Shape{64, 2, "2", 32, false}));

TEST(Packed, OffsetsThatAreNoneLeadNowhere) {
  // Every sequence is empty then. compute-sanitizer sees what is touched; here, that results say so.
  const Case c{.dtype = DType::kBFloat16,
               .packed = true,
               .q_lens = {40, 80, 1, 120},
               .cfg = small_config(),
               .kind = CompressionKind::kMlp,
               .rope = true};
  const double total = 241;
  for (const std::vector<double>& wrong : {std::vector<double>{0, 160, 40, 241, 150},
                                           {-5, 40, 120, 121, 241},
                                           {0, 40, 120, 121, 9999},
                                           {0, total, 0, total, total},
                                           {1, 40, 120, 121, 241},
                                           {0, 2147483647, -2147483648.0, 121, 241}}) {
    for (const std::int64_t longest : {60, 241}) {
      Problem p(c);
      for (Tensor* offsets : {&p.cu_q, &p.cu_k})
        for (std::size_t i = 0; i < wrong.size(); ++i) offsets->set({static_cast<std::int64_t>(i)}, wrong[i]);
      p.packed.max_seqlen_q = p.packed.max_seqlen_k = longest;
      for (const Result& result : run_all(p)) {
        if (result.name.starts_with("combine")) continue;  // it has no offsets
        for (const double x : values_of(result.value))
          ASSERT_TRUE(x == 0 || x == -1 || x == -std::numeric_limits<double>::infinity()) << result.name << ": " << x;
      }
    }
  }
}

/// bfloat16 tensors of the default problem for `length` rows that are never touched, with or without offsets.
struct Shapes {
  static constexpr std::int64_t kHeads = 64, kKvHeads = 4, kDim = 128;

  Shapes(std::int64_t rows, std::int64_t sequences, std::int64_t longest) : rows(rows) {
    std::uintptr_t address = 0;  // another one for every tensor
    const auto view = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
      return TensorView::contiguous(reinterpret_cast<void*>(address += 256), dtype, shape, {DeviceType::kCUDA, 0});
    };
    const auto bf16 = [&](std::int64_t n, std::int64_t heads) { return view(DType::kBFloat16, {n, heads, kDim}); };
    const auto q = [&] { return bf16(rows, kHeads); };
    const auto k = [&] { return bf16(rows, kKvHeads); };
    const auto k_c = [&] { return bf16(rows / 16, kKvHeads); };
    const auto lse = [&] { return view(DType::kFloat32, {kHeads, rows}); };
    const auto gates = [&] { return view(DType::kBFloat16, {rows, kHeads, 3}); };
    NsaAttentionParams& f = whole.forward;
    for (TensorView* t : {&f.q, &f.o, &f.o_cmp, &f.o_slc, &f.o_swa, &whole.d_o, &whole.d_q}) *t = q();
    for (TensorView* t : {&f.k_c, &f.v_c, &whole.d_k_c, &whole.d_v_c}) *t = k_c();
    for (TensorView* t : {&f.k_slc, &f.v_slc, &f.k_swa, &f.v_swa}) *t = k();
    for (TensorView* t : {&whole.d_k_slc, &whole.d_v_slc, &whole.d_k_swa, &whole.d_v_swa}) *t = k();
    for (TensorView* t : {&f.lse_cmp, &f.lse_slc, &f.lse_swa}) *t = lse();
    for (TensorView* t : {&f.gates, &whole.d_gates}) *t = gates();
    f.indices = view(DType::kInt32, {rows, kKvHeads, 16});
    f.packed.cu_seqlens_q = view(DType::kInt32, {sequences + 1});
    f.packed.max_seqlen_q = f.packed.max_seqlen_k = longest;
    const TensorView &d_o = whole.d_o, &d_q = whole.d_q;
    compressed_branch = {{f.q, f.k_c, f.v_c, f.cfg, {}, {}, f.packed, f.o_cmp, f.lse_cmp}, d_o, d_q, k_c(), k_c()};
    selected_branch = {{f.q, f.k_slc, f.v_slc, f.indices, 64, {}, f.packed, f.o_slc, f.lse_slc}, d_o, d_q, k(), k()};
    window_branch = {{f.q, f.k_swa, f.v_swa, 512, {}, f.packed, f.o_swa, f.lse_swa}, d_o, d_q, k(), k()};
  }

  template <class Params>
  static std::int64_t workspace(const Params& params) {
    std::size_t bytes = 0;
    const Status status = workspace_size(params, bytes);
    EXPECT_TRUE(status.ok()) << status.message();
    return static_cast<std::int64_t>(bytes);
  }

  std::int64_t rows;
  NsaAttentionBackwardParams whole;
  CompressedAttentionBackwardParams compressed_branch;
  SelectedAttentionBackwardParams selected_branch;
  SlidingWindowAttentionBackwardParams window_branch;
};

TEST(Packed, WorkspaceFollowsTheRows) {
  const std::int64_t rows = 65536 + 1000 * 64, forgotten = 0;
  const Shapes one(rows, 1, rows);
  for (const auto& [longest, ds_mib] : {std::pair(std::int64_t{65536}, "0"), {forgotten, "0"}, {forgotten, ""}}) {
    const Environment memory("NSA_CUDA_DS_MIB", ds_mib);
    const Shapes many(rows, 1001, longest);
    // Per row and KV head of the selection, at most: a list of 16, sums of parts for 3 * 16 queries of a thousand
    // (48 / 1024 key tiles of 64 x 256 floats), and half a KiB for what is kept per row and block. Where dS is stored,
    // 2 GiB of it, and a sum of 256 floats.
    const std::int64_t parts = rows * Shapes::kKvHeads * (16 * 4 + 3072 + 512);
    const std::int64_t stored = *ds_mib ? 0 : (std::int64_t{2} << 30) + rows * Shapes::kKvHeads * 1024;
    EXPECT_LE(Shapes::workspace(many.selected_branch), parts + stored);
    // Hardly more than one sequence of as many rows takes: the ends of sequences may have parts of their own.
    EXPECT_LE(Shapes::workspace(many.selected_branch), Shapes::workspace(one.selected_branch) * 5 / 4);
    EXPECT_LE(Shapes::workspace(many.compressed_branch), Shapes::workspace(one.compressed_branch) * 2);
    EXPECT_LE(Shapes::workspace(many.window_branch), Shapes::workspace(one.window_branch) * 2);
    EXPECT_LE(Shapes::workspace(many.whole), Shapes::workspace(one.whole) * 5 / 4);
  }
}

}  // namespace
}  // namespace nsa::test
