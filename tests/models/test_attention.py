"""Attention kinds against the masked reference in float64, and the work of their masks."""

import re
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolib.measurement import BadInput, Unsupported
from nanolib.models import attention
from nanolib.models.attention import block_sparse, dense, flex
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.partial import scale_queries
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.sparse import Options, choose_mask, watched_work
from tests.models.inputs import (
    REQUIRED,
    TOLERANCE,
    agrees,
    closed_form,
    kept_tiles,
    masked_by,
    qkv,
    uncompiled,
)

ALL_PATTERNS = sorted([*PATTERNS, *CHOOSERS])


@pytest.mark.parametrize(
    ("q_len", "kv_len", "kv_heads", "causal"),
    [(1, 1, 4, True), (1, 5, 2, True), (2, 5, 4, False), (7, 20, 2, True), (50, 50, 2, False)],
)
@pytest.mark.parametrize("backend", ["auto", "math", "flash"])
def test_dense_equals_the_reference(causal, q_len, kv_len, kv_heads, backend):
    inputs = qkv(3, 4, kv_heads, q_len, kv_len)
    mask = causal_mask(q_len, kv_len) if causal else torch.ones(q_len, kv_len, dtype=torch.bool)
    out = attention.attend("dense", *inputs, causal=causal, options={"backend": backend})
    assert agrees(out, masked_attention(*inputs, mask), inputs)


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
REFUSED = r"SDPA backend \w+ has no CPU|impl FA\d has no cpu|this needs flash_attn|FlexAttention has no backend"


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
    """For every value of every option, which gives the reference or says why it cannot."""
    options = {"window": 9, "block_size": 16} if "window" in WALKED[kind] else {}
    options |= READERS.get(name, {}) | (REQUIRED.get(value, {}) if name == "pattern" else {})
    options = attention.parse_options(kind, options | {name: value})
    q, k, _ = inputs = qkv(1, 4, 2, 45, 45)
    mask = causal_mask(45, 45)
    if "window" in WALKED[kind]:
        mask, _ = masked_by((scale_queries(q, 0.9), k), True, options)
    by_flex = kind == "flex"  # which compiles, and has no backward pass on CPU
    monkeypatch.setattr(flex, "compiled", lambda *of: uncompiled)
    try:
        with torch.set_grad_enabled(not by_flex):
            out = attention.attend(kind, *inputs, causal=True, scale=0.9, options=options)
    except Unsupported as error:
        assert re.match(REFUSED, str(error))
        return
    reference = masked_attention(*inputs, mask, 0.9)
    if by_flex:
        assert relative_error(out, reference.detach()) < TOLERANCE
    else:
        assert agrees(out, reference, inputs)


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_queries_before_the_first_key_are_refused_or_right(pattern):
    sizes = {"window": 20, "global_tokens": 2, "random_tokens": 16, "block_size": 16}
    options = Options(pattern=pattern, **sizes, **REQUIRED.get(pattern, {}))
    inputs = qkv(1, 2, 2, 90, 40)
    if pattern in ("random", "bigbird", "document"):
        for kind in ("sparse", "flex"):
            message = (
                "q: has more queries than keys; for a pattern of tiles or documents give fewer"
            )
            with torch.no_grad(), pytest.raises(BadInput, match=message):
                attention.attend(kind, *inputs, causal=False, options=options.model_dump())
        return
    dense_mask, mask = masked_by(inputs, False, options)
    blind = ~dense_mask[0, 0].any(dim=1)
    assert 0 < blind.sum() < 90 or pattern in ("local_global", "strided", "prefix_lm", "own")
    reference = masked_attention(*inputs, dense_mask)
    out = attention.attend("sparse", *inputs, causal=False, options=options)
    assert agrees(out, reference, inputs) and not out[:, :, blind].any()
    with torch.no_grad():
        out = block_sparse.attend_by_blocks(*inputs, mask)
        assert relative_error(out, reference) < TOLERANCE and not out[:, :, blind].any()


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


@settings(max_examples=48, derandomize=True)
@given(ANY_SHAPE)
def test_sparse_equals_dense_for_any_shape(shape):
    _compare(**shape)


@pytest.mark.thorough
@settings(max_examples=1000)
@given(ANY_SHAPE)
def test_sparse_equals_dense_for_many_more_shapes(shape):
    _compare(**shape)


