// nsa bench: time of NSA and of dense attention by sequence length, as a table and as JSON.
#include <ATen/Parallel.h>
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/machine.h"
#include "base/names.h"
#include "bench/recorded_blocks.h"
#include "bench/run.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "lm/run/checkpoint.h"
#include "nsa/backend.h"

namespace nsa::cli {
namespace {

/// NSA at least `factor` times as fast as torch's dense attention.
struct Target {
  bool bfloat16;
  const char* pass;
  std::int64_t length;
  double factor;
};
constexpr Target kTargets[] = {
    {true, "forward", 4096, 3},           {true, "forward", 16384, 8},           {true, "forward", 65536, 16},
    {true, "forward_backward", 16384, 5}, {true, "forward_backward", 65536, 12}, {false, "forward", 16384, 4},
    {false, "forward", 65536, 9},
};

/// Four times the length takes at most this many times as long.
constexpr std::int64_t kGrowthFrom = 16384, kGrowthTo = 65536;
constexpr double kMaxGrowth = 8.4;

const bench::Ratio* find(const bench::Report& report, const std::string& pass, std::int64_t length) {
  for (const auto& ratio : report.ratios) {
    if (ratio.pass == pass && ratio.length == length) return &ratio;
  }
  return nullptr;
}

bool is_target_machine(const bench::Report& report) {
  const auto& shape = report.options.shape;
  return variant_of(Backend::kCPU) == "avx512bf16" && shape.threads == 2 && shape.num_heads == 16 &&
         shape.num_kv_heads == 1 && shape.head_dim == 128 && shape.v_head_dim == 128 && shape.nsa == NSAConfig{};
}

const char* verdict(bool judged, bool reached) { return !judged ? "not judged" : reached ? "reached" : "MISSED"; }

/// Prints a line for each target of the report's dtype: reached, missed, not measured, or not judged (a disturbed run,
/// or not the targets' machine: two threads with AVX512_BF16). Throws Exit{1} when one is missed.
void judge_targets(const bench::Report& report) {
  if (report.options.shape.device.is_cuda()) {
    fmt::print("\ntargets: for the CPU only, none is judged on cuda\n");
    return;
  }
  const bool on_target_machine = is_target_machine(report);
  bool missed = false;
  fmt::print("\ntargets (2 threads with AVX512_BF16, H = 16, Hkv = 1, D = 128, default configuration)\n");
  for (const auto& bar : kTargets) {
    if (bar.bfloat16 != report.options.shape.bfloat16) continue;
    const auto* const ratio = find(report, bar.pass, bar.length);
    if (ratio == nullptr) {
      fmt::print("{:<17} at {:>6}: at least {:>4.1f} x torch: not measured\n", bar.pass, bar.length, bar.factor);
      continue;
    }
    const bool judged = on_target_machine && ratio->judged, reached = ratio->over_dense() >= bar.factor;
    missed = missed || (judged && !reached);
    fmt::print("{:<17} at {:>6}: at least {:>4.1f} x torch: {:>6.2f}, {}\n", bar.pass, bar.length, bar.factor,
               ratio->over_dense(), verdict(judged, reached));
  }
  const auto* const from = find(report, "forward", kGrowthFrom);
  const auto* const to = find(report, "forward", kGrowthTo);
  if (from != nullptr && to != nullptr) {
    const double growth = to->seconds / from->seconds;
    const bool judged = on_target_machine && from->judged && to->judged;
    missed = missed || (judged && growth > kMaxGrowth);
    fmt::print("forward from {} to {}: at most {:.1f} x the time: {:.2f}, {}\n", kGrowthFrom, kGrowthTo, kMaxGrowth,
               growth, verdict(judged, growth <= kMaxGrowth));
  }
  if (missed) throw Exit{1};
}

/// This program's command line.
std::vector<std::string> command_words() {
  std::ifstream file("/proc/self/cmdline");
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

/// Origin of the results: {"command", "date", "commit"}; the commit is the variable COMMIT, or null without it.
nlohmann::json origin() {
  const char* const commit = std::getenv("COMMIT");
  const std::time_t now = std::time(nullptr);
  std::tm date{};
  gmtime_r(&now, &date);
  return {{"command", fmt::to_string(fmt::join(command_words(), " "))},
          {"date", fmt::format("{:04}-{:02}-{:02}", date.tm_year + 1900, date.tm_mon + 1, date.tm_mday)},
          {"commit", commit != nullptr && *commit != 0 ? nlohmann::json(commit) : nlohmann::json()}};
}

/// OpenMP's idle threads spin by default, which counts as CPU time and takes cores from other threads. The runtime
/// reads the variable at program start, so the program executes itself again.
void restart_with_passive_threads() {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  setenv("OMP_WAIT_POLICY", "passive", 0);
  auto words = command_words();
  std::vector<char*> arguments;
  for (auto& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  execv("/proc/self/exe", arguments.data());
  throw base::Error("cannot restart with OMP_WAIT_POLICY=passive; set the variable before starting");
}

/// The table of results. The CPU table has a column for disturbed runs; the CUDA table has larger units and peers.
class Table {
 public:
  Table(bool on_cuda, bool peers) : on_cuda_(on_cuda), peers_(peers) {}

  void print_header() const {
    fmt::print("{:>7}  {:<33} {:<9} {:>10} {:>10} {:>9} {:>7} {:>6} {:>9} {}\n", "length", "operation", "variant",
               "best ms", "median ms", on_cuda_ ? "TFLOP" : "GFLOP", on_cuda_ ? "TF/s" : "GF/s",
               on_cuda_ ? "limit" : "peak", "MB", on_cuda_ ? peers_ ? "peer ms" : "" : "   cpu");
  }

  void print(const bench::Result& r) const {
    std::string notes;
    if (!on_cuda_) notes += fmt::format("{:>6.2f} ", r.timing.cpu_over_wall);
    if (r.peer) notes += fmt::format("{:>7.2f} {}", 1e3 * r.peer->seconds, r.peer->name);
    if (r.extrapolated) notes += " extrapolated as length squared";
    if (!r.timing.judged) notes += " not judged";
    const double unit = on_cuda_ ? 1e-3 : 1;
    const auto share = r.share() ? fmt::format("{:.0f} %", 100 * *r.share()) : "";
    const auto name = r.part_of.empty() ? r.op : "| " + r.op;
    fmt::print("{:>7}  {:<33} {:<9} {:>10.2f} {:>10.2f} {:>9.{}f} {:>7.0f} {:>6} {:>9.1f} {}\n", r.length, name,
               r.variant, 1e3 * r.timing.best_s, 1e3 * r.timing.median_s, unit * r.cost.gflop, on_cuda_ ? 3 : 1,
               unit * r.gflops(), share, 1e-6 * static_cast<double>(r.cost.bytes), notes);
    std::fflush(stdout);
  }

 private:
  bool on_cuda_, peers_;
};

void print_ratios(const bench::Report& report) {
  fmt::print("\n{:<17} {:>7} {:>10} {:>12} {:>8} {:>13} {:>8}\n", "NSA vs dense", "length", "NSA ms", "torch ms",
             "ratio", "libnsa dense", "ratio");
  for (const auto& r : report.ratios) {
    const auto peer =
        r.peer ? fmt::format("; {} {:.2f}, {:.2f}", r.peer->name, 1e3 * r.peer->seconds, r.peer->seconds / r.seconds)
               : "";
    fmt::print("{:<17} {:>7} {:>10.2f} {:>12.2f} {:>8.2f} {:>13.2f} {:>8.2f} {}{}{}{}\n", r.pass, r.length,
               1e3 * r.seconds, 1e3 * r.dense_seconds, r.over_dense(), 1e3 * r.plain_seconds, r.over_plain(),
               r.dense_variant, r.extrapolated ? " dense extrapolated" : "", r.judged ? "" : " not judged", peer);
  }
  for (const auto& refusal : report.refusals) fmt::print("{}\n", refusal);
  const auto length = [&](const char* pass, auto over) {
    const auto found = report.crossover(pass, over);
    return found ? fmt::format("from {:.0f} tokens", *found) : std::string("at no measured length");
  };
  for (const char* pass : {"forward", "forward_backward"}) {
    if (pass == std::string("forward_backward") && !report.options.backward) continue;
    fmt::print("{}: faster than dense attention {}, than dense attention on the same kernels {}\n", pass,
               length(pass, &bench::Ratio::over_dense), length(pass, &bench::Ratio::over_plain));
  }
}

void print_overlaps(const bench::Report& report) {
  const auto& shape = report.options.shape;
  std::string text;
  for (const auto& [length, measured] : report.overlaps) {
    text += text.empty() ? " " : ", ";
    if (!measured) {
      text += fmt::format("no choice at {}", length);
      continue;
    }
    text += fmt::format("{:.3f} at {}", *measured, length);
    const double excess = *measured - shape.neighbour_overlap.value_or(*measured);
    if (std::abs(excess) > 0.01) text += excess > 0 ? " (the least possible)" : " (the most possible)";
  }
  if (!text.empty()) fmt::print("neighbour overlap, {} selection:{}\n", bench::name_of(shape.selection), text);
}

class BenchCommand {
 public:
  explicit BenchCommand(CLI::App& app)
      : command_(*app.add_subcommand("bench", "Time every operation, nsa_attention end to end, and dense attention.")) {
    const auto length_range = CLI::Range(std::int64_t{0}, std::int64_t{1} << 24);
    auto& shape = options_.shape;
    const auto cuda = bench::default_options(at::kCUDA);
    const auto option = [&](const char* name, auto& value, const char* help, const auto& on_cuda) {
      auto* const added = command_.add_option(name, value, help);
      device_.on_cuda(added, value, on_cuda);
      return added;
    };
    device_.add(command_);
    option("--lengths", options_.lengths, "Sequence lengths, tokens, comma-separated", cuda.lengths)
        ->delimiter(',')
        ->check(length_range);
    command_.add_option("--dtype", dtype_, "Data type: bfloat16 or float32")
        ->check(CLI::IsMember({"bfloat16", "float32"}));
    option("--heads", shape.num_heads, "Number of query heads", cuda.shape.num_heads)->check(CLI::Range(1, 1024));
    option("--kv-heads", shape.num_kv_heads, "Number of key/value heads", cuda.shape.num_kv_heads)
        ->check(CLI::Range(1, 1024));
    command_.add_option("--head-dim", shape.head_dim, "Head dimension of queries and keys")->check(CLI::Range(8, 1024));
    command_.add_option("--v-head-dim", shape.v_head_dim, "Head dimension of values")->check(CLI::Range(8, 1024));
    command_
        .add_option("--phi", phis_, "Compression functions: mean, linear, mlp, comma-separated; ratios use the first")
        ->delimiter(',');
    command_.add_option("--threads", shape.threads, "Number of CPU threads; 0: one per core")
        ->check(CLI::Range(0, kMaxThreads));
    option("--repeats", options_.timing.repeats, "Number of undisturbed runs per measurement", cuda.timing.repeats)
        ->check(CLI::Range(1, 1000));
    command_
        .add_option("--budget", options_.timing.budget_s,
                    "Time limit per measurement, seconds; no further run starts after it")
        ->check(CLI::Range(0.0, 1e6));
    command_.add_flag("!--no-backward", options_.backward, "Time only forward passes");
    auto* const no_parts =
        command_.add_flag("!--no-parts", options_.parts, "Time only end to end, without stages and single operations");
    command_.add_flag("!--no-plain", options_.plain, "Skip dense attention on libnsa's own kernels");
    command_
        .add_option(
            "--selection", selection_,
            "Block selection: own, or given blocks: model-like, random, clustered; the selector runs in both cases")
        ->check(CLI::IsMember({"own", "random", "clustered", "model-like"}));
    command_
        .add_option(
            "--neighbour-overlap", overlap_,
            "Share of a query's blocks that the previous query has too, of model-like (default 0.8), or of own, "
            "where it makes neighbouring queries alike")
        ->check(CLI::Range(0.0, 1.0));
    command_.add_option("--blocks", blocks_, "Given blocks of a trained model: a file of nsa inspect --blocks")
        ->excludes("--selection")
        ->excludes("--neighbour-overlap");
    command_.add_option("--layer", layer_, "Layer of --blocks")->needs("--blocks")->check(CLI::Range(0, 1 << 20));
    command_.add_option("--write-blocks", write_blocks_,
                        "Write the given blocks of the one sequence length to this file, as layer 0, and time nothing");
    command_.add_option("--peers", peers_,
                        "JSON of bench/peers/peers.py, whose times of other implementations join the table");
    command_.add_option(
        "--flash3", flash3_,
        "FlashAttention-3 extension module (flash_attn_3/_C.abi3.so) to time as dense attention, on cuda in bfloat16");
    command_
        .add_option("--longest-backward", options_.longest_backward,
                    "Maximum sequence length with a backward pass, tokens")
        ->check(length_range);
    option("--longest-dense-forward", options_.longest_dense_forward,
           "Maximum length of dense forward passes, tokens; longer ones are extrapolated", cuda.longest_dense_forward)
        ->check(length_range);
    option("--longest-dense-backward", options_.longest_dense_backward,
           "Maximum length of dense backward passes, tokens; longer ones are extrapolated", cuda.longest_dense_backward)
        ->check(length_range);
    auto& nsa = shape.nsa;
    command_.add_option("--kernel-size", nsa.kernel_size, "Compression block size l, tokens");
    command_.add_option("--kernel-stride", nsa.kernel_stride, "Compression stride d, tokens");
    command_.add_option("--block-size", nsa.block_size, "Selection block size l', tokens");
    command_.add_option("--topk", nsa.topk, "Selected blocks per query, n");
    command_.add_option("--window-size", nsa.window_size, "Sliding window size w, tokens");
    auto* const model = command_.add_option(
        "--model", model_,
        "Run folder or transformers folder; sets heads and head dimensions, and for NSA hyperparameters and phi");
    for (const char* of_model : {"--heads", "--kv-heads", "--head-dim", "--v-head-dim", "--phi", "--kernel-size",
                                 "--kernel-stride", "--block-size", "--topk", "--window-size"})
      model->excludes(command_.get_option(of_model));
    auto* const targets =
        command_.add_flag("--targets", targets_, "Judge the speed targets; exit code 1 if one is missed");
    command_
        .add_option("--only", options_.only,
                    "Time only operations whose name contains this text, and neither end to end nor dense attention")
        ->excludes(no_parts)
        ->excludes(targets);
    json_.add(command_, "the results");
    command_.callback([this] { run(); });
  }

 private:
  void run() {
    auto& shape = options_.shape;
    restart_with_passive_threads();
    json_.open();
    const auto device = device_.choose();
    shape.device = device.device;
    if (!model_.empty()) take_model(lm::read_model_config(model_));
    if (const Status status = shape.nsa.validate(); !status.ok()) throw base::Error(status.message());
    if (shape.num_heads % shape.num_kv_heads != 0) {
      throw base::Error(fmt::format("--kv-heads {}: must divide --heads {}", shape.num_kv_heads, shape.num_heads));
    }
    for (const auto length : options_.lengths) {
      if (length < shape.nsa.kernel_size) {
        throw base::Error(
            fmt::format("--lengths {}: must be at least --kernel-size {}", length, shape.nsa.kernel_size));
      }
    }
    std::sort(options_.lengths.begin(), options_.lengths.end());
    if (options_.phis.empty())
      for (const auto& phi : phis_) options_.phis.push_back(base::compression_kind(phi));
    shape.bfloat16 = dtype_ == "bfloat16";
    take_selection();
    if (shape.threads == 0) shape.threads = default_num_threads();
    options_.timing.threads = shape.threads;
    at::set_num_threads(shape.threads);

    if (!write_blocks_.empty()) return write_blocks();
    require_backend();
    if (!flash3_.empty()) {
      shape.flash3.emplace(flash3_);
      if (!shape.device.is_cuda() || !shape.bfloat16)
        throw base::Error("--flash3: needs --device cuda and --dtype bfloat16");
    }
    if (!peers_.empty())
      options_.peers = bench::Peers(peers_, shape, shape.device.is_cuda() ? base::gpu_name() : base::cpu_name());
    print_machine(device);
    if (shape.device.is_cuda()) measure_rates();
    const Table table(shape.device.is_cuda(), !options_.peers.empty());
    table.print_header();
    const auto report = bench::run(options_, [&](const bench::Result& result) { table.print(result); });
    if (report.results.empty())
      throw base::Error(fmt::format("--only {}: no operation's name contains it", options_.only));
    if (options_.only.empty()) print_ratios(report);
    print_overlaps(report);
    nlohmann::json json = report;
    json.update(origin());
    json_.write(json);
    if (targets_) judge_targets(report);
  }

  void take_model(const lm::ModelConfig& model) {
    auto& shape = options_.shape;
    shape.num_heads = model.num_heads;
    shape.num_kv_heads = model.num_kv_heads;
    shape.head_dim = model.head_dim;
    shape.v_head_dim = model.v_head_dim;
    if (model.attention != lm::AttentionKind::kNsa) return;
    shape.nsa = model.nsa;
    options_.phis = {model.phi};
  }

  void take_selection() {
    auto& shape = options_.shape;
    shape.selection = bench::parse_selection(selection_);
    if (overlap_ || shape.selection != bench::Selection::kModelLike) shape.neighbour_overlap = overlap_;
    if (overlap_ && selection_ != "model-like" && selection_ != "own")
      throw base::Error(fmt::format("--neighbour-overlap: --selection {}: must be model-like or own", selection_));
    if (blocks_.empty()) return;
    shape.selection = bench::Selection::kRecorded;
    shape.neighbour_overlap.reset();
    shape.recorded = bench::read_blocks(blocks_, layer_, shape.nsa);
    if (const auto length = options_.lengths.back(); length > shape.recorded.length)
      throw base::Error(
          fmt::format("--lengths {}: {} has blocks of {} queries", length, blocks_, shape.recorded.length));
  }

  void write_blocks() const {
    const auto& shape = options_.shape;
    if (options_.lengths.size() != 1) throw base::Error("--write-blocks: needs one of --lengths");
    const auto length = options_.lengths[0];
    bench::RecordedBlocks written{
        .length = length, .kv_heads = shape.num_kv_heads, .topk = shape.nsa.topk, .blocks = {}};
    written.blocks = bench::given_blocks(shape, length);
    if (written.blocks.empty()) throw base::Error("--write-blocks: --selection own has no given blocks");
    bench::write_blocks(write_blocks_, {{0, written}}, shape.nsa);
  }

  /// Refuses what libnsa cannot run, before the first measurement.
  void require_backend() const {
    const auto& shape = options_.shape;
    Backend backend;
    const Problem problem{.dtype = shape.bfloat16 ? DType::kBFloat16 : DType::kFloat32,
                          .device = {shape.device.is_cuda() ? DeviceType::kCUDA : DeviceType::kCPU, 0},
                          .key_dim = shape.head_dim,
                          .value_dim = shape.v_head_dim};
    if (const Status status = choose_backend(problem, {}, backend); !status.ok()) throw base::Error(status.message());
  }

  void print_machine(const base::DeviceChoice& device) const {
    const auto& shape = options_.shape;
    const auto machine = base::machine_json(shape.threads, shape.device);
    const auto text = [&](const char* field) { return machine[field].get<std::string>(); };
    fmt::print("device: {}\n", device.text);
    if (shape.device.is_cuda()) {
      fmt::print("{}, kernels {}; torch {}, cuDNN {}; medians, L2 flushed before each run", text("gpu"), text("isa"),
                 text("torch"), machine["cudnn"].get<long>());
    } else {
      fmt::print("{}, {} threads, {} ({})", text("cpu"), shape.threads, text("backend"), text("isa"));
    }
    fmt::print("; H = {}, Hkv = {}, Dk = {}, Dv = {}, {}\n", shape.num_heads, shape.num_kv_heads, shape.head_dim,
               shape.v_head_dim, dtype_);
  }

  void measure_rates() {
    const auto rates = bench::measure_device_rates(options_.shape.device, options_.shape.bfloat16);
    options_.rates = {rates.gflops, rates.bytes_per_s};
    fmt::print("limits: GEMM of 8192 x 8192 {:.0f} TFLOP/s, copy of 1 GiB {:.2f} TB/s read and written\n",
               1e-3 * rates.gflops, 1e-12 * rates.bytes_per_s);
  }

  CLI::App& command_;
  bench::Options options_ = bench::default_options(at::kCPU);
  DeviceOption device_;
  std::string dtype_ = "bfloat16", model_, peers_, flash3_, selection_ = "model-like", blocks_, write_blocks_;
  std::optional<double> overlap_;
  int layer_ = 0;
  std::vector<std::string> phis_ = {"mean", "mlp"};
  JsonOption json_;
  bool targets_ = false;
};

}  // namespace

void add_bench(CLI::App& app) {
  static std::unique_ptr<BenchCommand> command;  // its callback refers to it
  command = std::make_unique<BenchCommand>(app);
}

}  // namespace nsa::cli
