#!/usr/bin/env bash
# The long form of what `make test` tries in part: every fault of every call that touches files, limits on memory one by
# one, every allocation of every operator that fails, many broken calls. Goes on after a failure; docs/guide/reliability.md says what it covers.
set -u
cd "$(dirname "$0")/.."
export NSA_HOSTILE=1 OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
verdict=0
for test in tests/cli/test_faults.py tests/cli/test_hostile.py tests/python/bad_input/test_out_of_memory.py \
  tests/python/bad_input/test_fuzz.py tests/cli/test_fuzz_readers.py; do
  echo "== $test"
  python -m pytest -q -p no:cacheprovider --durations=5 "$test" </dev/null || verdict=1
done
((verdict == 0)) && echo "make hostile: passed in $SECONDS s" || echo "make hostile: FAILED after $SECONDS s"
exit $verdict
