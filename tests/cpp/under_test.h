// The backend that the grid tests are linked with.
#pragma once

#include "support/problem.h"
#include "support/tolerance.h"

namespace nsa::test {

struct Operations {
  Operation<CompressParams> compress;
  Operation<CompressBackwardParams> compress_backward;
  Operation<CompressedAttentionParams> compressed_attention;
  Operation<CompressedAttentionBackwardParams> compressed_attention_backward;
  Operation<SelectBlocksParams> select_blocks;
  Operation<SelectedAttentionParams> selected_attention;
  Operation<SelectedAttentionBackwardParams> selected_attention_backward;
  Operation<SlidingWindowAttentionParams> sliding_window_attention;
  Operation<SlidingWindowAttentionBackwardParams> sliding_window_attention_backward;
  Operation<CombineParams> combine;
  Operation<CombineBackwardParams> combine_backward;
  Operation<NsaAttentionParams> nsa_attention;
  Operation<NsaAttentionBackwardParams> nsa_attention_backward;
  double floor;  // see within_bound
};

extern const Operations under_test;

/// The cases of the grid as far as the backend supports them; what it does not is replaced by what it does.
std::vector<Case> supported(std::vector<Case> cases);

}  // namespace nsa::test
