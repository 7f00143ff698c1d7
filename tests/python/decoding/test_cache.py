"""The cache between steps: new rows, sizes and memory, refusals, copies, and the pages of the C++ cache."""

import collections
import copy
import pickle
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nsa
from devices import head_dims
from nsa.serving import allocate
from problem import SMALL, assert_same, feed
from test_decode import KINDS

ROOT = Path(__file__).parents[3]


def filled(layer, x, kind, max_length=140, **options):
    """A cache of the rows x, all appended."""
    cache = layer.make_cache(x.shape[0], max_length, **KINDS[kind], **options)
    cache.reserve(max_length)
    feed(layer, cache, x, [x.shape[1] - 3, 1, 2])
    return cache


def state(cache):
    """All that a refusal must leave as it is."""
    pools = [(p.uses, p.free, p.held, p.page_size, p.max_pages) for p in cache._pages.pools]
    return [t.clone() for t in cache.tensors()], copy.deepcopy(pools), cache.max_length, list(cache._longest)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and a[1:] == b[1:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[2, 0, 0], [1, 1, 1], [0, 1, 2], [2], [1, 0, 2, 2, 0]])
def test_selected_rows_continue_as_their_source(backend, layer, kind, rows):
    x, more = torch.randn(3, 75, 32), torch.randn(len(rows), 40, 32)
    cache = filled(layer, x, kind, num_pages=48) if kind == "paged" else filled(layer, x, kind)
    if kind == "large pages":
        cache.grow(140, num_pages=24)
    cache.select(torch.tensor(rows) if len(rows) > 1 else rows)
    assert cache.batch_size == len(rows) and cache.cache_seqlens.tolist() == [75] * len(rows)
    cache.reserve(115)
    expected = layer(torch.cat((x[rows], more), 1))[:, 75:]
    assert_same(feed(layer, cache, more, [1, 16, 23]), expected)
    for pages in cache._pages.pools:
        held = [page for row in pages.held for page in row]
        assert sorted({*held, *pages.free}) == list(range(len(pages.uses))) and not {*held} & {*pages.free}
        assert [held.count(page) for page in range(len(pages.uses))] == pages.uses


@pytest.mark.parametrize("kind", KINDS)
def test_repeat(device, layer, kind):
    x, more = torch.randn(2, 60, 32), torch.randn(4, 9, 32)
    cache = filled(layer, x, kind)
    if kind != "contiguous":
        cache.grow(140, num_pages=64)
    cache.repeat(2)
    cache.reserve(69)
    assert_same(feed(layer, cache, more, [9]), layer(torch.cat((x[[0, 0, 1, 1]], more), 1))[:, 60:])


@pytest.mark.parametrize("kind", KINDS)
def test_grow(device, layer, kind):
    x = torch.randn(2, 150, 32)
    cache = filled(layer, x[:, :70], kind, max_length=72)
    before = [t.clone() for t in cache.tensors()[4:10]]
    cache.grow(200)
    assert cache.max_length == 200 and all(
        torch.equal(a, b) for a, b in zip(before, cache.tensors()[4:10], strict=True)
    )
    cache.reserve(150)
    assert_same(feed(layer, cache, x[:, 70:], [1, 16, 63]), layer(x)[:, 70:])


