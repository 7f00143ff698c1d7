"""nsa.replay: what generation selected is recorded, and training attends to it."""

import json
import zlib

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import nsa
from models import padded, sparse, tokens
from nsa.replay import SelectionRecord, collect, record, replay

NEW = 24


def rollout(model, prompts, **options):
    """Prompts padded on the left, continued by sampling: sequences, mask, log-probabilities of the new tokens."""
    ids, mask = padded(prompts, "left")
    given = {"max_new_tokens": NEW, "do_sample": True, "return_dict_in_generate": True, "output_logits": True} | options
    with record(model):
        out = model.generate(ids, attention_mask=mask, **given)
    mask = torch.nn.functional.pad(mask, (0, out.sequences.shape[1] - ids.shape[1]), value=1)
    return out, mask, ids.shape[1]


def log_probabilities(logits, ids):
    return logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]


@pytest.fixture
def prompts():
    return [tokens(n) for n in (150, 70, 3)]


@pytest.mark.parametrize("share_kv", (False, True))
def test_training_attends_to_what_was_selected(prompts, share_kv):
    model = sparse("llama", {"share_kv": share_kv})
    out, mask, longest = rollout(model, prompts)
    records = collect(out.cache)
    lengths = mask.sum(1).tolist()
    assert [len(one) for one in records] == [length - 1 for length in lengths]  # the last token was not fed back
    sampled = log_probabilities(torch.stack(out.logits, 1), out.sequences[:, longest:])
    model.train()
    with replay(model, records, lengths, compare=True) as state:
        logits = model(out.sequences, attention_mask=mask, use_cache=False).logits
        found = log_probabilities(logits[:, longest - 1 : -1], out.sequences[:, longest:])
        found.sum().backward()
    assert (found - sampled).abs().max() < 1e-5
    layer = model.model.layers[0].self_attn
    assert layer.q_proj.weight.grad.abs().sum() > 0 and layer.replayed is None
    for different, compared in state.by_layer():
        assert compared == sum(lengths) * 2
        assert different <= len(lengths) * 2  # the last tokens, which attend to the forced blocks


def test_a_selection_is_a_set(prompts):
    """A record of another program may have blocks in its own order, and one twice: attention is the same."""
    model = sparse("llama")
    out, mask, _ = rollout(model, prompts)
    lengths, found, results = mask.sum(1).tolist(), [], []
    recorded = collect(out.cache)
    for records in (
        recorded,
        [SelectionRecord(one.indices.flip(-1), one.cfg) for one in recorded],
        [SelectionRecord(one.indices.where(one.indices >= 0, one.indices[..., :1]), one.cfg) for one in recorded],
    ):
        with torch.no_grad(), replay(model, records, lengths, compare=True) as state:
            results.append(model(out.sequences, attention_mask=mask, use_cache=False).logits)
        found.append(state.by_layer())
    assert found[1] == found[2] == found[0] and found[0][0][0] < 7
    assert all((result - results[0]).abs().max() < 1e-5 for result in results)


def test_other_blocks_than_the_importance_selects(prompts):
    """The forward depends on the record: with the blocks of other weights its results are another model's."""
    model = sparse("llama")
    out, mask, _ = rollout(model, prompts)
    records, lengths = collect(out.cache), mask.sum(1).tolist()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.phi_k.w1.add_(torch.randn_like(layer.self_attn.phi_k.w1))
        with replay(model, records, lengths, compare=True) as state:
            replayed = model(out.sequences, attention_mask=mask, use_cache=False).logits
        own = model(out.sequences, attention_mask=mask, use_cache=False).logits
    assert min(different for different, _ in state.by_layer()) > 50
    assert (replayed - own)[mask.bool()].abs().max() > 1e-3


