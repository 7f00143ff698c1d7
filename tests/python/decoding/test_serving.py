"""nsa.serving: continuous batching gives every request what it has alone, and loses no memory."""

import random
from types import SimpleNamespace

import pytest
import torch

import nsa
from nsa.serving import LayerCache, Step, allocate, fork
from nsa.vllm import EngineConfig, check_supported, selections
from scheduler import CFG, DIM, HEADS, KV_HEADS, LAYERS, LONGEST, MAX_LENGTH, Engine, Model


@pytest.fixture(scope="module")
def model():
    return Model()


def alone(model, prompt):
    """Greedy tokens behind a prompt, by nsa.prefill and nsa.decode."""
    caches = [nsa.KVCache(1, KV_HEADS, DIM, cfg=CFG, max_length=MAX_LENGTH) for _ in range(LAYERS)]
    weights = {"weights_k": model.weights, "weights_v": model.weights, "rope": model.rope}
    tokens, new = list(prompt), list(prompt)
    while len(tokens) < len(prompt) + LONGEST:
        step = nsa.decode if len(new) == 1 else nsa.prefill

        def attend(layer, *x, step=step):
            return step(*(t[None] for t in x), caches[layer], **weights)[0]

        positions = range(len(tokens) - len(new), len(tokens))
        new = model.next_tokens(new, list(positions), attend)[-1:]
        tokens += new
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def prompts(model):
    """Prompts, some with the same beginning, what comes behind them, and the beginnings."""
    draw = random.Random(1)

    def text(length):
        return tuple(draw.randrange(60) for _ in range(length))

    prefixes = [text(37), text(64), text(131)]
    found = [prefix + text(draw.randrange(1, 90)) for prefix in prefixes for _ in range(4)]
    found += [text(length) for length in (1, 5, 16, 17, 64, 65, 150, 240)]
    return {prompt: alone(model, prompt) for prompt in found}, prefixes


def test_continuous_batching(model, prompts):
    engine = Engine(model, *prompts, seed=3)
    arrived = engine.run(2000)
    for request in arrived:
        assert request.tokens == [*request.prompt, *engine.truth[request.prompt][: request.wanted]]
    for pages in (engine.pages, engine.pages_c):
        assert not any(pages.holders) and sorted(pages.free) == list(range(len(pages.holders)))
    assert sorted(engine.slots) == list(range(10))
    assert len(arrived) > 500 and min(engine.counts.values()) > 30, engine.counts


class WrongSlots(Engine):
    def slots_of(self, batch):
        slots = super().slots_of(batch)
        return slots[::-1] if len(slots) == 3 else slots


class EarlyFree(Engine):
    def remember(self, request):
        super().remember(request)
        if len(request.pages) > 3 and self.pages.holders[request.pages[0]] == 1:
            self.pages.free.append(request.pages[0])

    def count(self):
        pass


class Unverified(Engine):
    def count_right(self, guesses, out):
        return len(guesses)


class NoFork(Engine):
    def fork(self, parent, child, length):
        pass


@pytest.mark.parametrize("broken", (WrongSlots, EarlyFree, Unverified, NoFork))
def test_a_fault_of_the_engine_shows(broken, model, prompts):
    engine = broken(model, *prompts, seed=3)
    refused = ValueError, "is this page too: only full pages can be shared"
    kind, message = refused if broken is EarlyFree else (AssertionError, "other tokens")
    with pytest.raises(kind, match=message):
        for request in engine.run(200):
            expected = [*request.prompt, *engine.truth[request.prompt][: request.wanted]]
            assert request.tokens == expected, "other tokens"


def good():
    """A step of three requests: two decodes, and a chunk of 20 tokens between them."""
    return {
        "query_start_loc": [0, 1, 21, 24],
        "seq_lens": torch.tensor([5, 20, 33], dtype=torch.int32),
        "block_table": torch.tensor([[3, -1, -1], [0, 1, -1], [2, 4, 5]], dtype=torch.int32),
        "block_table_c": torch.tensor([[-1], [0], [1]], dtype=torch.int32),
        "slots": [4, 0, 2],
        "cfg": CFG,
        "max_length": 48,
        "page_size": 16,
        "slot_mapping": torch.tensor([52, *range(20), 78, 79, 80]),
    }


def inputs(tokens=24):
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, 3))
    return [torch.rand(tokens, *shape) for shape in shapes]