class OutOfMemory(TorchDispatchMode):
    """The n-th tensor that is made from nothing cannot be allocated."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.new_zeros.default, torch.ops.aten.zeros.default, torch.ops.aten.full.default):
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("no memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_growth_without_memory_changes_nothing(device, layer, kind):
    x = torch.randn(2, 150, 32)
    cache = filled(layer, x[:, :70], kind, max_length=72)
    before, shapes, tables = state(cache), [t.shape for t in cache.tensors()], 0 if cache.contiguous else 1
    for n in range(4 + tables):
        with OutOfMemory(n), pytest.raises(torch.OutOfMemoryError, match="no memory"):
            cache.grow(200)
        assert cache.max_length == 72 and [t.shape for t in cache.tensors()] == shapes and same(before, state(cache))
    assert_same(layer(x[:, 70:71], cache=cache), layer(x[:, :71])[:, 70:])
    cache.grow(200)
    cache.reserve(150)
    assert_same(feed(layer, cache, x[:, 71:], [16, 63]), layer(x)[:, 71:])


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"device": "nowhere"}, RuntimeError, "device string: nowhere"),
        ({"num_pages": 2**31 - 16, "head_dim": 2**20}, RuntimeError, "memory|allocat"),
        ({"batch_size": 2**31 - 16, "head_dim": 2**31 - 16, "num_kv_heads": 2**31 - 16}, RuntimeError, "overflow"),
        (
            {"cfg": nsa.NSAConfig(window_size=2**31 - 1)},
            ValueError,
            r"^cfg.window_size = 2147483647: must be below",
        ),
        ({"dtype": torch.int8}, ValueError, r"^dtype = torch.int8: must be torch.float32, "),
        ({"dtype": "float32"}, TypeError, r"^dtype: str: must be torch.dtype"),
        (
            {"dtype": torch.float8_e4m3fn, "raw_dtype": torch.bool},
            ValueError,
            r"^raw_dtype = torch.bool: must be ",
        ),
    ],
)
def test_a_cache_that_cannot_be_made(wrong, kind, message):
    given = {"num_kv_heads": 1, "head_dim": 8, "page_size": 16, "cfg": SMALL} | wrong
    with pytest.raises(kind, match=message):
        nsa.KVCache(**{"batch_size": 2, "max_length": 96} | given)
    given = {"num_slots": given.pop("batch_size", 2), "num_pages": 2, "num_pages_c": 2} | given
    with pytest.raises(kind, match=message):
        allocate(**given)


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
def test_crop(device, layer, kind):
    x = torch.randn(2, 100, 32)
    for length, left in ((-13, [62, 62]), (70, [70, 70]), ([60, 75], [60, 75]), (80, [75, 75]), (-32, [43, 43])):
        cache, other = (filled(layer, x[:, :75], kind) for _ in range(2))
        cache.crop(length)
        assert cache.cache_seqlens.tolist() == left
        for row, one in enumerate(left):
            other.rollback(row, one)
        assert torch.equal(layer(x[:, 75:], cache=cache), layer(x[:, 75:], cache=other))


def test_shared_pages_without_a_free_one(device, layer):
    """Nothing is written into what another row reads, and nothing is half done."""
    x = torch.randn(1, 60, 32)
    cache = layer.make_cache(3, 96, page_size=16, num_pages=5)
    cache.reserve([60, 0, 0])
    layer(x.expand(3, 60, 32).contiguous(), cache=cache, num_new=torch.tensor([60, 0, 0], dtype=torch.int32))
    cache.fork(0, 1, 48)  # shares three pages
    cache.reserve([60, 49, 0])
    before = state(cache)
    calls = (lambda: cache.crop([59, 33, 0]), lambda: cache.crop(40), lambda: cache.rollback(1, 33))
    others = (lambda: cache.fork(0, 2, 52), lambda: cache.select([0, 0, 1, 1]), lambda: cache.repeat(2))
    for call in (*calls, *others):
        with pytest.raises(RuntimeError, match="needs 1 more pages of tokens, 0 are free"):
            call()
        assert same(before, state(cache))
    cache.crop([59, 48, 0])
    cache.grow(96, num_pages=6)
    cache.crop([58, 40, 0])
    step = torch.randn(1, 5, 32)
    out = layer(torch.cat((step, step, step)), cache=cache, num_new=torch.tensor([5, 5, 0], dtype=torch.int32))
    for row, length in ((0, 58), (1, 40)):
        assert_same(out[row], layer(torch.cat((x[:, :length], step), 1))[0, length:])


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
def test_reset(device, layer, kind):
    x = torch.randn(2, 60, 32)
    cache, new = filled(layer, torch.randn(2, 90, 32), kind), filled(layer, x, kind)
    cache.overflow.fill_(1)
    cache.reset()
    assert cache.cache_seqlens.tolist() == [0, 0]
    cache.reserve(140)
    feed(layer, cache, x, [57, 1, 2])
    step = torch.randn(2, 5, 32)
    assert torch.equal(layer(step, cache=cache), layer(step, cache=new))
    cache.check()


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_are_independent(device, layer, kind, copied):
    cache = filled(layer, torch.randn(2, 60, 32), kind)
    cache.rollback(0, 50)
    other, step = copied(cache), torch.randn(2, 5, 32)
    assert same(state(cache), state(other))
    before = state(other)
    first = layer(step, cache=cache)
    assert same(before, state(other))
    assert torch.equal(layer(step, cache=other), first)
    with pytest.raises(ValueError, match="at most 32 below the longest it has been, 65"):
        other.rollback(1, 30)


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_the_caller(device, layer, kind):
    x, step = torch.randn(2, 60, 32), torch.randn(2, 16, 32)
    one = filled(layer, x, kind)
    memory = tuple(t.clone() for t in one.tensors())
    other = nsa.KVCache.from_tensors(memory, SMALL, 140)
    assert all(a is b for a, b in zip(other.tensors(), memory, strict=True))
    assert other.contiguous == one.contiguous and other.free_pages == one.free_pages
    assert torch.equal(layer(step, cache=other), layer(step, cache=one))
    assert memory[8].tolist() == [76, 76] and torch.equal(memory[0], one.k_slc)
    other.rollback(0, 50)
    with pytest.raises(ValueError, match="at most 32 below"):
        other.rollback(1, 43)


@pytest.mark.bits
def test_memory_of_the_caller_with_shared_pages(device, layer):
    """Full ones are shared and not written to; the pages of a fork are refused once the parent's length says less."""
    x, step = torch.randn(2, 60, 32), torch.randn(2, 16, 32)
    one = layer.make_cache(2, 96, page_size=16)
    one.reserve([96, 0])
    layer(x, cache=one, num_new=torch.tensor([60, 0], dtype=torch.int32))
    one.fork(0, 1, 50)
    one.reserve(96)
    assert one.block_table[0, :3].equal(one.block_table[1, :3])
    memory = [t.clone() for t in one.tensors()]
    memory[8][0] = 47
    with pytest.raises(ValueError, match=r"block_table\[1, 2\] = \d+: block_table\[0, 2\] is this page too: only full"):
        nsa.KVCache.from_tensors(memory, layer.cfg, 96)
    memory[8][0] = 60
    other = nsa.KVCache.from_tensors(memory, layer.cfg, 96)
    assert same(state(one)[:1], state(other)[:1]) and other._pages.tokens.uses == one._pages.tokens.uses
    other.rollback(1, 40)  # into a shared page, which is copied
    one.rollback(1, 40)
    assert torch.equal(layer(step, cache=other), layer(step, cache=one))


