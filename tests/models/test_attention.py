"""Attention kinds against the masked reference in float64, and the work of their masks."""

import typing

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanolib.measurement import Unsupported
from nanolib.models import attention
from nanolib.models.attention import block_sparse, dense, flex
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.partial import scale_queries
from nanolib.models.attention.patterns import BY_TILE, PATTERNS, TABLED
from nanolib.models.attention.reference import causal_mask, masked_attention
from nanolib.models.attention.sparse import Options, choose_mask
from tests.models.inputs import REQUIRED, agrees, kept_tiles, masked_by, qkv, uncompiled

ALL_PATTERNS = sorted([*PATTERNS, *CHOOSERS])


SPARSE = {
    "pattern": ALL_PATTERNS,
    "window": [1],
    "global_tokens": [3],
    "random_tokens": [20],
    "sparsity": [0.7],
    "mass": [0.3],
    "block_size": [5],
    "seed": [3],
    "per_head": [True],
    "document_lengths": [[7, 30]],
    "document_starts": [[7, 30]],
    "mask_mod": [REQUIRED["own"]["mask_mod"]],
}
WALKED = {
    "dense": {
        "backend": ["auto", "math", "flash", "efficient", "cudnn"],
        "impl": ["", "FA3", "FA4"],
    },
    "flash_attn": {"version": ["auto", 2, 3, 4]},
    "flex": SPARSE | {"backend": ["auto", "triton", "flash"]},
    "sparse": SPARSE,
    "own": {"call": ["tests.models.inputs:strided_attention"]},
}
READERS = {  # option → options with which it is read
    "impl": {"backend": "flash"},
    "document_lengths": {"pattern": "document"},
    "document_starts": {"pattern": "document"},
    "mask_mod": {"pattern": "own", "per_head": True},
    "random_tokens": {"pattern": "bigbird"},
    "mass": {"pattern": "threshold"},
    "seed": {"pattern": "random"},
    "per_head": {"pattern": "random"},
}
REFUSED = {  # what a CPU does not have
    "dense efficient": "SDPA backend efficient has no CPU kernel; use math or flash",
    "dense cudnn": "SDPA backend cudnn has no CPU kernel; use math or flash",
    "dense FA3": "impl FA3 has no cpu kernel; leave impl out",
    "dense FA4": "impl FA4 has no cpu kernel; leave impl out",
    "flex triton": "FlexAttention has no backend triton on CPU",
    "flex flash": "FlexAttention has no backend flash on CPU",
}


@pytest.mark.parametrize("kind", attention.kinds())
def test_no_option_and_no_value_of_a_list_is_left_out(kind):
    fields = attention._module(kind).Options.model_fields
    assert {*fields} == {*WALKED[kind]}
    for name, field in fields.items():
        if typing.get_origin(field.annotation) is typing.Literal:
            assert {*WALKED[kind][name]} == {*typing.get_args(field.annotation)}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind, options in WALKED.items()
        for name, values in options.items()
        for value in values
    ],
)
def test_scores_are_multiplied_by_the_factor_given(monkeypatch, kind, name, value):
    """For every value of every option, which gives the reference, or is refused if a CPU does not have it."""
    options = {"window": 9, "block_size": 16} if "window" in WALKED[kind] else {}
    options |= READERS.get(name, {}) | (REQUIRED.get(value, {}) if name == "pattern" else {})
    options = attention.parse_options(kind, options | {name: value})
    q, k, _ = inputs = qkv(1, 4, 2, 45, 45)
    mask = causal_mask(45, 45)
    if "window" in WALKED[kind]:
        mask, _ = masked_by((scale_queries(q, 0.9), k), True, options)
    by_flex = kind == "flex"  # which compiles, and has no backward pass on CPU
    monkeypatch.setattr(flex, "compiled", lambda *of: uncompiled)
    refused = REFUSED.get(f"{kind} {value}")
    if kind == "flash_attn":
        refused = "the attention needs flash_attn"
    with torch.set_grad_enabled(not by_flex):
        if refused:
            with pytest.raises(Unsupported, match=refused):
                attention.attend(kind, *inputs, causal=True, options=options)
            return
        out = attention.attend(kind, *inputs, causal=True, scale=0.9, options=options)
    assert agrees(out, masked_attention(*inputs, mask, 0.9), () if by_flex else inputs)


ANY_SHAPE = st.builds(
    dict,
    pattern=st.sampled_from(ALL_PATTERNS),
    causal=st.booleans(),
    kv_len=st.integers(1, 90),
    queries=st.integers(1, 90),
    batch=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3]),
    options=st.fixed_dictionaries(
        {
            "window": st.integers(1, 100),
            "global_tokens": st.integers(0, 40),
            "random_tokens": st.integers(0, 40),
            "block_size": st.integers(1, 50),
            "mass": st.floats(0.1, 1.0),
            "seed": st.integers(0, 3),
            "per_head": st.booleans(),
        }
    ),
)

