#!/usr/bin/env bash
# Formatting, ruff, and clang-tidy over the torch-free C++ (the files of src/core and src/cpu, in parallel).
set -u
cd "$(dirname "$0")/.."
failed=0
tools/format.sh --check || failed=1
ruff check -q . || failed=1
[[ -f build/compile_commands.json ]] || cmake -S . -B build -G Ninja -DNSA_PYTHON="$(command -v python)" >/dev/null
git ls-files -z 'src/core/*.cpp' 'src/cpu/reference/*.cpp' | xargs -0r -n 1 -P "$(nproc)" clang-tidy --quiet -p build || failed=1
((failed == 0)) && echo "lint: clean" || echo "lint: FAILED"
exit $failed
