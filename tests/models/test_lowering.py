"""Masks as FlexAttention takes them: the pairs, tiles, outputs and gradients are those of the reference, by its own math path."""

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention as operation

from nanolib.models.attention import lowering, sparse
from nanolib.models.attention.choice import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.reference import masked_attention, relative_error

SHAPES = {  # batch, heads, key heads, queries, keys
    "square": (2, 4, 4, 80, 80),
    "odd, grouped": (2, 4, 2, 97, 97),
    "after a cache": (1, 4, 1, 45, 97),
}


def _inputs(shape, dtype=torch.float32):
    batch, heads, kv_heads, q_len, kv_len = SHAPES[shape]
    generator = torch.Generator().manual_seed(1)
    sizes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.randn(batch, h, n, 16, generator=generator).to(dtype).requires_grad_() for h, n in sizes]


def _options(pattern, **others):
    drawn = {"per_head": True} if pattern in ("random", "bigbird") else {}
    return sparse.Options(
        pattern=pattern, window=20, global_tokens=5, random_tokens=9, block_size=16, **(drawn | others)
    )


def _elements(q, k, causal, options):
    """From the blocks, which the loop on a CPU follows: bool [batch or 1, heads or 1, queries, keys]."""
    mask = sparse.choose_mask(q, k, causal=causal, options=options)
    elements = torch.stack([mask.elements(head) for head in range(len(mask.plans))])
    return elements.unflatten(0, (1, 1) if mask.shared else q.shape[:2])


TILES = (16, 32, 24)  # the plan's own, twice it, and one that it does not divide


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        pytest.param(
            shape, tile, marks=[pytest.mark.thorough] * (tile != 16 and at != place)
        )  # each tile once at least
        for at, shape in enumerate(SHAPES)
        for place, tile in enumerate(TILES)
    ],
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", sorted([*PATTERNS, *CHOOSERS]))
def test_outputs_and_gradients_are_those_of_the_reference(monkeypatch, pattern, shape, causal, tile):
    monkeypatch.setattr(lowering, "kernel_tile", lambda device, block_size: tile)
    monkeypatch.setattr(lowering, "_masks", {})
    q, k, v = _inputs(shape)
    options = _options(pattern)
    elements = _elements(q, k, causal, options)
    mask = sparse.lowered_mask(q, k, causal=causal, options=options)

    at = torch.cartesian_prod(*map(torch.arange, (*q.shape[:3], k.shape[2]))).unbind(1)
    assert torch.equal(mask.mask_mod(*at).view(*q.shape[:3], -1), elements.expand(*q.shape[:2], -1, -1))
    kept, whole = _tiles(elements, tile)
    assert torch.equal(mask.to_dense().bool().expand_as(kept) | ~kept, torch.ones_like(kept))
    if pattern in PATTERNS:  # of a chooser's masks some tiles that nothing is kept in may be computed, and none is lost
        assert torch.equal(mask.to_dense().bool().expand_as(kept), kept)
    full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (full & ~whole).any() and (pattern not in PATTERNS or torch.equal(full.expand_as(whole), whole))

    out = operation(q, k, v, lambda score, *_: score, mask.as_tuple(), 16**-0.5, {}, (), ())[0]
    reference = masked_attention(q, k, v, elements)
    gradient = torch.randn_like(reference)
    found = torch.autograd.grad(out, (q, k, v), gradient.float())
    exact = torch.autograd.grad(reference, (q, k, v), gradient)
    assert relative_error(out.detach(), reference.detach()) <= 1e-5
    assert all(relative_error(a, b) <= 1e-4 for a, b in zip(found, exact, strict=True))


def _tiles(elements, tile):
    """Which tiles hold a kept pair, and which are kept whole."""
    q_len, kv_len = elements.shape[-2:]
    padded = torch.nn.functional.pad(elements, (0, -kv_len % tile, 0, -q_len % tile))
    pairs = padded.unflatten(3, (-1, tile)).unflatten(2, (-1, tile)).sum(dim=(3, 5))
    return pairs > 0, pairs == tile * tile


def _dense(counts, indices):
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    table = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool)
    return table.scatter(-1, torch.where(listed, indices.long(), indices.shape[-1]), True)[..., :-1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", sorted([*PATTERNS, *CHOOSERS]))
def test_in_bfloat16_too(pattern, causal):
    q, k, v = _inputs("odd, grouped", torch.bfloat16)
    options = _options(pattern)
    mask = sparse.lowered_mask(q, k, causal=causal, options=options)
    out = operation(q, k, v, lambda score, *_: score, mask.as_tuple(), 16**-0.5, {}, (), ())[0]
    reference = masked_attention(q, k, v, _elements(q, k, causal, options))
    gradient = torch.randn_like(reference)
    found = torch.autograd.grad(out, (q, k, v), gradient.bfloat16())
    exact = torch.autograd.grad(reference, (q, k, v), gradient)
    assert relative_error(out.detach(), reference.detach()) <= 2e-2
    assert all(relative_error(a, b) <= 0.1 for a, b in zip(found, exact, strict=True))


def test_on_a_gpu_it_skips_by_tiles_that_its_kernels_take():
    assert [lowering.kernel_tile("cuda", size) for size in (16, 64, 128, 200, 256)] == [128, 128, 128, 256, 256]
    assert lowering.kernel_tile("cpu", 16) == 16


def test_what_the_kernel_does_not_take_is_told():
    why = lowering.not_lowered
    assert why("cpu", torch.float32, 64, 512, 128) == "FlexAttention is compiled for CUDA alone"
    assert why("cuda:1", torch.float64, 64, 512, 128) == "FlexAttention has no kernel for float64"
    assert why("cuda", torch.bfloat16, 8, 512, 128) == "FlexAttention needs a head_dim of 16 or more"
    assert why("cuda", torch.bfloat16, 64, 128, 128) == "a single block of queries needs no loop"
    assert why("cuda", torch.float16, 16, 129, 128) == ""


@pytest.mark.parametrize(("grad", "donated"), [(True, False), (False, True)])
def test_a_graph_is_compiled_so_that_its_backward_pass_can_be_repeated(monkeypatch, grad, donated):
    found = []

    def compiled(*of):
        return lambda q, *_, **__: found.append(torch._functorch.config.donated_buffer) or q

    monkeypatch.setattr(lowering, "compiled", compiled)
    q, k, v = _inputs("square")
    mask = sparse.lowered_mask(q, k, causal=True, options=_options("window"))
    with torch.set_grad_enabled(grad):
        lowering.attend(q, k, v, mask, None, ())
    assert found == [donated]
