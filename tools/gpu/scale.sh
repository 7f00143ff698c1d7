# The stage `scale` of tools/gpu.sh, which reads this file: everything that wants all GPUs of one machine, the most
# important first. A step has a limit of its own, nothing that it started outlives it, and what it found is written
# before the next one begins. Without a GPU the same steps run with two processes and tiny sizes: a rehearsal.
if gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) && ((gpus)); then
  device=cuda
  results=${RESULTS:-bench/results/scale_x$gpus.json}
  ((gpus > 1)) || { echo "scale: this machine has one GPU, two are needed" >&2 && exit 1; }
else
  device=cpu gpus=2
  results=${RESULTS:-$logs/rehearsal.json}
fi
budget=${BUDGET:-540}
ranks=(python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus")
one=(python3 -m torch.distributed.run --standalone --nproc-per-node 1)
# A folder in memory where there is one: checkpoints of 300 million parameters are not to be waited for.
runs=$(mktemp -d -p "$([[ -w /dev/shm ]] && echo /dev/shm || echo "$logs")" nsa-scale.XXXXXX)
trap 'rm -rf "$runs"' EXIT
export GLOO_SOCKET_IFNAME=lo NSA_PARALLEL_DEVICE=$device NSA_SCALE=$$.$RANDOM
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}  # NVLink multicast is off by default
export GPUS=$gpus STOP=TERM GRACE=5
[[ $device == cpu ]] && export NSA_DEVICE=cpu OMP_NUM_THREADS=1

sweep() {  # ends what a step left running, by what it has in its environment
  local folder
  for folder in /proc/[0-9]*; do
    grep -qzx "NSA_SCALE=$NSA_SCALE" "$folder/environ" 2>/dev/null || continue
    [[ ${folder#/proc/} == "$BASHPID" ]] || kill -KILL "${folder#/proc/}" 2>/dev/null
  done
}
begin() {  # name, seconds at most, command...: in the background until `settle`
  local name=$1 limit=$2 left=$((budget - SECONDS))
  shift 2
  rm -f "$logs/$name.json"
  if ((left < 15)); then
    echo "skipped: $budget s are over" >"$logs/$name.log"
    printf '77\n0\n%s\n' "$*" >"$logs/$name.end"
    waiting+=("$name")
    return
  fi
  LIMIT=$((limit < left ? limit : left)) start "$name" "$@"
}
settle() {
  finish
  sweep
  record
}
step() {
  begin "$@"
  settle
}

if [[ $device == cuda ]]; then
  lengths=65536,262144,524288,1048576 shape=() bits=(--tokens 65536 --bits 20 --chunks 16) sizes=1,4,16,64,256,1024,2048
  tests=() training_tests=(tests/python/parallel/test_distributed.py tests/python/parallel/test_train_long.py) bits_tests=each_gpu
  data=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
  # From four GPUs on, about two minutes for each program that trains on all of them.
  steps_of_one=$((96 / gpus)) steps_of_all=$((gpus >= 4 ? 220 : 96 / gpus)) long_steps=$((gpus >= 4 ? 26 : 6))
  train=(--data "$data" --concat-by-folder --document-bytes 65536 --context 32768 --hidden-size 1024 --layers 18 --heads 16)
  train+=(--kv-heads 1 --head-dim 128 --ffn-size 3072)
  # Steps that keep the GPU busy longer than the host.
  kill=("${train[@]:0:7}" --hidden-size 512 --layers 4 --heads 8 --kv-heads 1 --head-dim 64 --steps 200 --log-every 10)
  kill+=(--save-every 40)
  at=80
  long=(--bfloat16 --recompute --width 1024 --heads 16 --kv-heads 1 --head-dim 128)
  tokens=1048576 tokens_of_one=262144
else
  lengths=1024,2048 shape=(--heads 4 --kv-heads 2 --head-dim 16 --dtype float32 --device cpu --alone 1024) sizes=0.01,0.1
  bits=(--tokens 1024 --bits 3 --chunks 8)
  tests=(-k "bits_of_one_process and 2-float32")
  training_tests=(tests/python/parallel/test_distributed.py -k "fsdp and not head") bits_tests="each_rank and whole-2"
  steps_of_one=20 steps_of_all=20 long_steps=3
  train=(--data python --context 128 --hidden-size 32 --layers 2 --heads 2 --kv-heads 1 --head-dim 16 --threads 1)
  kill=("${train[@]}" --steps 300 --log-every 4 --save-every 20)
  at=40
  long=() tokens=1024 tokens_of_one=512
fi
train+=(--batch-size 1 --seed 1 --grad-accum "$gpus" --log-every $((steps_of_one / 10)) --save-every 0)
train+=(--eval-every 0 --eval-tokens 32768)
kill+=(--batch-size 1 --eval-every 0 --eval-tokens 2048)
# Several sequences where there are GPUs for it.
dp=$((gpus >= 4 ? 2 : 1))

[[ $device == cuda ]] && step topology 30 bash -c 'nvidia-smi topo -m; nvidia-smi nvlink --status --id=0'
step collectives 75 "${ranks[@]}" bench/scale/collectives.py --sizes "$sizes" --json "$logs/collectives.json"
step context_parallel 200 env PYTORCH_ALLOC_CONF=expandable_segments:True "${ranks[@]}" bench/scale/context_parallel.py \
  --tokens "$lengths" --seconds 140 --json "$logs/context_parallel.json" "${shape[@]}"
# Bits, not times: run at the same time.
begin bits 90 "${ranks[@]}" bench/scale/context_parallel.py "${bits[@]}" --seconds 60 --json "$logs/bits.json" "${shape[@]}"
begin parallel 120 python3 -m pytest -q -p no:cacheprovider tests/python/parallel/test_parallel.py "${tests[@]}"
settle
# One GPU each, at the same time.
begin train_one 100 python3 bench/scale/train_ranks.py speed --ranks 1 --limit 90 --out "$runs/one" \
  --json "$logs/train_one.json" -- "${train[@]}" --steps "$steps_of_one"
CUDA_VISIBLE_DEVICES=1 begin train_long_one 100 "${one[@]}" examples/train_long.py "${long[@]}" \
  --steps 6 --tokens "$tokens_of_one" --batch 1 --out "$runs/long_one"
settle
rm -rf "${runs:?}"/*
step train_all 140 python3 bench/scale/train_ranks.py speed --ranks "$gpus" --limit 130 --out "$runs/all" \
  --json "$logs/train_all.json" -- "${train[@]}" --steps "$steps_of_all"
step train_long_all 130 "${ranks[@]}" examples/train_long.py "${long[@]}" --steps "$long_steps" --tokens "$tokens" \
  --dp "$dp" --cp $((gpus / dp)) --batch "$dp" --out "$runs/long_all"
rm -rf "${runs:?}"/*
begin killed 100 python3 bench/scale/train_ranks.py kill --ranks "$gpus" --at "$at" --limit 45 --out "$runs/killed" \
  --json "$logs/killed.json" -- "${kill[@]}"
begin parallel_training 120 python3 -m pytest -q -p no:cacheprovider "${training_tests[@]}"
begin train_bits 120 python3 -m pytest -q -p no:cacheprovider tests/cli/test_ranks.py -k "$bits_tests"
settle
tail -n 40 "$logs"/{collectives,context_parallel,bits}.log
