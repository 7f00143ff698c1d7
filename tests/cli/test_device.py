"""--device: what is chosen is said, what cannot be had is refused; on a GPU training, resuming and generating."""

import functools
import itertools
import json
import os
import random
import re
import subprocess
import sysconfig
import time

import pytest
from test_resume import same_bits

from conftest import PROGRAM, TINY_NSA, TINY_RUN, metrics, nsa, refused

HAS_GPU = nsa("info", "--chosen-device", device="auto").stdout.strip() == b"cuda"
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device, or a build without CUDA: nsa info says why")
without_gpu = pytest.mark.skipif(HAS_GPU, reason="there is a CUDA device")

# The kernels' smallest head dims; the rest as small as the tests' other models.
MODEL = "--layers 2 --hidden-size 64 --heads 4 --kv-heads 1 --head-dim 64".split()
SMALL = [*MODEL, *TINY_NSA, *TINY_RUN]


def chosen(text):
    """The one line that tells the device."""
    (line,) = re.findall(r"^device: (.*)$", text, re.MULTILINE)
    return line


@without_gpu
@pytest.mark.parametrize("command", ["train", "generate", "eval", "inspect", "needle", "recall", "bench"])
def test_cuda_is_refused_where_it_is_not(command, trained, tmp_path):
    arguments = {"train": ["--out", tmp_path / "run"], "recall": [], "bench": []}.get(command, [trained["nsa"]])
    message = refused(command, *arguments, "--device", "cuda")
    assert message.startswith("nsa: device = cuda: ") and message.count("\n") == 1
    assert not (tmp_path / "run").exists()


