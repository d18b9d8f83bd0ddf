"""Compiled FlexAttention at more shapes than dynamo keeps."""

import torch

from nanolib.models import attention
from nanolib.models.attention import flex


def test_dynamo_forgets_before_it_gives_up(monkeypatch):
    """Without that the ninth length runs unfused, forty times slower, and nobody is told."""
    seen, kept, resets = [], set(), []

    def compiled(q, k, v, **rest):
        assert torch._dynamo.config.fail_on_recompile_limit_hit
        kept.add(q.shape)
        seen.append(len(kept))
        return q

    def reset():
        kept.clear()
        resets.append(1)

    monkeypatch.setattr(flex, "compiled", lambda: compiled)
    monkeypatch.setattr(flex, "_shapes", set())
    monkeypatch.setattr(torch._dynamo, "reset", reset)
    options = {"pattern": "window", "window": 16, "block_size": 16}
    for _ in range(2):
        for length in range(16, 16 * 13, 16):
            q = torch.zeros(1, 1, length, 8)
            attention.attend("flex", q, q, q, causal=True, options=options)
            attention.attend("flex", q, q, q, causal=True, options=options)
    assert max(seen) < torch._dynamo.config.recompile_limit and len(resets) == 3
    assert not torch._dynamo.config.fail_on_recompile_limit_hit  # as others have it
