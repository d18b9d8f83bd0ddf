"""Block-diagonal: the sequence is cut into chunks, and a query sees its own chunk alone."""

from __future__ import annotations

from nanolib.models.attention.patterns.options import SparseOptions
from nanolib.models.attention.patterns.pattern import Pattern


def pattern(options: SparseOptions, kv_len: int) -> Pattern:
    """The block pattern: ⌊i / chunk⌋ = ⌊j / chunk⌋.

    Args:
        options: `sparsity` sets the chunk to (1 − sparsity) · kv_len, whole tiles of `block_size`; else it is `window` tokens.
        kv_len: Keys.
    """
    chunk = options.window
    if options.sparsity is not None:
        chunk = max(1, round((1 - options.sparsity) * kv_len / options.block_size)) * options.block_size
    return Pattern(
        mask=lambda i, j: i // chunk == j // chunk,
        runs=lambda first, last: [(first // chunk * chunk, (last // chunk + 1) * chunk)],
    )