@without_gpu
def test_a_run_of_another_device_is_not_resumed_here(trained, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    config = json.loads((trained["nsa"] / "config.json").read_text())
    assert config["train"]["device"] == "cpu"
    config["train"]["device"] = "cuda"
    (out / "config.json").write_text(json.dumps(config))
    assert "device = cuda: " in refused("train", "--out", out, "--resume")
    assert "train.device" in refused("train", "--out", out, "--resume", "--device", "cpu")


def test_device_is_printed_with_reason(trained, tmp_path, corpus):
    assert chosen(nsa("eval", trained["nsa"], "--tokens", 256, "--device", "cpu").text) == "cpu (--device)"
    done = nsa("generate", trained["nsa"], "--prompt", "x", "--tokens", 1)
    assert chosen(done.stderr.decode()) == "cpu (NSA_DEVICE = cpu)"
    if not HAS_GPU:
        line = chosen(nsa("eval", trained["nsa"], "--tokens", 256, device="auto").text)
        assert line.startswith("cpu (auto; cuda: ")


def test_unknown_devices_are_refused(trained):
    assert "--device" in refused("eval", trained["nsa"], "--device", "tpu")
    assert "NSA_DEVICE = 'tpu'" in refused("eval", trained["nsa"], device="tpu")


@pytest.fixture(scope="module")
def trained_on_cuda(tmp_path_factory, corpus):
    """The run of an attention, trained on first use; mixed: its second layer is dense. In bfloat16, which
    is the default on a GPU."""

    @functools.cache
    def run(attention):
        out = tmp_path_factory.mktemp("cuda") / attention
        kind = ["--dense-layers", 1] if attention == "mixed" else ["--attention", attention]
        arguments = ["--data", corpus, *kind, "--steps", 60, "--lr", 0.01, "--device", "cuda"]
        text = nsa("train", "--out", out, *arguments, *SMALL).text
        assert chosen(text).startswith("cuda:0 ")
        return out

    return run


@needs_gpu
@pytest.mark.parametrize("attention", ["nsa", "full", "window"])
def test_the_loss_falls(trained_on_cuda, attention):
    run = trained_on_cuda(attention)
    losses = [line["loss"] for line in metrics(run, "train")]
    assert losses[-1] < 0.6 * losses[0]
    assert metrics(run, "eval")[-1]["loss"] < losses[0]
    assert json.loads((run / "config.json").read_text())["train"]["device"] == "cuda"


@needs_gpu
@pytest.mark.parametrize("attention", ["nsa", "full", "window"])
def test_the_first_step_in_bfloat16_is_that_in_float32(tmp_path, corpus, attention):
    """In bfloat16 what lies between products and attention has kernels of its own, in float32 torch's operations."""
    first = {}
    for dtype in ("bfloat16", "float32"):
        arguments = ["--data", corpus, "--attention", attention, "--device", "cuda", *SMALL]
        nsa("train", "--out", tmp_path / dtype, *arguments, "--steps", 1, "--log-every", 1, "--dtype", dtype)
        first[dtype] = metrics(tmp_path / dtype, "train")[0]
    assert first["bfloat16"]["loss"] == pytest.approx(first["float32"]["loss"], rel=1e-2)
    assert first["bfloat16"]["grad_norm"] == pytest.approx(first["float32"]["grad_norm"], rel=5e-2)


@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_300_steps_follow_the_losses_of_the_cpu(losses_on_cpu, tmp_path, dtype):
    """Same data, order and weights: rounding makes the two drift apart, but not by more than noise."""
    found = losses_of_300_steps(tmp_path / "run", "--device", "cuda", "--dtype", dtype)
    for name in ("train", "held out"):
        print(f"{name:9} cpu float32 ", *(f"{loss:.3f}" for loss in losses_on_cpu[name]))
        print(f"{name:9} cuda {dtype:8}", *(f"{loss:.3f}" for loss in found[name]))
        assert found[name] == pytest.approx(losses_on_cpu[name], rel=2e-2)


@pytest.fixture(scope="module")
def losses_on_cpu(tmp_path_factory):
    return losses_of_300_steps(tmp_path_factory.mktemp("cpu") / "run", "--device", "cpu", "--dtype", "float32")


def losses_of_300_steps(run, *device):
    """Of each 30 steps the mean, and held out every 100 steps; Python's own sources are the data."""
    nsa("train", "--out", run, "--data", sysconfig.get_paths()["stdlib"], "--extension", ".py", "--seed", 1,
        *"--layers 2 --hidden-size 128 --heads 2 --kv-heads 1 --head-dim 64 --topk 6 --window-size 128".split(),
        *"--context 1024 --batch-size 2 --lr 0.003 --warmup-steps 20 --steps 300".split(),
        *"--log-every 1 --save-every 0 --eval-tokens 65536".split(), *device, timeout=900)  # fmt: skip
    losses = [line["loss"] for line in metrics(run, "train")]
    windows = [sum(losses[i : i + 30]) / 30 for i in range(0, 300, 30)]
    return {"train": windows, "held out": [line["loss"] for line in metrics(run, "eval")]}


@needs_gpu
def test_full_attention_in_float32_takes_no_square_memory(tmp_path):
    """S x S scores of four heads in float32 would be 69 GB, and a backward needs them more than once."""
    (tmp_path / "long.txt").write_text("some text " * 6600)
    nsa("train", "--out", tmp_path / "run", "--data", tmp_path / "long.txt", "--attention", "full", "--steps", 1,
        *SMALL, "--dtype", "float32", "--context", 65536, "--held-out-percent", 0, "--device", "cuda")  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("attention", ["nsa", "full", "window"])
def test_a_checkpoint_is_the_same_model_on_both_devices(trained_on_cuda, tmp_path, attention):
    losses = {}
    for device in ("cpu", "cuda"):
        path = tmp_path / f"{device}.json"
        nsa("eval", trained_on_cuda(attention), "--tokens", 0, "--device", device, "--json", path)
        losses[device] = json.loads(path.read_text())["loss"]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4)


PROMPTS = [
    "def value(self): return self in None\n    import",
    "import",
    "class self:\n    value = None\n",
    "( ) : for in" * 16,  # longer than the rings
]


