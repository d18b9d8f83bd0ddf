"""Sliding window: a query sees the keys less than `window` positions away (on both sides when not causal)."""

from __future__ import annotations

from typing import Any

from nanolib.models.attention.patterns.pattern import Pattern


def pattern(options: Any, kv_len: int) -> Pattern:
    """The window pattern: |i − j| < window.

    Args:
        options: `window`: reach in tokens, the query's own position included.
        kv_len: Keys.
    """
    window = options.window
    return Pattern(
        mask=lambda i, j: (i - j).abs() < window,
        runs=lambda first, last: [(first - window + 1, last + window)],
    )


def closed_form(length: int, window: int, causal: bool) -> int:
    """Kept pairs of a square window: w·n − w(w − 1)/2 causal, (2w − 1)·n − w(w − 1) otherwise."""
    w = min(window, length)
    one_side = w * length - w * (w - 1) // 2
    return one_side if causal else 2 * one_side - length
