#!/usr/bin/env bash
# Formatting, ruff, types, whether includes run one way and a folder is a namespace, whether the mutations still fit the
# code, the documents agree with the tree and the words are the field's, and clang-tidy over the library's scalar code
# (the kernels' intrinsics only add noise).
set -u
cd "$(dirname "$0")/.."
failed=0
# One core for a minute, in the background.
mypy --no-error-summary &
mypy=$!
tools/format.sh --check || failed=1
ruff check -q . || failed=1
python3 tools/check_folders.py || failed=1
python3 tests/mutation/run.py --check || failed=1
python3 tools/check_docs.py || failed=1
python3 tools/check_words.py || failed=1
python3 tools/performance.py --check || failed=1
python3 -m evidence.page --check || failed=1
python3 tools/scale.py --check || failed=1
python3 tools/draw_branches.py --check || failed=1
git ls-files -z 'src/core/*.cpp' 'src/reference/*.cpp' |
  xargs -0r -n 1 -P "$(nproc)" clang-tidy --quiet -p build 2> >(grep -v 'warnings generated' >&2) || failed=1
wait "$mypy" || failed=1
((failed == 0)) && echo "lint: clean" || echo "lint: FAILED"
exit $failed
