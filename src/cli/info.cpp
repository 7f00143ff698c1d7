// nsa info: backends of this build, hardware of this machine, and the defaults chosen from them.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <thread>

#include "base/device.h"
#include "base/error.h"
#include "base/machine.h"
#include "base/names.h"
#include "cli/commands.h"
#include "nsa/backend.h"

namespace nsa::cli {
namespace {

void print_section(const char* title, std::string_view lines) {
  fmt::print("{}\n", title);
  while (!lines.empty()) {
    const auto end = lines.find('\n');
    fmt::print("  {}\n", lines.substr(0, end));
    lines.remove_prefix(end == std::string_view::npos ? lines.size() : end + 1);
  }
}

/// Options of `nsa info --describe`.
struct Description {
  bool wanted = false;
  std::string dtype = "bfloat16", phi = "mlp";
  KernelQuery query;
};

void print_kernels(Description& d) {
  d.query.dtype = d.dtype == "bfloat16" ? DType::kBFloat16 : d.dtype == "float16" ? DType::kFloat16 : DType::kFloat32;
  d.query.phi = base::compression_kind(d.phi);
  if (const Status status = d.query.cfg.validate(); !status.ok()) throw base::Error(status.message());
  if (d.query.num_kv_heads < 1 || d.query.num_heads < 1 || d.query.num_heads % d.query.num_kv_heads != 0)
    throw base::Error(describe_kernels(d.query));
  fmt::print("{}\n", describe_kernels(d.query));
}

void print_info(bool device_alone) {
  if (device_alone) {
    fmt::print("{}\n", base::choose_device("auto").kind());
    return;
  }
  const char* wish = std::getenv("OMP_NUM_THREADS");
  fmt::print("nsa {}\n", version());
  print_section("backends", describe_backends());
  print_section("instruction sets of the backend cpu", describe_instruction_sets());
  print_section("devices", fmt::format("cpu: {}, {} logical cores\ncuda: {}", base::cpu_name(),
                                       std::thread::hardware_concurrency(), describe_devices()));
  print_section("device of the language model (--device auto)", base::choose_device("auto").text);
  print_section("threads", fmt::format("{} to a call, {}", default_num_threads(),
                                       wish ? fmt::format("OMP_NUM_THREADS = {}", wish)
                                            : std::string("OpenMP's default (OMP_NUM_THREADS is not set)")));
}

}  // namespace

void add_info(CLI::App& app) {
  auto* const command = app.add_subcommand(
      "info", "Print version, backends, instruction sets and devices, and which of them are the default and why.");
  static bool device_alone = false;  // the callback refers to it
  command->add_flag("--chosen-device", device_alone, "Print only the device that --device auto selects: cpu or cuda");
  static Description described;
  command->add_flag(
      "--describe", described.wanted,
      "Print only the CUDA kernels that a call with the options below launches, and why portable ones are chosen");
  const auto option = [&](const char* name, auto& value, const char* text) {
    return command->add_option(name, value, text)->group("Call that --describe describes")->capture_default_str();
  };
  option("--dtype", described.dtype, "Data type: bfloat16, float16 or float32")
      ->check(CLI::IsMember({"bfloat16", "float16", "float32"}));
  option("--heads", described.query.num_heads, "Number of query heads, H");
  option("--kv-heads", described.query.num_kv_heads, "Number of key/value heads, Hkv");
  option("--head-dim", described.query.key_dim, "Head dimension of queries and keys, Dk");
  option("--v-head-dim", described.query.value_dim, "Head dimension of values, Dv");
  option("--kernel-size", described.query.cfg.kernel_size, "Compression block size l, tokens");
  option("--kernel-stride", described.query.cfg.kernel_stride, "Compression stride d, tokens");
  option("--block-size", described.query.cfg.block_size, "Selection block size l', tokens");
  option("--topk", described.query.cfg.topk, "Selected blocks per query, n");
  option("--phi", described.phi, "Compression function phi: mean, linear or mlp");
  option("--phi-hidden", described.query.phi_hidden, "Hidden units of phi mlp, E; 0: 2 x head dimension");
  command->callback([] { described.wanted ? print_kernels(described) : print_info(device_alone); });
}

}  // namespace nsa::cli
