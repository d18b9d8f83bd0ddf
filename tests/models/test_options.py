"""Every option of every attention kind, walked: a new one, or a new value of one, fails here until it is walked."""

import re
import typing

import pytest
import torch

from nanolib.measurement import Unsupported
from nanolib.models import attention
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.sparse import choose_mask
from tests.models.inputs import REQUIRED, TOLERANCE, qkv

DENSE = {
    "backend": ["auto", "math", "flash", "efficient", "cudnn"],
    "impl": ["", "FA3", "FA4"],
}
SPARSE = {
    "pattern": [*PATTERNS, *CHOOSERS],
    "window": [1, 30],
    "global_tokens": [0, 9],
    "random_tokens": [0, 20],
    "sparsity": [None, 0.7],
    "mass": [0.3, 1],
    "block_size": [5, 16],
    "seed": [0, 3],
    "per_head": [False, True],
    "document_lengths": [[7, 30]],
    "mask_mod": [REQUIRED["own"]["mask_mod"]],
}
WALKED = {
    "dense": DENSE,
    "flash_attn": {"version": ["auto", 2, 3, 4]},
    "flex": SPARSE | {"backend": ["auto", "triton", "flash"]},
    "sparse": SPARSE,
    "own": {"call": ["tests.models.inputs:strided_attention"]},
}
NEEDS = {  # option → what it is an option of
    "impl": {"backend": "flash"},
    "document_lengths": {"pattern": "document"},
    "mask_mod": {"pattern": "own"},
    "random_tokens": {"pattern": "bigbird"},
    "sparsity": {"pattern": "window"},
    "mass": {"pattern": "threshold"},
    "seed": {"pattern": "random"},
    "per_head": {"pattern": "random"},
}
REFUSED = r"SDPA backend \w+ has no CPU kernel|impl FA\d has no cpu|this needs flash_attn, which"


@pytest.mark.parametrize("kind", attention.kinds())
def test_nothing_is_left_out(kind):
    fields = attention._module(kind).Options.model_fields
    assert set(fields) == set(WALKED[kind])
    for name, field in fields.items():
        if typing.get_origin(field.annotation) is typing.Literal:
            assert set(WALKED[kind][name]) == set(typing.get_args(field.annotation))
    assert set(SPARSE["pattern"]) == {*PATTERNS, *CHOOSERS}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind in ("dense", "flash_attn", "sparse", "own")  # flex compiles: see test_flex
        for name, values in WALKED[kind].items()
        for value in values
    ],
)
def test_each_value_gives_the_reference_or_says_why_not(kind, name, value, causal):
    options = NEEDS.get(name, {}) | (REQUIRED.get(value, {}) if name == "pattern" else {})
    options = attention.parse_options(kind, options | {name: value})
    inputs = [x.detach() for x in qkv(1, 4, 2, 45, 45)]
    mask = causal_mask(45, 45) if causal else torch.ones(45, 45, dtype=torch.bool)
    if kind == "sparse":
        plans = choose_mask(*inputs[:2], causal=causal, options=options)
        mask = torch.stack([plans.elements(head) for head in range(len(plans.plans))])
    try:
        out = attention.attend(kind, *inputs, causal=causal, options=options)
    except Unsupported as error:
        assert re.match(REFUSED, str(error))
        return
    assert relative_error(out, masked_attention(*inputs, mask)) < TOLERANCE


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_a_backend_of_flex_needs_a_gpu(backend):
    inputs = [x.detach() for x in qkv(1, 2, 2, 16, 16)]
    with pytest.raises(Unsupported, match=f"FlexAttention has no backend {backend} on CPU"):
        attention.attend("flex", *inputs, causal=True, options={"backend": backend})
