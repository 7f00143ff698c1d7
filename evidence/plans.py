"""Plans of experiments: a plan is a length of training and the models that share it.

Models are options of `nsa train` on top of the plan's. `recipe-2` is its default (partial RoPE), `recipe-1` the same
with full RoPE. The ablations change one thing in recipe-1. `blocks-A-B-C-D` has kernel size A, kernel stride B, block
size C and top-k D; `recipe-2-A-B-C-D` is recipe-2 with these.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

BASE, RECIPE, WINDOW = "full", "recipe-2", "window"
RECIPE_BLOCKS = (8, 8, 32, 32)  # kernel size, kernel stride, block size, top-k, as in nsa.NSAConfig.recipe()
# Training-free sparse attention, with which full attention is evaluated as well.
BASELINES = {
    "streaming": "StreamingLLM",
    "h2o": "H2O",
    "quest": "Quest",
    "infllm": "InfLLM",
    "clusterkv": "ClusterKV",
    "exact": "oracle top-k",
}
FULL_ROPE = "--partial-rotary-factor 1"


def block_options(sizes: tuple[int, ...]) -> str:
    return "--kernel-size {} --kernel-stride {} --block-size {} --topk {}".format(*sizes)


MAIN = {
    BASE: "--attention full",
    "full-gated": "--attention full --gated",
    "full-equal-parameters": "--attention full --equal-parameters",
    WINDOW: "--attention window",
    RECIPE: "",
    "recipe-1": FULL_ROPE,
    "no-selector-loss": f"{FULL_ROPE} --selector-loss 0",
}
ABLATIONS = {
    name: f"{FULL_ROPE} {change}"
    for name, change in {
        "blocks-32-16-64-16": "--kernel-size 32 --kernel-stride 16 --block-size 64 --topk 16",
        "blocks-16-8-32-32": "--kernel-size 16 --kernel-stride 8",
        "blocks-8-4-32-32": "--kernel-stride 4",
        "blocks-8-8-64-16": "--block-size 64 --topk 16",
        "separate-kv": "--separate-kv",
        "phi-mean": "--phi mean",
        "phi-linear": "--phi linear",
        "phi-lr-scale-1": "--phi-lr-scale 1",
        "window-128": "--window-size 128",
        "window-256": "--window-size 256",
        "qk-norm": "--qk-norm",
        "last-layer-dense": "--dense-layers 7",
        "noise": "--noise 1",
        "gate-balance": "--gate-balance .1",
        "selector-loss-weak": "--selector-loss .03",
        "selector-loss-strong": "--selector-loss 1",
        "topk-64": "--topk 64",
    }.items()
} | {  # these differ in more than one thing
    "paper-blocks-and-kv": "--preset paper --rope-theta 500000",
    "paper": "--preset paper",
    "full-partial-rope": "--attention full --partial-rotary-factor .5",
}
# The recipe with other blocks.
BLOCKS = {
    "recipe-2-" + "-".join(map(str, sizes)): block_options(sizes)
    for sizes in ((16, 8, 32, 32), (16, 16, 32, 32), (16, 16, 64, 16), (32, 16, 64, 16), (32, 16, 32, 32))
}
# What full attention may gain from other settings, and the recipe with the same learning rates.
TUNING = {
    f"{name}-{kind}": f"{options} {change}".strip()
    for name, options in ((BASE, MAIN[BASE]), (RECIPE, MAIN[RECIPE]))
    for kind, change in {
        "lr-half": "--lr .0005",
        "lr-double": "--lr .002",
        "warmup-200": "--warmup-steps 200",
        "theta-10000": "--rope-theta 10000",
        "theta-100000": "--rope-theta 100000",
        "qk-norm": "--qk-norm",
    }.items()
    if name == BASE or kind.startswith("lr-")
}
# Associative recall beyond the window, in the recipe's blocks. The models are trained on this task only.
RECALL = (
    f"{block_options((8, 8, 32, 32))} --share-kv --rope-theta 500000 --pairs 64 "
    "--head-dim 64 --kv-heads 2 --lr .003 --tokens-per-step 16384 --steps 2000 --selector-loss 1 "
    "--partial-rotary-factor .5 --dtype bfloat16"
)
RECALL_TASKS = {
    "2k": "--length 2048",
    "4k": "--length 4096",
    "8k": "--length 8192",
    "16k": "--length 16384",
    "32k": "--length 32768",
    "64k": "--length 65536",
    "multi-hop-8k": "--length 8192 --hops 3",
    "4k-no-selector-loss": "--length 4096 --selector-loss 0",
}
RECALL_TASKS |= {f"{name}-full-rope": f"{RECALL_TASKS[name]} {FULL_ROPE}" for name in ("16k", "64k", "multi-hop-8k")}


class Needle(NamedTuple):
    """Arguments of `nsa needle`, which is called once for each length, so that a limit of time loses little."""

    lengths: tuple[int, ...]
    depths: str
    samples: int
    tasks: tuple[str, ...] = ()  # those of several lines, besides the single needle


class Plan(NamedTuple):
    title: str
    options: str
    models: dict[str, str]
    seeds: tuple[int, ...] = (1, 2, 3)
    fewer: Mapping[str, int] = MappingProxyType({})  # models that have only so many of the seeds
    evaluations: tuple[str, ...] = ("eval", "inspect")  # of every model
    needle: Needle | None = None
    # Evaluations of full attention with every baseline; in the plan `recall`, the models with baselines.
    by_baseline: Mapping[str, Needle | None] = MappingProxyType({})
    command: str = "train"  # `recall` trains and evaluates NSA, full attention and the window in one call

    def seeds_of(self, model: str) -> tuple[int, ...]:
        return self.seeds[: self.fewer.get(model)]


def some(*names: str) -> dict[str, str]:
    return {name: (MAIN | ABLATIONS | BLOCKS)[name] for name in names}


CONCATENATED = "--concat-by-folder --document-bytes 65536"
DEPTHS = "0,.1,.2,.3,.4,.5,.6,.7,.8,.9,1"
PLANS = {
    "8k": Plan(
        "Byte-level, context 8192, 164 million bytes",
        "--steps 5000",
        MAIN | some("window-128", "blocks-16-8-32-32", "blocks-8-4-32-32", "full-partial-rope", "recipe-2-16-16-32-32"),
        seeds=(1, 2, 3, 4, 5),
        fewer=dict.fromkeys(("full-gated", WINDOW, "full-partial-rope"), 3)
        | dict.fromkeys(("window-128", "blocks-16-8-32-32"), 1)
        | {"blocks-8-4-32-32": 4, "recipe-2-16-16-32-32": 3},
        by_baseline={"eval": None},
    ),
    "8k-long": Plan(
        "Byte-level, context 8192, 301 million bytes",
        "--steps 9200",
        some(BASE, RECIPE, "recipe-1"),
        seeds=(1,),
    ),
    "bpe": Plan(
        "BPE (vocabulary 4000), context 8192, 164 million tokens",
        "--steps 5000 --tokenizer {tokenizer}",
        some(BASE, RECIPE, "recipe-1", "no-selector-loss", "window-128", "qk-norm", "blocks-8-4-32-32")
        | some("full-partial-rope"),
        seeds=tuple(range(1, 10)),
        fewer=dict.fromkeys(("no-selector-loss", "window-128", "qk-norm", "full-partial-rope"), 1)
        | {"recipe-1": 5, "blocks-8-4-32-32": 3},
    ),
    "32k": Plan(
        "Byte-level, context 32768, 98 million bytes",
        "--steps 3000 --context 32768 --batch-size 1",
        some(BASE, RECIPE, "recipe-1", "no-selector-loss", "recipe-2-16-16-32-32"),
        seeds=(1, 2, 3, 4, 5),
        fewer={"no-selector-loss": 1, "recipe-2-16-16-32-32": 3},
    ),
    "32k-time": Plan(
        "Byte-level, context 32768, 15 minutes of training",
        "--minutes 15 --context 32768 --batch-size 1 --eval-every 500",  # evaluations do not count in the 15
        some(BASE, RECIPE, "recipe-1"),
    ),
    "recall": Plan(
        "Associative recall, 64 key-value pairs beyond the window",
        RECALL,
        RECALL_TASKS,
        seeds=(1, 2, 3, 4, 5),
        fewer=dict.fromkeys(("16k", "64k", "16k-full-rope", "64k-full-rope"), 3)
        | dict.fromkeys(("2k", "8k", "32k"), 2)
        | dict.fromkeys(("4k", "4k-no-selector-loss"), 1),
        by_baseline=dict.fromkeys(("2k", "16k", "multi-hop-8k")),
        command="recall",
    ),
    "retrieval-8k": Plan(
        "Byte-level, context 8192, 164 million bytes, a quarter of them key-value lines",
        "--steps 5000 --batch-size 4 --context-warmup 1024 --eval-every 500 --retrieval-fraction .25 " + CONCATENATED,
        some(RECIPE, "recipe-1", "blocks-8-4-32-32", WINDOW, BASE),
        fewer=dict.fromkeys(("recipe-1", "blocks-8-4-32-32", WINDOW), 1),
        needle=Needle((8192,), DEPTHS, 100),
        by_baseline={"needle": Needle((8192,), "0,.3,.6,.9", 5)},  # H2O evicts token by token, which takes minutes
    ),
    "retrieval-64k": Plan(
        "Byte-level, context 65536, 236 million bytes, half of them key-value lines, RoPE base 1 million",
        "--steps 3600 --batch-size 1 --context 65536 --context-warmup 1024 --eval-every 1000 --retrieval-fraction .5 "
        f"--selector-queries 128 --rope-theta 1000000 {CONCATENATED}",
        some(RECIPE, "recipe-1", "blocks-8-4-32-32", "recipe-2-16-16-32-32"),
        fewer=dict.fromkeys(("recipe-1", "blocks-8-4-32-32"), 1),
        needle=Needle((8192, 16384, 32768, 65536), DEPTHS, 25),
    ),
    "speed": Plan(
        "Training throughput, 300 million parameters, byte-level, context 32768",
        "--steps 12 --context 32768 --batch-size 1 --hidden-size 1024 --layers 18 --heads 16 --kv-heads 1 "
        f"--head-dim 128 --ffn-size 3072 {CONCATENATED} --log-every 3 --eval-every 0 "
        "--eval-tokens 32768 --save-every 0",
        some(BASE, "full-gated", RECIPE, "recipe-1", "no-selector-loss"),
        seeds=(1,),
        evaluations=(),
    ),
    "ablations": Plan(
        "Ablations: byte-level, context 8192, 49 million bytes",
        "--steps 1500",
        some(BASE, RECIPE, "recipe-1", WINDOW, "no-selector-loss") | ABLATIONS | BLOCKS | TUNING,
        seeds=(1,),
    ),
    "ablations-bpe": Plan(
        "Ablations: BPE (vocabulary 4000), context 8192, 49 million tokens",
        "--steps 1500 --tokenizer {tokenizer}",
        some(BASE, RECIPE, "recipe-1", "no-selector-loss"),
        seeds=(1,),
    ),
}
