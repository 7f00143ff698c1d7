#!/usr/bin/env python3
"""Times `nsa generate`, sparse and dense, and llama.cpp with the same Llama on a CPU: tokens/s of prompts and steps.

    python bench/models/llama_cpp.py WORK --llama-cpp FOLDER --cores 0,1 --json bench/results/llama_cpp.json

A Llama of 300 million parameters with random weights is made in WORK, converted to NSA (`nsa.convert`, shared keys and
values) and written as GGUF files in bfloat16 and float16. FOLDER has llama.cpp's `llama-batched-bench`; the package
gguf writes its files. Each run reads one random prompt and then generates greedily.

`--cores 0,1 2,3` runs as many programs side by side, each on cores of its own, the longest contexts first. A run that
does not end in `--limit` seconds is recorded as an error. `--prompt-cores` gives llama.cpp more threads for the prompt,
whose rate is then not recorded. Later runs are added to FILE.

Each run records how many cores other processes kept busy (`others`). With `--max-others` a run begins only when they
keep no more busy, and counts, as one of `--repeats`, only if that held.
"""

import argparse
import json
import os
import queue
import random
import re
import shlex
import statistics
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import amount, integer, integers

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("NSA_PROGRAM", "build/bin/nsa")
SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 15,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
ENGINES = {
    "sparse": "nsa generate, NSA, bfloat16",
    "dense": "nsa generate, full attention, bfloat16",
    "bf16": "llama.cpp, weights in bfloat16",
    "f16": "llama.cpp, weights in float16",
}


# ---------------------------------------------------------------------------------------------------------- the models


def make_dense(folder):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    config = LlamaConfig(**SHAPE, max_position_embeddings=131072, rope_parameters=rope, tie_word_embeddings=True)
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def make_sparse(dense, folder):
    subprocess.run([sys.executable, "-m", "nsa.convert", dense, folder, "--lengths", "0"], check=True)


