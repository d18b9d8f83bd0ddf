"""FlexAttention compiled at more shapes than dynamo keeps."""

import functools

import torch

from nanolib.models import attention
from nanolib.models.attention import lowering

OPTIONS = {"pattern": "window", "window": 16, "block_size": 16}


def test_past_dynamos_limit_it_is_compiled_anew_and_never_unfused(monkeypatch):
    """The real limit and the real error, of a function that compiles in no time."""
    monkeypatch.setattr(lowering, "flex_attention", _attended)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    lowering.compiled.cache_clear()
    resets, reset = [], torch._dynamo.reset
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1) or reset())
    reset()
    _CALLS.clear()
    with torch._dynamo.config.patch(recompile_limit=3):
        for length in (16, 32, 48, 64, 80):
            for mode in (torch.no_grad, torch.inference_mode):
                q = torch.zeros(1, 1, length, 8)
                with mode():
                    out = attention.attend("flex", q, q, q, causal=True, options=OPTIONS)
                assert out.shape == q.shape
    reset()
    lowering.compiled.cache_clear()
    assert len(resets) >= 2 and all(_CALLS)
    assert not torch._dynamo.config.fail_on_recompile_limit_hit  # as others have it


_CALLS: list[bool] = []


def _attended(q, k, v, **rest):
    _CALLS.append(torch.compiler.is_compiling())
    return q * 2