@needs_gpu
@pytest.mark.parametrize("attention", ["nsa", "full", "window"])
@pytest.mark.parametrize("other", [["--device", "cuda", "--no-cache"], ["--device", "cpu"]])
def test_greedy_text_equals_the_full_forward_and_the_cpu(trained_on_cuda, tmp_path, attention, other):
    """Margins: by how much the likeliest token wins. Rounding moves them by 1e-5; only where two blocks are as good as
    each other within rounding does NSA take different ones, and margins by 1e-2. That is rare: not in most texts."""
    apart = 0
    for prompt in PROMPTS if attention == "nsa" else PROMPTS[:1]:
        results = []
        for i, options in enumerate((["--device", "cuda"], other)):
            path = tmp_path / f"{i}.json"
            nsa("generate", trained_on_cuda(attention), "--prompt", prompt, "--temperature", 0, "--tokens", 80,
                "--ignore-end", "--dtype", "float32", "--json", path, *options)  # fmt: skip
            results.append(json.loads(path.read_text())["sequences"])
        assert len(results[0][0]["tokens"]) == 80
        apart += texts_apart(*results, rounding=1e-3)
    assert apart <= (1 if attention == "nsa" else 0)


def texts_apart(ours, theirs, rounding):
    """How many greedy texts differ by more than rounding, which moves margins by so much; behind a token that was as
    likely as another nothing is compared."""
    apart = compared = 0
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for step, (x, y, *margins) in enumerate(zip(a["tokens"], b["tokens"], a["margins"], b["margins"], strict=True)):
            if x != y and min(margins) < rounding:
                break
            if x != y or margins[0] != pytest.approx(margins[1], abs=rounding):
                print(f"text {number}, token {step}: {x} and {y}, margins {margins}")
                apart += 1
                break
            compared += 1
    print(f"{apart} of {len(ours)} texts apart, {compared} tokens alike")
    return apart


@needs_gpu
@pytest.mark.parametrize(
    "attention, dtype", [("nsa", "bfloat16"), ("nsa", "float32"), ("full", "bfloat16"), ("mixed", "bfloat16")]
)
@pytest.mark.parametrize("options", [["--temperature", 0, "--ignore-end"], ["--temperature", 3, "--seed", 1]])
def test_a_step_in_one_graph_has_the_same_bits(trained_on_cuda, tmp_path, attention, dtype, options):
    """Prompts of several lengths side by side, over the edges of blocks and of the window; drawn ones may end."""
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt!r}\n" for prompt in PROMPTS))
    reports = []
    for i, graph in enumerate(([], ["--no-graph"])):
        path = tmp_path / f"{i}.json"
        nsa("generate", trained_on_cuda(attention), "--prompts", tmp_path / "prompts.txt", "--tokens", 150,
            "--dtype", dtype, "--device", "cuda", "--json", path, *options, *graph)  # fmt: skip
        reports.append(json.loads(path.read_text()))
    assert [report["graph"] for report in reports] == [True, False]
    assert reports[0]["sequences"] == reports[1]["sequences"]


@needs_gpu
@pytest.mark.parametrize("attention", ["nsa", "full"])
def test_skinny_gemms_in_bfloat16_equal_the_forward(tmp_path, corpus, attention):
    """Only a step has skinny GEMMs (1, 2, up to 4 and up to 8 rows) and dense attention with lengths on the device.
    Rounding moves margins by up to 0.1; a block that is as good as another may be taken in a text or two."""
    run = tmp_path / "run"
    nsa("train", "--out", run, "--data", corpus, "--steps", 30, "--lr", 0.01, "--device", "cuda", *SMALL,
        "--ffn-size", 2560, "--attention", attention)  # fmt: skip
    apart = 0
    for rows in (1, 2, 4, 5):
        reports = cached_and_not(run, tmp_path, (PROMPTS * 2)[:rows], "--tokens", 40)
        apart += texts_apart(*reports, rounding=0.2)
    assert apart <= (2 if attention == "nsa" else 0)


def cached_and_not(run, tmp_path, prompts, *options):
    """The texts that follow greedily on the GPU, through the cache and by a full forward for each token."""
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt!r}\n" for prompt in prompts))
    reports = []
    for i, cache in enumerate(([], ["--no-cache"])):
        path = tmp_path / f"{i}.json"
        nsa("generate", run, "--prompts", tmp_path / "prompts.txt", "--temperature", 0, "--ignore-end",
            "--device", "cuda", "--json", path, *options, *cache)  # fmt: skip
        reports.append(json.loads(path.read_text())["sequences"])
    return reports


