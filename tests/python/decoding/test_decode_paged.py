"""nsa.serving.decode_paged: each request has what it has alone, from the pages of an engine."""

import random
from itertools import pairwise

import pytest
import torch

import nsa
from devices import head_dims, here, on_gpu
from nsa._registration import ops
from nsa.serving import LayerCache, Step, allocate, decode_paged
from scheduler import CFG, DIM, HEADS, KV_HEADS

PAGE = 16


class Paged:
    """Requests in one layer's pages of an engine, which shares full pages of equal beginnings and forgets old ones."""

    def __init__(self, dtype, own_table, window_pages, seed, scales=None):
        self.draw, self.own_table, self.window_pages = random.Random(seed), own_table, window_pages
        self.page = PAGE
        torch.manual_seed(seed)
        self.dim = dim = head_dims(DIM, DIM)[0]
        rows = PAGE, -(-PAGE // CFG.kernel_stride // 16) * 16 if own_table else PAGE // CFG.kernel_stride, PAGE, PAGE
        shapes = [(64, n, KV_HEADS, dim) for n in rows for _ in "kv"]
        if not window_pages:
            shapes[4:] = [(4, w + 32, KV_HEADS, dim) for w in (CFG.window_size, CFG.kernel_size) for _ in "kv"]
        self.scales = scales or {}
        stored = torch.float8_e4m3fn if scales else dtype
        dtypes = stored, stored, stored, dtype
        both = [
            torch.full((n, 2, *shape), torch.nan, dtype=t) for (n, *shape), t in zip(shapes[::2], dtypes, strict=True)
        ]
        self.layer = LayerCache(*(half for pair in both for half in pair.unbind(1)))  # keys and values in one tensor
        self.free = self.draw.sample(range(64), 64)
        self.dtype, angles = dtype, torch.arange(200)[:, None] * 0.3 ** torch.arange(dim // 2)
        self.options = {"rope": (angles.cos(), angles.sin()), "softmax_scale": 0.4}
        for name in ("weights_k", "weights_v"):
            phi = nsa.initial_compression_weights("mlp", CFG.kernel_size, dim)
            self.options[name] = nsa.CompressionWeights(
                "mlp", *(None if t is None else t.to(dtype) for t in vars(phi).values() if not isinstance(t, str))
            )

    def rotated(self, packed, starts, seq_lens):
        """Arguments for tokens that the engine has rotated itself."""
        q, k, *_ = packed
        at = torch.cat([torch.arange(n - c, n) for n, c in zip(seq_lens.tolist(), starts.diff().tolist(), strict=True)])
        cos, sin = (torch.nn.functional.pad(table[at], (0, 0, 0, 3)) for table in self.options["rope"])
        k_slc = nsa.rotate(k, cos, sin)
        return {"q": nsa.rotate(q, cos, sin), "k_slc": k_slc, "k_swa": k_slc, "rotated": True}

    def text(self, shared=None, length=0):
        """New tokens (q, k, v, gates) of a request of 120, the first ones those of another."""
        shapes = (HEADS, self.dim), (KV_HEADS, self.dim), (KV_HEADS, self.dim)
        new = [torch.randn(120, *shape).to(self.dtype) for shape in shapes]
        new.append(torch.rand(120, HEADS, 3).to(self.dtype))
        for mine, other in zip(new, shared or new, strict=True):
            mine[:length] = other[:length]
        return new

    def alone(self, text):
        """Of every token, by nsa.prefill and nsa.decode."""
        dtypes = {"dtype": self.layer.k_slc.dtype, "raw_dtype": self.dtype, **self.scales}
        cache = nsa.KVCache(1, KV_HEADS, self.dim, cfg=CFG, max_length=120, **dtypes)
        parts = []
        for begin in range(0, 120, 8):
            step = nsa.decode if begin % 16 else nsa.prefill
            parts.append(step(*(t[None, begin : begin + 8] for t in text), cache, **self.options, return_indices=True))
        return [torch.cat(part, 1)[0] for part in zip(*parts, strict=True)]

    def step(self, texts, pages, lengths, counts):
        """Of the requests' next tokens: (o, indices), rows of padding behind them."""
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        packed = []
        for i in range(4):
            rows = [text[i][n : n + c] for text, n, c in zip(texts, lengths, counts, strict=True)]
            packed.append(torch.cat([*rows, torch.full_like(texts[0][i][:3], torch.nan)]))
        table = torch.full((len(texts), 9), -1, dtype=torch.int32)
        for r, (mine, n, c) in enumerate(zip(pages, lengths, counts, strict=True)):
            while c and len(mine) * self.page < n + c:
                mine.append(self.free.pop())
            table[r, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        window, raw = table.clone(), table.clone()
        for r, n in enumerate(lengths):  # what the engine has no longer
            window[r, : max(0, n - CFG.window_size + 1) // PAGE] = -1
            raw[r, : CFG.num_compressed(n) * CFG.kernel_stride // PAGE] = -1
        seq_lens = torch.tensor([n + c for n, c in zip(lengths, counts, strict=True)], dtype=torch.int32)
        given = {"block_table_c": table} if self.own_table else {}
        given |= {"block_table_swa": window, "block_table_cmp": raw} if self.window_pages else {}
        given |= self.own(packed, starts, seq_lens, table)
        o, indices = decode_paged(
            layer=self.layer,
            **dict(zip(("q", "k", "v", "gates"), packed, strict=True))
            | {"cfg": CFG, "query_start_loc": starts, "seq_lens": seq_lens, "block_table": table, **given},
            **self.options,
            **self.scales,
            max_query_len=max(*counts, 1),
            return_indices=True,
        )
        assert (o[starts[-1] :] == 0).all() and (indices[starts[-1] :] == -1).all()
        return [(o[a:b], indices[a:b]) for a, b in pairwise(starts.tolist())]

    def own(self, packed, starts, seq_lens, table):
        return {}


class Shared(Paged):
    """One page for all of its tokens: the window and raw values are the selection's, raw keys have fewer slots."""

    def __init__(self, dtype, seed, raw_slots):
        super().__init__(dtype, False, False, seed)
        self.page, parts = 64, (64, 64, raw_slots, 16, 16)
        rows = KV_HEADS * self.dim
        memory = torch.full((64, sum(parts) * rows), torch.nan, dtype=dtype)
        parts = [part.unflatten(1, (-1, KV_HEADS, self.dim)) for part in memory.split([n * rows for n in parts], 1)]
        k, v, raw, k_c, v_c = parts
        self.layer = LayerCache(k, v, k_c, v_c, None, None, raw, None)
        self.columns = 64 // raw_slots

    def own(self, packed, starts, seq_lens, table):
        out = torch.full_like(packed[0], torch.nan)
        repeated = table.repeat_interleave(self.columns, 1)
        return self.rotated(packed, starts, seq_lens) | {"block_table_cmp": repeated, "out": out}


class RotatedBefore(Paged):
    def own(self, packed, starts, seq_lens, table):
        return self.rotated(packed, starts, seq_lens)


# As engines have them: for the layer or for each head.
SCALES = {"k_scale": torch.tensor(0.02), "v_scale": torch.tensor([0.5, 0.03])}


def assert_as_alone(parts, truths):
    """Of every token (o, indices). On a GPU chunks and steps have kernels of their own, which agree within rounding."""
    o, indices = (torch.cat(part) for part in zip(*parts, strict=True))
    if not on_gpu():
        assert torch.equal(o, truths[0]) and torch.equal(indices, truths[1])
        return
    alike = (indices == truths[1]).all(-1).all(-1)
    assert alike.float().mean() > 0.97
    tolerance = 1e-4 if o.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(o[alike], truths[0][alike], rtol=tolerance, atol=tolerance)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("dtype", "scales"),
    ((torch.float32, None), (torch.bfloat16, None), (torch.float32, SCALES), (torch.bfloat16, SCALES)),
)
@pytest.mark.parametrize(("own_table", "window_pages"), ((False, True), (True, True), (False, False)))
def test_decode_paged_gives_what_decode_gives(device, dtype, scales, own_table, window_pages):
    scales = scales and {name: here(scale) for name, scale in scales.items()}
    shares = not own_table and window_pages  # full pages are then all that a beginning needs
    run_requests(lambda seed: Paged(dtype, own_table, window_pages, seed, scales), (16, 32, 48) if shares else (0,))


@pytest.mark.bits
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("raw_slots", (64, 32))
def test_memory_can_be_shared_between_branches(device, dtype, raw_slots):
    run_requests(lambda seed: Shared(dtype, seed, raw_slots), (0, 64))


@pytest.mark.bits
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_rotation_in_the_operator_has_the_bits_of_rotate(backend, dtype):
    if dtype == torch.float16 and backend == "cpu":
        pytest.skip("the CPU backend has no float16")
    # Packed rows with padding.
    inside, before = (engine(dtype, False, True, 0) for engine in (Paged, RotatedBefore))
    texts, pages, lengths = [inside.text(), inside.text()], ([[], []], [[], []]), [0, 0]
    for counts in ([20, 3], [1, 16], [0, 5]):
        parts = [e.step(texts, mine, lengths, counts) for e, mine in zip((inside, before), pages, strict=True)]
        for got, expected in zip(*parts, strict=True):
            assert all(map(torch.equal, got, expected))
        lengths = [n + c for n, c in zip(lengths, counts, strict=True)]
    for got, expected in zip(inside.layer, before.layer, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    # Batches, with keys that branches share and without.
    dim, rope = inside.dim, nsa.rotary_tables(torch.arange(64), inside.dim)
    for shares in (True, False):
        caches = [nsa.KVCache(2, KV_HEADS, dim, cfg=CFG, max_length=64, dtype=dtype) for _ in range(2)]
        for counts in ((30, 17), (3, 0), (1, 16)):
            m, num_new = max(counts), torch.tensor(counts, dtype=torch.int32)
            q, k, v, k_slc, k_swa = (torch.randn(2, m, heads, dim).to(dtype) for heads in (HEADS, *[KV_HEADS] * 4))
            if shares:
                k_slc = k_swa = k
            for b, count in enumerate(counts):
                q[b, count:] = torch.nan
            at = (caches[0].cache_seqlens[:, None] + torch.arange(m)).clamp(max=63)
            rotated = [nsa.rotate(t, rope[0][at], rope[1][at]) for t in (q, k_slc, k_swa)]
            operator = ops.prefill if m > 16 else ops.decode
            gates, mean = torch.rand(2, m, HEADS, 3).to(dtype), ("mean", *[None] * 5)
            (o, indices), expected = (
                operator(
                    *(query, k, v, keys, v, window, v, gates, *cache.tensors(), *mean, *mean),
                    *(CFG.as_list(), None, *rope, inside_operator, num_new, None, None, None),
                )
                for cache, inside_operator, (query, keys, window) in zip(
                    caches, (True, False), ((q, k_slc, k_swa), rotated), strict=True
                )
            )
            assert torch.equal(o, expected[0]) and torch.equal(indices, expected[1])
        for got, expected in zip(caches[0].tensors(), caches[1].tensors(), strict=True):
            assert torch.equal(got, expected)


def run_requests(make, beginnings):
    """Four requests in steps of all kinds, some of which begin as the first one."""
    for seed in range(3):
        engine = make(seed)
        begins = [0, *(engine.draw.choice(beginnings) for _ in range(3))]
        first = engine.text()
        texts = [first, *(engine.text(first, begin) for begin in begins[1:])]
        expected = [engine.alone(text) for text in texts]
        got, pages, lengths = [[] for _ in texts], [[] for _ in texts], list(begins)

        def run(counts, engine=engine, texts=texts, pages=pages, lengths=lengths, got=got):
            for r, part in enumerate(engine.step(texts, pages, lengths, counts)):
                got[r].append(part)
                lengths[r] += counts[r]

        run([17, 0, 0, 0])
        run([0, 0, 0, 0])
        run([max(35, max(begins) - 17), 0, 0, 0])
        for mine, begin in zip(pages[1:], begins[1:], strict=True):
            mine.extend(pages[0][: begin // engine.page])
        while min(lengths) < 120:
            most = engine.draw.choice((1, 4, 30))
            run([min(engine.draw.randint(0, most), 120 - n) for n in lengths])
        for parts, truths, begin in zip(got, expected, begins, strict=True):
            assert_as_alone(parts, [truth[begin:] for truth in truths])


@pytest.mark.bits
def test_a_step_in_fp8(device):
    """A chunk and a decode, as a cache alone has them, with rings of other slots around."""
    dim, scales = head_dims(DIM, DIM)[0], {name: here(scale) for name, scale in SCALES.items()}
    layer = allocate(
        CFG, KV_HEADS, dim, page_size=16, num_pages=8, num_pages_c=4, num_slots=3, dtype=torch.float8_e4m3fn
    )
    assert layer.k_cmp_ring.dtype == torch.bfloat16
    layer = layer._replace(k_cmp_ring=layer.k_cmp_ring.float(), v_cmp_ring=layer.v_cmp_ring.float())
    new = [t[:20] for t in Paged(torch.float32, False, True, 0).text()]
    options = {"dtype": torch.float8_e4m3fn, "raw_dtype": torch.float32, **scales}
    cache = nsa.KVCache(1, KV_HEADS, dim, cfg=CFG, max_length=32, **options)
    for begin, end in ((0, 17), (17, 20)):
        tables = [torch.tensor([[5, 2]], dtype=torch.int32), torch.tensor([[3]], dtype=torch.int32)]
        lengths = torch.tensor([end], dtype=torch.int32)
        step = Step([0, end - begin], lengths, *tables, [1], CFG, max_length=32, page_size=16)
        part = [t[begin:end] for t in new]
        o = step.attend(layer, *part, **scales)
        assert torch.equal(o, (nsa.prefill if begin == 0 else nsa.decode)(*(t[None] for t in part), cache)[0])
    with pytest.raises(ValueError, match="k_scale: not given: a layer in float8_e4m3fn"):
        step.attend(layer, *part)


def test_decode_paged_without_a_page(device):
    engine = Paged(torch.float32, False, True, 0)
    texts, pages = [engine.text(), engine.text()], [[1], [2]]
    engine.step(texts, pages, [0, 0], [10, 10])
    before = [t.clone() for t in engine.layer]
    engine.free = [-1] * 9
    with pytest.raises(RuntimeError, match="a request found no page and its tokens were dropped"):
        engine.step(texts, pages, [10, 10], [0, 7])
    assert all(
        torch.equal(
            t,
            b,
        )
        for t, b in zip(map(torch.nan_to_num, engine.layer), map(torch.nan_to_num, before), strict=True)
    )


def test_a_wrong_decode_paged():
    engine = Paged(torch.float32, False, True, 0)
    new = [t[:5] for t in engine.text()]
    table = torch.tensor([[3, -1], [4, -1]], dtype=torch.int32)
    good = {"query_start_loc": torch.tensor([0, 2, 5], dtype=torch.int32), "block_table": table}
    good |= {"seq_lens": torch.tensor([2, 3], dtype=torch.int32), "block_table_swa": table, "block_table_cmp": table}
    decode_paged(*new, engine.layer, cfg=CFG, **good)
    stored = engine.layer._replace(
        **{n: getattr(engine.layer, n).to(torch.float8_e4m3fn) for n in engine.layer._fields[:6]}
    )
    one = torch.tensor(1.0)
    fp8 = {"layer": stored, "k_scale": one, "v_scale": one}
    without_window = engine.layer._replace(k_swa_ring=None, v_swa_ring=None)
    decode_paged(**dict(zip(("q", "k", "v", "gates"), new, strict=True)), cfg=CFG, **good, **fp8)
    for message, wrong in {
        "k_scale: given for a layer in float32: goes with float8_e4m3fn": {"k_scale": one},
        "v_scale: not given: a layer in float8_e4m3fn: goes with float8_e4m3fn": fp8 | {"v_scale": None},
        r"k_scale: \(3,\): must be one number, or 2, one for each KV head": fp8 | {"k_scale": torch.ones(3)},
        r"v_scale\[1\] = 0: must be positive and finite": fp8 | {"v_scale": torch.tensor([1.0, 0.0])},
        "layer.k_cmp_ring: float8_e4m3fn .*: expected float32 as q": fp8
        | {"layer": stored._replace(k_cmp_ring=stored.k_slc)},
        r"block_table\[1, 0\] = 3: \[0, 0\] is this page too, and the step writes to it": {
            "block_table": table[[0, 0]]
        },
        r"block_table_swa\[1, 0\] = 3: \[0, 0\] is this page too, and": {"block_table_swa": table[[0, 0]]},
        r"block_table_cmp\[1, 0\] = 3: \[0, 0\] is this page too, and": {"block_table_cmp": table[[0, 0]]},
        r"block_table_swa\[0, 0\] = 64: must be -1 or below 64": {"block_table_swa": table + 61},
        r"seq_lens\[1\] = 2: without advance it counts the new tokens too, 3": {
            "seq_lens": torch.tensor([2, 2], dtype=torch.int32)
        },
        r"query_start_loc\[2\] = 6: must not exceed the rows of the tensor, 5": {
            "query_start_loc": torch.tensor([0, 2, 6], dtype=torch.int32)
        },
        "query_start_loc: sequence 1 has 3 new tokens: at most max_query_len = 2": {"max_query_len": 2},
        r"layer.k_c: float32 \(64, 1, 2, 16\): expected the shape": {
            "block_table_c": None,
            "layer": engine.layer._replace(k_c=engine.layer.k_c[:, :1]),
        },
        r"k: float32 \(4, 2, 16\): expected the shape \(T = 5": {"k": new[1][:4]},
        "seq_lens: dtype Long: must be .* int32 for indices, lengths and tables": {
            "seq_lens": torch.tensor([2, 3]),
            "rope": engine.options["rope"],
        },
        r"query_start_loc: int32 \(2\): expected the shape \(B \+ 1 = 3\)": {
            "query_start_loc": torch.tensor([0, 5], dtype=torch.int32),
            "rope": engine.options["rope"],
        },
        r"rope_cos: float32 \(2, 8\): sequence 1 rotates a token at position 2": {
            "rope": tuple(table[:2] for table in engine.options["rope"])
        },
        "rope: 1 tensors: must be cosines and sines": {"rope": engine.options["rope"][:1]},
        r"out: float32 \(4, 4, 16\): expected the shape": {"out": new[0][:4].clone()},
        "layer.k_swa_ring: ": {"layer": engine.layer._replace(k_swa_ring=None)},
        "block_table_swa: given without layer.k_swa_ring": {"layer": without_window},
        "v_swa: another tensor than v: must be the same one": {
            "layer": without_window,
            "block_table_swa": None,
            "v_swa": new[2].clone(),
        },
        "v: another tensor than v_slc: must be the same one": {
            "layer": engine.layer._replace(v_cmp_ring=None),
            "v_slc": new[2].clone(),
        },
        "layer.v_cmp_ring: not given: must be for a cache in float8_e4m3fn": fp8
        | {"layer": stored._replace(v_cmp_ring=None)},
        r"block_table_cmp\[1, 0\] = 4: \[0, 0\] is this page too": {"block_table_cmp": table[[1, 1]]},
        r"block_table_cmp\[0, 2\] = 3: \[0, 0\] is this page too": {
            "seq_lens": torch.tensor([40, 3], dtype=torch.int32),
            "query_start_loc": torch.tensor([0, 40, 43], dtype=torch.int32),
            **dict(zip(("q", "k", "v", "gates"), (t.repeat(9, 1, 1)[:43] for t in new), strict=True)),
            **dict.fromkeys(
                ("block_table", "block_table_swa"), torch.tensor([[3, 7, 8], [4, -1, -1]], dtype=torch.int32)
            ),
            "block_table_cmp": torch.tensor([[3, 7, 3], [4, -1, -1]], dtype=torch.int32),
        },
    }.items():
        arguments = dict(zip(("q", "k", "v", "gates"), new, strict=True)) | {"layer": engine.layer, "cfg": CFG}
        with pytest.raises(ValueError, match=f"^(decode_paged: )?{message}"):
            decode_paged(**arguments | good | wrong)
