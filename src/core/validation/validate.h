// What every operation demands of its arguments. Success fills `call`; a failure names the argument, what came and what
// is allowed. Nothing of a tensor is read but offsets, lengths and tables in host memory.
#pragma once

#include "core/call.h"
#include "nsa/decode.h"
#include "nsa/operations.h"

namespace nsa {

Status validate(const CompressParams& params, Call& call);
Status validate(const CompressBackwardParams& params, Call& call);
Status validate(const CompressedAttentionParams& params, Call& call);
Status validate(const CompressedAttentionBackwardParams& params, Call& call);
Status validate(const SelectBlocksParams& params, Call& call);
Status validate(const SelectedAttentionParams& params, Call& call);
Status validate(const SelectedAttentionBackwardParams& params, Call& call);
Status validate(const SlidingWindowAttentionParams& params, Call& call);
Status validate(const SlidingWindowAttentionBackwardParams& params, Call& call);
Status validate(const CombineParams& params, Call& call);
Status validate(const CombineBackwardParams& params, Call& call);
Status validate(const NsaAttentionParams& params, Call& call);
Status validate(const NsaAttentionBackwardParams& params, Call& call);
Status validate(const NativeSparseAttentionParams& params, Call& call);
Status validate(const NativeSparseAttentionBackwardParams& params, Call& call);
Status validate(const DecodeParams& params, Call& call);
Status validate(const ForkParams& params, Call& call);

}  // namespace nsa
