// What every operation demands of its arguments. Success fills `call`; a failure names the argument, what came and what
// is allowed. Nothing of a tensor is read but offsets, lengths and tables in host memory.
#pragma once

#include "core/call.h"
#include "core/operation_list.h"
#include "nsa/decode.h"
#include "nsa/operations.h"

namespace nsa {

#define NSA_DECLARE(operation, Params) Status validate(const Params& params, Call& call);
NSA_OPERATIONS(NSA_DECLARE)
#undef NSA_DECLARE

}  // namespace nsa
