"""Calls with broken arguments, run in a process of their own that may crash: the worker of test_fuzz.py.

A case is {"call": NAME, "changes": [[PLACE, KIND, NUMBER], ...], "threads": 1 or 2}: one of the valid calls below with
some arguments, or parts of them, replaced. The worker reads one case a line and answers with one line, [OUTCOME, TEXT]:
"taken", "refused", "slow", or "wrong" with what is wrong. One case again: echo CASE | python adversarial_calls.py
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import json
import math
import mmap
import resource
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nsa
from nsa.cache import NAMES

sys.path.insert(0, str(Path(__file__).parents[1]))  # of a worker

import test_operators
from valid_calls import ADVERSARIAL, calls

MEMORY = 3 << 30  # bytes that a case may allocate
SMALL = 1 << 20  # elements up to which a tensor is copied and compared
FAR = 2**31 + 8  # elements between rows that lie far from each other

# ------------------------------------------------------------------------------------------------------- valid calls


def valid_call(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function and its arguments by name, new ones each time."""
    torch.manual_seed(0)
    if name in INJECTED:
        return INJECTED[name], {"x": torch.ones(3)}
    if not name.startswith("ops."):
        return calls()[name]
    _, operator, index = name.split(".")
    given = list(test_operators.arguments())[int(index)][1]
    overload = getattr(torch.ops.nsa, operator).default
    names = [argument.name for argument in overload._schema.arguments]
    return overload, {n: own(value) for n, value in zip(names, given, strict=True)}


SECONDS = 10.0
"""CPU time of a case, which does not depend on what else runs."""


def write(x: Tensor) -> None:
    x.zero_()
    raise ValueError("x: must not be written")


def fail(x: Tensor) -> None:
    raise IndexError("x: another kind of error")


def work(x: Tensor) -> None:
    end = time.process_time() + 0.5
    while time.process_time() < end:
        x.sum()


_drawn = iter(range(1 << 60))
INJECTED: dict[str, Callable[..., Any]] = {
    "injected crash": lambda x: ctypes.string_at(8),
    "injected hang": lambda x: time.sleep(1000),
    "injected work": work,
    "injected error": fail,
    "injected write": write,
    "injected bits": lambda x: x + next(_drawn),
}
"""Faults that test_fuzz.py must notice."""


def own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def names_of_calls() -> list[str]:
    operators = [f"ops.{name}.{i}" for i, (name, _) in enumerate(test_operators.arguments())]
    return [*calls(), *operators]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every argument and every part of one: where it is, and the value."""
    if path:
        yield path, value
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        parts = list(enumerate(value))
    elif isinstance(value, nsa.CompressionWeights):
        parts = list(vars(value).items())
    elif isinstance(value, nsa.NSAConfig):
        parts = list(vars(value).items())
    elif isinstance(value, nsa.KVCache):
        parts = [(name, getattr(value, name)) for name in NAMES]
    else:
        return
    for key, part in parts:
        yield from places(part, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The same with another value at that place. A cache is changed, everything else copied."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, dict):
        return value | {key: replaced(value[key], tuple(rest), new)}
    if isinstance(value, (tuple, list)):
        parts = [replaced(part, tuple(rest), new) if i == key else part for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, nsa.KVCache):
        setattr(value, key, replaced(getattr(value, key), tuple(rest), new))
        return value
    return type(value)(**(vars(value) | {key: replaced(getattr(value, key), tuple(rest), new)}))


def catalogue() -> dict[str, list[tuple[list[Any], str]]]:
    """For every call the places of its arguments, and which kinds of change each can have."""
    found = {}
    for name in names_of_calls():
        _, arguments = valid_call(name)
        found[name] = [
            (list(path), "tensor" if isinstance(value, Tensor) else "value")
            for path, value in places(arguments)
            if not (isinstance(value, list) and len(path) == 1 and path[0] == "needs")
        ]
    return {name: places for name, places in found.items() if places}


# ------------------------------------------------------------------------------------------------------ broken tensors

DTYPES = list(dict.fromkeys(dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)))
SIZES = (0, 1, -1, 2**31 - 1, 2**31, 2**40)
"""-1: one less, 1: one more; sizes from 2^31 - 1 on have stride 0."""
NUMBERS = (math.nan, math.inf, -math.inf, 1e38, -3e38, 1e-45, 0.0, 65520.0)
INTEGERS = (-(2**31), 2**31 - 1, -1, 0, 1, 7, 10**6)


class Subclass(torch.Tensor):
    pass


class Refusing(torch.Tensor):
    """A subclass that takes no function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


