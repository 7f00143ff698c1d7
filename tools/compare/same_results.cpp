// Prints a hash of every result of the library: every operation on the grid of the tests, forward and backward, and
// decoding with a cache. same_results.py compiles this together with the tests of a tree, which have the grid.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/layout.h"
#include "cpp/grid.h"
#include "cpp/under_test.h"
#include "cpu/isa.h"
#include "nsa/kv_cache.h"

namespace nsa::test {
namespace {

/// FNV-1a over the bytes of the elements in row-major order.
void print_hash(const std::string& name, const TensorView& view) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const std::size_t size = size_of(view.dtype);
  for_each_index(view, [&](const Index& index) {
    const std::byte* element = view.as<std::byte>() + offset_of(view, index) * static_cast<std::int64_t>(size);
    for (std::size_t i = 0; i < size; ++i) hash = (hash ^ std::to_integer<std::uint64_t>(element[i])) * 0x100000001b3;
  });
  std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}

bool ok(const Status& status) {
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok();
}

/// A chunk of the prompt, then steps of three tokens, until the cache holds all of the sequences.
bool print_decoded(const Problem& p, const Context& context, std::int64_t page_size) {
  const Case& c = p.c;
  const auto batch = static_cast<std::int64_t>(c.q_lens.size()), length = c.q_lens[0];
  KVCache cache;
  if (!ok(KVCache::create({batch, c.kv_heads, c.dk, c.dv, c.dtype, c.cfg, length, page_size}, cache))) return false;
  const Tensor o = p.query_rows(c.heads(), c.dv, c.dtype),
               indices = p.query_rows(c.kv_heads, c.cfg.topk, DType::kInt32);
  for (std::int64_t begin = 0, end; begin < length; begin = end) {
    end = std::min(length, begin == 0 ? length / 2 + 1 : begin + 3);
    const auto rows = [&](const TensorView& view) { return slice(view, 1, begin, end); };
    DecodeParams d;
    d.q = rows(p.q), d.gates = rows(p.gates);
    d.k_cmp = rows(p.k_cmp), d.k_slc = rows(p.k_slc), d.k_swa = rows(p.k_swa);
    d.v_cmp = rows(p.v_cmp), d.v_slc = rows(p.v_slc), d.v_swa = rows(p.v_swa);
    d.cache = cache.view();
    d.weights_k = p.weights_k.view(c.kind), d.weights_v = p.weights_v.view(c.kind);
    d.cfg = c.cfg;
    d.rope_cos = p.rope_cos, d.rope_sin = p.rope_sin;
    d.o = rows(o), d.indices = rows(indices);
    if (!ok(cache.reserve(std::vector<std::int64_t>(static_cast<std::size_t>(batch), end)))) return false;
    if (!ok((end - begin > kMaxDecodeTokens ? prefill : decode)(d, context))) return false;
  }
  const std::string name = c.name + " decode, pages of " + std::to_string(page_size);
  print_hash(name + " o", o);
  print_hash(name + " indices", indices);
  print_hash(name + " k_c", cache.view().k_c);
  print_hash(name + " v_c", cache.view().v_c);
  return true;
}

}  // namespace

/// False if a decode step fails.
bool print_results(const Context& context) {
  std::vector<Case> cases = compression_cases();
  for (Case& c : cases) c.noise = 1, c.seed = 7;
  for (const auto& more : {attention_cases(), layer_cases()}) cases.insert(cases.end(), more.begin(), more.end());
  for (const Case& c : cases) {
    const Problem p(c);
    for (const Result& result : run_all(p, context)) print_hash(c.name + " " + result.name, result.value);
    if (c.packed || !c.k_lens.empty() || c.q_lens[0] == 0) continue;
    for (const std::int64_t page_size : {0, 16})
      if (!print_decoded(p, context, page_size)) return false;
  }
  return true;
}

}  // namespace nsa::test

int main(int argc, char** argv) {
  nsa::cpu::Isa isa;
  if (!nsa::cpu::choose_isa(isa).ok()) return 77;  // as the tests say that this CPU lacks it
  const bool reference = argc == 2 && std::strcmp(argv[1], "reference") == 0;
  return nsa::test::print_results({reference ? nsa::Backend::kReference : nsa::Backend::kCPU}) ? 0 : 1;
}