CHANGES = {
    "tensors: 11 tensors: must be 12: k_slc, ": lambda t: t[:-1],
    "k_slc: .*: must be .pages, page_size, Hkv, D": lambda t: [t[0][0], *t[1:]],
    r"v_slc: float64 .*: must be float32": lambda t: [t[0], t[1].double(), *t[2:]],
    r"k_swa_ring: float32 .2, 51, .*: must be float32 .2, 52,": lambda t: [*t[:4], t[4][:, 1:], *t[5:]],
    r"cache_seqlens: int64": lambda t: [*t[:8], t[8].long(), *t[9:]],
    r"cache_seqlens\[1\] = 97: must be 0 ... 96": lambda t: [*t[:8], t[8] + torch.tensor([0, 97]).int(), *t[9:]],
    r"block_table\[0\]: must be pages below 12, then -1": lambda t: [*t[:10], t[10] + 7, t[11]],
    r"block_table\[1, 0\] = 0: block_table\[0, 0\] is this page too: only full pages can be shared": lambda t: [
        *t[:10],
        t[10][[0, 0]],
        t[11],
    ],
    r"block_table_c\[1, 0\] = 0: block_table_c\[0, 0\] is this page too": lambda t: [*t[:11], t[11][[0, 0]]],
    r"block_table\[0, 1\] = 5: block_table\[0, 0\] is this page too: .*, by different sequences": lambda t: [
        *t[:8],
        t[8] + 96,
        t[9],
        t[10][:, [5, 5, 3, 2, 1, 0]],
        t[11],
    ],
    r"block_table: .2, 5.: must have 6 pages per sequence for max_length = 96": lambda t: [
        *t[:10],
        t[10][:, 1:],
        t[11],
    ],
}


