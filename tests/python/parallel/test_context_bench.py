"""bench/scale/context_parallel.py on two gloo processes, and its comparison of single queries with float64."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import nsa
from torchrun import torchrun

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "bench/scale/context_parallel.py"
SMALL = "--heads 4 --kv-heads 2 --head-dim 16 --device cpu".split()


@pytest.fixture(scope="module")
def bench():
    """Imports from the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench/scale"))
        yield importlib.import_module


def test_times(tmp_path):
    """All kinds of rows, and one device up to --alone; a sequence with a real block selection (32 blocks)."""
    file = tmp_path / "times.json"
    options = ["--tokens", "1024,2048", "--alone", "1024", "--repeats", "1", "--dtype", "float32", "--json", file]
    printed = torchrun(2, BENCH, *SMALL, *options)
    found = json.loads(file.read_text())
    rows = [(row["tokens"], row["layout"], row["kv_heads_at_once"]) for row in found["rows"]]
    assert rows == [
        *((1024, "head_tail", 2), (2048, "head_tail", 2)),
        *((2048, "head_tail", 1), (2048, "contiguous", 2)),
    ]
    assert len(printed.splitlines()) == 4 and found["not_run"] == [] and found["ranks"] == 2
    for row in found["rows"]:
        for name in ("forward", "backward"):
            assert row[f"{name}_ms"] == max(row[f"{name}_ms_of_ranks"]) > 0 and len(row[f"{name}_ms_of_ranks"]) == 2
    first, second, *others = found["rows"]
    assert first["alone"]["forward_ms"] > 0 and "alone" not in second and "sampled" not in others[0]
    assert first["vs_one_gpu"]["within_bounds"] and max(first["vs_one_gpu"]["difference"].values()) < 1e-5
    for row in (first, second):
        # No time is set against another: both ranks share the machine with other tests.
        assert row["recomputed_backward_ms"] > 0 and row["waited_ms"] > 0
        assert row["attention_alone"]["forward_ms"] > 0 and row["attention_alone"]["backward_ms"] > 0
        # Four queries of each of four chunks.
        assert row["sampled"]["rows"] == 16 and row["sampled"]["within_bounds"]
        assert row["sampled"]["difference"].keys() == {"o", "d_q", "d_k", "d_v", "d_gates"}


def test_kv_heads_gathered_one_by_one(tmp_path):
    file = tmp_path / "heads.json"
    options = ["--tokens", "2048,1024", "--at-once", "2,1", "--dtype", "bfloat16", "--repeats", "2", "--json", file]
    torchrun(2, BENCH, *SMALL, *options)
    found = json.loads(file.read_text())["rows"]
    assert [(row["tokens"], row["kv_heads_at_once"], row.get("same_bits")) for row in found] == [
        *((1024, 2, None), (1024, 1, True)),
        *((2048, 2, None), (2048, 1, True)),
    ]
    for row in found:
        calls = row["attention_alone"]
        assert calls["both_ms"] == max(calls["both_ms_of_ranks"]) <= calls["forward_ms"] + calls["backward_ms"]
        assert 0 < row["both_ms"] == max(row["both_ms_of_ranks"]) and row["waited_ms"] > 0


def test_no_time(tmp_path):
    file = tmp_path / "times.json"
    torchrun(2, BENCH, *SMALL, "--tokens", "1024", "--seconds", "0", "--json", file)
    found = json.loads(file.read_text())
    assert found["rows"] == [] and [row["why"] for row in found["not_run"]] == ["0.0 s were over"] * 3


def test_bits(tmp_path):
    file = tmp_path / "bits.json"
    options = "--bits 2 --chunks 8 --tokens 1024 --dtype bfloat16 --json".split()
    torchrun(2, BENCH, *SMALL, *options, file)
    rows = json.loads(file.read_text())["rows"]
    assert [(row["layout"], row["dtype"], row["runs"]) for row in rows] == [
        ("head_tail", "bfloat16", 2),
        ("contiguous", "bfloat16", 2),
    ]
    for row in rows:
        assert row["same_in_all_runs"] and row["as_one_rank"] == dict.fromkeys(
            ("o", "d_q", "d_k", "d_v", "d_gates"), True
        )


