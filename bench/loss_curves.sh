#!/usr/bin/env bash
# What NSA costs and brings in training: it beside full attention of equal width and of equal parameters, each for MINUTES
# on the same data in the same order, then the speed of all three over CONTEXTS. Made for GPUs: with several, as many
# models train at once, one process on each.
#   bench/loss_curves.sh [options of nsa train for every run, e.g. --data /usr/lib/python3.12 --context 32768]
#   MINUTES=20      MODELS="nsa full full-equal-parameters"      CONTEXTS="8192 32768"      NSA=path of the program
#   STEPS=40        steps of a measurement of speed, fewer of more than 32768 tokens       SPEED="nsa full": without the third
#   OUT=build/loss_curves   runs and report    NAME=loss_curves   RESULTS=bench/results: NAME.json
#   IMAGES=docs/images      NAME.png and NAME_speed.png (no second _speed where NAME ends so)
# What an earlier call left in OUT joins the results, so that a limit of time can be met in several calls: MODELS are those
# to train now, CONTEXTS those to measure now; either may be empty.
#   GPUS="0 1"      default: those of CUDA_VISIBLE_DEVICES, or all
set -euo pipefail
cd "$(dirname "$0")/.."
nsa=${NSA:-build/bin/nsa}
out=${OUT:-build/loss_curves}
results=${RESULTS:-bench/results}
images=${IMAGES:-docs/images}
name=${NAME:-loss_curves}
all=(nsa full full-equal-parameters)
read -ra compared <<<"${SPEED-${all[*]}}"
read -ra models <<<"${MODELS-${all[*]}}"
read -ra contexts <<<"${CONTEXTS-8192 32768}"
visible=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}
read -ra gpus <<<"${GPUS:-${visible//,/ }}"
minutes=${MINUTES:-20}
export COMMAND="bench/loss_curves.sh $*"
COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
export COMMIT
mkdir -p "$out" "$results" "$images"

train() {  # model, folder, options...
  local options=(--attention "${1%%-*}")
  [[ $1 == *-equal-parameters ]] && options+=(--equal-parameters)
  printf '\n== %s\n' "$2"
  "$nsa" train --out "$2" "${options[@]}" --seed 1 --overwrite "${@:3}"
}
running=()
finish() {
  local process failed=0
  for process in "${running[@]}"; do wait "$process" || failed=1; done
  running=()
  return $failed
}
# The same on the next GPU, beside those that run on the others; `finish` waits for them.
start() {
  if ((${#gpus[@]} < 2)); then
    train "$@"
    return
  fi
  if ((${#running[@]} == ${#gpus[@]})); then finish; fi
  CUDA_VISIBLE_DEVICES=${gpus[${#running[@]}]} train "$@" > >(sed -u "s|^|[$1] |") 2>&1 &
  running+=($!)
}

for model in "${models[@]}"; do start "$model" "$out/$model" "$@" --minutes "$minutes"; done
finish
# As many tokens to a step whatever the context, up to 32768, and documents that fill it.
for context in "${contexts[@]}"; do
  batch=$((context < 32768 ? 32768 / context : 1))
  steps=$((${STEPS:-40} * 32768 / (context * batch)))
  ((steps >= 4)) || steps=4
  for model in "${compared[@]}"; do
    start "$model" "$out/speed/$context/$model" --join --document-bytes $((context < 65536 ? 65536 : context)) "$@" \
      --steps "$steps" --context "$context" --batch-size "$batch" --log-every $((steps / 4)) \
      --eval-every 0 --eval-tokens "$context" --save-every 0
  done
done
finish

trained=()
for model in "${all[@]}"; do
  if [[ -e $out/$model/metrics.jsonl ]]; then trained+=("$model"); fi
done
if ((${#trained[@]})); then
  python3 tools/report "${trained[@]/#/$out/}" --out "$out/report"
  cp "$out/report/loss.png" "$images/$name.png"
fi
measured=("$out"/speed/*/*)
if [[ -e ${measured[0]} ]]; then
  python3 tools/report "${measured[@]}" --out "$out/report" --only speed_over_context
  cp "$out/report/speed_over_context.png" "$images/${name%_speed}_speed.png" || true  # one context makes no picture
fi
python3 - "$out" "$results/$name.json" "${trained[@]}" <<'PY'
import json, os, statistics, subprocess, sys, time
from pathlib import Path

out, path, *models = sys.argv[1:]


def run(folder):
    config = json.loads((folder / "config.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    tail = train[1:] or train
    end = [line for line in lines if line["kind"] == "eval"][-1]
    found = {key: statistics.median(line[key] for line in tail) for key in ("tokens_per_second", "model_tflops")}
    found["parameters"] = config["parameters"]["total"]
    return found | {key: end[key] for key in ("step", "tokens", "seconds", "loss")}, config


query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
try:
    gpu, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
except (OSError, subprocess.CalledProcessError):
    gpu = driver = None
about = {"gpu": gpu, "driver": driver, "command": os.environ["COMMAND"], "commit": os.environ["COMMIT"] or None}
about |= {"date": time.strftime("%Y-%m-%d")}
runs = {}
for model in models:
    runs[model], config = run(Path(out, model))
if models:
    about |= {"data": config["data"], "fingerprint": config["fingerprint"]}
    about |= {key: config["train"][key] for key in ("minutes", "context")}
speed = {}
for metrics in sorted(Path(out).glob("speed/*/*/metrics.jsonl"), key=lambda path: (int(path.parts[-3]), path)):
    found = run(metrics.parent)[0]
    speed.setdefault(metrics.parts[-3], {})[metrics.parts[-2]] = {
        key: found[key] for key in ("tokens_per_second", "model_tflops")
    }
Path(path).write_text(json.dumps({**about, "runs": runs, "speed": speed}, indent=1) + "\n")
for model, found in runs.items():
    print(f"{model:24} {found['loss']:.4f} nats/token after {found['tokens']:,} tokens in {found['seconds']:.0f} s")
for context, rates in speed.items():
    each = (f"{m} {r['tokens_per_second']:,.0f} ({r['model_tflops']:.0f} TFLOP/s)" for m, r in rates.items())
    print(f"tokens/s at {context}:", ", ".join(each))
PY
if ((${#trained[@]})); then echo "report: $out/report/report.html"; fi
