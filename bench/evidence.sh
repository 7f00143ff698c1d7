#!/usr/bin/env bash
# Everything that docs/evidence.md tells, anew: trains and measures what bench/results/evidence lacks (bench/evidence.py
# says how), then writes the page and its pictures. With several GPUs as many runs go side by side, one on each.
#   bench/evidence.sh [PLAN] [options of bench/evidence.py, e.g. --seeds 1] [-- options of every run]
#   LIMIT=570       seconds; then runs in progress are saved and the exit code is 3: the same command goes on. 0: none
#   GPUS="0 1"      default: those of CUDA_VISIBLE_DEVICES, or all
#   MODELS="full recipe"    these alone
#   NSA=build/bin/nsa   OUT=build/evidence: the runs   RESULTS=bench/results/evidence   PAGE=docs/evidence.md; empty: none
# One seed of every plan comes first, then the others. A run that fails is told, and the others go on; exit code 1.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-build/evidence}
results=${RESULTS:-bench/results/evidence}
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
done < <(python3 bench/evidence.py "${plan[@]}" --missing --results "$results" "${own[@]}")
echo "${#jobs[@]} results to make"

# One job after the other that no other worker is at, until the limit has passed. What is done is not done again.
work() {  # options for every run
  local job name model seed left code failed=0
  for job in "${jobs[@]}"; do
    read -r name model seed <<<"$job"
    left=$((limit - SECONDS))
    if ((limit > 0 && left <= 0)); then
      echo "stopped; the same command goes on" >&2
      return 3
    fi
    exec 9>"$out/$name.$model.$seed.lock"
    flock -n 9 || continue
    code=0
    python3 bench/evidence.py "$name" "$model" --nsa "${NSA:-build/bin/nsa}" --out "$out" --results "$results" \
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
page=${PAGE-docs/evidence.md}
if [[ -z $page ]]; then exit "$status"; fi
if python3 -c 'import matplotlib' 2>/dev/null; then
  python3 tools/evidence.py --results "$results" --page "$page" || status=1
else
  echo "no matplotlib here: tools/evidence.py writes the page and its pictures where there is"
fi
exit "$status"
