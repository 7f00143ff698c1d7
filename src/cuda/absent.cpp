// The stub of the CUDA backend in a build without it.
#include "core/backend.h"
#include "core/cache/memory.h"

namespace nsa::cuda {
namespace {

Status absent() { return Status::unsupported("backend cuda: this build of libnsa has none (NSA_BUILD_CUDA=OFF)"); }

}  // namespace

std::string describe_devices() { return "none: this build of libnsa has no CUDA backend (NSA_BUILD_CUDA=OFF)"; }
int device_count() { return 0; }
std::string describe_kernels(const KernelQuery&) { return describe_devices(); }
Status usable(int) { return absent(); }
Status available() { return absent(); }
Scope::Scope(const Device&, const char*) {}
Scope::~Scope() = default;
Status copy_to_host(void*, const void*, std::size_t) { return absent(); }
Status make_contiguous(TensorView&, Execution&) { return absent(); }
Status sanitize_offsets(TensorView&, TensorView&, std::int64_t, std::int64_t, Execution&) { return absent(); }
Status make_cache_memory(const KVCacheOptions&, std::unique_ptr<CacheMemory>&) { return absent(); }
const char* variant() { return "none"; }
bool built(const Problem&) { return false; }
std::int64_t max_topk(const Problem&, bool) { return 0; }
#define NSA_DEFINE(operation, Params) \
  Status run(const Params&, Execution&) { return absent(); }
NSA_OPERATIONS(NSA_DEFINE)
#undef NSA_DEFINE

}  // namespace nsa::cuda
