#!/usr/bin/env bash
# Runs every suite, also after one has failed, and ends with one line per suite and a verdict.
set -u
cd "$(dirname "$0")/.."
# Waiting threads sleep: the small calls of tests would otherwise spend most of their time spinning between regions.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
started=$SECONDS
verdict=0
summary=()

suite() {  # suite NAME COMMAND...
  local name=$1 begin=$SECONDS outcome=passed
  shift
  echo "== $name: $*"
  "$@" </dev/null || { outcome=FAILED; verdict=1; }
  summary+=("$(printf '%-14s %s in %d s' "$name" "$outcome" $((SECONDS - begin)))")
}

# Two files at a time: most tests keep one core busy.
parallel=(-n 2 --dist loadfile --no-loadscope-reorder)

suite "C++" ctest --test-dir build -j 2 --output-on-failure --no-tests=error
suite python python -m pytest -q --durations=5 "${parallel[@]}" tests/python
suite cli python -m pytest -q --durations=5 "${parallel[@]}" tests/cli
if python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then  # as transformers wants
  suite hf python -m pytest -q --durations=5 "${parallel[@]}" tests/hf
fi

echo
printf '%s\n' "${summary[@]}"
if ((verdict == 0)); then echo "make test: all suites passed in $((SECONDS - started)) s"; else
  echo "make test: FAILED after $((SECONDS - started)) s"; fi
exit $verdict
