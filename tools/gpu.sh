#!/usr/bin/env bash
# Runs everything that needs a GPU on a machine without network, with torch, nvcc and cmake; other dependencies come from
# `make bundle` (bundle/). Results are added to $RESULTS (default bench/results/gpu.json), which keeps other stages of the
# same commit and GPU. Logs go to build-gpu/results; with OUT=folder both go there too, as one archive and one JSON.
#   tools/gpu.sh [build] [test] [python] [cli] [sanitize] [repeat] [bench] [decode]      all of them without arguments
#   tools/gpu.sh scale   tests on all GPUs of the machine (tools/gpu/scale.sh); writes bench/results/scale_xN.json
#   tools/gpu.sh hf      a Llama through transformers (bench/models/llama.py), with transformers from WHEELS=bundle/wheels, if it is there
#   JOBS=8       tests at a time      SHARDS=2   sanitize: processes for the cases of a program (racecheck: 3 times as many)
#   TOOLS="racecheck memcheck"   sanitize: with these alone
#   LIMIT=3600   seconds after which a program is stopped and has failed
#   LM=0         without LibTorch's part of the program: no cli stage
#   PREBUILT=FOLDER   in place of the stage build: what tools/prebuilt.sh wrote; built here if it does not load
#   BUDGET=540   scale: time limit of the steps, seconds
#   PEERS=FILE   bench: a result of bench/peers/peers.py on this GPU, for the table of `nsa bench`
#   FLASH3=FILE   bench: extension module of FlashAttention-3; default: that of an installed package
#   FLASH_NSA=FOLDER   decode: sources of flash_nsa for bench/peers/peer_decode.py
# The stage bench also writes, next to $RESULTS, bench_{cuda,recipe,recipe_stride_16,minimax_m3}.json, and hf llama.json.
set -uo pipefail
cd "$(dirname "$0")/.."
steps=${*:-build test python cli sanitize repeat bench decode}
logs=build-gpu/results
results=${RESULTS:-bench/results/gpu.json}
mkdir -p "$logs" "$(dirname "$results")"
export PATH=$PATH:/usr/local/cuda/bin PYTHONPATH=$PWD/python OMP_WAIT_POLICY=passive
export NSA_PROGRAM=$PWD/build-gpu/bin/nsa
export COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)}
bundle=$PWD/bundle
failed=()
stages=()
waiting=()

