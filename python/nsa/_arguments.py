"""Types of arguments: a function takes what its annotations say."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import index
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, cast, get_args, get_type_hints

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F")

_ABSENT = object()
_IN_ORDER = (tuple, list, Tensor, NoneType)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Refuses an argument of another type than annotated: TypeError that names it.

    Numbers and strings are looked at before the call, because torch would cut 4.5 to 4, and a set, a dict or an
    iterator for a sequence, whose order would be chance or which ends after one pass. The rest is looked at only if
    the call fails, as it does with anything else, so that a good one does not pay for it. Flags are not looked at. Then
    it also looks for what torch has no words for (`check_usable`).
    """
    hints = {name: hint for name, hint in get_type_hints(function).items() if name != "return"}
    flags = {name for name, hint in hints.items() if hint is bool}
    hints = {name: hint for name, hint in hints.items() if name not in flags}
    plain = {name: hint for name, hint in hints.items() if {*_alternatives(hint)} <= {int, float, str, NoneType}}
    ordered = [name for name, hint in hints.items() if any(get_args(kind) for kind in _alternatives(hint))]
    names = tuple(inspect.signature(function).parameters)
    looked_at = [(i, name, plain[name], _usual(plain[name])) for i, name in enumerate(names) if name in plain]
    in_order = [(i, name) for i, name in enumerate(names) if name in ordered]

    @functools.wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        for i, name, hint, usual in looked_at:
            value = arguments[i] if i < len(arguments) else named.get(name, _ABSENT)
            if type(value) not in usual and value is not _ABSENT:
                check_type(name, value, hint)
                if isinstance(value, Tensor):  # as a tensor of 32 bits it would wrap where it is compared with 2^63
                    number = float(value) if float in usual else index(value)
                    arguments, named = _replaced(arguments, named, i, name, number)
        for i, name in in_order:
            value = arguments[i] if i < len(arguments) else named.get(name)
            if type(value) not in _IN_ORDER:
                check_order(name, value)
        try:
            return function(*arguments, **named)
        except ValueError:
            raise
        except Exception:
            given = [*zip(names, arguments, strict=False), *named.items()]
            if function.__name__ == "__init__":
                del given[0]  # the object, whose members are not all there
            for name, value in given:
                if name in hints:
                    check_type(name, value, hints[name])
                elif isinstance(value, Tensor) and name in flags:  # which torch may not take for true or false
                    check_type(name, value, bool)
            for name, value in given:
                check_usable(name, value)
            raise

    return run


def like(other: F) -> Callable[[Callable[..., Any]], F]:
    """Gives a function the type of another one, whose arguments and results it has."""
    return lambda function: cast(F, function)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raises TypeError unless `value` is of the annotated type, and of a sequence each member."""
    allowed = _alternatives(hint)
    if value is None and NoneType in allowed:
        return
    if not any(_is(value, kind) for kind in allowed):
        what = type(value).__name__
        if isinstance(value, Tensor) and Tensor in allowed:
            what = "nested tensor" if value.is_nested else f"tensor of {value.layout}, {value.dtype}"
        raise TypeError(f"{name}: {what}: must be {' or '.join(_described(kind) for kind in allowed)}") from None
    for kind in allowed:
        if get_args(kind) and _is(value, kind):
            for i, member in enumerate(value):
                check_type(f"{name}[{i}]", member, get_args(kind)[0])


def check_order(name: str, value: Any) -> None:
    """Raises TypeError for a set, a dict or an iterator where a sequence belongs."""
    if isinstance(value, (AbstractSet, Mapping, Iterator)):
        raise TypeError(f"{name}: {type(value).__name__}: must be a sequence, whose members have an order") from None


def check_usable(name: str, value: Any) -> None:
    """Raises ValueError for an integer above 64 bits and for a tensor whose storage ends before it does."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} = {value}: must fit into 64 bits") from None
    if check := getattr(value, "_check_tensors", None):
        check(name)
    elif isinstance(value, (tuple, list)):
        for i, member in enumerate(value):
            check_usable(f"{name}[{i}]", member)
    elif isinstance(value, Tensor) and value.numel():
        try:
            given = value.untyped_storage().nbytes()
        except RuntimeError:  # within a transform of torch.func
            return
        end = 1 + value.storage_offset()
        end += sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        needed = end * value.element_size()
        if needed > given:
            what = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
            raise ValueError(f"{name}: {what}: needs {needed} bytes of its storage's {given}") from None


def check_sizes(largest: int = 2**31 - 1, **sizes: int | None) -> None:
    """Raises ValueError unless each size that is given is 1 ... largest."""
    for name, value in sizes.items():
        if value is not None and not 1 <= value <= largest:
            raise ValueError(f"{name} = {value}: must be >= 1 and <= {largest}")


def validates_devices() -> bool:
    """Returns whether NSA_VALIDATE asks to read and check what tensors on a GPU hold; the operators read it so, too."""
    return os.environ.get("NSA_VALIDATE", "0") not in ("", "0")


def check_offsets(cu_seqlens: Tensor, name: str = "cu_seqlens") -> None:
    """Raises ValueError unless it has the dtype and shape of offsets; TypeError if it is no tensor."""
    check_type(name, cu_seqlens, Tensor)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        what = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}".removeprefix("torch.")
        raise ValueError(f"{name}: {what}: expected int32 (B + 1)")


def _replaced(arguments: Any, named: Any, i: int, name: str, value: Any) -> tuple[Any, Any]:
    """The arguments of a call with another value for the i-th."""
    if i < len(arguments):
        return (*arguments[:i], value, *arguments[i + 1 :]), named
    return arguments, {**named, name: value}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _usual(hint: Any) -> tuple[type, ...]:
    """Types of which every value is allowed for a hint of numbers and strings."""
    allowed = _alternatives(hint)
    return (*allowed, int) if float in allowed else allowed


def _is(value: Any, kind: Any) -> bool:
    if kind is int or kind is float:
        if isinstance(value, (int, torch.SymInt) if kind is int else (int, float, torch.SymInt, torch.SymFloat)):
            return not isinstance(value, bool)
        if isinstance(value, Tensor) and value.dtype == torch.bool:
            return False
        try:
            return not isinstance(value, (str, bytes)) and (index if kind is int else float)(value) is not None
        except (TypeError, ValueError, RuntimeError):
            return False
    if kind is Tensor:
        dense = isinstance(value, Tensor) and value.layout is torch.strided
        return dense and not value.is_nested and not value.is_quantized
    if get_args(kind):
        return isinstance(value, Sequence) and not isinstance(value, str)
    return isinstance(value, kind)


def _described(kind: Any) -> str:
    if get_args(kind):
        return f"a sequence of {({int: 'integers', float: 'numbers'}).get(get_args(kind)[0], 'tensors')}"
    names = {Tensor: "a dense tensor", int: "an integer", float: "a number", str: "a string", NoneType: "None"}
    return names.get(kind) or f"{kind.__module__.split('.')[0]}.{kind.__name__}"
