"""torch's flop counter on our operators gives what `nsa bench` counts."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import nsa
from problem import SMALL

ROOT = Path(__file__).parents[2]
LENGTH, H, HKV, DK, DV = 90, 6, 2, 16, 24


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.skipif(not shutil.which("g++") or not (ROOT / "build/lib/libnsa.so").exists(), reason="needs g++, libnsa")
def test_flops_are_those_of_the_benchmark(tmp_path):
    program, lib = tmp_path / "costs", ROOT / "build" / "lib"
    sources = [Path(__file__).with_name("costs.cpp"), ROOT / "src" / "bench" / "costs.cpp"]
    options = [f"-I{ROOT / 'include'}", f"-I{ROOT / 'src'}", f"-L{lib}", f"-Wl,-rpath,{lib}", "-lnsa"]
    subprocess.run(["g++", "-std=c++20", *map(str, sources), *options, "-o", program], check=True)
    numbers = " ".join(map(str, (LENGTH, H, HKV, DK, DV, *SMALL.as_list())))
    out = subprocess.run([program], input=numbers, capture_output=True, text=True, check=True).stdout
    expected = {name: int(flop) for name, flop in (line.split() for line in out.splitlines())}

    q, k, v = torch.randn(1, LENGTH, H, DK), torch.randn(1, LENGTH, HKV, DK), torch.randn(1, LENGTH, HKV, DV)
    phi = [nsa.initial_compression_weights("mlp", SMALL.kernel_size, d) for d in (DK, DV)]
    cfg, gates = SMALL, torch.rand(1, LENGTH, H, 3)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    weights = [nsa.CompressionWeights(w.kind, *(t.requires_grad_() for t in w.as_arguments()[1:])) for w in phi]
    k_c, v_c = (nsa.compress(t.detach(), w, cfg).detach() for t, w in zip((k, v), phi, strict=True))
    indices = torch.zeros(1, LENGTH, HKV, cfg.topk, dtype=torch.int32)
    calls = {
        "compress": lambda: sum(nsa.compress(t, w, cfg).sum() for t, w in zip((k, v), weights, strict=True)),
        "compressed_attention": lambda: nsa.compressed_attention(q, k_c.requires_grad_(), v_c, cfg)[0].sum(),
        "selected_attention": lambda: nsa.selected_attention(q, k, v, indices, cfg.block_size)[0].sum(),
        "sliding_window_attention": lambda: nsa.sliding_window_attention(q, k, v, cfg.window_size)[0].sum(),
    }
    for name, call in calls.items():
        assert counted(call) == expected[name], name
        assert counted(lambda call=call: call().backward()) == expected[name] + expected[f"{name}_backward"], name

    def layer(q=q, k=k, v=v, gates=gates, **packed):
        return nsa.native_sparse_attention(
            *(q, k, v, gates), cfg=cfg, weights_k=weights[0], weights_v=weights[1], **packed
        )

    assert counted(layer) == expected["forward"]
    assert counted(lambda: layer().sum().backward()) == expected["forward_backward"]
    twice = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)
    double = {n: torch.cat((t[0], t[0])) for n, t in {"q": q, "k": k, "v": v, "gates": gates}.items()}
    assert counted(lambda: layer(**double, cu_seqlens_q=twice)) == 2 * expected["forward"]
    step = nsa.nsa_attention(q, k, v, gates, k_c=k_c, v_c=v_c, cfg=cfg)
    assert counted(lambda: nsa.nsa_attention(q, k, v, gates, k_c=k_c, v_c=v_c, cfg=cfg)) == (
        expected["forward"] - expected["compress"]
    ) and step.shape == (1, LENGTH, H, DV)