execute() {  # name, command...: its log, the tests that it ran and how it ended go to $logs
  local name=$1 start=$SECONDS code=0
  shift
  rm -f "$logs/$name".{xml,end}
  GTEST_OUTPUT="xml:$logs/$name.xml" PYTEST_ADDOPTS="--junit-xml=$logs/$name.xml" \
    env --default-signal=INT timeout --signal="${STOP:-INT}" --kill-after="${GRACE:-20}" "${LIMIT:-3600}" "$@" >"$logs/$name.log" 2>&1 || code=$?
  printf '%s\n%s\n%s\n' "$code" $((SECONDS - start)) "$*" >"$logs/$name.end"
}
start() {  # in the background, JOBS at a time; `finish` waits for them
  while (($(jobs -rp | wc -l) >= ${JOBS:-8})); do wait -n; done
  waiting+=("$1")
  execute "$@" &
}
finish() {
  local name end outcome
  wait
  for name in "${waiting[@]}"; do
    mapfile -t end <"$logs/$name.end"
    case ${end[0]} in
      0) outcome=ok ;;
      77) outcome=$(tail -1 "$logs/$name.log") ;;  # no device, it says
      *) outcome=FAILED failed+=("$name") ;;
    esac
    stages+=("$name" "${end[@]}")
    printf '%-34s %s, %d s\n' "$name" "$outcome" "${end[1]}"
  done
  waiting=()
}
run() {
  start "$@"
  finish
}
record() {  # what was found so far
  python3 tools/gpu/results.py "$logs" "$results" "tools/gpu.sh $steps" "${stages[@]}" || failed+=(results)
  [[ -n ${OUT:-} ]] || return 0
  mkdir -p "$OUT"
  [[ $results -ef $OUT/${results##*/} ]] || cp "$results" "$OUT/"
  tar -czf "$OUT/logs.tgz" -C "$logs" --exclude='./nsa-scale.*' .
}
# Without the full-size ones, too slow for the sanitizer and the portable kernels, and those that launch nothing.
tests() { for t in build-gpu/bin/cuda_*_test; do [[ $t == *_full_size_* || $t == *_heuristics_* || $t == *_partition_* ]] || basename "$t"; done; }
pytest=(python3 -m pytest -q -p no:cacheprovider)
python3 -c 'import xdist' 2>/dev/null && pytest+=(-n "${JOBS:-8}")

build() {
  run configure cmake -S . -B build-gpu -G Ninja -DNSA_BUILD_CUDA=ON -DNSA_BUILD_PYTHON=ON -DNSA_BUILD_LM="${LM:-1}" \
    -DNSA_PYTHON="$(command -v python3)" -DCMAKE_CUDA_COMPILER="$(command -v nvcc)" -DCMAKE_PREFIX_PATH="$bundle/usr" \
    -DCMAKE_CUDA_ARCHITECTURES="${ARCHITECTURES:-native}" -DNSA_CPU_ISAS="${ISAS:-avx2}" \
    ${INSTANCES:+-DNSA_CUDA_INSTANCES="$INSTANCES"} ${HEAD_DIMS:+-DNSA_CUDA_HEAD_DIMS="$HEAD_DIMS"} \
    -DNSA_BUILD_TESTS="${TESTS:-1}"
  run build ninja -C build-gpu
  tail -5 "$logs/build.log"
}
# The libraries in PREBUILT, if they load here and find the GPUs.
take_prebuilt() {
  export NSA_PROGRAM=$PREBUILT/bin/nsa LD_LIBRARY_PATH
  # Where the program was built torch lay elsewhere.
  LD_LIBRARY_PATH=$(python3 -c 'import torch; print(torch.__path__[0])')/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  cp "$PREBUILT/lib/_C.so" "$PREBUILT/lib/libnsa.so.0" python/nsa/
  LIMIT=120 run prebuilt python3 tools/gpu/check_prebuilt.py "$PREBUILT"
  cat "$logs/prebuilt.log"
  [[ $(head -1 "$logs/prebuilt.end") != 0 ]] || return 0
  echo "PREBUILT=$PREBUILT does not load here: building, without tests"
  export NSA_PROGRAM=$PWD/build-gpu/bin/nsa
  rm -f python/nsa/{_C.so,libnsa.so.0}
  [[ -d $bundle ]] || bundle=$PREBUILT/bundle
  TESTS=0 INSTANCES='Bf16;Half;float' HEAD_DIMS='64x64;128x128' LM=$([[ -d $bundle ]] && echo 1 || echo 0) build
}
if [[ -n ${PREBUILT:-} ]]; then
  PREBUILT=$(realpath "$PREBUILT")
  take_prebuilt
fi

for step in $steps; do
  case $step in
    build) build ;;
    test)
      start cuda_full_size_test build-gpu/bin/cuda_full_size_test --gtest_brief=1
      start cuda_heuristics_test build-gpu/bin/cuda_heuristics_test --gtest_brief=1
      start cuda_partition_test build-gpu/bin/cuda_partition_test --gtest_brief=1
      for t in $(tests); do
        start "$t" "build-gpu/bin/$t" --gtest_brief=1
        start "$t.portable" env NSA_CUDA_KERNELS=portable "build-gpu/bin/$t" --gtest_brief=1
      done
      # The least memory for dS: sequences one by one, packed ones without it.
      start cuda_grid_test.least env NSA_CUDA_KERNELS=portable NSA_CUDA_DS_MIB=0 build-gpu/bin/cuda_grid_test --gtest_brief=1
      # The selection's dS is not stored.
      start cuda_grid_test.unstored env NSA_CUDA_DS_MIB=0 build-gpu/bin/cuda_grid_test --gtest_brief=1
      finish
      ;;
    python)
      run python "${pytest[@]}" tests/python
      tail -15 "$logs/python.log"
      ;;
    cli)
      run cli "${pytest[@]}" tests/cli/test_device.py
      run bench_alone env NSA_GPU_ALONE=1 python3 -m pytest -q -p no:cacheprovider tests/cli/test_device.py -k add_up
      tail -15 "$logs/cli.log"
      ;;
    sanitize)
      # The cases launch every kernel (tools/kernel_cases.py), with few thread blocks so that each takes several tiles.
      # All four tools; memcheck's run is looked at for kernels that were left out. With a packed call of adversarial offsets.
      export NSA_CUDA_PROCESSORS=2 NSA_CUDA_INSTANCES_ONCE=1 GTEST_TOTAL_SHARDS GTEST_FILTER
      rm -rf "$logs/traces" && mkdir -p "$logs/traces"
      for tool in ${TOOLS:-racecheck synccheck memcheck initcheck}; do  # the slowest first
        GTEST_TOTAL_SHARDS=${SHARDS:-2}
        [[ $tool == racecheck ]] && ((GTEST_TOTAL_SHARDS *= 3))
        for t in $(tests); do
          for kernels in auto portable; do
            GTEST_FILTER=$(python3 tools/kernel_cases.py filter tests/cuda/sanitizer_cases.json "$t" "$kernels")
            [[ -n $GTEST_FILTER ]] || continue
            for ((shard = 0; shard < GTEST_TOTAL_SHARDS; ++shard)); do
              export NSA_CUDA_TRACE=$logs/traces/$tool.$shard/$t.$kernels NSA_CUDA_KERNELS=$kernels GTEST_SHARD_INDEX=$shard
              mkdir -p "$NSA_CUDA_TRACE"
              start "$t.$kernels.$tool.$shard" compute-sanitizer --tool "$tool" --error-exitcode 9 \
                "build-gpu/bin/$t" --gtest_brief=1
            done
          done
        done
      done
      finish
      unset NSA_CUDA_{PROCESSORS,INSTANCES_ONCE,TRACE,KERNELS} GTEST_{TOTAL_SHARDS,SHARD_INDEX,FILTER}
      [[ " ${TOOLS:-memcheck} " == *" memcheck "* ]] || continue
      mkdir -p "$logs/traces/all" && cp -r "$logs"/traces/memcheck.*/* "$logs/traces/all/"
      run every_kernel python3 tools/kernel_cases.py check "$logs/traces/all" build-gpu/lib/libnsa.so
      ;;
    repeat)
      export NSA_REPEATS=${NSA_REPEATS:-200}
      run repeat "${pytest[@]}" tests/python/test_cuda.py -k repeatable
      run repeat_full_size env NSA_FULL_SIZE_REPEATS="${NSA_FULL_SIZE_REPEATS:-1000}" \
        build-gpu/bin/cuda_full_size_test --gtest_filter='*EveryTime*'
      ;;
    bench)
      if [[ -x $NSA_PROGRAM ]]; then
        dense=(--longest-dense-forward 262144 --no-plain --budget 0.4)
        flash3=${FLASH3:-$(PYTHONPATH=bench/peers:$PYTHONPATH python3 -c 'import dense; print(dense.flash3_library() or "")')}
        [[ -z $flash3 ]] || dense+=(--flash3 "$flash3")
        run bench build-gpu/bin/nsa bench --device cuda --lengths 4096,6144,7168,8192,10240,16384,32768,65536,131072,262144 \
          "${dense[@]}" ${PEERS:+--peers "$PEERS"} --json "$(dirname "$results")/bench_cuda.json"
        cat "$logs/bench.log"
        blocks() {  # stage, its result, sizes as in evidence/plans.py
          local options
          read -ra options < <(python3 -c "from evidence.plans import *; print(block_options(($3)))")
          run "$1" build-gpu/bin/nsa bench --device cuda --lengths 4096,8192,10240,12288,16384,32768,65536,131072 \
            "${options[@]}" --phi mlp "${dense[@]}" --json "$(dirname "$results")/$2.json"
          cat "$logs/$1.log"
        }
        blocks recipe bench_recipe RECIPE_BLOCKS
        blocks stride_16 bench_recipe_stride_16 16,16,32,32
        # MiniMax-M3's attention: 16 blocks of 128.
        run minimax_m3 build-gpu/bin/nsa bench --device cuda --lengths 8192,65536 --heads 64 --kv-heads 4 --head-dim 128 \
          --block-size 128 --topk 16 --only selected_attention --budget 0.5 \
          --json "$(dirname "$results")/bench_minimax_m3.json"
        cat "$logs/minimax_m3.log"
      fi
      run stages build-gpu/bin/cuda_stages ${LENGTHS:-8192 65536}
      cat "$logs/stages.log"
      ;;
    decode)
      decode() { run "$1" build-gpu/bin/cuda_decode "${@:2}" --json "$logs/$1.json" && cat "$logs/$1.log"; }
      decode decode --batch 32,8,1 --kernels
      decode decode_layers --batch 8,1 --layers 32
      decode decode_several --batch 32,1 --new 2,4,16 --selection random
      decode decode_model_like --batch 32,1 --new 2,4,16 --selection model-like
      decode decode_ragged --batch 32 --ragged
      decode decode_fp8 --batch 32,8,1 --cache fp8
      decode decode_keys192 --batch 32,8,1 --key-dim 192
      for context in 8192 16384 32768 131072 262144; do decode "decode_$context" --context "$context" --batch 32,8,1; done
      run decode_dense python3 bench/peers/dense_decode.py --json "$logs/decode_dense.json"
      cat "$logs/decode_dense.log"
      if [[ -n ${FLASH_NSA:-} ]]; then
        run peer_decode python3 bench/peers/peer_decode.py "$FLASH_NSA" --json "$logs/peer_decode.json"
        cat "$logs/peer_decode.log"
      fi
      if [[ -x $NSA_PROGRAM ]]; then
        rm -rf "$logs/generate" "$logs/generate_speed.json"
        run generate_speed python3 bench/models/generate_speed.py "$logs/generate" --data src --batch 1,32 --json "$logs/generate_speed.json"
        cat "$logs/generate_speed.log"
      fi
      ;;
    hf)
      if compgen -G "${WHEELS:=$bundle/wheels}/*.whl" >/dev/null; then
        run wheels python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$logs/site" "$WHEELS"/*.whl
        export PYTHONPATH=$PWD/$logs/site:$PYTHONPATH
      fi
      run first_chunk "${pytest[@]}" tests/python/decoding/test_decode.py -k 'first_chunk and cuda'
      run llama python3 bench/models/llama.py --json "$(dirname "$results")/llama.json"
      tail -5 "$logs/first_chunk.log"
      cat "$logs/llama.log"
      ;;
    scale)
      source tools/gpu/scale.sh
      ;;
  esac
done
record
if ((${#failed[@]})); then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all of '$steps': ok"
