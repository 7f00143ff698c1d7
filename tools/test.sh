#!/usr/bin/env bash
# test.sh [adversarial]: runs every suite, also after one has failed, and ends with one line per suite and a verdict.
#
# adversarial: the long form of what the suites run in part. Injects every fault into every call that touches files,
# lowers the memory limit step by step, fails every allocation of every operator, and fuzzes arguments and readers.
# docs/guide/reliability.md lists what is covered.
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

if [[ ${1:-} == adversarial ]]; then
  export NSA_ADVERSARIAL=1
  for file in cli/test_faults cli/test_adversarial python/bad_input/test_out_of_memory python/bad_input/test_fuzz \
    cli/test_fuzz_readers cli/test_data; do
    suite "$file" python -m pytest -q -p no:cacheprovider --durations=5 "tests/$file.py"
  done
else
  suite "C++" ctest --test-dir build -j 2 --output-on-failure --no-tests=error
  suite python python -m pytest -q --durations=5 "${parallel[@]}" tests/python
  suite cli python -m pytest -q --durations=5 "${parallel[@]}" tests/cli
  if python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then  # as transformers wants
    suite hf python -m pytest -q --durations=5 "${parallel[@]}" tests/hf
  fi
fi

echo
printf '%s\n' "${summary[@]}"
if ((verdict == 0)); then echo "make ${1:-test}: all suites passed in $((SECONDS - started)) s"; else
  echo "make ${1:-test}: FAILED after $((SECONDS - started)) s"; fi
exit $verdict