def test_padded_and_packed_batches_agree(prompts):
    model = sparse("llama")
    out, mask, _ = rollout(model, prompts)
    records, lengths = collect(out.cache), mask.sum(1).tolist()
    packed = out.sequences[mask.bool()][None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad(), replay(model, records, lengths):
        padded = model(out.sequences, attention_mask=mask, use_cache=False).logits[mask.bool()]
        torch.testing.assert_close(model(packed, position_ids=positions, use_cache=False).logits[0], padded)


def test_rejected_drafts_leave_no_trace(prompts):
    model = sparse("llama")
    prompt = [prompts[0].repeat(2)[:120]]
    plain, _, _ = rollout(model, prompt, do_sample=False)
    drafted, _, _ = rollout(model, prompt, do_sample=False, prompt_lookup_num_tokens=5)
    assert torch.equal(plain.sequences, drafted.sequences)
    (left,), (right,) = collect(plain.cache), collect(drafted.cache)
    tokens = min(len(left), len(right))
    assert torch.equal(left.indices[:, :tokens], right.indices[:, :tokens])


def test_chunks_of_a_prompt(prompts):
    model = sparse("llama")
    ids = prompts[0][None]
    with record(model), torch.no_grad():
        whole, parts = DynamicCache(config=model.config), DynamicCache(config=model.config)
        model(ids, cache=whole)
        for chunk in ids.split((64, 1, 70, 15), 1):
            model(chunk, cache=parts)
    (left,), (right,) = collect(whole), collect(parts)
    assert len(left) == ids.shape[1] and torch.equal(left.indices, right.indices)


@pytest.mark.parametrize("page_size", (None, 16))
def test_rows_of_a_cache_keep_their_selections(page_size):
    """Forked, cropped, repeated and grown."""
    layer = nsa.NativeSparseAttention(32, 4, 2, 16, cfg=nsa.NSAConfig(16, 8, 16, 4, window_size=32)).eval()
    layer.record_selections = True
    x = torch.randn(2, 150, 32)
    with torch.no_grad():
        expected = layer(x, return_indices=True)[1]
        cache = layer.make_cache(3, 160, page_size=page_size)
        cache.reserve(160)
        layer(torch.cat((x[:, :90], x[:1, :90])), cache=cache, num_new=torch.tensor([90, 90, 0], dtype=torch.int32))
        cache.release(2)
        cache.fork(1, 2, 85)
        cache.crop([80, 85, 85])
        cache.select([2, 0])
        cache.grow(320)
        cache.reserve(160)
        for row, (source, length) in enumerate(((1, 85), (0, 80))):
            assert torch.equal(cache.selected(row).int(), expected[source, :length])
        tail = torch.zeros(2, 70, 32)
        tail[0, :65], tail[1] = x[1, 85:], x[0, 80:]
        layer(tail, cache=cache, num_new=torch.tensor([65, 70], dtype=torch.int32))
    for row, source in enumerate((1, 0)):
        assert torch.equal(cache.selected(row).int(), expected[source])
    (first, second) = collect(cache)
    assert torch.equal(first.indices[0].int(), expected[1]) and len(second) == 150


@pytest.mark.parametrize("page_size", (None, 16))
def test_steps_of_decoding_are_recorded(page_size):
    """Ragged steps of one and more tokens, in inference mode, with rollbacks, forks and rows that begin again."""
    layer = nsa.NativeSparseAttention(32, 4, 2, 16, cfg=nsa.NSAConfig(16, 8, 16, 4, window_size=32)).eval()
    layer.record_selections = True
    x = torch.randn(3, 200, 32)
    draw = np.random.default_rng(0)
    lengths, texts = [0, 0, 0, 0], [0, 1, 2, 1]
    with torch.inference_mode():
        expected = layer(x, return_indices=True)[1]
        cache = layer.make_cache(4, 200, page_size=page_size)
        cache.reserve(200)
        for at in range(150):
            m = int(draw.choice((1, 1, 1, 3)))
            new = [min(int(draw.integers(m + 1)), 200 - length) for length in lengths]
            new[3] *= at > 100  # until then without tokens
            rows = [x[text, length : length + m] for text, length in zip(texts, lengths, strict=True)]
            padded = torch.stack([torch.nn.functional.pad(row, (0, 0, 0, m - len(row))) for row in rows])
            _, given = layer(padded, cache=cache, num_new=torch.tensor(new, dtype=torch.int32), return_indices=True)
            given.fill_(7)  # the caller's
            lengths = [length + count for length, count in zip(lengths, new, strict=True)]
            if at % 40 == 25:
                cache.rollback(1, lengths[1] - 5)
                lengths[1] -= 5
            if at == 70:
                cache.release(2)
                cache.reserve(200)
                lengths[2] = 0
            if at == 100:
                cache.fork(1, 3)
                cache.reserve(200)
                lengths[3] = lengths[1]
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        assert torch.equal(cache.selected(row).int(), expected[text, :length])


def test_recording_is_nearly_free():
    """A step runs as many of torch's operations as without, but for a copy of the lengths."""

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            self.count += 1
            return operation(*arguments, **(options or {}))

    layer = nsa.NativeSparseAttention(32, 4, 2, 16, cfg=nsa.NSAConfig(16, 8, 16, 4, window_size=32)).eval()
    counts = []
    for layer.record_selections in (False, True):
        cache = layer.make_cache(1, 256)
        with torch.inference_mode(), Counter() as counter:
            for _ in range(128):
                layer(torch.zeros(1, 1, 32), cache=cache)
        counts.append(counter.count / 128)
    assert counts[1] - counts[0] < 2


def test_plain_layers_replay_too():
    layer = nsa.NativeSparseAttention(32, 4, 2, 16, cfg=nsa.NSAConfig(16, 8, 16, 4, window_size=32)).eval()
    x = torch.randn(2, 100, 32)
    others = torch.sort(torch.rand(2, 100, 2, 7).argsort(-1)[..., :4], -1)[0].short()
    given = others.masked_fill(others > torch.arange(100)[:, None, None] // 16, -1).sort(-1, descending=True)[0]
    records = [SelectionRecord(one[None], layer.cfg) for one in given]
    with replay(layer, records):
        o = layer(x)
        packed = layer(x.flatten(0, 1), torch.tensor([0, 100, 200], dtype=torch.int32))
    torch.testing.assert_close(o, layer(x, indices=given.int()))
    torch.testing.assert_close(packed.view_as(o), o)


def random_record(layers=2, tokens=600, heads=2, blocks_changed=2, topk=8, block_size=16):
    """Blocks as models select them: most of a token's are those of the token before."""
    cfg = nsa.NSAConfig(8, 4, block_size, topk, window_size=32)
    draw = np.random.default_rng(0)
    indices = np.full((layers, tokens, heads, topk), -1, np.int16)
    for at in np.ndindex(layers, heads):
        chosen = set()
        for t in range(tokens):
            own = t // block_size
            forced = {0, own, max(0, own - 1)}
            chosen = {b for b in chosen if b not in forced}
            for _ in range(blocks_changed):
                if chosen:
                    chosen.discard(int(draw.choice(sorted(chosen))))
            while len(chosen | forced) < min(topk, own + 1):
                chosen.add(int(draw.integers(own + 1)))
                chosen -= forced
            found = sorted(chosen | forced)[:topk]
            indices[at[0], t, at[1], : len(found)] = found
    return SelectionRecord(torch.from_numpy(indices), cfg)


def test_a_record_in_bytes():
    one = random_record()
    data = one.to_bytes()
    back = SelectionRecord.from_bytes(data)
    assert back.cfg == one.cfg and back.indices.dtype == one.indices.dtype
    assert torch.equal(back.indices, one.indices)
    empty = SelectionRecord(torch.zeros(2, 0, 2, 8, dtype=torch.int16), one.cfg)
    assert torch.equal(SelectionRecord.from_bytes(empty.to_bytes()).indices, empty.indices)
    assert len(data) < one.indices.numel()  # half of int16


def test_memory_of_a_record():
    """4 KV heads and 32 blocks: 256 bytes per token and layer, and less as bytes."""
    one = random_record(layers=1, tokens=1500, heads=4, topk=32)
    assert one.indices.nbytes == 256 * len(one)
    assert len(one.to_bytes()) < 64 * len(one)
    layer = nsa.NativeSparseAttention(32, 4, 4, 8, cfg=nsa.NSAConfig(8, 8, 32, 32, window_size=64))
    layer.record_selections = True
    kept = layer.make_cache(2, 2048).selections
    assert kept.nbytes == 256 * (2 + 1) * 2048  # a page of each row, and one that holds nothing


def test_given_blocks_beyond_the_sequence_count_as_none():
    """As in the attention: any order, blocks twice, and blocks that there are not."""
    one = random_record(layers=1, tokens=64, heads=1)
    indices = one.indices.clone()
    indices[..., -1] = 7  # of blocks 0 ... 3
    indices[..., -2] = indices[..., 0]
    back = SelectionRecord.from_bytes(SelectionRecord(indices.flip(-1), one.cfg).to_bytes())
    for found, given in zip(back.indices[0, :, 0], indices[0, :, 0], strict=True):
        assert set(found.tolist()) - {-1} == set(given.tolist()) - {-1, 7}


def test_damaged_bytes_are_refused():
    data = random_record(layers=1, tokens=40, heads=1).to_bytes()
    draw = np.random.default_rng(1)
    for length in range(len(data)):
        with pytest.raises(ValueError, match="data: "):
            SelectionRecord.from_bytes(data[:length])
    for _ in range(300):
        damaged = bytearray(data)
        damaged[draw.integers(len(data))] ^= int(draw.integers(1, 256))
        try:
            SelectionRecord.from_bytes(bytes(damaged))
        except ValueError as error:
            assert str(error).startswith("data: ") or "must be" in str(error)


def test_bytes_that_describe_what_no_record_holds_are_refused():
    """In no time: the numbers of a header do not become loops, memory or errors of another kind."""
    magic, head, _ = random_record(layers=1, tokens=40, heads=1).to_bytes().split(b"\n", 2)
    body = zlib.compress(b"")
    fields = json.loads(head) | {"tokens": 0, "changes": 0, "size": len(body)}
    sizes = [{"layers": 2**40}, {"layers": 10**7}, {"heads": 0, "tokens": 2**62}, {"layers": 0}, {"tokens": 2**30}]
    for changed in (*sizes, {"layers": [1]}, {"heads": True}, {"layers": "1"}, {"layers": 1e9}):
        with pytest.raises(ValueError, match="data: no record"):
            SelectionRecord.from_bytes(b"\n".join((magic, json.dumps(fields | changed).encode(), body)))
    with pytest.raises(ValueError, match="data: no record"):
        SelectionRecord.from_bytes(magic + b"\n" + b"[" * 100_000 + b"\n")


def test_records_of_other_lengths_than_the_sequences_are_refused():
    """Though they have as many tokens together: those of one row would be those of the next."""
    model, layer = sparse("llama"), nsa.NativeSparseAttention(64, 8, 2, 16, cfg=sparse("llama").config.nsa_config())
    ids, x = torch.randint(97, (2, 50)), torch.randn(2, 50, 64)

    def lengths(*tokens, layers):
        indices = torch.zeros(layers, 1, 2, layer.cfg.topk, dtype=torch.int16)
        return [SelectionRecord(indices.expand(-1, n, -1, -1), layer.cfg) for n in tokens]

    mask = torch.ones(2, 50, dtype=torch.long).index_fill(1, torch.arange(4), 0)
    mask[1, :8] = 0
    offsets = torch.tensor([0, 30, 30, 100], dtype=torch.int32)
    positions = torch.cat((torch.arange(30), torch.arange(20), torch.arange(20, 70))).view(2, 50)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 70, "max_length_k": 70}
    for given, right, wrong in (
        ({}, (50, 50), (49, 51)),
        ({"attention_mask": mask}, (46, 42), (42, 46)),
        (packed, (30, 0, 70), (70, 30)),
        ({"position_ids": positions}, (30, 20, 50), (50, 50)),
    ):
        with replay(model, lengths(*right, layers=2)):
            model(ids, use_cache=False, **given)
        with (
            replay(model, lengths(*wrong, layers=2)),
            pytest.raises(ValueError, match=r"^records: \[.*\] tokens: must "),
        ):
            model(ids, use_cache=False, **given)
    for given, right, wrong in (((x,), (50, 50), (49, 51)), ((x.flatten(0, 1), offsets), (30, 70), (70, 30))):
        with replay(layer, lengths(*right, layers=1)):
            layer(*given)
        with (
            replay(layer, lengths(*wrong, layers=1)),
            pytest.raises(ValueError, match=r"^records: \[.*\] tokens: must "),
        ):
            layer(*given)


def test_a_replay_within_another_leaves_it():
    layer = nsa.NativeSparseAttention(32, 4, 2, 8, cfg=nsa.NSAConfig(8, 4, 16, 8, window_size=16))
    x = torch.randn(1, 300, 32)
    outer, inner = (torch.full((1, 300, 2, 8), block, dtype=torch.int16) for block in (0, 1))
    with torch.no_grad(), replay(layer, [SelectionRecord(outer, layer.cfg)]):
        before = layer(x)
        with replay(layer, [SelectionRecord(inner, layer.cfg)]):
            assert not torch.equal(layer(x), before)
        assert torch.equal(layer(x), before)
    assert layer.replayed is None


def test_what_does_not_fit_is_refused(prompts):
    model = sparse("llama")
    out, mask, _ = rollout(model, prompts)
    records, lengths = collect(out.cache), mask.sum(1).tolist()
    one = records[0]
    ids = out.sequences
    with pytest.raises(ValueError, match=r"records: 2 layers|records\[0\]: layers = 1: must be 2"):
        with replay(model, [SelectionRecord(one.indices[:1], one.cfg)]):
            pass
    with pytest.raises(ValueError, match=r"records\[0\]: num_kv_heads = 1: must be 2"):
        with replay(model, [SelectionRecord(one.indices[:, :, :1], one.cfg)]):
            pass
    other = nsa.NSAConfig(**{**vars(one.cfg), "block_size": 2 * one.cfg.block_size})
    with pytest.raises(ValueError, match=r"records\[0\]: cfg = .*: must be"):
        with replay(model, [SelectionRecord(one.indices, other)]):
            pass
    with pytest.raises(ValueError, match=r"lengths: 2: must be 3"):
        with replay(model, records, lengths[:2]):
            pass
    with pytest.raises(TypeError, match="lengths: set: must be a sequence"):
        with replay(model, records, {*range(3)}):
            pass
    for wrong, kind in ((5, "int"), ("ab", "str"), ([1.0] * 3, "float")):
        with pytest.raises(TypeError, match=rf"^lengths(\[0\])?: {kind}: must be (an integer|a sequence of integers)"):
            with replay(model, records, wrong):
                pass
    for wrong in (3, iter([out.cache])):
        with pytest.raises(TypeError, match=r"^cache: \w+: must be "):
            collect(wrong)
    with pytest.raises(ValueError, match=r"length = 300: must be 0 \.\.\. "):
        with replay(model, records, [300, *lengths[1:]]):
            pass
    with replay(model, records), pytest.raises(ValueError, match=r"records: \d+ tokens: must be \d+, the tokens of"):
        model(ids, attention_mask=mask, use_cache=False)
    with pytest.raises(ValueError, match="model: has no sparse layer"):
        with record(torch.nn.Linear(2, 2)):
            pass
    with torch.no_grad():
        plain = model(ids, attention_mask=mask, use_cache=True)
    with pytest.raises(ValueError, match=r"cache\[0\]: keeps no selections"):
        collect(plain.cache)
    for indices in (one.indices[0], one.indices[:0], one.indices[:, :, :0]):
        with pytest.raises(ValueError, match="indices: int16"):
            SelectionRecord(indices, one.cfg)
    assert one in [*records[1:], one] and records[1] not in records[:1]  # not a comparison of tensors
