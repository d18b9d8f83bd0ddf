import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolib.measurement import BadInput, Unsupported
from nanolib.models import attention
from nanolib.models.attention.patterns import PATTERNS, window
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.sparse import Options, element_mask

TOLERANCE = 1e-5


def _qkv(batch, heads, kv_heads, q_len, kv_len, head_dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(h, n):
        return torch.randn(batch, h, n, head_dim, generator=generator, requires_grad=True)

    return draw(heads, q_len), draw(kv_heads, kv_len), draw(kv_heads, kv_len)


def _agrees(out, reference, inputs):
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    ours = torch.autograd.grad(out, inputs, gradient)
    theirs = torch.autograd.grad(reference, inputs, gradient.double())
    # All three gradients as one: where a query sees a single key, those of q and k are zero but for rounding.
    together = [torch.cat([g.double().flatten() for g in gradients]) for gradients in (ours, theirs)]
    return max(relative_error(out.detach(), reference.detach()), relative_error(*together)) < TOLERANCE


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), (64, 64), (1, 77), (33, 200), (5, 5)])
def test_sparse_equals_dense_with_the_same_mask(pattern, causal, q_len, kv_len):
    options = Options(pattern=pattern, window=37, global_tokens=5, block_size=32)
    inputs = _qkv(2, 4, 2, q_len, kv_len)
    mask = element_mask(q_len, kv_len, causal=causal, options=options)
    out = attention.attend("sparse", *inputs, causal=causal, options=options)
    assert _agrees(out, masked_attention(*inputs, mask), inputs)


@settings(max_examples=int(os.environ.get("NANOLIB_EXAMPLES", "60")), deadline=None, derandomize=True)
@given(
    pattern=st.sampled_from(sorted(PATTERNS)),
    causal=st.booleans(),
    kv_len=st.integers(1, 90),
    queries=st.integers(1, 90),
    group=st.sampled_from([1, 2, 3]),
    options=st.fixed_dictionaries(
        {"window": st.integers(1, 100), "global_tokens": st.integers(0, 40), "block_size": st.integers(1, 50)}
    ),
)
def test_sparse_equals_dense_for_any_shape(pattern, causal, kv_len, queries, group, options):
    q_len = min(queries, kv_len)
    parsed = Options(pattern=pattern, **options)
    inputs = _qkv(1, 2 * group, 2, q_len, kv_len, head_dim=8)
    mask = element_mask(q_len, kv_len, causal=causal, options=parsed)
    out = attention.attend("sparse", *inputs, causal=causal, options=parsed)
    assert _agrees(out, masked_attention(*inputs, mask), inputs)
    work = attention.work("sparse", q_len, kv_len, causal=causal, options=parsed)
    assert work.kept == int(mask.sum())
    assert work.kept_tiles == _tiles(mask, parsed.block_size)


def _tiles(mask, size):
    return sum(bool(part.any()) for rows in mask.split(size, dim=0) for part in rows.split(size, dim=1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["auto", "math", "flash"])
def test_dense_equals_the_reference(causal, backend):
    inputs = _qkv(2, 4, 2, 50, 50)
    mask = causal_mask(50, 50) if causal else torch.ones(50, 50, dtype=torch.bool)
    out = attention.attend("dense", *inputs, causal=causal, options={"backend": backend})
    assert _agrees(out, masked_attention(*inputs, mask), inputs)


@pytest.mark.parametrize("kind", attention.kinds())
def test_causality_is_aligned_at_the_end(kind):
    q, k, v = _qkv(1, 2, 2, 7, 20)
    options = {"window": 20, "global_tokens": 0} if kind == "sparse" else {}
    out = attention.attend(kind, q, k, v, causal=True, options=options)
    assert relative_error(out.detach(), masked_attention(q, k, v, causal_mask(7, 20)).detach()) < TOLERANCE


def test_a_dense_backend_without_a_kernel_here_is_unsupported():
    q, k, v = _qkv(1, 1, 1, 8, 8)
    with pytest.raises(Unsupported, match="SDPA backend cudnn has no CPU kernel; use math or flash"):
        attention.attend("dense", q, k, v, causal=True, options={"backend": "cudnn"})


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "reach"), [(100, 7), (64, 64), (50, 200), (1, 1)])
def test_window_density_is_the_closed_form(causal, length, reach):
    work = attention.work("sparse", length, length, causal=causal, options={"pattern": "window", "window": reach})
    assert work.kept == window.closed_form(length, reach, causal)


