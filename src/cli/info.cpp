// nsa info: what this build has, what the machine has, what was chosen and why.
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

/// What `nsa info --describe` was asked about.
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
  auto* const command =
      app.add_subcommand("info", "Print version, backends, instruction sets and devices, what was chosen and why.");
  static bool device_alone = false;  // the callback refers to it
  command->add_flag("--chosen-device", device_alone, "Print only what --device auto means here: cpu or cuda");
  static Description described;
  command->add_flag("--describe", described.wanted,
                    "Print only which CUDA kernels serve a call of the options below, and why portable ones do");
  const auto option = [&](const char* name, auto& value, const char* text) {
    return command->add_option(name, value, text)->group("What --describe describes")->capture_default_str();
  };
  option("--dtype", described.dtype, "bfloat16, float16 or float32")
      ->check(CLI::IsMember({"bfloat16", "float16", "float32"}));
  option("--heads", described.query.num_heads, "H: query heads");
  option("--kv-heads", described.query.num_kv_heads, "Hkv: key/value heads");
  option("--head-dim", described.query.key_dim, "Dk: channels of a query or key");
  option("--v-head-dim", described.query.value_dim, "Dv: channels of a value");
  option("--kernel-size", described.query.cfg.kernel_size, "l: tokens in a compression block");
  option("--kernel-stride", described.query.cfg.kernel_stride, "d: tokens between compression blocks");
  option("--block-size", described.query.cfg.block_size, "l': tokens in a selection block");
  option("--topk", described.query.cfg.topk, "n: selection blocks per query");
  option("--phi", described.phi, "Compression function: mean, linear or mlp");
  option("--phi-hidden", described.query.phi_hidden, "E: hidden units of phi mlp; 0: 2 x head dim");
  command->callback([] { described.wanted ? print_kernels(described) : print_info(device_alone); });
}

}  // namespace nsa::cli
