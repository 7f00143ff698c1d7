// What the baselines share that rank spans of consecutive tokens.
#pragma once

#include "lm/baselines/baseline.h"

namespace nsa::lm {

/// Rows (Hkv, S, D) in spans of `size` tokens, (Hkv, S / size, size, D), without those of an unfinished last one.
at::Tensor whole_spans(const at::Tensor& rows, std::int64_t size);

/// For every token its span's priority: (Hkv, T, spans) -> (Hkv, T, tokens); 0 behind the last span.
at::Tensor of_tokens(const at::Tensor& of_spans, std::int64_t size, std::int64_t tokens);

/// Positions of the block's queries, int64 (T).
at::Tensor positions(const QueryBlock& block);

/// `priorities` (Hkv, T, end) with +inf for the first `sinks` tokens and, for each query, for those at `from` (T) and
/// behind.
at::Tensor read_in_any_case(const at::Tensor& priorities, std::int64_t sinks, const at::Tensor& from);

}  // namespace nsa::lm
