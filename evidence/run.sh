#!/usr/bin/env bash
# Every figure of docs/evidence.md: trains and evaluates what evidence/results lacks (evidence/run.py says how), then
# writes the pages and pictures. With several GPUs as many runs go side by side, one on each.
#   evidence/run.sh [PLAN] [options of evidence/run.py, e.g. --seeds 1] [-- options of every run]
#   LIMIT=570       seconds; then runs in progress are saved and the exit code is 3: the same command continues. 0: none
#   GPUS="0 1"      default: those of CUDA_VISIBLE_DEVICES, or all
#   MODELS="full recipe-2"   only these
#   NSA=build/bin/nsa   OUT=build/evidence: the runs   RESULTS=evidence/results   DOCS=docs: where pages go; empty: none
# One seed of every plan comes first, then the others. A run that fails is reported, and the others continue; exit code 1.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-build/evidence}
results=${RESULTS:-evidence/results}
limit=${LIMIT:-570}
visible=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}
read -ra gpus <<<"${GPUS:-${visible//,/ }}"
plan=()
if [[ ${1:-} != -* && -n ${1:-} ]]; then plan=("$1") && shift; fi
own=()
while (($#)) && [[ $1 != -- ]]; do own+=("$1") && shift; done
COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
export COMMIT
mkdir -p "$out" "$results"

jobs=()
while read -r name model seed; do
  if [[ -z ${MODELS:-} || " $MODELS " == *" $model "* ]]; then jobs+=("$name $model $seed"); fi
done < <(python3 -m evidence.run "${plan[@]}" --missing --results "$results" "${own[@]}")
echo "${#jobs[@]} results to make"

# One job after the other that no other worker is at, until the limit has passed. What is done is not done again.
work() {  # options for every run
  local job name model seed left code failed=0
  for job in "${jobs[@]}"; do
    read -r name model seed <<<"$job"
    left=$((limit - SECONDS))
    if ((limit > 0 && left <= 0)); then
      echo "stopped; the same command continues" >&2
      return 3
    fi
    exec 9>"$out/$name.$model.$seed.lock"
    flock -n 9 || continue
    code=0
    python3 -m evidence.run "$name" "$model" --nsa "${NSA:-build/bin/nsa}" --out "$out" --results "$results" \
      --limit "$((limit > 0 ? left : 0))" "${own[@]}" --seeds "$seed" "$@" || code=$?
    if ((code == 3)); then return 3; fi
    if ((code)); then echo "$job: failed" >&2 && failed=1; fi
  done
  return "$failed"
}

workers=()
for gpu in "${gpus[@]:-}"; do
  CUDA_VISIBLE_DEVICES=$gpu work "$@" &
  workers+=($!)
done
status=0
for worker in "${workers[@]}"; do
  code=0
  wait "$worker" || code=$?
  if ((code > status)); then status=$code; fi
done
docs=${DOCS-docs}
if [[ -z $docs ]]; then exit "$status"; fi
if python3 -c 'import matplotlib' 2>/dev/null; then
  python3 -m evidence.page --results "$results" --docs "$docs" || status=1
else
  echo "no matplotlib here: python -m evidence.page writes the pages and pictures where it is installed"
fi
exit "$status"