@needs_gpu
@pytest.mark.parametrize(
    "attention, dtype, rounding",
    [
        ("nsa", "bfloat16", 0.2),
        ("nsa", "float16", 0.05),
        ("nsa", "float32", 1e-3),
        ("full", "bfloat16", 0.2),
        ("full", "float16", 0.05),
        ("full", "float32", 1e-3),
        ("mixed", "bfloat16", 0.2),
        ("mixed", "float16", 0.05),
        ("mixed", "float32", 1e-3),
    ],
)
def test_32_texts_side_by_side_are_those_of_the_forward(trained_on_cuda, tmp_path, attention, dtype, rounding):
    """Of unlike lengths. So many rows go to cuBLAS; a text or two may have blocks that are as good as others."""
    prompts = ["".join(PROMPTS)[i : 9 * i + 1] for i in range(32)]
    reports = cached_and_not(trained_on_cuda(attention), tmp_path, prompts, "--tokens", 40, "--dtype", dtype)
    assert texts_apart(*reports, rounding) <= (0 if attention == "full" else 2)


@needs_gpu
@pytest.mark.parametrize("dtype, rounding", [("bfloat16", 0.2), ("float32", 1e-3)])
def test_full_attention_reads_a_prompt_of_two_chunks(trained_on_cuda, tmp_path, dtype, rounding):
    """65536 tokens go through the model together; those behind them, one in the second text, see them in the cache."""
    text = "".join(random.Random(3).choices("selfinmport ():=", k=65536 + 777))
    reports = cached_and_not(trained_on_cuda("full"), tmp_path, [text, text[:65534]], "--tokens", 4, "--dtype", dtype)
    assert texts_apart(*reports, rounding) == 0


@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_generation_runs(trained_on_cuda, tmp_path, dtype):
    path = tmp_path / "out.json"
    nsa("generate", trained_on_cuda("nsa"), "--tokens", 80, "--ignore-end", "--device", "cuda", "--dtype", dtype,
        "--json", path)  # fmt: skip
    assert len(json.loads(path.read_text())["sequences"][0]["tokens"]) == 80


@needs_gpu
@pytest.mark.parametrize("attention", ["nsa", "full"])
def test_resuming_on_cuda_is_bitwise(tmp_path, corpus, attention):
    """The checkpoint in the middle lies between two lines of the log."""
    arguments = ["--data", corpus, "--attention", attention, "--device", "cuda", "--noise", 0.5, *SMALL]
    arguments += ["--steps", 30, "--grad-accum", 2, "--save-every", 7]
    if attention == "nsa":
        arguments += ["--gate-balance", 0.05]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    nsa("train", "--out", whole, *arguments)
    stop_after(parts, 14, arguments)
    nsa("train", "--out", parts, "--resume")
    same_bits(whole, parts)


