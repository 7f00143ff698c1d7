#!/usr/bin/env bash
# The benchmark: NSA and dense attention in both dtypes, with the speed targets judged. About 20 minutes on two
# cores. Results: build/bench/{bfloat16,float32}.{txt,json}; exit code 1 if a target was missed.
#   NSA=path of the program      OUT=folder for the results
set -uo pipefail
cd "$(dirname "$0")/.."
nsa=${NSA:-build/bin/nsa}
out=${OUT:-build/bench}
mkdir -p "$out"
export COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)}  # which the results name
missed=0
measure() {  # dtype, lengths, further options
  "$nsa" bench --dtype "$1" --lengths "$2" --json "$out/$1.json" --targets "${@:3}" 2>&1 | tee "$out/$1.txt" || missed=1
}
measure bfloat16 1024,2048,4096,8192,16384,32768,65536,131072
measure float32 1024,4096,16384,65536
exit $missed
