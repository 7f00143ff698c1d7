#!/usr/bin/env bash
# Formats every tracked source; with --check it only reports what would change, and fails if anything would.
set -u
cd "$(dirname "$0")/.."
if [[ ${1:-} == --check ]]; then
  clang=(--dry-run -Werror) ruff=(--check)
else
  clang=(-i) ruff=()
fi
failed=0
git ls-files -z '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -0r clang-format "${clang[@]}" || failed=1
ruff format -q "${ruff[@]}" . || failed=1
exit $failed