def stop_after(out, step, arguments):
    """Trains until the checkpoint of `step` is there, then kills the process."""
    process = subprocess.Popen([PROGRAM, "train", "--out", out, *map(str, arguments)], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    while process.poll() is None and not (out / f"optimizer-{step}.safetensors").exists():
        time.sleep(0.001)
    process.kill()
    process.wait(60)


@needs_gpu
def test_inspect_needle_and_recall_run_on_cuda(trained_on_cuda, tmp_path):
    run, path = trained_on_cuda("nsa"), tmp_path / "out.json"
    nsa("inspect", run, "--device", "cuda", "--json", path)
    (tmp_path / "cpu").mkdir()
    nsa("inspect", run, "--device", "cpu", "--json", tmp_path / "cpu" / "out.json")
    here, there = (json.loads(p.read_text())["layers"] for p in (path, tmp_path / "cpu" / "out.json"))
    for a, b in zip(here, there, strict=True):
        assert a["gates"] == pytest.approx(b["gates"], abs=1e-4)
        for stat in ("unforced_share", "entropy", "entropy_max", "neighbour_overlap"):
            counts = [[head[stat] for head in layer["kv_heads"]] for layer in (a, b)]
            assert counts[0] == pytest.approx(counts[1], abs=0.02)
        rows = [layer["kv_heads"][0]["map"]["blocks"] for layer in (a, b)]
        assert sum(x == y for x, y in zip(*rows, strict=True)) >= 0.95 * len(rows[0])
    nsa("needle", run, "--device", "cuda", "--lengths", 200, "--samples", 1, "--task", "tracking", "--diagnose")
    text = nsa("recall", "--device", "cuda", "--steps", 20).text
    assert chosen(text).startswith("cuda:0 ") and "chance" in text


@needs_gpu
def test_recall_beyond_the_window_on_cuda():
    assert "chance" in nsa("recall", "--check", "--device", "cuda", timeout=900).text


@needs_gpu
def test_other_head_dims_are_refused_on_cuda(trained, tmp_path, corpus):
    assert "takes 64/64, 128/128 and 192/128" in refused("eval", trained["nsa"], "--device", "cuda")
    out = tmp_path / "run"
    message = refused("train", "--out", out, "--data", corpus, "--device", "cuda", "--steps", 1, "--head-dim", 32)
    assert "takes 64/64, 128/128 and 192/128" in message and not out.exists()


@needs_gpu
@pytest.mark.skipif(os.environ.get("NSA_GPU_ALONE") != "1", reason="times need a GPU of their own: NSA_GPU_ALONE=1")
def test_stage_times_sum_to_end_to_end(tmp_path):
    path = tmp_path / "out.json"
    nsa("bench", "--device", "cuda", "--lengths", "8192,16384", "--repeats", 20, "--json", path)
    results = json.loads(path.read_text())["results"]
    shares = {}
    for whole in results:
        if whole["op"] in ("forward", "forward_backward"):
            of_whole = [r for r in results if r["part_of"] == whole["op"] and
                        (r["length"], r["variant"]) == (whole["length"], whole["variant"])]  # fmt: skip
            shares[whole["length"], whole["variant"], whole["op"]] = (
                sum(r["seconds"] for r in of_whole) / whole["seconds"]
            )
    print(shares)
    assert len(shares) == 8
    assert all(abs(share - 1) < 0.1 for share in shares.values()), shares


@needs_gpu
def test_bench_on_cuda(tmp_path):
    path = tmp_path / "out.json"
    text = nsa("bench", "--device", "cuda", "--lengths", "1024,2048", "--repeats", 2, "--json", path).text
    out = json.loads(path.read_text())
    assert out["machine"]["backend"] == "cuda" and out["machine"]["gpu"] in text
    variants = {r["variant"] for r in out["results"] if r["op"] == "dense_forward"}
    refused_forms = {form for form in ("cudnn", "flash2") if any(form in line for line in out["refusals"])}
    assert variants | refused_forms == {"cudnn", "flash2"} and variants
    for r in out["results"]:
        assert 0 < r["best_s"] <= r["median_s"] == r["seconds"] and r["gflop"] >= 0 and r["bytes"] > 0
        least = max(r["gflop"] / out["rates"]["gflops"], r["bytes"] / out["rates"]["bytes_per_s"])
        assert r["share"] == pytest.approx(least / r["seconds"])
    forward = ["compress", "compressed attention, selection", "selected attention", "sliding window, combine"]
    for length, phi, pass_name in itertools.product((1024, 2048), ("mean", "mlp"), ("forward", "forward_backward")):
        of_pass = [r for r in out["results"] if (r["length"], r["variant"]) == (length, phi)]
        stages = [r for r in of_pass if r["part_of"] == pass_name]
        assert [r["op"] for r in stages][:4] == forward and len(stages) == (4 if pass_name == "forward" else 11)
        assert len([r for r in of_pass if r["op"] == pass_name]) == 1
    for ratio, pass_name in itertools.product(out["ratios"], ("forward", "forward_backward")):
        if ratio["pass"] == pass_name:
            assert ratio["over_dense"] == pytest.approx(ratio["dense_seconds"] / ratio["seconds"])
    assert "faster than dense attention" in text


def test_one_openmp_runtime_for_torch_and_libnsa():
    loaded = subprocess.run(["ldd", PROGRAM], capture_output=True, text=True, check=True).stdout
    runtimes = {line.split("=>")[1].split()[0] for line in loaded.splitlines() if "omp" in line.split()[0]}
    assert len(runtimes) == 1, runtimes