PART = 1 << 40  # bytes
_far: list[Tensor] = []


def far_memory() -> Tensor:
    """Memory of 2^40 bytes, of which only those pages exist that are written; other memory for the next 15 calls."""
    if not _far:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        whole = torch.frombuffer(mmap.mmap(-1, 16 * PART, flags), dtype=torch.uint8)
        _far.extend(whole[i * PART : (i + 1) * PART] for i in range(16))
    _far.append(_far.pop(0))
    return _far[-1]


def placed(t: Tensor, memory: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    """The values of t in other memory, which overlapping strides may overwrite."""
    memory = memory.view(t.dtype)
    result = memory.as_strided(size, stride, memory.storage_offset() + offset)
    if all(size):
        for index in torch.cartesian_prod(*(torch.arange(n) for n in size)).reshape(-1, len(size))[:SMALL].tolist():
            result[tuple(index)] = t[tuple(index)]
    return result


def change_dtype(t: Tensor, number: int) -> Tensor:
    return t.to(DTYPES[number % len(DTYPES)])


def change_rank(t: Tensor, number: int) -> Tensor:
    rank = number % 7
    while t.dim() > rank:
        t = t[0] if t.shape[0] else t.reshape(t.shape[1:] if t.numel() else [0] * (t.dim() - 1))
    while t.dim() < rank:
        t = t[None]
    return t


def change_size(t: Tensor, number: int) -> Tensor:
    if not t.dim():
        return t
    dim, size = number % t.dim(), SIZES[number // 7 % len(SIZES)]
    if size == 0:
        return t.narrow(dim, 0, 0)
    if size == -1:
        return t.narrow(dim, 0, max(0, t.shape[dim] - 1))
    if size == 1:
        return torch.cat((t, t.narrow(dim, 0, min(1, t.shape[dim]))), dim)
    return t.narrow(dim, 0, min(1, t.shape[dim])).expand(*(size if i == dim else -1 for i in range(t.dim())))


def change_stride(t: Tensor, number: int) -> Tensor:
    """A dimension that overlaps, has gaps, or is far from the next; one of size 1 of any stride."""
    if not t.dim() or not t.numel() or t.numel() > 1 << 14:
        return t
    dim, kind = number % t.dim(), number // 7 % 6
    stride = list(t.stride())
    if kind == 0:
        stride[dim] = 0
        return t.as_strided(t.shape, stride, t.storage_offset())
    if kind == 1:
        return torch.stack((t, t), dim + 1).select(dim + 1, 0)
    if kind == 2:
        return t.transpose(dim, -1).contiguous().transpose(dim, -1)
    if kind == 3:
        t = t.narrow(dim, 0, 1)
        stride[dim] = (2**31, 2**62, 2**63 - 1, 2**59)[number // 42 % 4]
        return t.as_strided(t.shape, stride, t.storage_offset())
    if kind == 4 and (t.shape[dim] + 1) * FAR * t.element_size() < PART:
        stride = [FAR if i == dim else s for i, s in enumerate(t.contiguous().stride())]
        return placed(t, far_memory(), list(t.shape), stride, number % 5)
    return t.flip(dim).as_strided(t.shape, t.stride(), t.storage_offset())


def change_place(t: Tensor, number: int) -> Tensor:
    """Memory that begins at no multiple of 64, or even of an element's size."""
    size, shift = t.element_size(), 1 + number % 67
    room = torch.zeros(t.numel() * size + shift + 8, dtype=torch.uint8)
    if not t.numel():
        return t
    if shift % size:
        moved = torch.frombuffer(room.numpy(), dtype=t.dtype, count=t.numel(), offset=shift)
    else:
        moved = room[shift : shift + t.numel() * size].view(t.dtype)
    return moved.copy_(t.reshape(-1)).view(t.shape)


def change_storage(t: Tensor, number: int) -> Tensor:
    """A storage with less memory than the tensor needs, or an offset past all memory."""
    t = t.clone()
    if number % 3 == 2:
        return t.narrow(0, 0, 0).as_strided([0, *t.shape[1:]], t.stride(), 2**62) if t.dim() else t
    t.untyped_storage().resize_(number % 3 * t.element_size())
    return t


def change_layout(t: Tensor, number: int) -> Tensor:
    kinds: list[Callable[[], Tensor]] = [
        lambda: t.to_sparse(),
        lambda: t.reshape(t.shape[0], -1).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([t[0]]),
        lambda: torch.nested.nested_tensor([t[0]], layout=torch.jagged),
        lambda: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
        lambda: t.to_mkldnn(),
        lambda: t.to("meta"),
    ]
    return kinds[number % len(kinds)]()


def change_kind(t: Tensor, number: int) -> Tensor:
    """A view with a bit that says conjugate or negative, a subclass, a leaf of autograd, an inference tensor."""
    kinds: list[Callable[[], Tensor]] = [
        lambda: torch._neg_view(-t),
        lambda: torch._neg_view(t),
        lambda: torch.complex(t.float(), t.float()).conj(),
        lambda: torch.complex(t.float(), -t.float()).conj().imag,
        lambda: t.as_subclass(Subclass),
        lambda: t.as_subclass(Refusing),
        lambda: torch.nn.Parameter(t),
        lambda: t.clone().requires_grad_(),
        lambda: inference(t),
    ]
    return kinds[number % len(kinds)]()


def inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


def change_content(t: Tensor, number: int) -> Tensor:
    t = t.clone()
    values = NUMBERS if t.dtype.is_floating_point else INTEGERS
    value = values[number % len(values)]
    if t.numel() and number // 16 % 2:
        t.view(-1)[number // 32 % t.numel()] = value
    else:
        t.fill_(value)
    return t


CHANGES: dict[str, Callable[[Tensor, int], Tensor]] = {
    function.__name__.removeprefix("change_"): function
    for function in (
        change_dtype, change_rank, change_size, change_stride, change_place, change_storage, change_layout, change_kind,
        change_content,
    )
}  # fmt: skip
KINDS = {"tensor": [*CHANGES, "alias", "value"], "value": ["value", "number", "alias"]}
SCALARS = (
    *(0, 1, -1, 2, 15, 16, 17, 64, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *(10**30, 0.0, -0.5, 0.5, 1e308, 5e-324, math.nan, math.inf, -math.inf, True, False),
)


def changed(arguments: dict[str, Any], path: list[Any], kind: str, number: int) -> dict[str, Any]:
    found = list(places(arguments))
    value = next((v for p, v in found if list(p) == path), None)
    if kind == "alias":
        others = [v for p, v in found if p != tuple(path[: len(p)])]
        new = others[number % len(others)] if others else value
    elif kind == "number":
        new = SCALARS[number % len(SCALARS)]
    elif kind == "value" or not isinstance(value, Tensor):
        new = ADVERSARIAL[number % len(ADVERSARIAL)]
    else:
        new = CHANGES[kind](value, number)
    return replaced(arguments, tuple(path), new)


def build(case: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The function and the broken arguments; None where torch does not make such a tensor, or a class refuses it."""
    function, arguments = valid_call(case["call"])
    # Torch itself reads past a storage that was made smaller.
    for change in sorted(case["changes"], key=lambda change: change[1] == "storage"):
        try:
            arguments = changed(arguments, *change)
        except Exception:
            return None
    return function, arguments


# ----------------------------------------------------------------------------------------------------------- outcomes


def tensors_in(value: Any) -> list[Tensor]:
    own = [value] if isinstance(value, Tensor) else []
    if isinstance(value, torch.nn.Module):
        own = list(value.state_dict().values())
    return own + [part for _, part in places(value) if isinstance(part, Tensor)]


def plain(t: Tensor) -> bool:
    """Small, dense and whole: a tensor that can be read."""
    if type(t) not in (Tensor, torch.nn.Parameter) or t.layout is not torch.strided or t.device.type != "cpu":
        return False
    if t.is_nested or t.is_quantized or t.numel() > SMALL:
        return False
    end = 1 + t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.numel() == 0 or end * t.element_size() <= t.untyped_storage().nbytes()


def copied(t: Tensor) -> Tensor:
    """The values in memory without gaps."""
    t = t.detach()
    return torch.empty(t.shape, dtype=t.dtype).copy_(t) if t.numel() else torch.empty(t.shape, dtype=t.dtype)


def bits(t: Tensor) -> Tensor:
    """A copy whose equality is that of the bits."""
    return copied(t).reshape(-1).view(torch.uint8)


def state(value: Any) -> list[Any]:
    found: list[Any] = [(t.dtype, tuple(t.shape), bits(t)) for t in tensors_in(value) if plain(t)]
    for _, part in [((), value), *places(value)]:
        if isinstance(part, nsa.KVCache):
            found.append(part.max_length)
            found += [sorted(part._pages.changed), part._pages.kept, part._pages.free_slots]
            for pages in part._pages.pools:
                found += [pages.uses, pages.free, pages.held, pages.page_size, pages.max_pages]
    return copy.deepcopy(found)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def cleaned(value: Any) -> Any:
    """The same values in memory of their own without gaps; raises ValueError where there is none."""
    for path, part in list(places(value)):
        if isinstance(part, Tensor):
            if not plain(part):
                raise ValueError
            value = replaced(value, path, copied(part))
    return value


DRAWING = ("NativeSparseAttention", "initial weights")
"""Calls that draw from torch's generator, which two threads share."""
WORDS = (
    *("out of memory", "allocate memory", "bad_alloc", "Storage size calculation overflowed"),
    *("more pages of", "no page for", "Inference tensors cannot be saved for backward"),
)
"""Of the RuntimeErrors that are documented: memory, pages of a pool, and torch's rule for tensors of inference mode."""
OF_TORCH = (
    *("invalid argument: ", "not supported: ", "nsa::", "Could not run 'nsa::", "There were no tensor arguments"),
    *("setStorage: ", "a Tensor with "),  # a tensor as a number
)
"""How messages begin when an operator itself is called: the extension's, and the dispatcher's for another type."""


def allowed(error: BaseException, operator: bool) -> bool:
    if isinstance(error, (ValueError, TypeError, NotImplementedError, MemoryError)):
        return str(error) != "" or isinstance(error, MemoryError)
    text = str(error)
    return isinstance(error, RuntimeError) and (
        any(words in text for words in WORDS)
        or (operator and (text.startswith(OF_TORCH) or text.endswith(": None: must be a tensor")))
    )


def out_of_memory(result: Any) -> bool:
    return isinstance(result, Exception) and (
        isinstance(result, MemoryError) or any(words in str(result) for words in WORDS[:4])
    )


def run(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, Any]:
    try:
        return "taken", function(**arguments)
    except Exception as error:
        return "refused", error


def by_reference(name: str, arguments: dict[str, Any]) -> Any:
    """What nsa.reference makes of the values in float64; None where there is no such function or it is of no use."""
    function = getattr(nsa.reference, name, None)
    if function is None or name == "NativeSparseAttention":
        return None
    exact = arguments
    for path, part in list(places(arguments)):
        if isinstance(part, Tensor) and part.dtype.is_floating_point:
            values = part.double()
            if not values.isfinite().all() or (values.numel() and values.abs().max() > 1e4):
                return None
            exact = replaced(exact, path, part.double() if path[0] != "rope" else part)
    if abs(exact.get("softmax_scale") or 0) > 100 or exact.get("noise"):
        return None
    try:
        return function(**exact)
    except Exception:
        return None


def close(name: str, result: Any, truth: Any) -> bool:
    pairs = zip(tensors_in(result), tensors_in(truth), strict=True)
    for i, (found, expected) in enumerate(pairs):
        if not found.dtype.is_floating_point:
            continue  # indices: ties may fall differently, test_reference.py compares them
        tolerance = 1e-4 if found.dtype is torch.float32 else 0.1
        scale = max(1.0, expected.nan_to_num(neginf=0).abs().max().item()) if expected.numel() else 1.0
        if i == 0 and "select" in name:
            continue
        if not torch.allclose(found.double() / scale, expected.double() / scale, tolerance, tolerance, True):
            return False
    return True


def judge(case: dict[str, Any]) -> tuple[str, str]:
    built = build(case)
    if built is None:
        return "not made", ""
    function, arguments = built
    operator = case["call"].startswith("ops.")
    owner = getattr(function, "__self__", function if isinstance(function, torch.nn.Module) else None)
    before = state([owner, arguments])
    two = case["threads"] == 2 and case["call"] not in DRAWING
    if two:
        others = [build(case) for _ in range(2)]
        outcomes: list[Any] = [None, None]

        def at(i: int) -> None:
            outcomes[i] = run(*others[i])  # type: ignore[misc]

        threads = [threading.Thread(target=at, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    outcome, result = run(function, arguments)
    if two:
        for other, its in outcomes:
            if any(out_of_memory(found) for found in (its, result)):
                return "refused", "out of memory"  # of which one thread may have had enough
            equal = same(state(its), state(result)) if outcome == "taken" else type(its) is type(result)
            if other != outcome or not equal:
                return "wrong", f"alone {outcome}: {result!r:.300}; with another thread {other}: {its!r:.300}"
    if outcome == "refused":
        text = f"{type(result).__name__}: {result}"
        if not allowed(result, operator):
            return "wrong", text
        if not same(before, state([owner, arguments])):
            return "wrong", f"changed an argument, then {text}"
        return "refused", text
    try:
        function, arguments = build(case)  # type: ignore[misc]
        arguments = cleaned(arguments)
    except ValueError:
        return "taken", ""
    outcome, expected = run(function, arguments)
    if outcome == "refused":
        return "wrong", f"taken, but refused in other memory: {expected!r:.300}"
    # The projections of a layer are torch's, whose bits depend on where the memory begins.
    equal = close(case["call"], result, expected) if "layer" in case["call"] else same(state(result), state(expected))
    if not equal:
        return "wrong", "other bits than with the same values in other memory"
    function, arguments = build(case)  # type: ignore[misc]
    truth = by_reference(case["call"], cleaned(arguments))
    if truth is not None and not close(case["call"], result, truth):
        return "wrong", "another result than nsa.reference"
    return "taken", "" if truth is None else "as nsa.reference"


def main() -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    far_memory()
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        case, begin = json.loads(line), time.process_time()
        try:
            answer = judge(case)
        except Exception as error:  # of this program
            answer = "broken", f"{type(error).__name__}: {error}"
        limit, spent = case.get("seconds", SECONDS), time.process_time() - begin
        if spent > limit:
            answer = "slow", f"{spent:.1f} s of CPU time, more than {limit}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
