"""Times `nsa generate` on a GPU over the context: tokens/s of the steps, NSA and full attention.

    python bench/models/generate_speed.py WORK --data SOURCES --contexts 1024,8192,65536,262144 --batch 1,32 --json FILE

Two models over bytes (18 layers, hidden 1024, 16 heads, one KV head of 128: 304 million parameters, with full attention
250) are trained for a step in WORK where they are not there yet. A step's time does not depend on what is in the
weights, apart from the blocks that NSA selects; the texts are random letters, all read as prompts. A program of its
own for each line: its steps take what remains when the prompts have been read.
"""

import argparse
import itertools
import json
import os
import random
import string
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import integer, integers

PROGRAM = os.environ.get("NSA_PROGRAM", "build/bin/nsa")
MODEL = "--layers 18 --hidden-size 1024 --heads 16 --kv-heads 1 --head-dim 128 --ffn-size 3072".split()
PROBLEM = (
    "18 layers, hidden 1024, 16 heads, one KV head of 128, bfloat16; 304 million parameters, 250 with full attention"
)
TRAINING = "--preset paper --context 1024 --batch-size 1 --steps 1 --eval-tokens 1024".split()


def model(work, attention, data):
    folder = work / attention
    if not folder.exists():
        how = ["--attention", attention] if attention != "nsa" else []
        run = [PROGRAM, "train", "--out", folder, "--data", data, *TRAINING, *MODEL, *how]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    return folder


def prompts(work, batch, context):
    """A byte is a token, and a document begins with one more."""
    draw = random.Random(batch * context)
    path = work / f"{batch}x{context}.txt"
    texts = ("".join(draw.choices(string.ascii_lowercase, k=context)) for _ in range(batch))
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def speed(folder, texts, tokens):
    report = texts.with_suffix(".json")
    run = [PROGRAM, "generate", folder, "--prompts", texts, "-n", str(tokens), "--json", report]
    subprocess.run([*run, "--temperature", "0", "--ignore-end", "--no-echo"], check=True, stdout=subprocess.DEVNULL)
    found = json.loads(report.read_text(encoding="utf-8"))
    sequences = found["sequences"]
    return {
        "graph": found["graph"],
        "tokens": tokens,
        "tokens_per_second": len(sequences) * (tokens - 1) / found["decode_seconds"],
        "prompt_tokens_per_second": sum(s["prompt_tokens"] for s in sequences) / found["prefill_seconds"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", required=True, help="text files or folders for the one step of training")
    parser.add_argument("--contexts", type=integers, default=[1024, 8192, 32768, 65536, 131072, 262144])
    parser.add_argument("--batch", type=integers, default=[1], help="numbers of sequences, comma-separated")
    parser.add_argument(
        "--most",
        type=integer,
        default=32 * 65536,
        help="maximum number of tokens of all prompts; larger cases are skipped",
    )
    parser.add_argument("--tokens", type=integer, default=400, help="number of tokens to generate per sequence")
    parser.add_argument("--attentions", default="nsa,full")
    parser.add_argument("--json", type=Path, help="file to which the results are added")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    result = {"problem": PROBLEM, "unit": "tokens/s", "steps": []}
    if options.json and options.json.exists():
        result = json.loads(options.json.read_text(encoding="utf-8"))
    for batch, context in itertools.product(options.batch, options.contexts):
        if batch * context > options.most:
            continue
        texts = prompts(options.work, batch, context)
        for attention in options.attentions.split(","):
            found = speed(model(options.work, attention, options.data), texts, options.tokens)
            step = {"attention": attention, "context": context, "batch": batch}
            others = [other for other in result["steps"] if not step.items() <= other.items()]
            result["steps"] = [*others, step | found]
            print(f"{attention} {batch} x {context}:", f"{found['tokens_per_second']:.1f} tokens/s", flush=True)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
