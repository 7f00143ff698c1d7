#!/usr/bin/env bash
# What NSA costs and brings in training: it beside full attention of equal width and of equal parameters, each for MINUTES
# on the same data in the same order, then the speed of all three over CONTEXTS. Made for a GPU.
#   bench/loss_curves.sh [options of nsa train for every run, e.g. --data /usr/lib/python3.12 --context 32768]
#   MINUTES=20      CONTEXTS="8192 32768"      NSA=path of the program
#   OUT=build/loss_curves   runs and report    RESULTS=docs/results   loss_curves.json and loss_curves.png
set -euo pipefail
cd "$(dirname "$0")/.."
nsa=${NSA:-build/bin/nsa}
out=${OUT:-build/loss_curves}
results=${RESULTS:-docs/results}
export MINUTES=${MINUTES:-20} COMMAND="bench/loss_curves.sh $*"
COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
export COMMIT
models=(nsa full full-equal-parameters)
train() {  # model, folder, options...
  local options=(--attention "${1%%-*}")
  [[ $1 == *-equal-parameters ]] && options+=(--equal-parameters)
  printf '\n== %s\n' "$2"
  "$nsa" train --out "$2" "${options[@]}" --seed 1 --overwrite "${@:3}"
}

rm -rf "$out/speed"
for model in "${models[@]}"; do train "$model" "$out/$model" "$@" --minutes "$MINUTES"; done
# As many tokens to a step whatever the context.
for context in ${CONTEXTS:-8192 32768}; do
  for model in "${models[@]}"; do
    train "$model" "$out/speed/$context/$model" "$@" --steps 40 --context "$context" \
      --batch-size $((context < 32768 ? 32768 / context : 1)) --log-every 5 --eval-every 0 --eval-tokens "$context" --save-every 0
  done
done

python -m nsa.report "${models[@]/#/$out/}" --out "$out/report"
cp "$out/report/loss.png" "$results/loss_curves.png"
python - "$out" "$results/loss_curves.json" "${models[@]}" <<'PY'
import json, os, statistics, subprocess, sys, time
from pathlib import Path

out, path, *models = sys.argv[1:]


def run(folder):
    config = json.loads((folder / "config.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    end = [line for line in lines if line["kind"] == "eval"][-1]
    found = {"parameters": config["parameters"]["total"], "tokens_per_second": statistics.median(rates[1:] or rates)}
    return found | {key: end[key] for key in ("step", "tokens", "seconds", "loss")}, config


query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
try:
    gpu, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
except OSError:
    gpu = driver = None
about = {"gpu": gpu, "driver": driver, "command": os.environ["COMMAND"], "commit": os.environ["COMMIT"] or None}
about |= {"date": time.strftime("%Y-%m-%d"), "minutes": float(os.environ["MINUTES"])}
runs = {}
for model in models:
    runs[model], config = run(Path(out, model))
about |= {"data": config["data"], "fingerprint": config["fingerprint"], "context": config["train"]["context"]}
speed = {folder.name: {model: run(folder / model)[0]["tokens_per_second"] for model in models}
         for folder in sorted(Path(out, "speed").iterdir(), key=lambda folder: int(folder.name))}
Path(path).write_text(json.dumps({**about, "runs": runs, "tokens_per_second": speed}, indent=1) + "\n")
for model, found in runs.items():
    rates = ", ".join(f"{rates[model]:,.0f} at {context}" for context, rates in speed.items())
    print(f"{model:24} {found['loss']:.4f} nats/token after {found['tokens']:,} tokens; tokens/s: {rates}")
PY
echo "report: $out/report/report.html"
