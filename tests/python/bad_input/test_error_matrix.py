"""Each tensor of each public call with each thing wrong with it: an error that names it, and nothing has changed.

Where a wrong tensor is none for a call, the result is that of the same values in other memory.
"""

import inspect
import re

import pytest
import torch

import nsa
from adversarial_calls import cleaned, same, state
from nsa import parallel, serving
from problem import SMALL
from valid_calls import HKV, S, calls, make_cache, tensors_of, used_cache, with_another


def shrunk(t):
    t = t.clone()
    t.untyped_storage().resize_(t.element_size() - 1)
    return t


CHANGES = {
    "dtype": lambda t: t.to(torch.int16),
    "no dimension": lambda t: t.flatten()[0],
    "six dimensions": lambda t: t[(None,) * (6 - t.dim())],
    "a size more": lambda t: torch.cat((t, t[-1:])),
    "device": lambda t: t.to("meta"),
    "strides": lambda t: torch.stack((t, t), -1)[..., 0],
    "storage": shrunk,
}
ANY = set(CHANGES)
TAKEN = {
    ("compress", "k"): {"a size more"},  # a row past the last sequence
    ("compress", "cu_seqlens"): {"a size more"},  # an empty sequence
    ("compressed_cu_seqlens", "cu_seqlens"): {"a size more", "device"},
    ("layer", "cu_seqlens"): {"a size more"},
    ("layer", "x"): {"storage", "a size more"},  # which torch's projections read
    ("cached layer", "x"): {"storage"},
    ("rotary_tables", "positions"): ANY - {"storage"},
    ("sliding_window_attention", "q"): {"a size more"},
    ("rotate", "x"): {"six dimensions", "a size more"},
    ("ContextParallel.shard", "x"): ANY - {"no dimension", "storage"},
    ("serving.attend", "layer.k_slc"): {"a size more"},
    ("serving.attend", "layer.k_c"): {"a size more"},
    **{
        (name, f"layer.{ring}"): {"a size more"}
        for name in ("serving.attend", "serving.fork")
        for ring in serving.LayerCache._fields[4:]
    },
    **{("CompressionWeights", name): ANY for name in ("pe", "w1", "b1", "w2", "b2")},  # looked at where it is used
}
CASES = [
    (name, argument, change)
    for name, (_, arguments) in calls().items()
    for argument, _ in tensors_of(arguments)
    for change in CHANGES
    if change not in TAKEN.get((name, argument), ())
]
WITHOUT_TENSORS = {"Backend", "NSAConfig", "backends", "describe_backends", "device_count", "use_backend"}
OTHERS = {"CompressionFunction", "parameter_groups", "selector_loss", "parallel", "reference", "serving", "LayerCache"}
OTHERS |= {"replay"}
"""Modules, and what takes a module or gives one that the layer's tests look at."""


def functions():
    return {getattr(f, "__func__", f) for f, _ in calls().values()} | {type(f) for f, _ in calls().values()}


def test_every_public_function_is_called():
    called = functions()
    for module in (nsa, serving, parallel):
        for name in set(module.__all__) - WITHOUT_TENSORS - OTHERS - {"ContextParallel", "shard_heads"}:
            value = getattr(module, name)
            assert not callable(value) or value in called, name
    for name, method in inspect.getmembers(nsa.KVCache, callable):
        if not name.startswith("_") and name != "tensors":
            assert getattr(method, "__func__", method) in called, name


def refused(name, changed):
    """What the error says; arguments and caches are what they were."""
    function, arguments = calls()[name]
    arguments = changed(arguments)
    owner = getattr(function, "__self__", function if isinstance(function, torch.nn.Module) else None)
    before = state([owner, arguments])
    with pytest.raises((ValueError, TypeError)) as error:
        function(**arguments)
    assert same(before, state([owner, arguments]))
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize(("name", "argument", "change"), CASES)
def test_a_wrong_tensor(name, argument, change):
    function, arguments = calls()[name]
    wrong = CHANGES[change](dict(tensors_of(arguments))[argument])
    if change == "strides":
        try:
            found = function(**with_another(arguments, argument, wrong))
        except ValueError:
            pass
        else:
            function, arguments = calls()[name]
            assert same(state(found), state(function(**cleaned(with_another(arguments, argument, wrong)))))
            return
    message = refused(name, lambda arguments: with_another(arguments, argument, wrong))
    roots = {re.split(r"[.\[]", other)[-1 if "." in other else 0] for other, _ in tensors_of(arguments)}
    own = re.split(r"[.\[]", argument)[-1 if "." in argument else 0]
    sets_what_others_must_have = change == "a size more" or argument.endswith(".k_slc")
    allowed = roots | {"Sq", "cache"} if sets_what_others_must_have else {own}
    assert re.search(rf"(?<![a-zA-Z])({'|'.join(allowed)})", message), message


