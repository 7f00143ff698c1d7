"""Fields of the sparse configurations: none is ignored, and none fails later than here."""

from __future__ import annotations

import math
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

import nsa.hf
from models import SIZES, SMALL, SPARSE, sparse
from nsa.hf.configuration import OPTIONS

BOTH = pytest.mark.parametrize("name", SPARSE)
WRONG = (True, 0.5, 4.0, "4", [4], {"value": 4}, None, math.nan, -1, 0, 2**40)
"""Of other types than a size, nested, or no size."""


def refused(name, **fields):
    with pytest.raises((ValueError, StrictDataclassError)) as raised:
        SPARSE[name][1](**{**SIZES, **fields})
    return str(raised.value)


@BOTH
@pytest.mark.parametrize("value", [[], {}.keys(), 0, False, "", "nsa", [("topk", 4)], 1.5, math.nan])
def test_nsa_is_a_dict(name, value):
    assert refused(name, nsa=value) == f"nsa = {value!r}: must be a dict or None"


@BOTH
@pytest.mark.parametrize("value", [0, 1, False, True, "", "0", {0}, {0: 1}, 0.0, 1.5])
def test_dense_layers_is_a_list(name, value):
    assert refused(name, dense_layers=value) == f"dense_layers = {value!r}: must be a list of integers or None"


@BOTH
@pytest.mark.parametrize("value", [0.5, 1.0, True, False, "1", None, [1], math.nan, -1, 2])
def test_members_of_dense_layers_are_layers(name, value):
    assert refused(name, dense_layers=[0, value]) == f"dense_layers: {value!r}: must be 0 ... 1"


@BOTH
@pytest.mark.parametrize("field", OPTIONS)
def test_every_field_of_nsa_has_its_type(name, field):
    for value in WRONG[:8]:
        if type(value) is not type(OPTIONS[field]):
            text = refused(name, nsa={**SMALL, field: value})
            assert text == f"nsa: {field} = {value!r}: must be of type {type(OPTIONS[field]).__name__}"
    assert refused(name, **{field: OPTIONS[field]}) == f"{field} = {OPTIONS[field]!r}: must be given in nsa"


@BOTH
@pytest.mark.parametrize("field", [f for f in SIZES if "token_id" not in f and "range" not in f])
def test_every_size_is_a_positive_integer(name, field):
    for value in WRONG[:10]:
        if value is None and field in ("num_key_value_heads", "head_dim"):
            continue
        text = refused(name, **{field: value})
        assert field in text
        assert type(value) is not int or text == f"{field} = {value}: must be >= 1"


@BOTH
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, r"num_key_value_heads = 3: must divide num_attention_heads = 8"),
        ({"rms_norm_eps": math.nan}, r"rms_norm_eps = nan: must be > 0 and finite"),
        ({"rms_norm_eps": -1e-6}, r"rms_norm_eps = -1e-06: must be > 0 and finite"),
        ({"initializer_range": math.nan}, r".*initializer_range"),  # of Llama transformers itself refuses it
        ({"attention_dropout": 0.5}, r"attention_dropout = 0.5: must be 0"),
        ({"attention_dropout": math.nan}, r"attention_dropout = nan: must be 0"),
        ({"is_causal": False}, r"is_causal = False: must be True"),
        ({"head_dim": 12}, r"head_dim = 12: must be a multiple of 8"),
        ({"nsa": {"phi_hidden": -1}}, r"nsa: phi_hidden = -1: must be >= 1, or 0 for 2 x head dim"),
        ({"nsa": {3: 4}}, r"nsa: unknown field 3: must be one of kernel_size, "),
    ],
)
def test_values_that_no_model_has(name, fields, message):
    assert re.match(message, refused(name, **fields))