@pytest.mark.parametrize("message", CHANGES)
def test_memory_that_does_not_fit(message):
    cache = nsa.KVCache(2, 1, 8, cfg=SMALL, max_length=96, page_size=16)
    cache.reserve(96)
    with pytest.raises(ValueError, match=message):
        nsa.KVCache.from_tensors(CHANGES[message](list(cache.tensors())), SMALL, 96)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda c: c.crop(-33), "length = 7: must be at most 32 below the longest it has been, 40"),
        (lambda c: c.crop(-41), "length = -1: must be 0 ... the row's length, 40"),
        (lambda c: c.crop([40, 41]), "length = 41: must be 0 ... the row's length, 40"),
        (lambda c: c.crop([40]), "length: 1 numbers: must be one, or 2"),
        (lambda c: c.select([0, 2]), r"rows\[1\] = 2: must be 0 ... B - 1 = 1"),
        (lambda c: c.select([]), "rows: none: must be at least one"),
        (lambda c: c.select([0, 0, 1]), "KVCache: sequence 1 needs 1 more pages of tokens, 0 are free"),
        (lambda c: c.repeat(0), "count = 0: must be >= 1"),
        (lambda c: c.repeat(2), "KVCache: sequence 1 needs 1 more pages of tokens, 0 are free"),
        (lambda c: c.grow(95), "max_length = 95: must be at least what it is, 96"),
        (lambda c: c.grow(96, num_pages=6), "num_pages = 6: must be at least what it is, 7"),
        (lambda c: c.fork(0, 1, 40), "child = 1: must be an empty row"),
    ],
)
def test_a_refusal_changes_nothing(call, message):
    cache = nsa.KVCache(2, 1, 8, cfg=SMALL, max_length=96, page_size=16, num_pages=7)
    cache.reserve([64, 48])
    cache.cache_seqlens.fill_(40)
    before = state(cache)
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(cache)
    assert same(before[:3], state(cache)[:3])


@pytest.mark.bits
@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("more", [0, 3, 32])  # tokens behind the last full page
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_kept_prefix_has_the_bits_of_its_tokens(device, page_size, more, dtype):
    """Whatever became of the row that it was cached from."""
    dim = head_dims(16, 16)[0]

    def draw(count):
        q, *kv = (torch.randn(1, count, heads, dim) for heads in (4, 2, 2))
        return [q, *kv, torch.rand(1, count, 4, 3)]

    def step(cache, row, inputs):
        """The outputs of a step of one row, the others idle."""
        m = inputs[0].shape[1]
        num_new = torch.zeros(cache.batch_size, dtype=torch.int32)
        num_new[row] = m
        given = [t.expand(cache.batch_size, *t.shape[1:]).contiguous() for t in inputs]
        return (nsa.decode if m <= nsa.MAX_DECODE_TOKENS else nsa.prefill)(*given, cache, num_new=num_new)[row]

    def cached(batch, **options):
        sizes = {"max_length": 140, "page_size": page_size, "dtype": dtype}
        return nsa.KVCache(batch, 2, dim, cfg=SMALL, **sizes, raw_dtype=torch.float32, **options)

    prompt, behind, tail, ids = draw(96), draw(more), [draw(m) for m in (1, 16, 13)], list(range(96 + more))
    alone, cache = cached(1), cached(2, num_prefixes=1)
    alone.reserve(140)
    step(alone, 0, prompt)
    expected = [step(alone, 0, inputs) for inputs in tail]

    cache.reserve([140, 0])
    step(cache, 0, prompt)
    if more:
        step(cache, 0, behind)
    known = ids[: 96 + min(more, 15)]
    assert cache.keep_prefix(0, known) == cache.keep_prefix(0, torch.tensor(known)) == 96
    cache.rollback(0, 96 + more - min(more, 20))
    step(cache, 0, draw(12))
    cache.release(0)
    assert cache.match_prefix(1, ids[:96]) == 0 and cache.match_prefix(1, [*ids[:95], 7, 7]) == 0
    assert cache.match_prefix(1, [*ids[:96], 7]) == 96 and cache.cache_seqlens.tolist() == [0, 96]
    cache.reserve([140, 126])
    step(cache, 0, draw(100))  # the first row's own tokens go elsewhere
    assert all(torch.equal(step(cache, 1, inputs), o) for inputs, o in zip(tail, expected, strict=True))
    cache.check()