WRONG = {
    "slot_mapping: 53 for token 4 of request 0: must be 52, as block_table says": {
        "slot_mapping": torch.tensor([53, *range(20), 78, 79, 80])
    },
    r"slot_mapping: int32 \(24,\): must be int64": {"slot_mapping": torch.zeros(24, dtype=torch.int32)},
    r"query_start_loc: \[0, 1, 1, 24\]: must begin with 0 and ascend": {"query_start_loc": [0, 1, 1, 24]},
    r"slots: \[4, 0, 4\]: must be 3 different numbers": {"slots": [4, 0, 4]},
    r"seq_lens: int64 \(3,\): must be int32 \(3,\)": {"seq_lens": torch.tensor([5, 20, 33])},
    r"seq_lens\[2\] = 49: must be 3 \(its new tokens\) ... max_length = 48": {
        "seq_lens": torch.tensor([5, 20, 49], dtype=torch.int32)
    },
    r"block_table\[2\]: \[2, 4, -1\]: must be at least 3 pages for 33 tokens": {
        "block_table": torch.tensor([[3, -1, -1], [0, 1, -1], [2, 4, -1]], dtype=torch.int32)
    },
    r"block_table_c\[1\]: \[-1\]: must be at least 1 pages for 20 tokens": {
        "block_table_c": torch.tensor([[-1], [-1], [1]], dtype=torch.int32)
    },
    r"block_table\[2, 0\] = 3: block_table\[0, 0\] is this page too: only full pages can be shared": {
        "block_table": torch.tensor([[3, -1, -1], [0, 1, -1], [3, 4, 5]], dtype=torch.int32)
    },
    r"block_table\[2, 2\] = 2: block_table\[2, 0\] is this page too": {
        "block_table": torch.tensor([[3, -1, -1], [0, 1, -1], [2, 4, 2]], dtype=torch.int32)
    },
    r"block_table_c\[2, 0\] = 0: block_table_c\[1, 0\] is this page too": {
        "block_table_c": torch.tensor([[-1], [0], [0]], dtype=torch.int32)
    },
    r"block_table: int32 \(2, 3\): must be int32 \(3, max_pages\)": {
        "block_table": torch.zeros(2, 3, dtype=torch.int32)
    },
    "page_size = 0: must be >= 1": {"page_size": 0},
    r"seq_lens_cpu_upper_bound: \[5, 19, 33\]: must be at least \[5, 20, 33\], seq_lens": {
        "seq_lens_cpu_upper_bound": [5, 19, 33]
    },
    r"seq_lens_cpu_upper_bound: \[5, 20\]: must be at least \[5, 20, 33\]": {"seq_lens_cpu_upper_bound": [5, 20]},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_step(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Step(**good() | {"slot_mapping": None} | WRONG[message])


def cut_short(t):
    """Its storage ends before its last element."""
    t.untyped_storage().resize_(t.untyped_storage().nbytes() - 4)
    return t


def memory(slots=5):
    torch.manual_seed(0)
    layer = allocate(CFG, KV_HEADS, DIM, page_size=16, num_pages=6, num_pages_c=2, num_slots=slots)
    return LayerCache(*(torch.randn_like(t) for t in layer))


@pytest.mark.parametrize(
    ("message", "slots", "change"),
    [
        (r"q: \(23, 4, 16\): must be \(24, heads, ...\)", 5, {0: inputs(23)[0]}),
        (r"layer: k_swa_ring: 4 slots: must have 5", 4, {}),
        (r"gates: .*\(.*2.*\)", 5, {3: torch.rand(24, HEADS, 2)}),
        (r"v: .*float64", 5, {2: torch.rand(24, KV_HEADS, DIM, dtype=torch.float64)}),
        (r"^v: the last dimension has stride 0, expected 1", 5, {2: torch.rand(24, KV_HEADS, 1).expand(-1, -1, DIM)}),
        (r"^gates: float32 \(24, 4, 3\): needs 1152 bytes of its storage's 1148", 5, {3: cut_short(inputs()[3])}),
    ],
)
def test_a_refusal_changes_nothing(message, slots, change):
    layer = memory(slots)
    before = [t.clone() for t in layer]
    given = [change.get(i, t) for i, t in enumerate(inputs())]
    with pytest.raises(ValueError, match=message):
        Step(**good()).attend(layer, *given)
    assert all(torch.equal(a, b) for a, b in zip(layer, before, strict=True))


@pytest.mark.parametrize("name", ["block_table", "block_table_c"])
def test_a_page_that_the_layer_lacks_changes_nothing(name):
    """The decodes of a step run before the chunk, whose pages these are."""
    table = good()[name]
    table[1, 0] = 9
    layer = memory()
    before = [t.clone() for t in layer]
    step = Step(**good() | {name: table, "slot_mapping": None})
    with pytest.raises(ValueError, match=rf"^{name}: page 9: must be below \d, the pages of the layer"):
        step.attend(layer, *inputs())
    assert all(torch.equal(a, b) for a, b in zip(layer, before, strict=True))


def test_another_page_size_than_the_layers_changes_nothing():
    """By the step's page size the tables suffice, and what they share is full."""
    table = torch.tensor([[3, -1], [0, -1], [2, 4]], dtype=torch.int32)
    layer = memory()
    before = [t.clone() for t in layer]
    step = Step(**good() | {"block_table": table, "slot_mapping": None, "page_size": 32})
    with pytest.raises(ValueError, match="layer: k_slc: pages of 16 tokens: must be 32, by page_size of the step"):
        step.attend(layer, *inputs())
    assert all(torch.equal(a, b) for a, b in zip(layer, before, strict=True))
    joined = layer._replace(k_c=layer.k_c.view(1, -1, KV_HEADS, DIM), v_c=layer.v_c.view(1, -1, KV_HEADS, DIM))
    with pytest.raises(ValueError, match=r"layer: k_c: pages of \d+ tokens: must be \d+"):
        Step(**good()).attend(joined, *inputs())


@pytest.mark.parametrize("name", ["slots", "query_start_loc", "seq_lens_cpu_upper_bound"])
def test_numbers_come_in_a_sequence(name):
    numbers = good()[name] if name in good() else [5, 20, 33]
    for given in ((number for number in numbers), {*numbers}):
        with pytest.raises(TypeError, match=f"^{name}: (generator|set): must be a sequence"):
            Step(**good() | {name: given})


@pytest.mark.bits
@pytest.mark.parametrize("change", [lambda t: t.roll(1, 0), lambda t: t.fill_(9)])
@pytest.mark.parametrize("name", ["seq_lens", "block_table", "block_table_c"])
def test_a_step_has_the_tables_of_its_construction(name, change):
    """Decodes and chunks alike, whatever the caller writes to its tensors before a layer runs."""
    given, layers, arguments = inputs(), (memory(), memory()), good()
    expected = Step(**arguments).attend(layers[0], *given)
    step = Step(**arguments)
    arguments[name].copy_(change(arguments[name]))
    found = step.attend(layers[1], *given)
    assert torch.equal(found, expected) and all(torch.equal(a, b) for a, b in zip(*layers, strict=True))


@pytest.mark.bits
@pytest.mark.parametrize(("bounds", "firsts"), [(None, 1), ([5, 20, 33], 1), ([99, 21, 99], 0)])
def test_a_chunk_that_begins_its_prompt(bounds, firsts, monkeypatch):
    """It is known by the lengths on the host, and has the same bits either way."""
    calls, real = [], nsa.serving.prefill_empty_rows
    monkeypatch.setattr("nsa.serving.prefill_empty_rows", lambda *a, **named: calls.append(1) or real(*a, **named))
    given, layers = inputs(), (memory(), memory())
    found = Step(**good() | {"seq_lens_cpu_upper_bound": bounds}).attend(layers[0], *given)
    assert len(calls) == firsts
    expected = Step(**good() | {"seq_lens_cpu_upper_bound": [48] * 3}).attend(layers[1], *given)
    assert torch.equal(found, expected) and all(torch.equal(a, b) for a, b in zip(*layers, strict=True))


@pytest.mark.parametrize(("value", "read"), [("", False), ("0", False), ("1", True), ("2", True), ("true", True)])
def test_a_step_reads_a_device_where_the_operators_do(value, read, monkeypatch):
    """Its tensors are on the host; a GPU is what they say they are on."""
    monkeypatch.setenv("NSA_VALIDATE", value)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    wrong = good() | {"seq_lens": torch.tensor([5, 20, 49], dtype=torch.int32)}
    if not read:
        Step(**wrong)
        return
    with pytest.raises(ValueError, match=r"^seq_lens\[2\] = 49: must be 3"):
        Step(**wrong)


def test_a_layer_of_another_configuration_is_refused_by_its_names():
    layer, before = memory(), memory()
    for changed, name in (({"window_size": CFG.window_size + 1}, "k_swa_ring"), ({"kernel_size": 16}, "k_cmp_ring")):
        step = Step(**good() | {"cfg": nsa.NSAConfig(**vars(CFG) | changed), "slot_mapping": None})
        with pytest.raises(ValueError, match=rf"^decode: layer\.{name}: float32 "):
            step.attend(layer, *inputs())
    assert all(torch.equal(a, b) for a, b in zip(layer, before, strict=True))


def test_no_other_memory_changes():
    layer = memory()
    before = [t.clone() for t in layer]
    step = Step(**good())
    o = step.attend(layer, *inputs())
    step.check()
    assert o.shape == (24, HEADS, DIM) and o.isfinite().all() and (o != 0).any((1, 2)).all()
    written = {3 * 16 + 4, *range(20), 78, 79, 80}  # as slot_mapping says
    for store, old in zip(layer[:2], before[:2], strict=True):
        changed = (store != old).flatten(0, 1).any((1, 2)).nonzero().flatten().tolist()
        assert set(changed) == written
    for ring, old in zip(layer[4:], before[4:], strict=True):
        assert set((ring != old).flatten(1).any(1).nonzero().flatten().tolist()) == {0, 2, 4}


@pytest.mark.parametrize(
    ("parent", "child", "length", "message"),
    [
        (0, 0, 5, "parent = 0: must be 0 ... 4, and another"),
        (0, 5, 5, "child = 5: must be 0 ... 4"),
        (0, 1, 41, "length = 41: must be 8 ... 40, the parent's length"),
        (0, 1, 7, "length = 7: must be 8 ... 40"),
    ],
)
def test_a_wrong_fork(parent, child, length, message):
    tables = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        fork(memory(), parent, child, *tables, length, 40, CFG)
    with pytest.raises(ValueError, match="parent_length = 1099511627776: must be"):
        fork(memory(), 0, 1, *tables, 2**40, 2**40, CFG)


@pytest.mark.parametrize("parent", [0, 1])
@pytest.mark.parametrize(
    ("kind", "name", "column", "page", "message"),
    [
        (ValueError, "block_table", 2, 6, r"\[1, 2\] = 6: must be -1 or below 6"),
        (ValueError, "block_table", 1, 1, r"\[1, 1\]: shared with the parent, but not full at the shared length"),
        (RuntimeError, "block_table", 1, -1, r"\[1, 1\]: no page for the child's tokens"),
        (RuntimeError, "block_table_c", 0, -1, r"\[1, 0\]: no page for the child's tokens"),
    ],
)
def test_a_wrong_table_of_a_fork_is_named_by_the_callers_rows(parent, kind, name, column, page, message):
    tables = {"block_table": [[0, 1, 2], [0, 3, 4]], "block_table_c": [[0], [1]]}
    tables[name][1][column] = page
    with pytest.raises(kind, match=rf"^fork: {name}{message}"):
        fork(
            memory(),
            parent,
            1 - parent,
            **{n: torch.tensor(table, dtype=torch.int32) for n, table in tables.items()},
            length=20,
            parent_length=40,
            cfg=CFG,
        )


@pytest.mark.parametrize("behind", [2, 5])  # the parent's page, and a free one
def test_a_fork_uses_no_column_behind_its_length(behind):
    """An engine may leave stale numbers there. The step that needs the page refuses the parent's."""
    layer, expected = memory(), memory()
    table, table_c = torch.tensor([[0, 1, 2], [0, 3, -1]], dtype=torch.int32), torch.tensor([[0], [1]]).int()
    fork(expected, 0, 1, table, table_c, 20, 40, CFG)
    table[1, 2] = behind
    fork(layer, 0, 1, table, table_c, 20, 40, CFG)
    assert all(torch.equal(a, b) for a, b in zip(layer, expected, strict=True))

    def step():
        lengths = torch.tensor([41, 33], dtype=torch.int32)
        return Step([0, 1, 14], lengths, table, table_c, [0, 1], CFG, max_length=48, page_size=16)

    if behind == 5:
        step().attend(layer, *inputs(14))
    else:
        with pytest.raises(ValueError, match=r"^block_table\[1, 2\] = 2: block_table\[0, 2\] is this page too"):
            step()


def test_selections_of_what_has_none():
    def engine(**config):
        return SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama", **config)))

    output = SimpleNamespace(outputs=[SimpleNamespace(routed_experts=None)])
    with pytest.raises(ValueError, match=r"^engine: model_type = llama: must be a sparse model of nsa.hf"):
        selections(engine(), output)
    with pytest.raises(TypeError, match=r"^output: list: must be one RequestOutput"):
        selections(engine(nsa_config=lambda: CFG), [output])
    with pytest.raises(ValueError, match=r"^output.outputs\[0\]: has no selections: must be finished"):
        selections(engine(nsa_config=lambda: CFG), output)


def test_what_the_plug_in_for_vllm_refuses():
    """Without vLLM, whose configuration is a stub."""

    def config(**changes):
        parts = {
            "model_config": {"quantization": None, "hf_config": None},
            "hf_config": {
                "model_type": "nsa_qwen3",
                "nsa": {"share_kv": True, "kernel_stride": 16},
                "num_key_value_heads": 4,
                "attention_bias": False,
                "dense_layers": [0],
                "_check_fields": lambda more: None,
                "_complete": lambda: None,
            },
            "cache_config": {"cache_dtype": "auto", "block_size": 64},
            "parallel_config": {
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 1,
                "decode_context_parallel_size": 1,
                "prefill_context_parallel_size": 1,
            },
            "scheduler_config": {"scheduler_cls": None, "async_scheduling": True},
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        }
        made = {name: SimpleNamespace(**{**fields, **changes.get(name, {})}) for name, fields in parts.items()}
        made["model_config"].hf_config = made.pop("hf_config")
        made |= {"lora_config": None, "kv_transfer_config": None, "additional_config": {}}
        return SimpleNamespace(**made | {name: v for name, v in changes.items() if name not in parts})

    check_supported(config())
    check_supported(config(additional_config=object()))  # another plug-in's
    for part, changes, message in (
        ("hf_config", {"attention_bias": True}, "attention_bias = True: must be False for Qwen3 with dense_layers"),
        (
            "hf_config",
            {"nsa": {"share_kv": True, "kernel_stride": 12}},
            "block_size = 64: must be a multiple of kernel",
        ),
        (
            "hf_config",
            {"num_key_value_heads": 3},
            "tensor_parallel_size = 2: must be a divisor of the number of KV head",
        ),
        ("cache_config", {"block_size": 8}, "block_size = 8: must be a multiple of 16"),
        ("parallel_config", {"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2: must be 1"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "decode_context_parallel_size = 2: must be 1"),
        ("cache_config", {"cache_dtype": "fp8_e5m2"}, "kv_cache_dtype = fp8_e5m2: must be auto, fp8 or fp8_e4m3"),
        ("cache_config", {"calculate_kv_scales": True}, "calculate_kv_scales = True: must be False, as scales are 1,"),
        (
            "cache_config",
            {"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
            r"kv_cache_dtype_skip_layers = \['0'\]: must be empty with nsa_qwen3",
        ),
        ("additional_config", {"record_selections": "false"}, "record_selections = 'false': must be True or False"),
        ("additional_config", {"record_selections": 1}, "record_selections = 1: must be True or False"),
        ("model_config", {"quantization": "fp8"}, "quantization = fp8: must be None"),
        ("speculative_config", {"method": "eagle"}, "method = eagle: must be ngram"),
        ("speculative_config", {"num_speculative_tokens": 16}, "num_speculative_tokens = 16: must be below 16"),
        ("scheduler_config", {"scheduler_cls": "other"}, "scheduler_cls = other: must be None"),
        ("lora_config", object(), "enable_lora = True: must be False"),
        ("kv_transfer_config", object(), "kv_transfer_config = given: must be None"),
        ("additional_config", {"record_selections": True}, "async_scheduling = True: must be False with record_sel"),
    ):
        with pytest.raises(ValueError, match=message):
            check_supported(config(**{part: changes}))
    recording = config(scheduler_config={"async_scheduling": None}, additional_config={"record_selections": True})
    EngineConfig.verify_and_update_config(recording)
    assert recording.scheduler_config.async_scheduling is False  # vLLM would turn None into True on a GPU
