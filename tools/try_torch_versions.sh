#!/usr/bin/env bash
# Does one build of the extension work in other torch versions? For each: a fresh environment in a temporary folder,
# that torch, and the tests of the operators with the extension as it was built here (target nsa_torch).
#   tools/try_torch_versions.sh [VERSION...]     default: 2.10.0 and the newest; about 5 GB of disk at a time
set -euo pipefail
cd "$(dirname "$0")/.."
[[ -e python/nsa/_C.so ]] || { echo "python/nsa/_C.so is missing: build the target nsa_torch" >&2; exit 1; }
python=${PYTHON:-python3}
versions=("${@:-2.10.0}")
[[ $# -gt 0 ]] || versions+=("")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

verdict=0
for version in "${versions[@]}"; do
  rm -rf "$work/venv"
  "$python" -m venv "$work/venv"
  "$work/venv/bin/pip" install -q --disable-pip-version-check --no-cache-dir "torch${version:+==$version}" \
    numpy pytest hypothesis
  name=$("$work/venv/bin/python" -c 'import torch; print(torch.__version__)')
  if PYTHONPATH=python "$work/venv/bin/python" -m pytest -q -p no:cacheprovider tests/python/test_operators.py \
    tests/python/test_config.py tests/python/test_errors.py -k "not inductor"; then
    echo "torch $name: passed"
  else
    echo "torch $name: FAILED"
    verdict=1
  fi
done
exit $verdict