def test_prefixes_give_way_the_least_recently_used_first(device):
    cache = nsa.KVCache(2, 1, 8, cfg=SMALL, max_length=96, page_size=16, num_pages=7, num_prefixes=3)
    texts = [[text] * 96 for text in range(4)]
    for text in texts[:3]:
        cache.reserve([33, 0])
        cache.cache_seqlens[0] = 33
        assert cache.keep_prefix(0, text[:33]) == 32
        cache.release(0)
    assert cache.free_pages == 1
    assert cache.match_prefix(1, texts[0]) == 32  # used now
    cache.release(1)
    cache.reserve([48, 0])  # three pages: the second text's two and the free one
    assert cache.match_prefix(1, texts[1]) == 0
    for text in (texts[0], texts[2]):
        assert cache.match_prefix(1, text) == 32
        cache.release(1)
    before = state(cache)
    with pytest.raises(RuntimeError, match="sequence 1 needs 6 more pages of tokens, 4 are free"):
        cache.reserve([48, 96])
    assert same(before, state(cache)) and cache.match_prefix(1, texts[2]) == 32


def test_what_a_prefix_cannot_be():
    with pytest.raises(ValueError, match=r"num_prefixes = 1: must be 0 \.\.\. \d+, and goes with page_size"):
        nsa.KVCache(1, 1, 8, cfg=SMALL, max_length=96, num_prefixes=1)
    cache = nsa.KVCache(2, 1, 8, cfg=SMALL, max_length=96, page_size=16, num_prefixes=2)
    cache.reserve(96)
    cache.cache_seqlens[0] = 70
    with pytest.raises(ValueError, match="tokens: 71: must be at most as many as the row has, 70"):
        cache.keep_prefix(0, range(71))
    with pytest.raises(ValueError, match="sequence = 0: must be an empty row"):
        cache.match_prefix(0, [1, 2])
    with pytest.raises(ValueError, match=r"tokens: float32 \(3,\): must be whole numbers \(tokens,\)"):
        cache.keep_prefix(0, torch.ones(3))
    with pytest.raises(ValueError, match=r"tokens: bool \(3,\): must be whole numbers \(tokens,\)"):
        cache.keep_prefix(0, torch.ones(3) > 0)
    with pytest.raises(TypeError, match=r"tokens\[1\]"):
        cache.match_prefix(1, [1, 2.5])
    for call in (
        lambda: cache.keep_prefix(0, set(range(48))),
        lambda: cache.match_prefix(1, dict.fromkeys(range(48))),
        lambda: cache.keep_prefix(0, iter(range(48))),
        lambda: cache.match_prefix(1, (token for token in range(48))),
        lambda: cache.select({0, 1}),
        lambda: cache.crop({0: 70, 1: 0}.keys()),
        lambda: cache.reserve({16, 96}),
        lambda: nsa.KVCache.from_tensors(frozenset(cache.tensors()), SMALL, 96),
    ):
        with pytest.raises(TypeError, match=r"^\w+: \w+: must be a sequence, whose members have an order$"):
            call()
    assert cache.keep_prefix(0, range(15)) == cache.keep_prefix(0, range(37)) == 0  # no full page; 38 tokens back
    assert cache.keep_prefix(0, range(38)) == 0 and cache.keep_prefix(0, range(48)) == 48
    assert cache.match_prefix(1, []) == cache.match_prefix(1, range(48)) == 0