@pytest.mark.parametrize("options, message", (
    (("--tokens", "1024"), "--simulated-ranks: must be given where torchrun does not start the ranks"),
    (("--simulated-ranks", "2", "--tokens", "1024,2048"), "--tokens: must be one length with --simulated-ranks"),
    (("--simulated-ranks", "2", "--tokens", "1000"), "the shortest length that works is"),
    (("--simulated-ranks", "2", "--tokens", "many"), "--tokens: many: must be an integer of at least 1"),
    (("--simulated-ranks", "2", "--ranks", "2"), "--ranks [2]: must be in 0 ... 1"),
    (("--simulated-ranks", "2", "--at-once", "1,x"), "--at-once: x: must be an integer of at least 1"),
    (("--simulated-ranks", "2", "--at-once", "2,3"), "--at-once 3: must divide the 2 KV heads"),
))  # fmt: skip
def test_refused(bench, options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(BENCH), *SMALL, *options])
    with pytest.raises(SystemExit) as stopped:
        bench("context_parallel").main()
    assert stopped.value.code == 2 and message in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- sampled rows


@pytest.fixture(scope="module")
def sampled_rows(bench):
    return bench("sampled_rows")


CFG = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, window_size=20)
POSITIONS = [0, 6, 7, 40, 63, 111, 255]  # 6: before the first compressed key


@pytest.fixture(scope="module")
def problem(sampled_rows):
    """Inputs, the oracle's blocks, and some rows of them."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, d_o = (torch.randn(1, 256, heads, 16, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4))
    gates = torch.rand(1, 256, 4, 3, dtype=torch.float64, generator=generator)
    _, indices = nsa.reference.native_sparse_attention(q, k, v, gates, cfg=CFG, return_indices=True)
    rows = [sampled_rows.Row(p, q[0, p], gates[0, p], d_o[0, p], indices[0, p]) for p in POSITIONS]
    return (q, k, v, gates), d_o, rows


def test_sampled_rows(sampled_rows, problem):
    """They are those of nsa.reference, whose dO is zero elsewhere."""
    inputs, d_o, rows = problem
    leaves = [t.clone().requires_grad_() for t in inputs]
    sparse = torch.zeros_like(d_o)
    sparse[:, POSITIONS] = d_o[:, POSITIONS]
    o = nsa.reference.native_sparse_attention(*leaves, cfg=CFG)
    d_q, d_k, d_v, d_gates = torch.autograd.grad(o, leaves, sparse)
    found = sampled_rows.by_oracle(rows, inputs[1][0], inputs[2][0], CFG)
    for name, expected in (("o", o[0, POSITIONS]), ("d_q", d_q[0, POSITIONS]), ("d_gates", d_gates[0, POSITIONS])):
        torch.testing.assert_close(getattr(found, name), expected.detach(), rtol=0, atol=1e-12)
    for name, expected in (("d_k", d_k[0]), ("d_v", d_v[0])):
        torch.testing.assert_close(getattr(found, name), expected.float(), rtol=0, atol=1e-6)
    assert (found.blocks_differ, found.largest_gap) == (0, 0)


def test_other_selection_is_reported(sampled_rows, problem):
    """A block that is not among the best counts with its gap, a missing or forced one without bound."""
    (_, k, v, _), _, rows = problem
    row = rows[-1]
    others = [block for block in range(16) if block not in row.indices[0].tolist()]
    for wrong, differ, gap in ((others[0], 1, 1.0), (-1, CFG.topk, float("inf"))):
        indices = row.indices.clone()
        free = next(i for i, block in enumerate(indices[0].tolist()) if 0 < block < 14)
        indices[0, free] = wrong
        changed = sampled_rows.Row(row.position, row.q, row.gates, row.d_o, indices)
        found = sampled_rows.by_oracle([changed], k[0], v[0], CFG)
        assert found.blocks_differ == differ and 0 < found.largest_gap <= gap
