// Compares the shared memory of the portable attention kernels with what a thread block has on each architecture. Reads
// what `ptxas -v` writes of one instance, NSA_ELEMENT with NSA_KEY_DIM and NSA_VALUE_DIM: static bytes and spills. The
// dynamic bytes are the sources' constants. Needs no device.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <regex>
#include <string>

#include "cuda/common/element.cuh"
#include "cuda/portable/d_kv.cuh"
#include "cuda/portable/range_d_q.cuh"
#include "cuda/portable/range_forward.cuh"
#include "cuda/portable/selected_d_q.cuh"
#include "cuda/portable/selected_forward.cuh"

namespace nsa::cuda::portable {
namespace {

using T = NSA_ELEMENT;
constexpr int Dk = NSA_KEY_DIM, Dv = NSA_VALUE_DIM;
constexpr int kTopk = 1024;  // fits everywhere

// Limits of a row of selected blocks: bfloat16 with heads of 192/128 has the least, on GPUs with 99 KB.
static_assert(max_topk(99 * 1024, SelectedDq<Bf16, 192, 128>::kMemory) == kTopk);
static_assert(max_topk(99 * 1024, SelectedForward<Bf16, 192, 128>::kMemory) == 2304);
static_assert(max_topk(99 * 1024, SelectedDq<float, 192, 128>::kMemory) == 2048);
static_assert(max_topk(227 * 1024, SelectedDq<Bf16, 192, 128>::kMemory) == 17408);

int dynamic_memory(const std::string& kernel, int arch) {
  if (kernel == "range_forward") return 2 * kRangeStage<T, Dk, Dv>;
  if (kernel == "selected_forward") return SelectedForward<T, Dk, Dv>::kMemory + list_bytes(kTopk);
  if (kernel == "step_ranges") return KeySteps<T, Dk, Dv, Dv>::kMemory;
  if (kernel == "selected_d_q") return SelectedDq<T, Dk, Dv>::kMemory + list_bytes(kTopk);
  if (kernel == "d_kv") return KeyGradients<T, Dk, Dv>::kMemory;
  if (kernel == "range_d_q")
    return arch / 10 == 9 ? RangeDq<T, Dk, Dv, true>::kMemory : RangeDq<T, Dk, Dv, false>::kMemory;
  if (kernel == "sum_partials") return 0;
  return -1;
}

/// Bytes of a thread block. PTX for 8.0 and for 9.0 also runs where a thread block has 99 KB.
int limit_of(int arch) { return (arch == 100 ? 227 : 99) * 1024; }

int check(std::istream& log) {
  const std::regex entry("Compiling entry function '\\w*?portable\\d+([a-z_]+?)I\\w*' for 'sm_(\\d+)a?'");
  const std::regex spill("(\\d+) bytes spill stores"), used("Used \\d+ registers(?:.* (\\d+) bytes smem)?");
  std::string line, kernel;
  std::smatch match;
  int arch = 0, spilled = 0, failures = 0, kernels = 0;
  while (std::getline(log, line)) {
    if (std::regex_search(line, match, entry)) {
      kernel = match[1], arch = std::stoi(match[2]), spilled = 0;
    } else if (std::regex_search(line, match, spill)) {
      spilled = std::max(spilled, std::stoi(match[1]));  // of functions that it calls, too
    } else if (std::regex_search(line, match, used)) {
      const int fixed = match[1].matched ? std::stoi(match[1]) : 0;
      const int dynamic = dynamic_memory(kernel, arch);
      const bool has_list = kernel == "selected_forward" || kernel == "selected_d_q";
      const int limit = limit_of(arch);
      const bool good =
          dynamic >= 0 && spilled == 0 && fixed + dynamic <= limit && (!has_list || fixed <= kStaticWithList);
      std::printf("sm_%d %s: %d + %d bytes of %d, %d bytes spilled%s\n", arch, kernel.c_str(), fixed, dynamic, limit,
                  spilled, good ? "" : ": FAILED");
      failures += !good, ++kernels;
    }
  }
  if (kernels == 0) std::puts("no kernels: FAILED");
  return failures > 0 || kernels == 0;
}

}  // namespace
}  // namespace nsa::cuda::portable

int main() { return nsa::cuda::portable::check(std::cin); }
