// What `nsa bench` counts for one sequence: flop of compress, of the three attentions and end to end.
#include <cmath>
#include <iostream>

#include "bench/costs.h"

int main() {
  nsa::bench::Dims dims;
  std::int64_t length = 0;
  std::cin >> length >> dims.num_heads >> dims.num_kv_heads >> dims.head_dim >> dims.v_head_dim;
  auto& cfg = dims.nsa;
  std::cin >> cfg.kernel_size >> cfg.kernel_stride >> cfg.block_size >> cfg.topk >> cfg.init_blocks >>
      cfg.local_blocks >> cfg.window_size;
  const nsa::bench::Costs costs(dims, length);
  for (const char* name : {"compress", "compress_backward", "compressed_attention", "compressed_attention_backward",
                           "selected_attention", "selected_attention_backward", "sliding_window_attention",
                           "sliding_window_attention_backward", "forward", "forward_backward"})
    std::cout << name << ' ' << std::llround(1e9 * costs.of(name, nsa::CompressionKind::kMlp).gflop) << '\n';
}
