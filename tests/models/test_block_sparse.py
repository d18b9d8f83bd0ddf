"""The loops over tiles: valid arguments, threads, and planned memory."""

import threading

import pytest
import torch

from nanolib.experiments.attention.case import AttentionCase
from nanolib.meters.memory import peak_memory
from nanolib.models import attention
from nanolib.models.attention import block_sparse
from nanolib.models.attention.reference import masked_attention
from nanolib.models.attention.sparse import Options
from tests.models.inputs import agrees, masked_by, qkv


@pytest.mark.parametrize("pattern", ["window", "random"])
@pytest.mark.parametrize("scores", [1, 2 * 16 * 48, 10**9])
def test_it_does_not_matter_how_many_heads_go_at_once(monkeypatch, scores, pattern):
    """One, two (the last group is then smaller), or all five. Autocast changes no product."""
    monkeypatch.setattr(block_sparse, "_SCORES", scores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # other threads never autocast
    inputs, options = qkv(2, 5, 5, 96, 96, 8), Options(pattern=pattern, window=32, block_size=16)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention.attend("sparse", *inputs, causal=True, options=options)
    assert agrees(out, masked_attention(*inputs, masked_by(inputs, True, options)[0]), inputs)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_torchscript_compiles_the_loops(name):
    """Otherwise the plain ones would run, and threads would wait for each other."""
    assert isinstance(block_sparse.compiled_loop(name), torch.jit.ScriptFunction)


@pytest.mark.parametrize(("threads", "heads", "shares"), [(4, 3, 3), (2, 4, 2), (4, 1, 1)])
def test_heads_are_shared_among_threads(monkeypatch, threads, heads, shares):
    """Each thread computes on its share of the cores."""
    seen, before = [], torch.get_num_threads()

    def loop(q, *_):
        seen.append((threading.get_ident(), torch.get_num_threads(), len(q)))

    monkeypatch.setattr(block_sparse, "compiled_loop", lambda name: loop)
    inputs = [x.detach() for x in qkv(1, heads, heads, 8, 8)]
    try:
        torch.set_num_threads(threads)
        attention.attend("sparse", *inputs, causal=True, options={"pattern": "window"})
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    idents, cores, counts = zip(*seen, strict=True)
    assert len(seen) == shares and sum(counts) == heads
    assert (threading.get_ident() in idents) == (shares == 1)
    assert {*cores} == {threads if shares == 1 else threads // shares}


SPARSE = {"window": 70, "global_tokens": 20, "random_tokens": 20, "block_size": 32}


@pytest.mark.parametrize(
    ("name", "batch", "kv_heads", "length", "dtype", "causal"),
    [
        ("math", 2, 4, 500, "float32", True),
        ("bigbird", 2, 4, 500, "float32", True),
        ("random", 2, 2, 500, "float32", False),
        ("local_global", 3, 2, 500, "bfloat16", True),
        ("local_global", 3, 2, 30, "bfloat16", True),
    ],
)
def test_a_plan_is_the_live_peak(name, batch, kv_heads, length, dtype, causal):
    """Of a pattern of sparse attention, or of a backend of dense attention."""
    kind, options = "dense", {"backend": name}
    if name != "math":
        kind, options = "sparse", SPARSE | {"pattern": name}
    shape = length, batch, dtype, 4, kv_heads, 16, causal
    case = AttentionCase("cpu", name, kind, options, *shape, backward=True)
    for work in case.workloads(*case.inputs(0)):
        work.call()
        with peak_memory("cpu", *work.existing()) as peak:
            work.call()
        assert case.plan().peaks[work.scope] == pytest.approx(peak.live, rel=0.05)
