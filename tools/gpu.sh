#!/usr/bin/env bash
# Everything that needs a GPU, on a machine without network: torch, nvcc and cmake are there, what else is missing comes
# from `make bundle` (bundle/). Results go to $OUT (default build-gpu/results).
#   tools/gpu.sh [build] [test] [python] [sanitize] [repeat] [bench]      all of them without arguments
set -uo pipefail
cd "$(dirname "$0")/.."
steps=${*:-build test python sanitize repeat bench}
out=${OUT:-build-gpu/results}
mkdir -p "$out"
export PATH=$PATH:/usr/local/cuda/bin PYTHONPATH=$PWD/python OMP_WAIT_POLICY=passive
bundle=$PWD/bundle
failed=()
run() {  # name, command...: its log goes to $out, its result to the summary
  local name=$1 start=$SECONDS
  shift
  "$@" >"$out/$name.log" 2>&1 || failed+=("$name")
  printf '%-34s %s, %d s\n' "$name" "$([[ " ${failed[*]:-} " == *" $name "* ]] && echo FAILED || echo ok)" $((SECONDS - start))
}
tests() { for t in build-gpu/bin/cuda_*_test; do basename "$t"; done; }

for step in $steps; do
  case $step in
    build)
      run configure cmake -S . -B build-gpu -G Ninja -DNSA_BUILD_CUDA=ON -DNSA_BUILD_PYTHON=ON -DNSA_BUILD_LM=OFF \
        -DNSA_PYTHON="$(command -v python3)" -DCMAKE_CUDA_COMPILER="$(command -v nvcc)" -DCMAKE_PREFIX_PATH="$bundle/usr" \
        -DCMAKE_CUDA_ARCHITECTURES="${ARCHITECTURES:-native}" -DNSA_CPU_ISAS="${ISAS:-avx2}"
      run build ninja -C build-gpu
      tail -5 "$out/build.log"
      ;;
    test)
      for t in $(tests); do run "$t" "build-gpu/bin/$t" --gtest_brief=1; done
      ;;
    python)
      run python python3 -m pytest -q -p no:cacheprovider tests/python
      tail -15 "$out/python.log"
      ;;
    sanitize)
      for t in $(tests); do
        for tool in memcheck racecheck initcheck synccheck; do
          # A part of the cases each: the edge lengths are spread over them.
          shards=${SHARDS:-4}
          [[ $tool == racecheck ]] && shards=$((shards * 8))  # by far the slowest
          GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=1 run "$t.$tool" compute-sanitizer --tool "$tool" \
            --error-exitcode 9 "build-gpu/bin/$t" --gtest_brief=1
        done
      done
      ;;
    repeat)
      NSA_REPEATS=${NSA_REPEATS:-200} run repeat python3 -m pytest -q -p no:cacheprovider tests/python/test_cuda.py -k repeatable
      ;;
    bench)
      run bench build-gpu/bin/cuda_stages ${LENGTHS:-8192 65536}
      cat "$out/bench.log"
      COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)} python3 - "$out/bench.log" >"$out/cuda_stages.json" <<'PY'
import json, os, re, subprocess, sys, time

query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
gpu, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
about = {"gpu": gpu, "driver": driver, "command": "tools/gpu.sh build bench", "commit": os.environ["COMMIT"]}
about |= {"date": time.strftime("%Y-%m-%d"), "problem": "B=1 H=64 Hkv=4 D=128 bfloat16, MLP phi, defaults", "unit": "ms"}
lengths, now = {}, None
for line in open(sys.argv[1]):
    if found := re.match(r"S = (\d+)", line):
        now = lengths.setdefault(found[1], {})
    elif found := re.match(r"  (.+?) +([0-9.]+) ms +workspace +([0-9.]+) MiB", line):
        now[found[1]] = {"ms": float(found[2]), "workspace_mib": float(found[3])}
json.dump({**about, "lengths": lengths}, sys.stdout, indent=1)
PY
      ;;
  esac
done
if ((${#failed[@]})); then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all of '$steps': ok"