def _compare(pattern, causal, kv_len, queries, batch, group, options):
    q_len = min(queries, kv_len)
    parsed = Options(pattern=pattern, **options | REQUIRED.get(pattern, {}))
    inputs = qkv(batch, 2 * group, 2, q_len, kv_len, head_dim=8)
    dense, mask = masked_by(inputs, causal, parsed)
    out = attention.attend("sparse", *inputs, causal=causal, options=parsed)
    assert agrees(out, masked_attention(*inputs, dense), inputs)
    with torch.no_grad():  # what other devices compute
        out = block_sparse.attend_by_blocks(*inputs, mask, 0.9)
    assert relative_error(out, masked_attention(*inputs, dense, 0.9).detach()) < TOLERANCE
    work = mask.work
    assert work.kept == pytest.approx(float(dense.flatten(0, 1).sum(dim=(1, 2)).double().mean()))
    if pattern != "dca":  # whose chosen keys are packed
        tiles, _ = kept_tiles(dense, parsed.block_size)
        assert work.kept_tiles == pytest.approx(float(tiles.sum()) / len(mask.plans))


@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("pattern", ["random", "strided", "block", "top_k"])
def test_a_pattern_of_tiles_has_the_requested_sparsity(pattern, sparsity):
    options = Options(pattern=pattern, sparsity=sparsity, block_size=16)
    q, k, _ = qkv(1, 2, 2, 640, 640)
    work = choose_mask(q, k, causal=False, options=options).work
    assert work.sparsity == pytest.approx(sparsity, abs=0.02) == work.block_sparsity
    if pattern == "random":
        assert work.kept == 640 * round((1 - sparsity) * 40) * 16


def test_each_head_draws_its_own_tiles_with_per_head():
    q, k, _ = qkv(2, 3, 3, 256, 256)
    options = Options(pattern="random", sparsity=0.75, block_size=16, per_head=True)
    alone = choose_mask(q, k, causal=False, options=options)
    assert len(alone.plans) == 3 and alone.plan(0) is alone.plan(3)
    assert not torch.equal(alone.elements(0), alone.elements(1))


def test_a_kernel_that_torch_lacks_is_unsupported_and_any_other_error_stays(monkeypatch):
    q, k, v = qkv(1, 1, 1, 8, 8)
    messages = ["No available kernel. Aborting execution.", "out of memory"]

    def fails(*_):
        raise RuntimeError(messages.pop(0))

    monkeypatch.setattr(dense, "_call", fails)
    with pytest.raises(
        Unsupported, match=r"SDPA backend flash has no kernel for torch.float32, head_dim 16 on cpu"
    ):
        attention.attend("dense", q, k, v, causal=True, options={"backend": "flash"})
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        attention.attend("dense", q, k, v, causal=True, options={"backend": "flash"})


def test_sparsity_is_of_the_causal_triangle_when_causal():
    work = attention.work("sparse", 4, 4, causal=True, options={"pattern": "window", "window": 1})
    assert (work.kept, work.total, work.sparsity) == (4, 10, 0.6)
    assert attention.work("dense", 4, 4, causal=True).sparsity == 0


def test_tiles_are_counted_over_the_whole_grid():
    dense = attention.work("dense", 512, 512, causal=True)
    assert (dense.kept_tiles, dense.total_tiles) == (10, 16)
    assert attention.work("flash_attn", 512, 512, causal=True) == dense
    assert attention.work("dense", 300 * 128, 1, causal=False).kept_tiles == 300
    assert attention.work("dense", 128, 512, causal=True).kept_tiles == 4


@pytest.mark.parametrize(("n", "sparsity"), [(300, 0.5), (300, 0.75), (300, 0.9), (4, 0.99)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_window_for_a_sparsity_is_the_largest_that_reaches_it_or_one(n, sparsity, causal):
    options = {"pattern": "window", "sparsity": sparsity}
    got = attention.work("sparse", n, n, causal=causal, options=options)
    kept = [closed_form(n, w, causal) for w in range(1, n + 1)]
    reaching = [k for k in kept if 1 - k / got.total >= sparsity]
    assert got.kept == max(reaching, default=kept[0])


def test_watched_work_is_what_each_call_keeps():
    inputs = qkv(1, 2, 2, 96, 96)
    options = Options(pattern="top_k", sparsity=0.5, block_size=16)
    with watched_work() as found:
        for causal in (True, False):
            attention.attend("sparse", *inputs, causal=causal, options=options)
    attention.attend("sparse", *inputs, causal=True, options=options)
    assert found == [masked_by(inputs, causal, options)[1].work for causal in (True, False)]
