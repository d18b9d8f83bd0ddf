"""FlexAttention compiled for more shapes, patterns and modes than dynamo keeps of one function."""

import functools
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

from nanolib.models import attention
from nanolib.models.attention import lowering

OPTIONS = {"pattern": "window", "window": 16, "block_size": 16}
PATTERNS = [OPTIONS | {"pattern": name} for name in ("window", "local_global", "strided", "random")]


@pytest.fixture
def _compiles_at_once(monkeypatch):
    monkeypatch.setattr(lowering, "flex_attention", _attended)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    lowering.compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    lowering.compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "calls",
    [
        [(length, OPTIONS) for length in (16, 32, 48, 64, 80)],
        [(64, options) for options in PATTERNS],
        [(64, OPTIONS | {"window": window}) for window in (16, 24, 32, 48)],
    ],
    ids=["lengths", "patterns", "windows"],
)
@pytest.mark.usefixtures("_compiles_at_once")
def test_calls_in_turns_are_compiled_once_each(calls):
    """In a second round nothing is compiled, and nothing runs unfused, although a function may have two graphs."""
    with torch._dynamo.config.patch(recompile_limit=2):
        _round(calls)
        compiled = counters["stats"]["unique_graphs"]
        with patch.object(torch._dynamo, "reset", side_effect=AssertionError):
            _round(calls)
    assert compiled == 2 * len(calls)
    assert counters["stats"]["unique_graphs"] == compiled


def _round(calls):
    for length, options in calls:
        for mode in (torch.no_grad, torch.inference_mode):
            q = torch.zeros(1, 1, length, 8)
            with mode():
                assert attention.attend("flex", q, q, q, causal=True, options=options).shape == q.shape


def _attended(q, k, v, **rest):
    assert torch.compiler.is_compiling()
    return q * 2