class Uploads(TorchDispatchMode):
    """Sizes of the copies without a wait."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and len(args) > 2 and args[2]:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_one_copy_uploads_both_tables(device):
    cache = nsa.KVCache(2, 1, 8, cfg=SMALL, max_length=96, page_size=16)
    for change in (
        lambda: cache.reserve([40, 20]),
        lambda: cache.reserve([40, 33]),
        lambda: cache.grow(200),
        lambda: cache.select([1, 0, 1]),
        lambda: cache.release(0),
    ):
        with Uploads() as uploads:
            change()
        assert uploads.sizes == [cache.block_table.numel() + cache.block_table_c.numel()]
        for pages, table in cache._pools():
            for row, numbers in zip(pages.held, table.tolist(), strict=True):
                assert numbers == row + [-1] * (len(numbers) - len(row))
    with Uploads() as uploads:
        cache.reserve([0, 20, 0])  # nothing new
    assert not uploads.sizes


@pytest.mark.skipif(not shutil.which("g++") or not (ROOT / "build/lib/libnsa.so").exists(), reason="needs g++, libnsa")
@pytest.mark.parametrize("page, longest, pages", [(16, 160, 16), (32, 200, 9)])
def test_ten_thousand_operations_give_the_pages_of_the_cpp_cache(device, tmp_path, page, longest, pages):
    """Both keep the pages of their sequences by themselves: here they do the same, and refuse in the same words."""
    program, lib = tmp_path / "pages", ROOT / "build" / "lib"
    source = [Path(__file__).with_name("pages.cpp"), f"-I{ROOT / 'include'}", f"-L{lib}", f"-Wl,-rpath,{lib}", "-lnsa"]
    subprocess.run(["g++", "-std=c++20", "-O1", *map(str, source), "-o", program], check=True)
    rows, prefixes = 5, 4
    sizes = {"max_length": longest, "page_size": page, "num_pages": pages, "num_prefixes": prefixes}
    cache = nsa.KVCache(rows, 1, head_dims(8, 8)[0], cfg=SMALL, **sizes)
    draw, lines, outcomes = random.Random(5), [f"{rows} {longest} {page} {pages} {prefixes}"], []
    texts = [[draw.randrange(100) for _ in range(longest)] for _ in range(2)]
    texts.append(texts[0][:40] + texts[1][40:])
    refused, found = collections.Counter(), collections.Counter()
    for _ in range(10_000):
        lengths = cache.cache_seqlens.tolist()
        row, empty = draw.randrange(rows), [b for b in range(rows) if not lengths[b]]
        other = draw.choice(empty) if empty else draw.randrange(rows)
        room = min(longest, len(cache._pages.tokens.held[row]) * page, _room_of(cache, row)) - lengths[row]
        operation, numbers = {
            0: ("reserve", [min(longest, n + draw.randrange(40) * (b == row)) for b, n in enumerate(lengths)]),
            1: ("append", [row, draw.randrange(room + 1) if room > 0 else 0]),
            2: ("rollback", [row, max(0, lengths[row] - draw.randrange(40))]),
            3: ("fork", [row, other, max(0, lengths[row] - draw.randrange(36))]),
            4: ("release", [row]),
            5: ("keep_prefix", [row, *draw.choice(texts)[: max(0, lengths[row] - draw.randrange(-1, 30))]]),
            6: ("match_prefix", [other, *draw.choice(texts)[: draw.randrange(longest + 1)]]),
        }[draw.choices(range(7), (25, 30, 15, 15, 9, 12, 10))[0]]
        lines.append(" ".join(map(str, (operation, *numbers))))
        done, prefix, message = True, 0, []
        try:
            if operation == "reserve":
                cache.reserve(numbers)
            elif operation == "append":
                cache.cache_seqlens[row] += numbers[1]
            elif operation.endswith("prefix"):
                prefix = getattr(cache, operation)(numbers[0], numbers[1:])
                found[operation] += prefix > 0
            else:
                getattr(cache, operation)(*numbers)
        except (ValueError, RuntimeError) as error:
            done = False
            refused[operation, type(error).__name__] += 1
            message = [error] if isinstance(error, RuntimeError) else []
        tables = (cache.cache_seqlens, cache.block_table, cache.block_table_c)
        numbers = [n for t in tables for n in t.flatten().tolist()]
        outcomes.append(" ".join(map(str, (int(done), prefix, *numbers, *message))))
    print(refused, found)
    assert sum(refused.values()) < 8000 and min(found.values()) > 100
    assert min(refused[n, "RuntimeError"] for n in ("reserve", "fork", "rollback")) > 10
    done = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True)
    for i, (line, mine, theirs) in enumerate(zip(lines[1:], outcomes, done.stdout.splitlines(), strict=False)):
        assert mine == theirs, f"operation {i}: {line}"
    assert done.returncode == 0 and done.stdout.count("\n") == len(outcomes)


def _room_of(cache, row):
    """Tokens whose compressed ones have capacity."""
    compressed = cache._pages.compressed
    tokens_c = len(compressed.held[row]) * compressed.page_size
    return SMALL.kernel_size + tokens_c * SMALL.kernel_stride - 1