def test_numbers_are_read_within_their_storage():
    """Sequences of numbers that may be tensors, and what is copied before an operator sees it."""
    step = calls()["serving.Step"][1]
    numbers, table = torch.arange(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    for name, call in {
        "rows": lambda bad: used_cache().select(bad(numbers)),
        "tokens": lambda bad: used_cache().keep_prefix(0, bad(numbers)),
        "k_scale": lambda bad: make_cache(dtype=torch.float8_e4m3fn, k_scale=bad(torch.ones(HKV))),
        "slots": lambda bad: serving.Step(**step | {"slots": bad(numbers)}),
        "seq_lens": lambda bad: serving.Step(**step | {"seq_lens": bad(numbers)}),
        "block_table_c": lambda bad: serving.Step(**step | {"block_table_c": bad(table)}),
    }.items():
        with pytest.raises(ValueError, match=rf"^{name}: .* needs \d+ bytes of its storage's"):
            call(shrunk)


OFFSETS = {
    "not from 0": [1, 8, S],
    "not ascending": [0, 12, 8],
    "behind the end": [0, 8, S + 1],
    "negative": [0, -1, S],
    "of 64 bits": torch.tensor([0, 8, S]),
    "no tensor": [],
    "empty": torch.zeros(0, dtype=torch.int32),
}
PACKED = [(n, a) for n, (_, arguments) in calls().items() for a in arguments if a.startswith("cu_seqlens")]


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize(("name", "argument"), PACKED)
def test_wrong_offsets(name, argument, offsets):
    given = OFFSETS[offsets]
    if isinstance(given, list) and given:
        given = torch.tensor(given, dtype=torch.int32)
    if name == "compressed_cu_seqlens" and offsets == "behind the end":
        return  # of no tensor
    message = refused(name, lambda arguments: arguments | {argument: given})
    assert re.search(r"\bcu_seqlens", message), message


@pytest.mark.parametrize("name", ["selected_attention", "nsa_attention", "native_sparse_attention", "decode"])
def test_blocks_out_of_range_are_ignored(name):
    function, arguments = calls()[name]
    far = arguments["indices"].clone()
    assert far.dtype is torch.int32
    far[...] = torch.tensor([-(2**31), 2**31 - 1, 1000, 0], dtype=torch.int32)
    nearest = torch.full_like(far, -1)
    nearest[..., 0] = 0
    results = []
    for blocks in (far, nearest):
        function, arguments = calls()[name]
        results.append(function(**(arguments | {"indices": blocks})))
    assert same(state(results[0]), state(results[1]))


@pytest.mark.parametrize("row", [-1, 2, 10**6, 2**62])
def test_rows_of_a_cache(row):
    cache = make_cache(2)
    before = state(cache)
    for call in (
        lambda: cache.rollback(row, 0),
        lambda: cache.release(row),
        lambda: cache.fork(row, 1),
        lambda: cache.fork(0, row),
        lambda: cache.select([0, row]),
    ):
        with pytest.raises(ValueError, match=rf"^\w+(\[1\])? = {row}: must be"):
            call()
        assert same(before, state(cache))


@pytest.mark.parametrize("field", vars(SMALL))
@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, "x", None])
def test_hyperparameters(field, value):
    if (field, value) == ("init_blocks", 0):
        return
    with pytest.raises(ValueError, match=rf"{field} = |{field}: "):
        nsa.NSAConfig(**(vars(SMALL) | {field: value}))
