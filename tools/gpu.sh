#!/usr/bin/env bash
# Everything that needs a GPU, on a machine without network: torch, nvcc and cmake are there, what else is missing comes
# from `make bundle` (bundle/). Logs go to $OUT (default build-gpu/results), what each stage found to $RESULTS (default
# docs/results/gpu.json), beside what it says of other stages on the same commit and GPU.
#   tools/gpu.sh [build] [test] [python] [sanitize] [repeat] [bench]      all of them without arguments
set -uo pipefail
cd "$(dirname "$0")/.."
steps=${*:-build test python sanitize repeat bench}
out=${OUT:-build-gpu/results}
mkdir -p "$out"
export PATH=$PATH:/usr/local/cuda/bin PYTHONPATH=$PWD/python OMP_WAIT_POLICY=passive
bundle=$PWD/bundle
failed=()
stages=()
run() {  # name, command...: its log and the tests that it ran go to $out
  local name=$1 start=$SECONDS code=0 outcome=ok
  shift
  rm -f "$out/$name.xml"
  GTEST_OUTPUT="xml:$out/$name.xml" PYTEST_ADDOPTS="--junit-xml=$out/$name.xml" "$@" >"$out/$name.log" 2>&1 || code=$?
  case $code in
    0) ;;
    77) outcome=$(tail -1 "$out/$name.log") ;;  # no device, it says
    *) outcome=FAILED failed+=("$name") ;;
  esac
  stages+=("$name" "$code" $((SECONDS - start)) "$*")
  printf '%-34s %s, %d s\n' "$name" "$outcome" $((SECONDS - start))
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
      export NSA_REPEATS=${NSA_REPEATS:-200}
      run repeat python3 -m pytest -q -p no:cacheprovider tests/python/test_cuda.py -k repeatable
      ;;
    bench)
      run bench build-gpu/bin/cuda_stages ${LENGTHS:-8192 65536}
      cat "$out/bench.log"
      ;;
  esac
done
COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)} \
  python3 tools/gpu_results.py "$out" "${RESULTS:-docs/results/gpu.json}" "tools/gpu.sh $steps" "${stages[@]}"
if ((${#failed[@]})); then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all of '$steps': ok"
