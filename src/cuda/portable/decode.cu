// decode, prefill and fork of the portable backend.
#include "core/backend.h"

namespace nsa::cuda::portable {

Status decode(const DecodeParams&, Execution&) { return Status::unsupported("backend cuda: has no decode yet"); }
Status fork(const ForkParams&, Execution&) { return Status::unsupported("backend cuda: has no fork yet"); }

}  // namespace nsa::cuda::portable
