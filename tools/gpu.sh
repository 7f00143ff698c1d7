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
  printf '%-28s %s, %d s\n' "$name" "$([[ " ${failed[*]} " == *" $name "* ]] && echo FAILED || echo ok)" $((SECONDS - start))
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
          GTEST_TOTAL_SHARDS=${SHARDS:-24} GTEST_SHARD_INDEX=1 run "$t.$tool" compute-sanitizer --tool "$tool" \
            --error-exitcode 9 "build-gpu/bin/$t" --gtest_brief=1
        done
      done
      ;;
    repeat)
      NSA_REPEATS=${NSA_REPEATS:-200} run repeat python3 -m pytest -q -p no:cacheprovider tests/python/test_cuda.py -k repeatable
      ;;
    bench)
      run bench build-gpu/bin/cuda_stages
      cat "$out/bench.log"
      ;;
  esac
done
if ((${#failed[@]})); then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all of '$steps': ok"