@BOTH
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"rope_theta": v}, f"rope_theta = {v!r}: must be a finite number")
            for v in (math.nan, True, "1e4", None, [1])
        ),
        *(({"rope_theta": v}, f"rope_theta = {v}: must be positive") for v in (0, -1e4)),
        ({"rope_type": "linear", "factor": math.inf}, "factor = inf: must be a finite number"),
        ({"rope_type": "linear", "factor": 0.0}, "factor = 0.0: must be positive"),
        ({"rope_type": "foo"}, "rope_type = 'foo': must be default, linear, yarn, llama3 or proportional, whose"),
        ({"rope_type": None}, "rope_type = None: must be default"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention = {'rope_type': 'default'"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor = 0.5: must be 1 with rope_type = 'default'; goes with",
        ),
        ({"rope_type": "proportional", "partial_rotary_factor": 2}, "partial_rotary_factor = 2: must be 0 ... 1"),
    ],
)
def test_rotations(name, changes, message):
    rope = {"rope_type": "default", "rope_theta": 10000.0, **changes}
    assert refused(name, rope_parameters=rope).startswith(f"rope_parameters: {message}")


@BOTH
@pytest.mark.parametrize("change", [{"dense_layers": 0}, {"nsa": []}, {"dense_layers": [0.5]}, {"nsa": {"topk": 0}}])
def test_a_field_changed_later_is_checked_by_the_model(name, change):
    config = SPARSE[name][1](**SIZES, nsa=SMALL)
    for field, value in change.items():
        setattr(config, field, value)
    with pytest.raises(ValueError, match=r"^(dense_layers|nsa|topk)\b"):
        SPARSE[name][0](config)


@BOTH
def test_layers_made_dense_later_are(name):
    config = SPARSE[name][1](**SIZES, nsa=SMALL)
    config.dense_layers = [1]
    model = SPARSE[name][0](config)
    assert model.config.layer_types == ["nsa", "full_attention"]
    assert [hasattr(layer.self_attn, "gate") for layer in model.model.layers] == [True, False]
    assert sparse(name, dense_layers=(1, 1)).config.dense_layers == [1]


@BOTH
def test_the_recipe_is_that_of_the_program(name):
    config = SPARSE[name][1].recipe(**SIZES, nsa={"window_size": 64})
    fields = {"kernel_size": 8, "kernel_stride": 8, "block_size": 32, "topk": 32, "share_kv": True, "phi": "mlp"}
    assert config.nsa == OPTIONS | fields | {"window_size": 64}
    rope = {"rope_type": "proportional", "rope_theta": 500000.0, "partial_rotary_factor": 0.5}
    assert config.rope_parameters == rope
    assert SPARSE[name][0](config)(torch.ones(1, 40, dtype=torch.long)).logits.isfinite().all()
    given = {"rope_type": "default", "rope_theta": 1e4}
    assert SPARSE[name][1].recipe(**SIZES, rope_parameters=given).rope_parameters == given
    with pytest.raises(ValueError, match=r"^nsa = \[\]: must be a dict or None$"):
        SPARSE[name][1].recipe(**SIZES, nsa=[])


MROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("Mistral", {"sliding_window": 16}, "sliding_window = 16: must be None"),
        ("Qwen2", {"use_sliding_window": True}, "sliding_window = 4096: must be None (use_sliding_window = False)"),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok = 5: must be at most num_exp"),
        ("Qwen3Moe", {"num_experts": 0}, "num_experts = 0: must be >= 1"),
        ("Qwen3Moe", {"moe_intermediate_size": -1}, "moe_intermediate_size = -1: must be >= 1"),
        *(
            (
                "Qwen3VLText",
                {"rope_parameters": MROPE | {"mrope_section": axes}},
                f"rope_parameters: mrope_section = {axes!r}",
            )
            for axes in ([4, 4], [4, 2, -2], [4, 2, 2.0], "422", None)
        ),
    ],
)
def test_fields_of_other_families(family, fields, message):
    config = getattr(nsa.hf, f"Nsa{family}Config")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        config(**{**SIZES, **fields})
    made = config(**{**SIZES, "head_dim": None} if family != "Qwen3VLText" else SIZES)
    assert made.head_dim == (16 if family == "Qwen3VLText" else 8) and made.layer_types == ["nsa", "nsa"]
