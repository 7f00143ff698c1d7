"""Context parallelism on the ranks of torchrun: what bench/scale/context_parallel.py runs without --simulated-ranks."""

import json
import os
import statistics
import sys
import time
from contextlib import contextmanager
from datetime import date, timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import nsa
from nsa.parallel import ContextParallel
from nsa.parallel.attention import heads_at_once
from nsa.parallel.layout import LAYOUTS, chunk_owners, divide
from sampled_rows import Row, by_oracle
from timing import DTYPES, device_name, mark, median_of, milliseconds, time_chunk, wait

NAMES = ("q", "k", "v", "gates", "d_o")
RESULTS = ("o", "d_q", "d_k", "d_v", "d_gates")
GIB = 2**30
SECONDS = 3  # of repeats of one measurement
# How far a result of 16 bits may be from float64's, and two of them from each other: norm of the difference over norm.
ALLOWED = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
# The gap of importances (sampled_rows.Found) that rounding explains.
ALLOWED_GAP = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}


class Ranks:
    """This process among those of torchrun, with its device."""

    def __init__(self, device):
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backends = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backends, timeout=timedelta(minutes=2))
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gathered(self, value):
        """Every rank's, a number; on the host."""
        found = [torch.zeros(1, dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([float(value)], dtype=torch.float64))
        return [one.item() for one in found]

    def largest(self, value):
        """Over the ranks."""
        return max(self.gathered(value))

    def all(self, value):
        """Returns whether the value is true on every rank."""
        return min(self.gathered(value)) > 0

    def free_gib(self):
        """On the fullest device; None on the CPU."""
        if self.device.type != "cuda":
            return None
        torch.cuda.empty_cache()
        return -self.largest(-torch.cuda.mem_get_info()[0] / GIB)


class Problem:
    """Inputs of a sequence in parts, each of which any rank can generate."""

    def __init__(self, options, tokens, parts, device, dtype=None):
        self.tokens, self.parts, self.device = tokens, parts, device
        self.dtype = DTYPES[options.dtype] if dtype is None else dtype
        heads, kv_heads, dim = options.heads, options.kv_heads, options.head_dim
        shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim), (heads, 3), (heads, dim))
        self.shapes = dict(zip(NAMES, shapes, strict=True))

    def part(self, name, i):
        """Part i of a tensor."""
        seed = NAMES.index(name) + len(NAMES) * i
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (1, self.tokens // self.parts, *self.shapes[name])
        t = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return t.sigmoid() if name == "gates" else t

    def whole(self, name):
        """The tensor over all ranks."""
        return torch.cat([self.part(name, i) for i in range(self.parts)], 1)

    def local(self, name, cp):
        """The rows of this rank's chunks."""
        share = self.parts // len(cp.owners)
        return torch.cat([self.part(name, c * share + i) for c in cp.own for i in range(share)], 1)


def run(call, inputs, d_o):
    """The results, by name."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    o = call(*leaves)
    return dict(zip(RESULTS, (o.detach(), *torch.autograd.grad(o, leaves, d_o)), strict=True))


def timed(ranks, call, inputs, d_o, repeats, warm=True):
    """Milliseconds of forward, backward and both on the slowest rank and on each, medians; and the last results.

    A rank that ends its backward first waits for the other one in its next forward: the slowest forward and the slowest
    backward together count that twice, both_ms counts it once.

    A first call does not count. Of --repeats there are as many as SECONDS allow, at least one. Short ones follow each
    other without a wait, after one more that does not count: the host's part of a call overlaps with queued device
    work, as in a model.
    """
    marks, results = [], None

    def once():
        nonlocal results
        results = None  # memory
        leaves = [t.detach().requires_grad_() for t in inputs]
        begin = mark(ranks.device)
        o = call(*leaves)
        between = mark(ranks.device)
        gradients = torch.autograd.grad(o, leaves, d_o)
        marks.append((begin, between, mark(ranks.device)))
        results = dict(zip(RESULTS, (o.detach(), *gradients), strict=True))

    if warm:
        once()
    wait(ranks.device)
    begin = time.monotonic()
    once()
    wait(ranks.device)
    first = ranks.largest(time.monotonic() - begin)
    count = max(1, min(repeats, int(SECONDS / first)))
    for _ in range(count + 1 if first < SECONDS / 4 else count - 1):
        once()
    wait(ranks.device)
    found = {"repeats": count, "calls": len(marks)}
    for name, begin, end in (("forward", 0, 1), ("backward", 1, 2), ("both", 0, 2)):
        each = ranks.gathered(statistics.median(milliseconds(m[begin], m[end]) for m in marks[-count:]))
        found |= {f"{name}_ms": max(each), f"{name}_ms_of_ranks": each}
    return found, results


@contextmanager
def waits(device):
    """A list of marks before and after each collective that the device waits for."""
    spans, gather, exchange = [], dist.all_gather_into_tensor, dist.all_to_all_single

    def timed_wait(function, *arguments, **named):
        begin = mark(device)
        result = function(*arguments, **named)
        spans.append((begin, mark(device)))
        return result

    class Work:
        def __init__(self, work):
            self.wait = partial(timed_wait, work.wait)

    dist.all_gather_into_tensor = lambda *arguments, **named: Work(gather(*arguments, **named))
    dist.all_to_all_single = partial(timed_wait, exchange)
    try:
        yield spans
    finally:
        dist.all_gather_into_tensor, dist.all_to_all_single = gather, exchange


def attention_alone(ranks, problem, cp, at_once, inputs, d_o, repeats):
    """Milliseconds of the rank's `nsa_attention` calls with all keys there: nothing is sent."""
    whole = [problem.whole(name) for name in ("k", "v")]
    whole += [nsa.compress(t, nsa.CompressionWeights("mean"), nsa.NSAConfig()) for t in whole]
    chunks = divide(problem.tokens, len(cp.owners), nsa.NSAConfig(), None)
    size, sums = problem.tokens // len(cp.owners), [0.0, 0.0]
    kv_heads = whole[0].shape[2]
    ratio = inputs[0].shape[2] // kv_heads
    for slot, c in enumerate(cp.own):
        own = [t[:, slot * size : (slot + 1) * size] for t in (inputs[0], inputs[3], d_o)]
        for first in range(0, kv_heads, at_once):
            keys = [t[:, :, first : first + at_once] for t in whole]
            queries = [t[:, :, first * ratio : (first + at_once) * ratio] for t in own]
            medians = median_of(partial(time_chunk, chunks[c], keys, queries, ranks.device), repeats)
            sums = [total + one for total, one in zip(sums, medians, strict=True)]
    found = {}
    for name, time_of in zip(("forward", "backward", "both"), (*sums, sum(sums)), strict=True):
        each = ranks.gathered(time_of)
        found |= {f"{name}_ms": max(each), f"{name}_ms_of_ranks": each}
    return found


def difference(found, expected):
    """Norm of the difference over the norm."""
    apart = size = 0.0
    for a, b in zip(found.flatten().split(2**28), expected.flatten().split(2**28), strict=True):
        apart += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    return (apart / size) ** 0.5 if size else apart**0.5


def sampled(ranks, problem, cp, at_once, count):
    """The differences of some rows from float64, their selected blocks, and whether all of it is within bounds.

    dO is zero elsewhere, so that all of dK and dV comes of these rows.
    """
    cfg, rows = nsa.NSAConfig(), []
    leaves = [problem.local(name, cp).requires_grad_() for name in NAMES[:4]]
    positions = cp.positions(problem.tokens)
    size = len(positions) // len(cp.own)
    generator = torch.Generator().manual_seed(ranks.rank)
    within = [0, size - 1, *torch.randint(size, (max(0, count - 2),), generator=generator).tolist()][:count]
    local = sorted({slot * size + row for slot in range(len(cp.own)) for row in within})
    own_d_o = problem.local("d_o", cp)[:, local]
    o, indices = nsa.parallel.native_sparse_attention(*leaves, cp, kv_heads_at_once=at_once, return_indices=True)
    d_o = torch.zeros_like(o)
    d_o[:, local] = own_d_o
    results = dict(zip(RESULTS[1:], torch.autograd.grad(o, leaves, d_o), strict=True))
    results["o"] = o.detach()
    for i, row in enumerate(local):
        q, gates, chosen = (t[0, row].detach().clone() for t in (leaves[0], leaves[3], indices))
        rows.append(Row(int(positions[row]), q, gates, own_d_o[0, i], chosen))
    kept = {name: results[name][0, local] for name in ("o", "d_q", "d_gates")}
    kept |= {name: results[name] for name in ("d_k", "d_v")}
    del leaves, o, indices, results, d_o  # memory
    oracle = by_oracle(rows, problem.whole("k")[0], problem.whole("v")[0], cfg)
    found = {name: difference(kept[name], getattr(oracle, name)) for name in ("o", "d_q", "d_gates")}
    for name in ("d_k", "d_v"):
        total = getattr(oracle, name)[None]
        dist.all_reduce(total)
        found[name] = difference(kept[name], cp.shard(total))
    found = {name: ranks.largest(value) for name, value in found.items()}
    choice = {"blocks_differ": int(sum(ranks.gathered(oracle.blocks_differ)))}
    choice["largest_gap"] = ranks.largest(oracle.largest_gap)
    fine = max(found.values()) <= ALLOWED[problem.dtype] and choice["largest_gap"] <= ALLOWED_GAP[problem.dtype]
    return {"rows": int(sum(ranks.gathered(len(rows)))), "difference": found, **choice, "within_bounds": fine}


def enough(ranks, problem, cp):
    """None, or why the device's memory will not do (an estimate: bytes of a dozen tensors like q, and keys)."""
    heads, dim = problem.shapes["q"]
    rows = problem.tokens if cp is None else len(cp.own) * (problem.tokens // len(cp.owners))
    width = torch.empty((), dtype=problem.dtype).element_size()
    keys = problem.tokens * problem.shapes["k"][0] * dim * width
    needed, free = (rows * heads * dim * width * (9 if cp is None else 12) + 8 * keys) / GIB + 2, ranks.free_gib()
    return f"needs about {needed:.0f} GiB, {free:.0f} are free" if free is not None and free < needed else None


class Bench:
    """The rows of a run, in a file as they come."""

    def __init__(self, ranks, options):
        self.ranks, self.options, self.begin, self.failed = ranks, options, time.monotonic(), False
        settings = ("heads", "kv_heads", "head_dim", "dtype", "repeats")
        self.result = {name: getattr(options, name) for name in settings}
        self.result |= {"ranks": ranks.size, "device_name": device_name(ranks.device), "date": date.today().isoformat()}
        self.result |= {"commit": os.environ.get("COMMIT"), "torch": torch.__version__, "rows": [], "not_run": []}

    def left(self, what):
        """Returns whether there is time for another row; --seconds counts on the slowest rank."""
        late = self.ranks.largest(time.monotonic() - self.begin) > self.options.seconds
        if late:
            self.skip(what, f"{self.options.seconds} s were over")
        return not late

    def skip(self, what, why):
        """Says so."""
        self.result["not_run"].append({"what": what, "why": why})
        self.save()
        if self.ranks.rank == 0:
            print(f"{what}: not run: {why}", flush=True)

    def save(self):
        """Writes the file."""
        if self.ranks.rank or not self.options.json:
            return
        unfinished = Path(f"{self.options.json}.tmp")
        unfinished.write_text(json.dumps(self.result, indent=1) + "\n")
        unfinished.rename(self.options.json)

    def add(self, row):
        """A row."""
        self.result["rows"].append(row)
        self.failed |= not row.get("sampled", {}).get("within_bounds", True)
        self.failed |= not row.get("vs_one_gpu", {}).get("within_bounds", True)
        self.failed |= not row.get("same_bits", True)
        self.save()
        if self.ranks.rank == 0:
            parts = [f"{row['tokens']} tokens {row['layout']} {row['kv_heads_at_once']} KV heads at once:"]
            parts += [f"{name} {row[name]:.1f}" for name in row if name.endswith(("_ms", "_gib"))]
            for name in ("alone", "attention_alone", "vs_one_gpu", "sampled", "same_bits"):
                parts += [f"{name} {json.dumps(row[name])}"] if name in row else []
            print(*parts, flush=True)

    def vs_one_gpu(self, problem, cp, results):
        """Times of one device with the global sequence, all devices at once, and the difference of the results."""
        ranks = self.ranks
        *inputs, d_o = (problem.whole(name) for name in NAMES)
        found, expected = timed(ranks, nsa.native_sparse_attention, inputs, d_o, self.options.repeats)
        apart = {name: ranks.largest(difference(t, cp.shard(expected[name]))) for name, t in results.items()}
        bound = max(apart.values()) <= ALLOWED[problem.dtype]
        return {"alone": found, "vs_one_gpu": {"difference": apart, "within_bounds": bound}}

    def row(self, problem, cp, at_once, parts, expected=None):
        """A row: times, and of `parts` the share of attention, a backward that runs the forward again, and the checks.

        `expected`: results whose bits these must have. Returns the results, or None where a check needs their memory.
        """
        ranks, repeats = self.ranks, self.options.repeats
        row = {"tokens": problem.tokens, "layout": cp.layout, "kv_heads_at_once": at_once}
        *inputs, d_o = (problem.local(name, cp) for name in NAMES)
        cuda = ranks.device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

        def call(*tensors):
            return nsa.parallel.native_sparse_attention(*tensors, cp, kv_heads_at_once=at_once)

        with waits(ranks.device) as spans:
            found, results = timed(ranks, call, inputs, d_o, repeats)
        row |= found
        if cuda:
            row["peak_gib"] = ranks.largest(torch.cuda.max_memory_allocated() / GIB)
            row["reserved_gib"] = ranks.largest(torch.cuda.max_memory_reserved() / GIB)
        last = spans[-(len(spans) // found["calls"]) :]  # of the last call
        row["waited_ms"] = ranks.largest(sum(milliseconds(*span) for span in last))
        if expected is not None:
            row["same_bits"] = ranks.all(all(torch.equal(t, expected[name]) for name, t in results.items()))
        if "attention" in parts:
            row["attention_alone"] = attention_alone(ranks, problem, cp, at_once, inputs, d_o, found["repeats"])
        if "checks" not in parts:
            self.add(row)
            return results
        again = partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)
        again = timed(ranks, again, inputs, d_o, repeats, warm=found["repeats"] > 1)
        row["recomputed_backward_ms"] = again[0]["backward_ms"]
        del again
        del inputs, d_o
        if problem.tokens <= self.options.alone:
            if why := enough(ranks, problem, None):
                self.skip(f"{problem.tokens} tokens on one device", why)
            else:
                row |= self.vs_one_gpu(problem, cp, results)
        del results
        if self.options.rows:
            row["sampled"] = sampled(ranks, problem, cp, at_once, self.options.rows)
        self.add(row)
        return None

    def heads_in_turn(self):
        """For each length a row for each number of KV heads at once, and whether their bits are those of the first."""
        for tokens in sorted(self.options.tokens):
            problem = Problem(self.options, tokens, 2 * self.ranks.size, self.ranks.device)
            cp, expected = ContextParallel(dist.group.WORLD), None
            for at_once in self.options.at_once:
                if self.left(f"{tokens} tokens, {at_once} KV heads at once"):
                    found = self.row(problem, cp, at_once, ("attention",), expected)
                    expected = found if expected is None else expected
                    del found  # memory

    def numbers_at_once(self, tokens):
        """All KV heads, then the default where that is another number, and at the longest length one."""
        options, kv_heads = self.options, self.options.kv_heads
        numbers = [kv_heads]
        if self.ranks.device.type == "cuda":
            numbers.append(heads_at_once(tokens // (2 * self.ranks.size) * (options.heads // kv_heads), kv_heads))
        return dict.fromkeys([*numbers, 1] if tokens == max(options.tokens) else numbers)

    def times(self):
        """Rows for each length: all KV heads at once, other numbers of them; at the longest also the other layout."""
        options, ranks = self.options, self.ranks
        longest = max(options.tokens)
        for tokens in sorted(options.tokens):
            problem = Problem(options, tokens, 2 * ranks.size, ranks.device)
            for layout in LAYOUTS:
                cp = ContextParallel(dist.group.WORLD, layout)
                for at_once in self.numbers_at_once(tokens):
                    first = at_once == options.kv_heads
                    if layout != "head_tail" and not (first and tokens == longest):
                        continue
                    parts = ("attention", "checks")[: 1 + first] if layout == "head_tail" else ()
                    what = f"{tokens} tokens, {layout}, {at_once} KV heads at once"
                    if not self.left(what):
                        continue
                    if why := enough(ranks, problem, cp):
                        self.skip(what, why)
                        continue
                    try:
                        self.row(problem, cp, at_once, parts)
                    except torch.OutOfMemoryError as error:  # on all ranks, which have equally much to keep
                        self.failed = True
                        self.skip(what, str(error).split(". ")[0])

    def bits(self):
        """Compares the bits of every run with those of one rank with as many chunks."""
        options, ranks = self.options, self.ranks
        types = ("bfloat16", "float16") if ranks.device.type == "cuda" else (options.dtype,)
        for tokens in options.tokens:
            for name in types:
                problem = Problem(options, tokens, options.chunks, ranks.device, DTYPES[name])
                for layout in LAYOUTS:
                    what = f"{tokens} tokens, {layout}, {name}"
                    if not self.left(what):
                        continue
                    shared = ContextParallel(dist.group.WORLD, layout, options.chunks)
                    *inputs, d_o = (problem.local(t, shared) for t in NAMES)
                    call = partial(nsa.parallel.native_sparse_attention, cp=shared)
                    found = run(call, inputs, d_o)
                    repeated = True
                    for _ in range(options.bits - 1):
                        again = run(call, inputs, d_o)
                        repeated = repeated and all(torch.equal(t, found[n]) for n, t in again.items())
                    single = ContextParallel(None, layout, options.chunks)
                    call = partial(nsa.parallel.native_sparse_attention, cp=single)
                    *inputs, d_o = (problem.whole(t) for t in NAMES)
                    expected = run(call, inputs, d_o)
                    equal = {n: ranks.all(torch.equal(t, shared.shard(expected[n]))) for n, t in found.items()}
                    row = {"tokens": tokens, "layout": layout, "dtype": name, "chunks": options.chunks}
                    row |= {"runs": options.bits, "same_in_all_runs": ranks.all(repeated), "as_one_rank": equal}
                    self.failed |= not (row["same_in_all_runs"] and all(equal.values()))
                    self.result["rows"].append(row)
                    self.save()
                    if ranks.rank == 0:
                        print(json.dumps(row), flush=True)


def main(options):
    """Runs on one rank; returns the exit code."""
    ranks = Ranks(options.device)
    most = options.chunks if options.bits else 2 * ranks.size
    for tokens in options.tokens:
        try:
            for layout in LAYOUTS:
                chunk_owners(layout, ranks.size, options.chunks if options.bits else None)
            divide(tokens, most, nsa.NSAConfig(), None)
        except ValueError as error:
            sys.exit(f"context_parallel.py: {error}")
    bench = Bench(ranks, options)
    run_all = bench.bits if options.bits else bench.heads_in_turn if options.at_once else bench.times
    run_all()
    bench.save()
    dist.barrier()
    # The end of a process group joins gloo's threads, which may wait for the interpreter. So leave while it lives.
    os._exit(int(bench.failed))
