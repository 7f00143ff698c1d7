#!/usr/bin/env bash
# From Python sources to a report: trains a byte-level NSA model and the same model with full attention, generates
# text, measures attention by length, inspects block selection, and trains small models on associative recall beyond
# their window. Called by `make demo`; about 9 minutes on 2 cores. With a GPU (nsa info says) the models are larger: 31 million
# parameters at 8192 tokens; their training data has key-value lines, and needle retrieval of the NSA model is measured.
#   OUT=demo       where everything goes        MINUTES=...   training time of each model: 2.5, with a GPU 3
#   NSA_DEVICE=cpu   leaves the GPU alone
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-demo}
nsa=build/bin/nsa
device=$("$nsa" info --chosen-device)
mkdir -p "$out"
# Threads that wait go to sleep soon: on a machine that does something else as well, spinning costs more than waking.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}

step() { printf '\n== %s\n' "$*"; }

# Documents are concatenated files of about 64 KiB.
if [[ $device == cuda ]]; then
  minutes=${MINUTES:-3}
  training=(--minutes "$minutes" --retrieval-fraction 0.02 --overwrite)  # and the defaults of nsa train on cuda
  bench=(--lengths 8192,16384,32768,65536)
else
  # Context 4096; topk * block_size = 8 * 64 = 512, an eighth of it. What a model of so few minutes lacks is steps, hence
  # two layers; and a short window learns to look at the last bytes sooner than one of 512, while the blocks are there for
  # the rest.
  minutes=${MINUTES:-2.5}
  training=(--layers 2 --hidden-size 128 --heads 4 --kv-heads 1 --head-dim 32 --context 4096
            --kernel-size 32 --kernel-stride 16 --block-size 64 --topk 8 --window-size 32 --minutes "$minutes"
            --batch-size 1 --lr 3e-3 --log-every 10 --eval-every 100 --eval-tokens 32768 --overwrite)
  bench=(--lengths 1024,2048,4096,8192,16384 --repeats 1 --longest-dense-backward 8192)
fi

step "NSA: $minutes minutes of training on this machine's Python sources"
"$nsa" train --out "$out/nsa" --attention nsa "${training[@]}"

step "full attention, the same model otherwise: $minutes minutes"
"$nsa" train --out "$out/full" --attention full "${training[@]}"

step "text from the NSA model, through its KV cache"
printf 'class Config:\n    """Options of a run."""\n\n    def __init__(self, path=None):\n        self.path = path\n\n    def ' \
  >"$out/prompt.txt"
# At lower temperatures a model so small falls into endless indentation.
"$nsa" generate "$out/nsa" --prompt-file "$out/prompt.txt" --tokens 500 --temperature 0.9 --top-p 0.9 --seed 2 |
  tee "$out/generated.txt"

step "attention over sequence length"
"$nsa" bench "${bench[@]}" --no-parts --phi mlp --json "$out/bench.json"

step "block selection"
"$nsa" inspect "$out/nsa" --json "$out/nsa/inspect.json"

step "looking up what was read beyond the window: NSA, full attention, the window alone"
"$nsa" recall --json "$out/recall.json"

if [[ $device == cuda ]]; then
  step "finding a needle"
  "$nsa" needle "$out/nsa" --dtype bfloat16 --json "$out/nsa/needle.json"
fi

step "report"
python -m nsa.report "$out/nsa" "$out/full" "$out/bench.json" "$out/recall.json" --out "$out/report"

python - "$out/nsa/metrics.jsonl" <<'PY'
import json, sys

lines = [json.loads(line) for line in open(sys.argv[1])]
layers = [line for line in lines if line["kind"] == "eval"][-1]["layers"]
share = sum(layer["unforced_share"] for layer in layers) / len(layers)
print(f"share of selections that were not forced: {share:.1%}")
PY
echo "report: $out/report/report.html"
