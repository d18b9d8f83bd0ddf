"""Sliding window: a query sees the keys less than `window` positions away (on both sides when not causal)."""

from __future__ import annotations

from nanolib.models.attention.patterns.options import SparseOptions
from nanolib.models.attention.patterns.pattern import Pattern


def pattern(options: SparseOptions, kv_len: int) -> Pattern:
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