BLIND = {  # blocks of queries that see no key
    "pattern": "window",
    "causal": False,
    "kv_len": 40,
    "queries": 90,
    "batch": 1,
    "group": 2,
    "options": {"window": 20, "block_size": 16},
}


@settings(max_examples=48, derandomize=True)
@given(ANY_SHAPE)
@example(BLIND)
def test_dense_and_sparse_equal_the_reference_for_any_shape(shape):
    _compare(**shape)


@pytest.mark.thorough
@settings(max_examples=1000)
@given(ANY_SHAPE)
def test_dense_and_sparse_equal_the_reference_for_many_more_shapes(shape):
    _compare(**shape)


def _compare(pattern, causal, kv_len, queries, batch, group, options):
    # keys of the past only, or of another sequence, of which some queries see none
    crossed = pattern in PATTERNS and pattern not in TABLED and not causal
    q_len = queries if crossed else min(queries, kv_len)
    parsed = Options(pattern=pattern, **options | REQUIRED.get(pattern, {}))
    inputs = qkv(batch, 2 * group, 2, q_len, kv_len, head_dim=8)
    seen = causal_mask(q_len, kv_len) if causal else torch.ones(q_len, kv_len, dtype=torch.bool)
    out = attention.attend("dense", *inputs, causal=causal)
    assert agrees(out, masked_attention(*inputs, seen), inputs)
    dense, mask = masked_by(inputs, causal, parsed)
    out = attention.attend("sparse", *inputs, causal=causal, options=parsed)
    assert agrees(out, masked_attention(*inputs, dense), inputs)
    out = block_sparse.attend_by_blocks(*inputs, mask, 0.9)  # what other devices compute
    assert agrees(out, masked_attention(*inputs, dense, 0.9))
    work = mask.work
    assert work.kept == pytest.approx(float(dense.flatten(0, 1).sum(dim=(1, 2)).double().mean()))
    if pattern != "dca":  # whose chosen keys are packed
        tiles, _ = kept_tiles(dense, parsed.block_size)
        assert work.kept_tiles == pytest.approx(float(tiles.sum()) / len(mask.plans))


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
@pytest.mark.parametrize("pattern", BY_TILE)
def test_a_pattern_of_tiles_has_the_requested_sparsity(pattern, sparsity):
    options = Options(pattern=pattern, sparsity=sparsity, block_size=16)
    q, k, _ = qkv(1, 2, 2, 640, 640)
    work = choose_mask(q, k, causal=False, options=options).work
    assert work.sparsity == pytest.approx(sparsity, abs=0.02) == work.block_sparsity


def test_each_head_draws_its_own_tiles_with_per_head():
    options = Options(pattern="random", sparsity=0.75, block_size=16, per_head=True)
    drawn, _ = masked_by(qkv(2, 3, 3, 256, 256), False, options)
    assert len(drawn[0].unique(dim=0)) == 3


@pytest.mark.parametrize(
    ("message", "error", "said"),
    [
        (
            "No available kernel. Aborting execution.",
            Unsupported,
            r"^SDPA backend flash has no kernel for torch.float32, head_dim 16 on cpu",
        ),
        ("out of memory", RuntimeError, r"^out of memory$"),
    ],
)
def test_a_kernel_that_torch_lacks_is_unsupported_and_any_other_error_stays(
    monkeypatch, message, error, said
):
    def fails(*_):
        raise RuntimeError(message)

    monkeypatch.setattr(dense, "_call", fails)
    with pytest.raises(error, match=said):
        attention.attend("dense", *qkv(1, 1, 1, 8, 8), causal=True, options={"backend": "flash"})


def test_pairs_are_counted_in_the_causal_triangle_and_tiles_over_the_whole_grid():
    work = attention.work("sparse", 4, 4, causal=True, options={"pattern": "window", "window": 1})
    assert (work.kept, work.total, work.sparsity) == (4, 10, 0.6)
    dense = attention.work("dense", 512, 512, causal=True)
    assert (dense.sparsity, dense.kept_tiles, dense.total_tiles) == (0, 10, 16)
    assert attention.work("dense", 128, 512, causal=True).kept_tiles == 4


def _window_pairs(length, window, causal):
    """Kept pairs of a square window: w·n − w(w − 1)/2 causal, (2w − 1)·n − w(w − 1) otherwise."""
    one_side = window * length - window * (window - 1) // 2
    return one_side if causal else 2 * one_side - length


@pytest.mark.parametrize(("n", "sparsity"), [(300, 0.5), (300, 0.9), (4, 0.99)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_window_for_a_sparsity_is_the_largest_that_reaches_it_or_one(n, sparsity, causal):
    options = {"pattern": "window", "sparsity": sparsity}
    got = attention.work("sparse", n, n, causal=causal, options=options)
    kept = [_window_pairs(n, window, causal) for window in range(1, n + 1)]
    assert got.kept == max((k for k in kept if 1 - k / got.total >= sparsity), default=kept[0])
