#!/usr/bin/env bash
# A hash of all that libnsa, the extension and the program are compiled from.
cd "$(dirname "$0")/../.." || exit
find CMakeLists.txt cmake include src python/csrc -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum |
  sha256sum | cut -d' ' -f1
