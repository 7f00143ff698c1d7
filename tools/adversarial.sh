#!/usr/bin/env bash
# The long form of tests that `make test` runs in part. Injects every fault into every call that touches files, lowers the
# memory limit step by step, fails every allocation of every operator, and fuzzes arguments and readers.
# A failure does not stop the rest. docs/guide/reliability.md lists what is covered.
set -u
cd "$(dirname "$0")/.."
export NSA_ADVERSARIAL=1 OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
verdict=0
for test in tests/cli/test_faults.py tests/cli/test_adversarial.py tests/python/bad_input/test_out_of_memory.py \
  tests/python/bad_input/test_fuzz.py tests/cli/test_fuzz_readers.py; do
  echo "== $test"
  python -m pytest -q -p no:cacheprovider --durations=5 "$test" </dev/null || verdict=1
done
((verdict == 0)) && echo "make adversarial: passed in $SECONDS s" || echo "make adversarial: FAILED after $SECONDS s"
exit $verdict
