"""Attention kinds against the masked reference in float64, and the work of their masks."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanolib.measurement import BadInput, Unsupported
from nanolib.models import attention
from nanolib.models.attention import block_sparse, dense
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import BY_TILE, PATTERNS
from nanolib.models.attention.reference import causal_mask, masked_attention
from nanolib.models.attention.sparse import Options, choose_mask
from tests.models.inputs import REQUIRED, agrees, kept_tiles, masked_by, qkv

ALL_PATTERNS = sorted([*PATTERNS, *CHOOSERS])


ANY_SHAPE = {
    "pattern": st.sampled_from(ALL_PATTERNS),
    "causal": st.booleans(),
    "kv_len": st.integers(1, 90),
    "queries": st.integers(1, 90),
    "batch": st.integers(1, 2),
    "group": st.sampled_from([1, 2, 3]),
    "scale": st.sampled_from([None, 0.9]),
    "options": st.fixed_dictionaries(
        {
            "window": st.integers(1, 100),
            "global_tokens": st.integers(0, 40),
            "random_tokens": st.integers(0, 40),
            "block_size": st.integers(1, 50),
            "mass": st.floats(0.1, 1.0),
            "seed": st.integers(0, 3),
        }
    ),
}

BLIND = {  # blocks of queries of which none or some see a key
    "pattern": "own",
    "causal": False,
    "kv_len": 90,
    "queries": 90,
    "batch": 1,
    "group": 2,
    "scale": None,
    "options": {"mask_mod": "tests.models.inputs:from_the_20th", "block_size": 16},
}


@settings(max_examples=48, derandomize=True)
@given(**ANY_SHAPE)
@example(**BLIND)
def test_dense_and_sparse_equal_the_reference_for_any_shape(
    pattern, causal, kv_len, queries, batch, group, scale, options
):
    q_len = min(queries, kv_len)
    parsed = Options(pattern=pattern, **REQUIRED.get(pattern, {}) | options)
    inputs = qkv(batch, 2 * group, 2, q_len, kv_len, head_dim=8)
    factor = 1 if scale is None else scale * 8**0.5

    def reference(mask):
        return masked_attention(inputs[0] * factor, *inputs[1:], mask)

    seen = causal_mask(q_len, kv_len) if causal else torch.ones(q_len, kv_len, dtype=torch.bool)
    out = attention.attend("dense", *inputs, causal=causal, scale=scale)
    assert agrees(out, reference(seen), inputs)
    dense, mask = masked_by((inputs[0] * factor, inputs[1]), causal, parsed)
    out = attention.attend("sparse", *inputs, causal=causal, scale=scale, options=parsed)
    assert agrees(out, reference(dense), inputs)
    out = block_sparse.attend_by_blocks(*inputs, mask)  # what other devices compute
    assert agrees(out, masked_attention(*inputs, dense))
    work = mask.work
    assert work.kept == pytest.approx(float(dense.flatten(0, 1).sum(dim=(1, 2)).double().mean()))
    if pattern != "dca":  # whose chosen keys are packed
        tiles, _ = kept_tiles(dense, parsed.block_size)
        assert work.kept_tiles == pytest.approx(float(tiles.sum()) / len(tiles.flatten(0, 1)))


@pytest.mark.parametrize("pattern", BY_TILE)
def test_a_pattern_of_tiles_has_the_requested_sparsity(pattern):
    options = Options(pattern=pattern, sparsity=0.8, block_size=16)
    q, k, _ = qkv(1, 2, 2, 640, 640)
    work = choose_mask(q, k, causal=False, options=options).work
    assert work.sparsity == pytest.approx(0.8, abs=0.02) == work.block_sparsity


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


X = torch.zeros(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": X[0]}, r"q, k, v: .* do not fit; give q \[batch, heads, q_len, head_dim\]"),
        ({"q": torch.zeros(1, 3, 4, 8)}, "q, k, v: .*heads a multiple of kv_heads"),
        ({"v": torch.zeros(1, 2, 5, 8)}, r"q, k, v: .*\[1, 2, 5, 8\] torch.float32 do not fit"),
        (dict.fromkeys("qkv", X.int()), "q, k, v: .* one floating-point dtype"),
        ({"q": torch.zeros(1, 2, 9, 8)}, "q, k: 9 queries over 4 keys; give .* at least as many"),
        ({"q": X[:, :, :0]}, "q, k: 0 queries over 4 keys; give at least one query"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    call = {"kind": "dense", "q": X, "k": X, "v": X, "causal": True} | change
    with pytest.raises(BadInput, match=f"^{message}"):
        attention.attend(**call)


def test_the_work_of_shapes_that_attention_refuses_is_refused_too():
    with pytest.raises(BadInput, match="9 queries over 4 keys"):
        attention.work("sparse", 9, 4, causal=True)


def test_a_second_derivative_of_sparse_attention_is_refused_not_left_out():
    inputs = qkv(1, 2, 2, 64, 64)
    out = attention.attend("sparse", *inputs, causal=True, options={"block_size": 16})
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
