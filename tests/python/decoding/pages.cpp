// Reads operations on nsa::KVCache from standard input, one a line, and prints after each whether it was done, the
// length of a prefix, which pages every sequence holds, and what exceeded the capacity. test_cache.py does the same
// with nsa.KVCache of the Python package.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "nsa/kv_cache.h"

namespace {

void print(const nsa::TensorView& table) {
  const auto* pages = static_cast<const std::int32_t*>(table.data);
  for (std::int64_t i = 0; i < table.numel(); ++i) std::cout << ' ' << pages[i];
}

}  // namespace

int main() {
  nsa::KVCacheOptions options;
  options.key_dim = options.value_dim = 1;
  options.dtype = nsa::DType::kFloat32;
  options.cfg = {8, 4, 16, 4, 1, 2, 20};
  std::cin >> options.batch >> options.capacity >> options.page_size >> options.num_pages >> options.num_prefixes;
  nsa::KVCache cache;
  if (const nsa::Status status = nsa::KVCache::create(options, cache); !status.ok()) {
    std::cerr << status.message() << '\n';
    return 1;
  }
  std::string line;
  std::getline(std::cin, line);
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string operation;
    words >> operation;
    std::vector<std::int64_t> n;
    for (std::int64_t value = 0; words >> value;) n.push_back(value);
    nsa::Status status;
    std::int64_t prefix = 0;
    const std::vector<std::int32_t> tokens(n.begin() + std::min<std::ptrdiff_t>(1, std::ssize(n)), n.end());
    if (operation == "reserve") status = cache.reserve(n);
    if (operation == "rollback") status = cache.rollback(n[0], n[1]);
    if (operation == "fork") status = cache.fork(n[0], n[1], n[2]);
    if (operation == "release") cache.release(n[0]);
    if (operation == "keep_prefix") status = cache.keep_prefix(n[0], tokens, prefix);
    if (operation == "match_prefix") status = cache.match_prefix(n[0], tokens, prefix);
    nsa::KVCacheView view = cache.view();
    if (operation == "append") static_cast<std::int32_t*>(view.cache_seqlens.data)[n[0]] += static_cast<int>(n[1]);
    std::cout << status.ok() << ' ' << prefix;
    print(view.cache_seqlens);
    print(view.block_table);
    print(view.block_table_c);
    if (status.code() == nsa::StatusCode::kOutOfCapacity) std::cout << ' ' << status.message();
    std::cout << '\n';
  }
}