def test_sparsity_is_of_the_causal_triangle_when_causal():
    work = attention.work("sparse", 4, 4, causal=True, options={"pattern": "window", "window": 1})
    assert (work.kept, work.total, work.sparsity) == (4, 10, 0.6)
    assert attention.work("dense", 4, 4, causal=True).sparsity == 0


def test_tiles_are_counted_over_the_whole_grid():
    dense = attention.work("dense", 512, 512, causal=True)
    sparse = attention.work("sparse", 512, 512, causal=True, options={"pattern": "window", "window": 1})
    assert (dense.kept_tiles, dense.total_tiles) == (10, 16)
    assert (sparse.kept_tiles, sparse.total_tiles, sparse.block_sparsity) == (4, 16, 0.75)
    assert sparse.speed_bound(dense) == 2.5


def test_flops_are_four_per_kept_connection_and_dimension():
    work = attention.work("sparse", 100, 100, causal=False, options={"pattern": "window", "window": 5})
    assert work.flops(batch=2, heads=3, head_dim=16) == 4 * 2 * 3 * work.kept * 16


@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("causal", [True, False])
def test_the_window_for_a_sparsity_is_the_largest_that_reaches_it(sparsity, causal):
    got = attention.work("sparse", 200, 200, causal=causal, options={"pattern": "window", "sparsity": sparsity})
    assert got.sparsity >= sparsity
    kept = [window.closed_form(200, w, causal) for w in range(1, 201)]
    assert got.kept == max(k for k in kept if 1 - k / got.total >= sparsity)


def test_sparse_attention_is_given_only_the_kept_tiles(monkeypatch):
    """It must skip the work it claims to skip: the kernel sees as many keys per block as there are kept tiles."""
    from nanolib.models.attention import sparse

    seen = []

    def spy(q, k, v, **rest):
        seen.append(q.shape[2] * k.shape[2])
        return torch.zeros_like(q)

    monkeypatch.setattr(sparse, "scaled_dot_product_attention", spy)
    options = Options(pattern="local_global", window=32, global_tokens=8, block_size=32)
    q, k, v = _qkv(1, 1, 1, 320, 320)
    attention.attend("sparse", q, k, v, causal=True, options=options)
    work = attention.work("sparse", 320, 320, causal=True, options=options)
    assert sum(seen) == work.kept_tiles * 32 * 32 < 0.3 * 320 * 320


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "dens"}, "attention_type: 'dens' is no attention kind"),
        ({"options": {"backend": "fast"}}, "attention_options.backend: 'fast' will not do"),
        ({"options": {"window": 3}}, "attention_options.window: unknown name"),
        (
            {"kind": "sparse", "options": {"pattern": "windo"}},
            "attention_options.pattern: 'windo' is no pattern; use one",
        ),
        ({"q": torch.zeros(1, 2, 3)}, "q, k: 3 and 4 dimensions"),
        ({"q": torch.zeros(1, 3, 4, 8)}, "k: 2 heads do not divide q's 3"),
        ({"v": torch.zeros(1, 2, 5, 8)}, "v: shape"),
        ({"q": torch.zeros(2, 2, 4, 8)}, "k: shape"),
        ({"q": torch.zeros(1, 2, 9, 8)}, "q: 9 causal queries over 4 keys"),
    ],
)
def test_what_does_not_fit_is_told(change, said):
    x = torch.zeros(1, 2, 4, 8)
    call = {"kind": "dense", "q": x, "k": x, "v": x, "options": None} | change
    with pytest.raises(BadInput) as caught:
        attention.attend(call["kind"], call["q"], call["k"], call["v"], causal=True, options=call["options"])
    assert caught.value.lines[0].startswith(said)
