#!/usr/bin/env python3
"""Do sources and documents use the field's words? Prints what does not, a line each; exit code 1 if anything does not.

A pattern below stands for a word that this project does not use; with it comes the one that it uses. Findings and the
changelog keep the words of their day, stored results those of the command that made them, but for their keys. A blank
in a pattern also matches the end of a line of a comment.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("CHANGELOG.md", "docs/findings/", "bench/results/", "evidence/results/", "tools/check_words.py")
TEXT = re.compile(r"\.(?:md|h|cpp|cu|cuh|py|sh|cmake|txt|toml|yml|yaml)$|(?:^|/)Makefile$")
WORDS = {
    r"\blook-ups?\b|--lookups\b|chains? of look": "associative recall, multi-hop recall",
    r"\b(?:numbers|lines) hidden|hidden (?:numbers|lines)\b": "needle retrieval",
    r"\bfar repeats?\b": "recurrences beyond 4096 tokens",
    r"\bpieces?\b": "BPE token, 16-byte vector, task",
    r"\bchoices? of (?:the )?blocks\b|\bown choice\b": "block selection, given block_indices",
    r"\bteach(?:es|er|ers|ing)?\b|\btaught\b": "train the block selector",
    r"\bchannel pairs? (?:that )?turn|\b(?:whole|half of the) rotation\b": "partial RoPE, full RoPE",
    r"\bshare kept\b": "retained long-range gain",
    r"\bthe whole(?=[.,;:)]| of a layer\b)": "end to end, nsa_attention",
    r"\brecall of the choice\b": "selection recall",
    r"\bfull by (?:quest|exact|streaming|h2o|infllm|clusterkv)\b": "full + Quest",
    r"(?<!-)\bgoals?\b|\bmissed by\b": "target, stretch target, gap",
    r"(?-i:\bPace\b)|\bStallWatch\b|\bplayed ranks?\b|\bbeside_64ed625\b": (
        "ThroughputMeter, Watchdog, simulated ranks, regression against a commit"
    ),
    r"\bk(?:Most|Least)[A-Z]\w*|\bk(?:Most|Least)\b": "kMax, kMin",
    r"\bimposed\b|\bimposed_indices\b": "given block_indices",
    r"\bfew_rows\w*|\bFewRows\w*|\bjoined weights\b": "skinny_gemm, fused weights",
    r"\bFiniteness\b|\bstand_in\w*|\bleft_to_fallback\b": "NonfiniteGuard, launch_fallback, should_fall_back",
    r"\bStepWish\b|\bstep_fold\b|\bwait_for_launcher\b|\bkept_units\b|\bof_cluster\b|\bleave_length\b": (
        "StepRequest, append_compress, griddepcontrol_wait, cached_tiles, cluster_id, publish_length"
    ),
    r"\bobstacle\b|\w+_obstacle\b|\btrust_offsets\b|\bwith_plain_gradient\b": (
        "unsupported_reason, sanitize_offsets, with_contiguous_grad"
    ),
    r"\bsecond-level cache|\bmultiprocessors?\b|\bmatrix products?\b|\bcopy engine\b": "L2, SM, GEMM / matmul, TMA",
    r"\bhostile\b|\bplanted\b": "adversarial, fault injection, mutant",
    r"\bwhoever\b|\bnobody\b|\banew\b|\bis told of\b|\bas they stand\b": "the thread, the owner, again",
    r"--accumulate\b|--first-context\b|--join\b": "--grad-accum, --context-warmup, --concat-by-folder",
}
# Keys of JSON objects, whole: in stored results, and as a string in a source.
KEYS = {
    "accumulate": "grad_accum",
    "first_context": "context_warmup",
    "join": "concat_by_folder",
    "lookups": "retrieval_fraction",
    "choice": "selection",
    "played": "simulated_ranks",
    "by_repeat": "by_recurrence",
    "loss_by_repeat": "loss_by_recurrence",
    "repeat_match": "recurrence_match",
    "eval_by_method": "eval_by_baseline",
    "needle_by_method": "needle_by_baseline",
}
MODELS = {"nsa", "full", "window", "streaming", "h2o", "quest", "infllm", "clusterkv", "exact"}
SCORES = {"accuracy", "by_hop", "by_distance", "by_length"}
LINE_END = r"\s+(?:(?://+|#+|\*) *)?"


def keys_at_fault(value):
    """The keys within a JSON value that are not the field's, each with what it must be."""
    if isinstance(value, list):
        for item in value:
            yield from keys_at_fault(item)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        word = KEYS.get(key)
        for pattern, instead in WORDS.items():
            if re.search(pattern, key.replace("_", " "), re.IGNORECASE):
                word = instead
        if key in MODELS and "length" in value:
            word = "scores.{model}"
        if word:
            yield key, word
        yield from keys_at_fault(item)
    scores = value.get("scores", {})
    for model, score in scores.items() if isinstance(scores, dict) else [("scores", None)]:
        if not isinstance(score, dict) or "accuracy" not in score or not score.keys() <= SCORES:
            yield f"scores.{model}", "{accuracy, by_hop, by_distance, by_length}"


def stored_results(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in (text.splitlines() if name.endswith(".jsonl") else [text])]


def main():
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    patterns = {re.compile(pattern.replace(" ", LINE_END), re.IGNORECASE): word for pattern, word in WORDS.items()}
    literals = re.compile(rf"[\"']({'|'.join(KEYS)})[\"']")
    found = 0
    for name in files:
        if name.endswith((".json", ".jsonl")) and (ROOT / name).is_file():
            for key, word in sorted(set(keys_at_fault(stored_results(name)))):
                print(f"{name}: key {key}: must be {word}")
                found += 1
        if name.startswith(LEFT_OUT) or not TEXT.search(name) or not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        if re.search(r"\.(?:h|cpp|py)$", name) and not name.startswith("tests/"):
            for match in literals.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                print(f"{name}:{line}: key {match[1]}: the word here is {KEYS[match[1]]}")
                found += 1
        for pattern, word in patterns.items():
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                print(f"{name}:{line}: {' '.join(match[0].split())}: the word here is {word}")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
