"""Window plus globals: the first `global_tokens` positions see every key and are seen by every query (Longformer).

Source: Beltagy, Peters & Cohan (2020), Longformer, arXiv 2004.05150.
"""

from __future__ import annotations

from nanolib.models.attention.patterns.options import SparseOptions
from nanolib.models.attention.patterns.pattern import Pattern


def pattern(options: SparseOptions, kv_len: int) -> Pattern:
    """The local_global pattern: |i − j| < window, or i < global_tokens, or j < global_tokens.

    Args:
        options: `window`: reach in tokens, the query's own position included; `global_tokens`: how many leading positions are
            global.
        kv_len: Keys.
    """
    window, global_tokens = options.window, options.global_tokens

    def runs(first: int, last: int) -> list[tuple[int, int]]:
        if first < global_tokens:
            return [(0, kv_len)]
        return [(0, global_tokens), (first - window + 1, last + window)]

    return Pattern(
        mask=lambda i, j: ((i - j).abs() < window) | (i < global_tokens) | (j < global_tokens),
        runs=runs,
    )
