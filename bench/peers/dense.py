"""Dense attention that bench/peers/peers.py times: by torch, FlashAttention-3 and FlashAttention-4.

Tensors are (length, heads, dim).
"""

import importlib
import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def padded(v, width):
    return F.pad(v, (0, width - v.shape[-1])) if v.shape[-1] < width else v


class Dense:
    """torch's causal attention on one of its back ends."""

    def __init__(self, name, backend, longest):
        self.name, self.backend, self.longest = name, backend, longest

    def begin(self, length):
        self.length = length

    def attend(self, q, k, v):
        values = padded(v, q.shape[-1]) if self.backend is SDPBackend.FLASH_ATTENTION else v
        heads_first = [t.transpose(0, 1)[None] for t in (q, k, values)]
        with sdpa_kernel(self.backend):
            o = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return o[0].transpose(0, 1)[..., : v.shape[-1]]

    def stages(self, inputs, _branches, _chosen):
        if self.length <= self.longest:
            yield "dense", lambda: self.attend(*inputs[:3]), inputs[:3]


class Flash3(Dense):
    """FlashAttention-3 by the operators of an installed package, as in `nsa bench --flash3`."""

    name = "flash3"

    def __init__(self, longest):
        super().__init__(self.name, None, longest)
        library = flash3_library()
        if library is None:
            raise ImportError("no package of it is installed")
        torch.ops.load_library(library)
        self.operators = next(of for of in (torch.ops.flash_attn_3, torch.ops.fa3_fwd) if hasattr(of, "fwd"))

    def attend(self, q, k, v):
        q, k, v = (t[None] for t in (q, k, v))
        if hasattr(self.operators, "bwd"):
            return Flash3Function.apply(self.operators, q, k, v)[0]
        return self.operators.fwd(q, k, v, is_causal=True, num_splits=1)[0][0]


class Flash3Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operators, q, k, v):
        o, lse, *_ = operators.fwd(q, k, v, is_causal=True, num_splits=1)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.operators = operators
        return o

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, o, lse = ctx.saved_tensors
        gradients = {f"d{name}": torch.empty_like(t) for name, t in (("q", q), ("k", k), ("v", v))}
        ctx.operators.bwd(d_o, q, k, v, o, lse, **gradients, is_causal=True)
        return None, *gradients.values()


class Flash4(Dense):
    """FlashAttention-4 by an installed package, which compiles its kernels in the first call."""

    name = "flash4"

    def __init__(self, longest):
        super().__init__(self.name, None, longest)
        package = "sgl_fa4" if importlib.util.find_spec("sgl_fa4") else "flash_attn"
        self.function = importlib.import_module(f"{package}.cute").flash_attn_func

    def attend(self, q, k, v):
        o = self.function(*(t[None] for t in (q, k, v)), causal=True)
        return (o[0] if isinstance(o, tuple) else o)[0]  # with the logsumexp


def flash3_library():
    """The extension module of an installed FlashAttention-3, the first one with a backward if there is any, or None."""
    for package, folder in {"flash_attn_3": "", "xformers": "flash_attn_3", "fa3_fwd": ""}.items():
        found = importlib.util.find_spec(package)
        for place in found.submodule_search_locations if found else ():
            for path in Path(place, folder).glob("_C*.so"):
                return path
    return None


def flash3_interface():
    """The Python module of FlashAttention-3. Raises ImportError where no package of it is installed."""
    try:
        return importlib.import_module("flash_attn_interface")
    except ImportError:
        return importlib.import_module("fa3_fwd_interface")
