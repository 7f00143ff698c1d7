"""A small engine: requests come, share prefixes, are preempted and guess ahead; all memory is counted."""

import random
from dataclasses import dataclass, field

import torch

import nsa
from nsa.serving import Step, allocate, compressed_page_size, fork

CFG = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, window_size=20)
HEADS, KV_HEADS, DIM, VOCAB = 4, 2, 16, 60
PAGE, CHUNK, MAX_LENGTH, LAYERS = 16, 64, 320, 2
LONGEST = 36  # tokens that a request may want
PAGE_C = compressed_page_size(CFG, PAGE)


class Model:
    """Two layers without a product over the batch: the bits of a token do not depend on the rest of the batch."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)

        def table(*shape):
            return [torch.randn(VOCAB, *shape, generator=generator) for _ in range(LAYERS)]

        self.q, self.k, self.v = table(HEADS, DIM), table(KV_HEADS, DIM), table(KV_HEADS, DIM)
        self.gates = [t.sigmoid() for t in table(HEADS, 3)]
        self.rope = nsa.rotary_tables(torch.arange(MAX_LENGTH), DIM)
        shape = (KV_HEADS, CFG.kernel_size, DIM)
        self.weights = nsa.CompressionWeights(
            "linear",
            torch.randn(shape, generator=generator),
            torch.randn(KV_HEADS, CFG.kernel_size * DIM, DIM, generator=generator) / 12,
        )

    def next_tokens(self, tokens, positions, attend):
        """`attend(layer, q, k, v, gates)`. The next token behind each of the packed ones."""
        tokens, scores = torch.tensor(tokens), 0
        for layer in range(LAYERS):
            x = (table[layer][tokens] for table in (self.q, self.k, self.v, self.gates))
            scores = scores + attend(layer, *x).flatten(1)[:, :VOCAB]
            tokens = (scores.argmax(1) + torch.tensor(positions)) % VOCAB
        return tokens.tolist()


class Pages:
    """Pages with the number of their holders."""

    def __init__(self, count):
        self.holders, self.free = [0] * count, list(range(count))

    def take(self, count):
        pages = [self.free.pop() for _ in range(count)]
        return self.share(pages)

    def share(self, pages):
        for page in pages:
            self.holders[page] += 1
        return pages

    def give_back(self, pages):
        for page in pages:
            self.holders[page] -= 1
            assert self.holders[page] >= 0
            if self.holders[page] == 0:
                self.free.append(page)


@dataclass(eq=False)
class Request:
    prompt: tuple
    wanted: int
    tokens: list = field(default_factory=list)  # the prompt and what came
    seen: int = 0  # of them, in the cache
    slot: int | None = None
    pages: list = field(default_factory=list)
    pages_c: list = field(default_factory=list)
    swapped: list | None = None

    def done(self):
        return len(self.tokens) - len(self.prompt) >= self.wanted


class Engine:
    def __init__(self, model, truth, prefixes, seed, slots=10, pages=64):
        self.model, self.truth, self.prefixes, self.draw = model, truth, prefixes, random.Random(seed)
        self.pages, self.pages_c, self.slots = Pages(pages), Pages(pages // 2), list(range(slots))
        sizes = {"page_size": PAGE, "num_pages": pages, "num_pages_c": pages // 2, "num_slots": slots}
        self.layers = [allocate(CFG, KV_HEADS, DIM, **sizes) for _ in range(LAYERS)]
        self.waiting, self.running, self.cached = [], [], {}
        self.counts = dict.fromkeys(("chunks", "decodes", "recomputed", "swapped", "forks", "rejected", "accepted"), 0)

    def run(self, steps):
        """Requests come for `steps` steps, then all are finished; returns them."""
        arrived = []
        for _ in range(steps):
            if len(self.waiting) < 4 and self.draw.random() < 0.5:
                arrived.append(Request(self.draw.choice(list(self.truth)), self.draw.randrange(1, LONGEST + 1)))
                self.waiting.append(arrived[-1])
            self.step()
            self.count()
        while self.waiting or self.running:
            self.step()
        while self.cached:
            self.forget()
        return arrived

    def count(self):
        """Every page has the holders that hold it."""
        for pages, name in ((self.pages, "pages"), (self.pages_c, "pages_c")):
            held = [page for r in (*self.running, *self.cached.values()) for page in getattr(r, name)]
            assert [held.count(page) for page in range(len(pages.holders))] == pages.holders
            assert sorted(pages.free) == [page for page, holders in enumerate(pages.holders) if not holders]

    # Memory

    def room(self, request, length):
        """Gives the request pages for `length` tokens, if there are."""
        need = -(-length // PAGE) - len(request.pages)
        need_c = -(-CFG.num_compressed(length) // PAGE_C) - len(request.pages_c)
        if need > len(self.pages.free) or need_c > len(self.pages_c.free):
            return False
        request.pages += self.pages.take(max(0, need))
        request.pages_c += self.pages_c.take(max(0, need_c))
        return True

    def leave(self, request):
        self.pages.give_back(request.pages)
        self.pages_c.give_back(request.pages_c)
        request.pages, request.pages_c = [], []
        self.slots.append(request.slot)
        request.slot, request.seen = None, 0

    def tables(self, requests):
        def table(rows, width):
            return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)

        width, width_c = -(-MAX_LENGTH // PAGE), -(-CFG.num_compressed(MAX_LENGTH) // PAGE_C)
        return table([r.pages for r in requests], width), table([r.pages_c for r in requests], width_c)

    def copy(self, parent, child, length):
        """Forks the parent after `length` tokens into the child, which has a slot."""
        full, full_c = length // PAGE, CFG.num_compressed(length) // PAGE_C
        child.pages, child.pages_c = self.pages.share(parent.pages[:full]), self.pages_c.share(parent.pages_c[:full_c])
        if not self.room(child, length):
            self.pages.give_back(child.pages)
            self.pages_c.give_back(child.pages_c)
            child.pages, child.pages_c = [], []
            return False
        self.fork(parent, child, length)
        child.seen = length
        self.counts["forks"] += 1
        return True

    def fork(self, parent, child, length):
        for layer in self.layers:
            fork(layer, parent.slot, child.slot, *self.tables([parent, child]), length, parent.seen, CFG)

    # Requests

    def admit(self, request):
        """A slot, and what is there of its prompt already."""
        request.slot = self.slots.pop(self.draw.randrange(len(self.slots)))
        request.tokens = request.tokens or list(request.prompt)
        if request.swapped is not None:
            seen, pages, pages_c, rings = request.swapped
            if not self.room(request, seen):
                self.slots.append(request.slot)
                request.slot = None
                return False
            for layer, kept, kept_c, ring in zip(self.layers, pages, pages_c, rings, strict=True):
                for store, old in zip(layer[:2], kept, strict=True):
                    store[request.pages] = old
                for store, old in zip(layer[2:4], kept_c, strict=True):
                    store[request.pages_c] = old
                for store, old in zip(layer[4:], ring, strict=True):
                    store[request.slot] = old
            request.seen, request.swapped = seen, None
        else:
            for prefix, parent in self.cached.items():
                if request.prompt[: len(prefix)] == prefix and len(request.tokens) > len(prefix):
                    self.copy(parent, request, len(prefix))
                    break
        self.running.append(request)
        return True

    def preempt(self, request):
        self.running.remove(request)
        if self.draw.random() < 0.5 and request.seen:
            used = request.pages[: -(-request.seen // PAGE)]
            used_c = request.pages_c[: -(-CFG.num_compressed(request.seen) // PAGE_C)]
            pages = [[store[used].clone() for store in layer[:2]] for layer in self.layers]
            pages_c = [[store[used_c].clone() for store in layer[2:4]] for layer in self.layers]
            rings = [[store[request.slot].clone() for store in layer[4:]] for layer in self.layers]
            request.swapped = (request.seen, pages, pages_c, rings)
            self.counts["swapped"] += 1
        else:
            self.counts["recomputed"] += 1
        self.leave(request)
        self.waiting.insert(0, request)

    def remember(self, request):
        """Keeps a prefix that the request has just come to, in a slot of its own."""
        prefix = tuple(request.tokens[: request.seen])
        if prefix not in self.prefixes or prefix in self.cached or len(self.slots) < 3:
            return
        kept = Request(prefix, 0, list(prefix), slot=self.slots.pop())
        if self.copy(request, kept, len(prefix)):
            self.cached[prefix] = kept
        else:
            self.slots.append(kept.slot)

    def forget(self):
        """Gives up a prefix."""
        prefix = self.draw.choice(list(self.cached))
        self.leave(self.cached.pop(prefix))

    def new_tokens(self, request):
        """What the request does next: a chunk of its tokens, or the last one and guesses."""
        left = request.tokens[request.seen :]
        if len(left) > 1:
            stops = [len(p) for p in self.prefixes if request.seen < len(p) and request.prompt[: len(p)] == p]
            return left[: min([CHUNK, *(stop - request.seen for stop in stops)])]
        room = min(7, request.wanted - (len(request.tokens) - len(request.prompt)) - 1)
        guesses = self.truth[request.prompt][len(request.tokens) - len(request.prompt) :]
        guesses = list(guesses[: self.draw.randrange(room + 1) if self.draw.random() < 0.4 and room > 0 else 0])
        if guesses and self.draw.random() < 0.5:
            at = self.draw.randrange(len(guesses))
            guesses[at] = (guesses[at] + 1 + self.draw.randrange(VOCAB - 1)) % VOCAB
        return left + guesses

    def step(self):
        while self.waiting and self.slots and self.draw.random() < 0.7:
            if not self.admit(self.waiting[0]):
                break
            self.waiting.pop(0)
        if self.running and self.draw.random() < 0.03:
            self.preempt(self.draw.choice(self.running))
        if self.cached and (not self.slots or self.draw.random() < 0.01):
            self.forget()
        batch, new = [], []
        for request in list(self.running):
            tokens = self.new_tokens(request)
            if request in self.running and self.draw.random() < 0.9:
                if self.room(request, request.seen + len(tokens)):
                    batch.append(request)
                    new.append(tokens)
                elif self.cached:
                    self.forget()
                elif request is not self.running[0]:
                    self.preempt(request)
        if not batch:
            return
        starts = [0]
        for tokens in new:
            starts.append(starts[-1] + len(tokens))
        positions = [r.seen + i for r, tokens in zip(batch, new, strict=True) for i in range(len(tokens))]
        mapping = [
            r.pages[p // PAGE] * PAGE + p % PAGE
            for r, tokens in zip(batch, new, strict=True)
            for p in range(r.seen, r.seen + len(tokens))
        ]
        step = Step(
            starts,
            torch.tensor([r.seen + len(tokens) for r, tokens in zip(batch, new, strict=True)], dtype=torch.int32),
            *self.tables(batch),
            self.slots_of(batch),
            CFG,
            max_length=MAX_LENGTH,
            page_size=PAGE,
            slot_mapping=torch.tensor(mapping),
        )
        weights = {"weights_k": self.model.weights, "weights_v": self.model.weights, "rope": self.model.rope}
        out = self.model.next_tokens(
            [token for tokens in new for token in tokens],
            positions,
            lambda layer, *x: step.attend(self.layers[layer], *x, **weights),
        )
        step.check()
        for request, tokens, start in zip(batch, new, starts, strict=False):
            self.take(request, tokens, out[start : start + len(tokens)])

    def slots_of(self, batch):
        return [request.slot for request in batch]

    def count_right(self, guesses, out):
        """How many guesses came out, each behind right ones."""
        right = 0
        while right < len(guesses) and guesses[right] == out[right]:
            right += 1
        return right

    def take(self, request, tokens, out):
        """The tokens that came out behind `tokens`; of guesses those that are right."""
        known = len(request.tokens) - request.seen
        self.counts["chunks" if len(tokens) > 16 else "decodes"] += 1
        if len(tokens) < known:
            request.seen += len(tokens)
            return self.remember(request)
        right = self.count_right(tokens[known:], out[known - 1 :])
        self.counts["accepted"] += right
        self.counts["rejected"] += len(tokens) - known - right
        request.seen += known + right  # the others are taken back
        request.tokens += out[known - 1 : known + right]
        self.remember(request)
        if request.done():
            self.running.remove(request)
            self.leave(request)
        return None
