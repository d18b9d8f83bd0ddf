"""FlexAttention by its own math path gives what the reference gives; and when it compiles."""

import functools
import tracemalloc

import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._higher_order_ops.flex_attention import flex_attention as operation

from nanolib.experiments.attention.case import AttentionCase
from nanolib.models import attention
from nanolib.models.attention import sparse
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.reference import masked_attention
from tests.models.inputs import REQUIRED, agrees, kept_tiles, masked_by, qkv

GROUPED, CACHED = (2, 4, 2, 97, 97), (1, 4, 1, 45, 97)
SIZES = {"window": 20, "global_tokens": 5, "random_tokens": 9, "block_size": 16}


@pytest.mark.parametrize(
    ("shape", "tile", "causal"),  # tiles of the plan's own side, and of multiples of it
    [(GROUPED, 32, True), (CACHED, 48, True), (CACHED, 16, False)],
)
@pytest.mark.parametrize("pattern", sorted([*PATTERNS, *CHOOSERS]))
def test_outputs_and_gradients_are_those_of_the_reference(
    monkeypatch, pattern, shape, tile, causal
):
    monkeypatch.setattr(sparse, "kernel_tile", lambda device, block_size: tile)
    sparse.forget_masks()
    options = sparse.Options(pattern=pattern, **SIZES, **REQUIRED.get(pattern, {}))
    inputs = qkv(*shape, seed=1)
    elements, _ = masked_by(inputs, causal, options)
    mask = sparse.choose_mask(*inputs[:2], causal=causal, options=options, by_flex=True)
    kept, whole = kept_tiles(elements, tile)
    # an output would not differ if too few tiles were listed as whole, or too many as kept
    for of, by_row, by_column in (
        (whole, mask.full_kv_num_blocks, mask.full_q_num_blocks),
        (kept & ~whole, mask.kv_num_blocks, mask.q_num_blocks),
    ):
        assert (by_row == of.sum(dim=-1)).all() and (by_column == of.sum(dim=-2)).all()
    how = (lambda score, *_: score), mask.as_tuple(), 16**-0.5, {}, (), ()
    out, *_ = operation(*inputs, *how)  # by its math path, which is not compiled
    assert agrees(out, masked_attention(*inputs, elements), inputs)


def test_the_mask_of_a_long_sequence_is_made_in_little_memory():
    """All pairs at once would be 4 GiB."""
    length = 2**16
    tracemalloc.start()
    try:
        options = sparse.Options(pattern="local_global", window=256)
        mask = sparse.drawn_mask(options, length, length, True, 1, torch.device("cpu"), None)
        _, most = tracemalloc.get_traced_memory()  # numpy's arrays are among it
    finally:
        tracemalloc.stop()
    assert most < 100 * 2**20
    kept = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert kept[0, 0, :5].tolist() == [1, 2, 3, 4, 4] and kept[0, 0, -1] == 4


WINDOW = {"pattern": "window", "window": 16, "block_size": 16}


def test_a_case_allows_its_backward_pass_to_repeat_before_anything_is_compiled():
    shape = 256, 1, "bfloat16", 2, 2, 16, True
    case = AttentionCase("cuda", "flex", "flex", WINDOW, *shape, backward=True)
    with functorch_config.patch(donated_buffer=True):
        next(work for work in case.workloads(torch.zeros(1)) if work.scope != "forward")
        assert not functorch_config.donated_buffer


def _attended(q, k, v, **rest):
    assert torch.compiler.is_compiling()
    return q * 2


def test_calls_in_turns_are_compiled_once_each(monkeypatch):
    """In a second round nothing is compiled or unfused, though a function may have two graphs."""
    monkeypatch.setattr(sparse, "flex_attention", _attended)
    monkeypatch.setattr(sparse, "compile_flex", functools.cache(sparse.compile_flex.__wrapped__))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    calls = [  # that differ in length, pattern and window
        (16, WINDOW),
        (64, WINDOW),
        (64, WINDOW | {"pattern": "random"}),
        (64, WINDOW | {"window": 32}),
    ]

    def run():
        for length, options in calls:
            for mode in (torch.no_grad, torch.inference_mode):
                q = torch.zeros(1, 1, length, 8)
                with mode():
                    attention.attend("flex", q, q, q, causal=True, options=options)
        return counters["stats"]["unique_graphs"]

    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=2):
        assert run() == 2 * len(calls)
        assert run() == 2 * len(calls)