def make_gguf(dense, path):
    """The dense model for llama.cpp, without a tokenizer."""
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((dense / "config.json").read_text(encoding="utf-8"))
    layers, heads, kv_heads = (config[f"num_{n}"] for n in ("hidden_layers", "attention_heads", "key_value_heads"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, tensor in load_file(dense / "model.safetensors").items():
        for projection, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if projection in name:  # llama.cpp rotates neighbouring channels
                tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
        called = names.get_name(name, try_suffixes=(".weight",))
        if tensor.dim() == 1:
            writer.add_tensor(called, tensor.float().numpy())
        elif path.stem == "f16":
            writer.add_tensor(called, tensor.half().numpy())
        else:
            bits = tensor.view(torch.uint8).numpy()
            writer.add_tensor(called, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_models(work, engines):
    """Those that are not there yet."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "dense").exists():
        make_dense(work / "dense")
    for engine in engines:
        path = model_path(work, engine)
        if not path.exists():
            make_sparse(work / "dense", path) if engine == "sparse" else make_gguf(work / "dense", path)


def model_path(work, engine):
    return work / (f"{engine}.gguf" if "f16" in engine else engine)


# ------------------------------------------------------------------------------------------------------------ the runs


def pinned(cores, command, options):
    """Output of the command on these cores."""
    left = options.end - time.monotonic()
    run = ["taskset", "-c", cores, *map(str, command)] if cores else [*map(str, command)]
    return subprocess.run(run, check=True, capture_output=True, text=True, timeout=max(left, 0.1))


def busy_elsewhere():
    """Seconds that the cores of this machine were busy, but for this process and the children that ended."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    user, nice, system, _, _, interrupts, soft, stolen = (int(field) for field in fields)
    busy = (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])


def others_during(action):
    """What the action returns, and how many cores others kept busy meanwhile."""
    start, before = time.monotonic(), busy_elsewhere()
    found = action()
    return found, round((busy_elsewhere() - before) / (time.monotonic() - start), 2)


def run_nsa(engine, context, cores, options):
    ids, report = (options.work / f"{engine}-{context}.{kind}" for kind in ("txt", "json"))
    draw = random.Random(context)
    ids.write_text(" ".join(str(draw.randrange(SHAPE["vocab_size"])) for _ in range(context)) + "\n", encoding="utf-8")
    command = [PROGRAM, "generate", model_path(options.work, engine), "--ids", ids, "--threads", options.threads]
    command += ["--dtype", "bfloat16", "--device", "cpu", "--temperature", 0, "--no-echo", "--ignore-end"]
    pinned(cores, [*command, "--tokens", options.tokens, "--json", report], options)
    found = json.loads(report.read_text(encoding="utf-8"))
    return {
        "prompt": context / found["prefill_seconds"],
        "generation": (options.tokens - 1) / found["decode_seconds"],  # the prompt gives the first token
    }


def run_llama_cpp(engine, context, cores, options):
    prompt_threads = len(options.prompt_cores.split(",")) if options.prompt_cores else options.threads
    command = [options.llama_cpp / "llama-batched-bench", "-m", model_path(options.work, engine), "-npl", 1]
    command += ["-npp", context, "-ntg", options.tokens, "-c", context + options.tokens, "--output-format", "jsonl"]
    command += ["-t", options.threads, "-tb", prompt_threads]
    done = pinned(options.prompt_cores or cores, command, options)
    found = json.loads(re.search(r'{"n_kv_max".*?}', done.stdout)[0])
    rates = {"generation": found["speed_tg"]}
    return rates if options.prompt_cores else rates | {"prompt": found["speed_pp"]}


def run(engine, context, cores, options):
    """Rates in tokens/s, or what kept the run from them."""
    measure = run_llama_cpp if "f16" in engine else run_nsa
    try:
        while options.max_others is not None and others_during(lambda: time.sleep(2))[1] > options.max_others:
            if time.monotonic() > options.end:
                return {"error": f"other processes kept more than {options.max_others} cores busy"}
        rates, others = others_during(lambda: measure(engine, context, cores, options))
        return rates | {"others": others}
    except subprocess.TimeoutExpired as error:  # its own time, without that of runs before it
        return {"error": f"not done in {error.timeout:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"error": (error.stderr or error.stdout).strip().splitlines()[-1]}


def disturbed(run, options):
    return options.max_others is not None and run.get("others", 0) > options.max_others


class Results:
    """The medians of all runs that count in a file, written after each."""

    def __init__(self, options):
        self.options, self.path, self.lock = options, options.json, threading.Lock()
        self.found = about(options)
        if self.path and self.path.exists():
            before = json.loads(self.path.read_text(encoding="utf-8"))
            self.found = before | {"command": f"{before['command']}\n{self.found['command']}"}

    def add(self, engine, context, rates):
        with self.lock:
            print(f"{context} {engine}:", json.dumps(rates), flush=True)
            rows = self.found["rows"]
            row = next((row for row in rows if (row["engine"], row["context"]) == (engine, context)), None)
            if row is None:
                row = {"engine": engine, "context": context, "runs": []}
                rows.append(row)
            row["runs"].append(rates)
            for rate in ("prompt", "generation"):
                if measured := [run[rate] for run in row["runs"] if rate in run and not disturbed(run, self.options)]:
                    row[rate] = statistics.median(measured)
            if self.path:
                self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")


def about(options):
    """Where, when and by which command."""
    shown = subprocess.run(["lscpu", "-J"], capture_output=True, text=True, check=True).stdout
    cpu = {entry["field"].rstrip(":"): entry["data"] for entry in flat(json.loads(shown)["lscpu"])}
    flags = [flag for flag in cpu["Flags"].split() if flag.startswith(("avx512_bf16", "amx_"))]
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = os.environ.get("COMMIT") or subprocess.run(head, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "command": shlex.join(["python", "bench/models/llama_cpp.py", *options.given]),
        "cpu": cpu["Model name"],
        "flags": flags,
        "date": date.today().isoformat(),
        "commit": commit,
        "llama_cpp": options.version,
        "shape": SHAPE,
        "threads": options.threads,
        "tokens": options.tokens,
        "engines": ENGINES,
        "rows": [],
    }


def flat(entries):
    for entry in entries:
        yield entry
        yield from flat(entry.get("children", []))


def main():
    given = sys.argv[1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for models and prompts")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder with llama-batched-bench")
    parser.add_argument("--version", default="", help="version of llama.cpp, for the record")
    parser.add_argument("--contexts", type=integers, default=[1024, 8192, 32768, 65536])
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--threads", type=integer, default=2)
    parser.add_argument("--tokens", type=integer, default=64, help="number of tokens to generate")
    parser.add_argument("--repeats", type=integer, default=1, help="runs per figure, of which the median counts")
    parser.add_argument("--cores", nargs="*", default=[""], help="cores of each of the programs at a time")
    parser.add_argument("--max-others", type=amount, help="cores that other processes may keep busy during a run")
    parser.add_argument("--prompt-cores", default="", help="cores of llama.cpp's prompt, one thread each")
    parser.add_argument("--limit", type=amount, default=3600, help="seconds for all runs (default %(default)s)")
    parser.add_argument("--json", type=Path, help="file to which the results are added")
    options = parser.parse_args()
    options.given = [word for word in given if word not in ("--json", str(options.json))]
    engines = options.engines.split(",")
    if unknown := [engine for engine in engines if engine not in ENGINES]:
        parser.error(f"--engines {unknown[0]}: must be among {', '.join(ENGINES)}")
    make_models(options.work, engines)
    options.end = time.monotonic() + options.limit
    results, waiting = Results(options), queue.SimpleQueue()
    for context in sorted(options.contexts, reverse=len(options.cores) > 1):
        for _ in range(options.repeats):
            for engine in engines:
                waiting.put((engine, context))

    def work_on(cores):
        while not waiting.empty():
            try:
                engine, context = waiting.get_nowait()
            except queue.Empty:
                return
            rates = run(engine, context, cores, options)
            results.add(engine, context, rates)
            if disturbed(rates, options):
                waiting.put((engine, context))

    workers = [threading.Thread(target=work_on, args=(cores,)) for cores in options.cores]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
