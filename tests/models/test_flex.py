"""FlexAttention: its masks, outputs and gradients are those of the reference, by its own math path; and when it compiles."""

import functools
import tracemalloc
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters
from torch._higher_order_ops.flex_attention import flex_attention as operation
from torch.utils._python_dispatch import TorchDispatchMode

from nanolib.measurement import Unsupported
from nanolib.meters.tensor_bytes import LiveBytes
from nanolib.models import attention
from nanolib.models.attention import dynamic, flex, sparse
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.reference import masked_attention, relative_error
from tests.models.inputs import REQUIRED, kept_tiles, masked_by, qkv

SHAPES = {  # batch, heads, key heads, queries, keys
    "square": (2, 4, 4, 80, 80),
    "odd, grouped": (2, 4, 2, 97, 97),
    "after a cache": (1, 4, 1, 45, 97),
}


def _inputs(shape, dtype="float32"):
    inputs = qkv(*SHAPES[shape], seed=1)
    return [x.detach().to(getattr(torch, dtype)).requires_grad_() for x in inputs]


def _options(pattern, **others):
    drawn = {"per_head": True} if pattern in ("random", "bigbird") else {}
    return sparse.Options(
        pattern=pattern,
        window=20,
        global_tokens=5,
        random_tokens=9,
        block_size=16,
        **(drawn | REQUIRED.get(pattern, {}) | others),
    )


LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (2e-2, 0.1)}  # errors of outputs, of gradients


@pytest.mark.parametrize(
    ("shape", "tile", "dtype", "causal"),  # tiles of the plan's own side, and of multiples of it
    [
        ("square", 16, "bfloat16", False),
        ("odd, grouped", 32, "float32", True),
        ("after a cache", 48, "float32", True),
        ("after a cache", 16, "float32", False),
    ],
)
@pytest.mark.parametrize("pattern", sorted([*PATTERNS, *CHOOSERS]))
def test_outputs_and_gradients_are_those_of_the_reference(
    monkeypatch, pattern, shape, causal, tile, dtype
):
    monkeypatch.setattr(flex, "kernel_tile", lambda device, block_size: tile)
    sparse.forget_masks()
    q, k, v = _inputs(shape, dtype)
    options = _options(pattern)
    elements, _ = masked_by((q, k), causal, options)
    mask = flex.mask_of(q, k, causal=causal, options=options)

    at = torch.cartesian_prod(*map(torch.arange, (*q.shape[:3], k.shape[2]))).unbind(1)
    assert torch.equal(
        mask.mask_mod(*at).view(*q.shape[:3], -1), elements.expand(*q.shape[:2], -1, -1)
    )
    kept, whole = kept_tiles(elements, tile)
    assert torch.equal(mask.to_dense().bool().expand_as(kept), kept.expand_as(kept))
    full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert torch.equal(full.expand_as(whole), whole)

    out = operation(q, k, v, lambda score, *_: score, mask.as_tuple(), 16**-0.5, {}, (), ())[0]
    reference = masked_attention(q, k, v, elements)
    gradient = torch.randn_like(reference)
    found = torch.autograd.grad(out, (q, k, v), gradient.to(out.dtype))
    exact = torch.autograd.grad(reference, (q, k, v), gradient)
    most, most_of_gradients = LIMITS[dtype]
    assert relative_error(out.detach(), reference.detach()) <= most
    assert all(relative_error(a, b) <= most_of_gradients for a, b in zip(found, exact, strict=True))


def _dense(counts, indices):
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    table = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool)
    return table.scatter(-1, torch.where(listed, indices.long(), indices.shape[-1]), True)[..., :-1]


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "q_len", "computes"),
    [
        ("cpu", "float32", 64, 512, False),
        ("cuda:1", "float64", 64, 512, False),
        ("cuda", "bfloat16", 8, 512, False),
        ("cuda", "bfloat16", 64, 128, False),  # a single block
        ("cuda", "float16", 16, 129, True),
    ],
)
def test_it_computes_sparse_where_it_has_a_kernel(device, dtype, head_dim, q_len, computes):
    assert flex.computes_sparse(device, getattr(torch, dtype), head_dim, q_len, 128) == computes


LONG = 2**16


