// One small problem or more for every instance of every kernel, all operations forward and backward. Persistent kernels
// get few thread blocks, so that each of these hands its shared memory over from tile to tile. Mostly for the
// sanitizers (tools/gpu.sh sanitize); alone the test shows that the number of thread blocks changes no bit.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iterator>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/environment.h"
#include "under_test.h"

namespace nsa::test {
namespace {

/// Block sizes and strides of each way in which compressed_select adds probabilities up to blocks, named by l, d and
/// l'.
std::vector<NSAConfig> configs() {
  std::vector<NSAConfig> all;
  for (const auto& [l, d, block] :
       {std::array{64, 32, 32}, {32, 16, 32}, {16, 16, 64}, {32, 16, 64}, {32, 16, 128}, {64, 16, 64}})
    all.push_back({.kernel_size = l, .kernel_stride = d, .block_size = block, .topk = 5, .window_size = 48});
  return all;
}

/// Groups that fill a warp's sixteen rows, that do not, and one of a few queries; the others with one configuration
/// only. The kernels for float32 know no such differences.
std::vector<std::int64_t> groups_of(DType dtype, const NSAConfig& cfg) {
  const bool usual = cfg.kernel_size == 2 * cfg.kernel_stride && cfg.block_size == 4 * cfg.kernel_stride;
  if (dtype == DType::kFloat32) return usual ? std::vector<std::int64_t>{4, 16} : std::vector<std::int64_t>{};
  return usual ? std::vector<std::int64_t>{1, 2, 4, 7, 8, 12, 16, 32} : std::vector<std::int64_t>{4, 12, 16};
}

std::vector<Case> cases() {
  const struct {
    const char* name;
    DType type;
  } types[] = {{"bf16", DType::kBFloat16}, {"f16", DType::kFloat16}, {"f32", DType::kFloat32}};
  const struct {
    const char* name;
    CompressionKind kind;
    std::int64_t hidden;
  } phis[] = {{"mlp", CompressionKind::kMlp, 0},      {"linear", CompressionKind::kLinear, 0},
              {"mlp64", CompressionKind::kMlp, 64},   {"mean", CompressionKind::kMean, 0},
              {"mlp512", CompressionKind::kMlp, 512}, {"mlp104", CompressionKind::kMlp, 104}};
  std::vector<Case> all;
  std::size_t number = 0;
  for (const auto& type : types)
    for (const std::int64_t key_dim : {64, 128, 192})
      for (const NSAConfig& cfg : configs())
        for (const std::int64_t group : groups_of(type.type, cfg)) {
          // Every second one packed and ragged, with a sequence that is empty and one of a single token.
          const auto& phi = phis[number % std::size(phis)];
          Case c{.dtype = type.type, .kv_heads = group > 4 ? 1 : 2, .group = group};
          c.packed = number / 3 % 2 == 0;
          // One of five with more queries than the kernels for dK and dV take at once.
          const bool is_long = number % 5 == 2;
          c.q_lens = c.packed ? std::vector<std::int64_t>{70, 0, 1, 33} : std::vector<std::int64_t>{75, 75};
          if (is_long) c.q_lens = c.packed ? std::vector<std::int64_t>{280, 1} : std::vector<std::int64_t>{290};
          if (number % 5 == 0)
            c.k_lens = c.packed ? std::vector<std::int64_t>{90, 3, 40, 33} : std::vector<std::int64_t>{100, 100};
          c.slack = c.packed ? 5 : 0;
          c.dk = key_dim, c.dv = std::min<std::int64_t>(key_dim, 128);
          c.cfg = cfg;
          c.kind = phi.kind, c.hidden = phi.hidden;
          c.shared_weights = number % 4 == 0;
          c.rope = number % 3 == 0;
          c.noise = number % 7 == 0 ? 0.5 : 0;
          c.name = std::string(type.name) + "_" + std::to_string(c.dk) + "x" + std::to_string(c.dv) + "_l" +
                   std::to_string(cfg.kernel_size) + "d" + std::to_string(cfg.kernel_stride) + "b" +
                   std::to_string(cfg.block_size) + "_g" + std::to_string(group) + "_" + phi.name +
                   (c.packed ? "_packed" : "");
          all.push_back(c);
          ++number;
        }
  return all;
}

class Instances : public testing::TestWithParam<Case> {};

TEST_P(Instances, FewThreadBlocksGiveTheSameBits) {
  const Problem p(GetParam());
  std::vector<Result> few;
  {
    const Environment processors("NSA_CUDA_PROCESSORS", "2");
    few = run_all(p);
  }
  if (std::getenv("NSA_CUDA_INSTANCES_ONCE")) return;  // under a sanitizer, which judges
  const std::vector<Result> all = run_all(p);
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(same_bits(few[i].value, all[i].value)) << all[i].name;
}

INSTANTIATE_TEST_SUITE_P(Every, Instances, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

/// What `run` gives, with thread blocks for so many processors and with all.
template <class Run>
void expect_the_same_bits(const char* processors, const Run& run) {
  std::vector<Tensor> few;
  {
    const Environment environment("NSA_CUDA_PROCESSORS", processors);
    few = run();
  }
  if (std::getenv("NSA_CUDA_INSTANCES_ONCE")) return;
  const std::vector<Tensor> all = run();
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(same_bits(few[i], all[i])) << "result " << i;
}

std::vector<Tensor> concatenated(std::vector<Tensor> outputs, std::vector<Tensor> gradients) {
  std::move(gradients.begin(), gradients.end(), std::back_inserter(outputs));
  return outputs;
}

/// The selection, forward and backward.
std::vector<Tensor> selected_results(const Problem& p) {
  const auto run = [](const SelectedAttentionParams& params) { return under_test.selected_attention(params, kCpu); };
  std::vector<Tensor> outputs = outputs_of(p.selected(), selected_outputs(p), false, run);
  const auto b = backward_of(p.selected(), views_of(outputs), p.d_o);
  return concatenated(std::move(outputs), outputs_of(b, selected_backward_outputs(p), false,
                                                     [](const SelectedAttentionBackwardParams& params) {
                                                       return under_test.selected_attention_backward(params, kCpu);
                                                     }));
}

/// Its kernels differ by whether dS is stored, which they do where there is memory for it, and by blocks.
class SelectedBackward : public testing::TestWithParam<std::tuple<DType, std::int64_t, int>> {};

TEST_P(SelectedBackward, FewThreadBlocksGiveTheSameBits) {
  const auto [dtype, key_dim, block_size] = GetParam();
  Case c{.dtype = dtype, .q_lens = {75, 75}, .kv_heads = 2, .group = 4};
  c.dk = key_dim, c.dv = std::min<std::int64_t>(key_dim, 128);
  c.cfg = {.kernel_size = 32, .kernel_stride = 16, .block_size = block_size, .topk = 3, .window_size = 48};
  // Packed, in two windows, of 1024 rows and less.
  Case windows = c;
  windows.packed = true, windows.q_lens = {40, 1100, 0, 900}, windows.kv_heads = 1;
  windows.cfg.topk = 205 / block_size;
  for (const auto& [problem, mib] : {std::pair(Problem(c), "0"), {Problem(c), ""}, {Problem(windows), "2"}}) {
    SCOPED_TRACE(std::string("NSA_CUDA_DS_MIB=") + mib);
    const Environment memory("NSA_CUDA_DS_MIB", mib);
    expect_the_same_bits("2", [&p = problem] { return selected_results(p); });
  }
}

/// Lists of more stages than a ring holds, with queries that see a block in part; one, few and many rows of a query, dS
/// stored and not, in one window and in two.
TEST_P(SelectedBackward, AgreesWithTheOracle) {
  const auto [dtype, key_dim, block_size] = GetParam();
  const std::vector<std::int64_t> lengths{40, 300, 0, 203}, windows{40, 1100, 0, 900};
  for (const auto& [group, q_lens, mib] :
       {std::tuple(1, lengths, ""), {6, lengths, "0"}, {16, lengths, ""}, {4, windows, "2"}}) {
    SCOPED_TRACE("G = " + std::to_string(group) + ", NSA_CUDA_DS_MIB=" + mib);
    const Environment memory("NSA_CUDA_DS_MIB", mib);
    Case c{.dtype = dtype, .q_lens = q_lens, .kv_heads = 1, .group = group};
    c.packed = true, c.dk = key_dim, c.dv = std::min<std::int64_t>(key_dim, 128);
    c.cfg = {.kernel_size = 32, .kernel_stride = 16, .block_size = block_size, .topk = 3, .window_size = 48};
    if (*mib == '2') c.cfg.topk = 205 / block_size;
    const Problem p(c);
    const auto outputs = expect_within_bound<SelectedAttentionParams>(
        p.selected(), selected_outputs(p), dtype, under_test.selected_attention, reference::run, under_test.floor);
    expect_within_bound<SelectedAttentionBackwardParams>(
        backward_of(p.selected(), views_of(outputs), p.d_o), selected_backward_outputs(p), dtype,
        under_test.selected_attention_backward, reference::run, under_test.floor);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, SelectedBackward,
                         testing::Combine(testing::Values(DType::kBFloat16, DType::kFloat16),
                                          testing::Values(64, 128, 192), testing::Values(32, 64)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::to_string(std::get<1>(info.param)) + "_b" +
                                  std::to_string(std::get<2>(info.param));
                         });

/// Where a warp's queries choose next to nothing it is, from the second tile of a thread block on, further ahead of the
/// copies than they have barriers.
class Ahead : public testing::TestWithParam<std::tuple<DType, std::int64_t>> {};

TEST_P(Ahead, OneThreadBlockGivesTheSameBits) {
  constexpr std::int64_t kQueries = 40, kBlocks = 1024;
  const auto [dtype, key_dim] = GetParam();
  Case c{.dtype = dtype, .q_lens = {kQueries}, .kv_heads = 1, .group = 16};
  c.cfg = {.kernel_size = 64, .kernel_stride = 32, .block_size = 32, .topk = 64, .window_size = 48};
  c.k_lens = {kBlocks * c.cfg.block_size + kQueries};  // of which every query sees all but the last ones
  c.dk = key_dim, c.dv = std::min<std::int64_t>(key_dim, 128);
  Problem p(c);
  // A warp has one query. Those that may be the first of a tile of 8, 12 or 16 choose one block, the others of a tile
  // all different ones.
  for (std::int64_t query = 0; query < kQueries; ++query)
    for (std::int64_t rank = 0; rank < c.cfg.topk; ++rank) {
      const bool left_out = rank > 0 && (query % 8 == 0 || query % 12 == 0);
      p.indices.set({0, query, 0, rank}, left_out ? -1 : static_cast<double>((query * c.cfg.topk + rank) % kBlocks));
    }
  expect_the_same_bits("1", [&] { return selected_results(p); });
}

INSTANTIATE_TEST_SUITE_P(
    Every, Ahead, testing::Combine(testing::Values(DType::kBFloat16, DType::kFloat16), testing::Values(64, 128, 192)),
    [](const auto& info) {
      return std::string(name_of(std::get<0>(info.param))) + "_" + std::to_string(std::get<1>(info.param));
    });

/// The forward with more blocks than a thread block has scores of in its shared memory.
class ManyBlocks : public testing::TestWithParam<DType> {};

TEST_P(ManyBlocks, FewThreadBlocksGiveTheSameBits) {
  Case c{.dtype = GetParam(), .q_lens = {40}, .kv_heads = 1, .group = 16};
  c.k_lens = {51500};
  c.dk = 128, c.dv = 128;
  c.cfg = {.kernel_size = 8, .kernel_stride = 4, .block_size = 16, .topk = 5, .window_size = 48};
  const Problem p(c);
  expect_the_same_bits("2", [&] {
    return outputs_of(p.whole(), whole_outputs(p), false,
                      [](const NsaAttentionParams& params) { return under_test.nsa_attention(params, kCpu); });
  });
}

INSTANTIATE_TEST_SUITE_P(Every, ManyBlocks, testing::Values(DType::kBFloat16, DType::kFloat16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

/// phi alone: its kernels differ by the number of hidden units and of rows.
class Phi : public testing::TestWithParam<std::tuple<DType, std::int64_t>> {};

TEST_P(Phi, FewThreadBlocksGiveTheSameBits) {
  const auto compressed = [](const Problem& p) {
    const CompressParams f = p.compress_keys();
    const CompressBackwardParams b{f, p.d_k_c, {}, {}};
    return concatenated(outputs_of(f, compress_outputs(p, f), false,
                                   [](const CompressParams& params) { return under_test.compress(params, kCpu); }),
                        outputs_of(b, compress_backward_outputs(p, f), false, [](const CompressBackwardParams& params) {
                          return under_test.compress_backward(params, kCpu);
                        }));
  };
  const auto [dtype, dim] = GetParam();
  for (const std::int64_t hidden : {0, 64, 192, 256, 384, 512})
    for (const std::int64_t length : {60, 1100}) {
      SCOPED_TRACE(std::to_string(hidden) + " hidden units, " + std::to_string(length) + " tokens");
      Case c{.dtype = dtype, .q_lens = {length}, .kv_heads = 2, .group = 1, .dk = dim, .dv = 64};
      c.cfg = {.kernel_size = 8, .kernel_stride = 4, .block_size = 32, .topk = 4, .window_size = 16};
      c.kind = hidden > 0 ? CompressionKind::kMlp : CompressionKind::kLinear, c.hidden = hidden;
      const Problem p(c);
      expect_the_same_bits("2", [&] { return compressed(p); });
    }
}

INSTANTIATE_TEST_SUITE_P(Every, Phi,
                         testing::Combine(testing::Values(DType::kBFloat16, DType::kFloat16, DType::kFloat32),
                                          testing::Values(64, 128, 192)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace nsa::test