def test_the_mask_of_a_long_sequence_is_made_in_little_memory():
    """All pairs at once would be 4 GiB."""
    tracemalloc.start()
    try:
        options = sparse.Options(pattern="local_global", window=256)
        mask = flex.drawn_mask(options, LONG, LONG, True, 1, torch.device("cpu"), None)
        _, most = tracemalloc.get_traced_memory()  # numpy's arrays are among it
    finally:
        tracemalloc.stop()
    assert most < 100 * 2**20
    kept = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert kept[0, 0, :5].tolist() == [1, 2, 3, 4, 4] and kept[0, 0, -1] == 4


def test_a_long_mask_that_was_chosen_is_made_in_little_memory():
    with LiveBytes() as counter:
        cells = dynamic.cells_of(
            dynamic.Sizes(512, LONG, True, 128, 128, 64), torch.device("cpu"), None
        )
        table = torch.arange(LONG // 128).eq(7).expand(1, 2, 4, -1)
        mask = flex.chosen_mask(dynamic.Choice(table, cells, 2))
    assert counter.peak < 100 * 2**20
    assert mask.to_dense().nonzero()[:5, 2:].tolist() == [
        [0, 7],
        [0, 507],
        [0, 508],
        [1, 7],
        [1, 508],
    ]


class _Operations(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("pattern", "most"), [("dca", 70), ("top_k", 60), ("threshold", 65)])
def test_listing_chosen_tiles_takes_few_operations_once_the_shape_is_known(pattern, most):
    """Each is a launch on a GPU, in every forward pass."""
    q, k, _ = _inputs("square")
    for _ in range(2):
        with _Operations() as operations:
            flex.mask_of(q, k, causal=True, options=_options(pattern))
    assert operations.count <= most


@pytest.mark.parametrize(("grad", "donated"), [(True, False), (False, True)])
def test_a_graph_is_compiled_so_that_its_backward_pass_can_be_repeated(monkeypatch, grad, donated):
    found = []

    def compiled(*of):
        return lambda q, *_, **__: found.append(torch._functorch.config.donated_buffer) or q

    monkeypatch.setattr(flex, "compiled", compiled)
    monkeypatch.setattr(flex, "unsupported", lambda *_: "")
    with torch.set_grad_enabled(grad):
        attention.attend(
            "flex", *_inputs("square"), causal=True, options=_options("window").model_dump()
        )
    assert found == [donated]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no backward pass on CPU; use sparse"),
        ({"backend": "triton"}, "FlexAttention has no backend triton on CPU"),
        ({"backend": "flash"}, "FlexAttention has no backend flash on CPU"),
    ],
)
def test_a_cpu_has_neither_a_backward_pass_nor_another_backend(options, message):
    """Forward it is compiled, and compared with the reference, by the walk of the full parameters."""
    with pytest.raises(Unsupported, match=message):
        attention.attend("flex", *_inputs("square"), causal=True, options=options)


OPTIONS = {"pattern": "window", "window": 16, "block_size": 16}


@pytest.fixture
def _compiles_at_once(monkeypatch):
    monkeypatch.setattr(flex, "flex_attention", _attended)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    flex.compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    flex.compiled.cache_clear()
    torch._dynamo.reset()


CALLS = [  # that differ in length, pattern and window
    (16, OPTIONS),
    (64, OPTIONS),
    (64, OPTIONS | {"pattern": "random"}),
    (64, OPTIONS | {"window": 32}),
]


@pytest.mark.usefixtures("_compiles_at_once")
def test_calls_in_turns_are_compiled_once_each():
    """In a second round nothing is compiled, and nothing runs unfused, although a function may have two graphs."""
    with torch._dynamo.config.patch(recompile_limit=2):
        _round(CALLS)
        compiled = counters["stats"]["unique_graphs"]
        with patch.object(torch._dynamo, "reset", side_effect=AssertionError):
            _round(CALLS)
    assert compiled == 2 * len(CALLS)
    assert counters["stats"]["unique_graphs"] == compiled


def _round(calls):
    for length, options in calls:
        for mode in (torch.no_grad, torch.inference_mode):
            q = torch.zeros(1, 1, length, 8)
            with mode():
                out = attention.attend("flex", q, q, q, causal=True, options=options)
                assert out.shape == q.shape


def _attended(q, k, v, **rest):
    assert torch.compiler.is_compiling()
    return q * 2
